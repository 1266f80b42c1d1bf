"""The arguments of a run's start, which its checkpoints hold, so that the next start can report changes.

A batch size or a number of epochs is an argument of a program; a restore does not change it. An integration saves such
values in its state, and a restore compares them with the values of the new start.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from ckpt_tasks.state.kinds.differences import Differences

_ROWS = 8  # Digest about this many rows of a data set, spread from the first to the last.


class Started:
    """Base class of a stateful object whose `state_dict` has the arguments of its start in the entry "started".

    "started" holds plain values by name. If a value differs, a restore warns with the sentence of this name in
    `effects`, which tells the effect. It compares only values that both sides have.

        class LightningState(Started):
            effects = {"batch_size": "The run continues with this one, at the same sample."}

            def state_dict(self):
                return {..., "started": {"batch_size": 8, "data": outline_of(dataset)}}
    """

    effects: ClassVar[Mapping[str, str]] = {}
    # True if the start may fail before its first step, and be made again with other arguments: the next commit warns.
    is_tried = False
    # The seconds from a restore to the first batch, for an object that yields batches.
    found_s: float | None = None
    # The seconds that the loop has waited for batches since a restore, `found_s` included.
    waited_s = 0.0


def note_changes(target: Started, live: Any, saved: Any, differences: Differences) -> None:
    """Record each value of this start that differs from the checkpoint's, with the effect."""
    was, now = map(_started, (saved, live))
    for name, effect in target.effects.items():
        if name in was and name in now and was[name] != now[name]:
            differences.change(name, was[name], now[name], effect)


def _started(state: Any) -> Mapping[str, Any]:
    started = state.get("started") if isinstance(state, Mapping) else None
    return started if isinstance(started, Mapping) else {}


def outline_of(dataset: Any) -> str | None:
    """Return the length of a data set and a digest of some rows, to detect other data or another order.

    Reads rows only of lists, tensors and tables: that runs no code of the user, and draws no random number. Returns
    None for a stream.
    """
    if not hasattr(dataset, "__len__"):
        return None
    count = len(dataset)
    rows = _rows(dataset, sorted({count * n // _ROWS for n in range(_ROWS)} | {count - 1})) if count else None
    digest = "" if rows is None else f" ({hashlib.blake2b(repr(rows).encode(), digest_size=4).hexdigest()})"
    return f"{count} samples{digest}"


def _rows(dataset: Any, places: Sequence[int]) -> Any:
    """Return some rows of a data set as plain values; None if reading them could run the user's code."""
    tables = sys.modules.get("datasets")
    if type(dataset) is Subset:
        of_whole = [int(dataset.indices[place]) for place in places]
        return of_whole, _rows(dataset.dataset, of_whole)
    if tables is not None and isinstance(dataset, tables.Dataset):
        return dataset.with_format("arrow")[[*places]].to_pylist()
    if type(dataset) in (list, tuple, TensorDataset):
        return [_plain(dataset[place]) for place in places]
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(_plain, value)]
    if isinstance(value, (torch.Tensor, np.ndarray, str, bytes, int, float, type(None))):
        return repr(value)
    return type(value).__qualname__
