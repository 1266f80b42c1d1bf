"""Facts about streams of several libraries: whether a stream can be resumed, and digests of its order and samples."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ckpt_tasks.state.data.drawing import seed_of

_MARKED = 64  # Digest about this many elements of an array or a list, and twice as many characters of a text.


def copy_of(stream: Any) -> Any:
    """Return a copy of a stream with the same attributes, for one epoch."""
    kind: Any = type(stream)
    if hasattr(stream, "__copy__") or kind.__new__ is not object.__new__:
        return copy.copy(stream)
    new = object.__new__(kind)
    vars(new).update(vars(stream))  # copy.copy would let two streams of `datasets` share one __dict__.
    for name, value in vars(stream).items():
        # All workers share the memory with the epoch of a `datasets` stream, and set_epoch adds a difference to it: two
        # workers at once would add the difference twice.
        if isinstance(value, torch.Tensor) and value.is_shared():  # type: ignore[no-untyped-call]
            vars(new)[name] = value.clone()
    return new


def why_inexact(stream: Any) -> str | None:
    """Return why a stream cannot continue by its own state; None if it can."""
    if callable(ask := getattr(stream, "why_inexact", None)):  # A ShuffleBuffer asks its own stream.
        return str(reason) if (reason := ask()) else None
    if any(
        type(one).__name__ == "BufferShuffledExamplesIterable" and one.buffer_size > 1 for one in _operations(stream)
    ):
        return (
            "the samples in the buffer of shuffle() are not in the state of a stream of datasets (use "
            "ShuffleBuffer(stream, size) in its place)"
        )
    if callable(getattr(stream, "state_dict", None)) and callable(getattr(stream, "load_state_dict", None)):
        return None
    return f"a stream of type {type(stream).__name__} has no state_dict and load_state_dict"


def way_of(stream: Any) -> str | None:
    """Return advice for a stream whose library has another way to resume; None for other streams."""
    library = type(stream).__module__.partition(".")[0]
    stages = getattr(stream, "pipeline", []) if library == "webdataset" else []
    if library == "streaming":
        return "Its position is its StreamingDataLoader's: put that loader into the state, and iterate it."
    if any(_shuffles(one) for one in stages):
        return (
            "Its shuffles count epochs by themselves, or are seeded by the clock. Make the pipeline in the __iter__ of "
            "a class of your own, with the epoch as its seed."
        )
    return None


def _shuffles(stage: Any) -> bool:
    """Return True if a stage of a WebDataset shuffles: `WebDataset(shardshuffle=False)` has a buffer of no shards."""
    if "shuffle" not in f"{type(stage).__name__} {getattr(stage, 'f', None)}":
        return False
    sizes = [getattr(stage, "bufsize", None), *(getattr(stage, "args", None) or ())[:1]]
    return not any(size is not None and size <= 1 for size in sizes)


def return_state(stream: Any, state: Any) -> None:
    """Give a stream a copy of its state.

    A stream of datasets loads the state twice: first for the whole stream, which fails if the stream has more shards
    than the worker, and then for the worker's part. So each list is extended to the stream's number of shards.
    """
    stream.load_state_dict(_as_long(state, getattr(stream, "num_shards", 0)))


def _as_long(state: Any, length: int) -> Any:
    if isinstance(state, Mapping):
        return {key: _as_long(item, length) for key, item in state.items()}
    if isinstance(state, list):
        return [_as_long(item, length) for item in state] + [None] * (length - len(state))
    return copy.deepcopy(state)


def _operations(stream: Any) -> Iterator[Any]:
    """Yield the operations of a stream of datasets, also inside a ShuffleBuffer."""
    if type(stream).__module__.startswith(("datasets.", "ckpt_tasks.")):
        yield stream
        below = [getattr(stream, name, None) for name in ("stream", "_ex_iterable", "ex_iterable")]
        for one in (*below, *getattr(stream, "ex_iterables", ())):
            yield from _operations(one)


def order_of(stream: Any) -> str:
    """Return a digest of the generators that shuffle a stream of datasets: without a seed, each start has others."""
    generators = (getattr(one, "generator", None) for one in _operations(stream))
    states = [one.bit_generator.state for one in generators if isinstance(one, np.random.Generator)]
    return seed_of(repr(states)).to_bytes(8).hex()


def mark_of(samples: list[Any], before: str) -> str:
    """Return a digest of parts of a batch's first and last sample, to detect other samples or random numbers."""
    digest = hashlib.blake2b(before.encode(), digest_size=8)
    for sample in (*samples[:1], *samples[-1:]):
        _add(digest, sample)
    return f"{len(samples)} {digest.hexdigest()}"


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        flat = value.detach().reshape(-1) if isinstance(value, torch.Tensor) else np.asarray(value).reshape(-1)
        digest.update(repr(flat[:: max(1, len(flat) // _MARKED)].tolist()).encode())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(repr(key).encode())
            _add(digest, item)
    elif isinstance(value, list | tuple):
        for item in value[:_MARKED]:
            _add(digest, item)
    elif isinstance(value, str | bytes):
        digest.update(f"{len(value)} {value[:_MARKED]!r} {value[-_MARKED:]!r}".encode())
    elif isinstance(value, int | float | None):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__qualname__.encode())
