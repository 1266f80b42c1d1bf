"""The position in a stream: data without a length or numbered samples, of which each worker reads its own part.

Invariants

1. Each batch comes with its place: its number, its digest, and the stream's state before it. The position has the place
   of each worker's last yielded batch, so prefetching does not move the position.
2. At a resume, each worker reads its last batch again and compares a digest of it. If a batch differs, the loader
   raises before it yields a batch: the stream is not as it was.
3. The loader reads the next batch before it yields a batch, so it knows the last batch of an epoch.
4. The loader never changes a global random stream; the stream's random numbers depend only on (seed, epoch, worker,
   batch).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ckpt_tasks.errors import ConfigError, StateMismatchError
from ckpt_tasks.state.data.drawing import own_random_numbers
from ckpt_tasks.state.data.libraries import copy_of, mark_of, order_of, return_state, way_of, why_inexact
from ckpt_tasks.state.data.seen import Position

_ENDED = -1  # `samples` in the state of an ended epoch: a stream has no size that would show its end.


class StreamPosition(Position):
    """Yield the batches of a stream; after a restore, continue after the last yielded batch.

    Has the methods of ResumableSampler that ResumableLoader calls. `make` returns a DataLoader for a data set of
    batches.
    """

    size = _ENDED
    world_size = 1

    def __init__(self, batches: StreamBatches, make: Callable[[Any], DataLoader[Any]]):
        self._batches, self._make = batches, make
        self._loader: DataLoader[Any] | None = None
        self._workers = make(batches).num_workers
        super().__init__()
        self._skip = 0
        self.batch = 0  # The number of the next batch of this epoch.
        self._turn = 0  # The worker that yields the next batch.
        self._places: list[dict[str, Any] | None] = [None] * max(1, self._workers)
        self._read: _Item | None = None  # The batch that `advance` passes; `_is_last`: the epoch's last.
        self._is_last = False

    @property
    def batch_size(self) -> int:
        """The number of samples in a batch; 1 for a stream of batches."""
        return self._batches.batch_size or 1

    @property
    def epoch_batches(self) -> int:
        """Raise TypeError: a stream has no length."""
        raise TypeError("a ResumableLoader over a stream has no length")

    def __repr__(self) -> str:
        return f"<StreamSampler in epoch {self._epoch}, after {self._samples} samples>"

    def iterate(self, _: Any) -> Iterator[Any]:
        """Yield the batches from the position to the end of the epoch; `advance` moves the position past each batch."""
        start = {"turn": self._turn, "places": [*self._places]} if self._samples else None
        if self._loader is None or start or self._batches.start:
            # Make a new loader: persistent workers keep their own copy of `start`.
            self._batches.start = start
            self._loader = self._make(self._batches)
        self._batches.begin(self._epoch)
        items: Iterator[_Item] = iter(self._loader)
        return self._hand_out(items, checks=len(self._places) if start else 0)

    def whole(self, _: Any, epoch: int) -> Iterator[Any]:
        """Yield the batches of a whole epoch, and leave the position as it is."""
        batches = copy.copy(self._batches)
        batches.start, batches._epoch = None, torch.tensor(epoch)
        return (item.batch for item in self._make(batches) if _check(item))

    def end_epoch(self, epoch: int) -> None:
        """Move the position to the start of the epoch after `epoch`, if it is in `epoch`; end a running pass."""
        if self._epoch == epoch:
            self._to_epoch(epoch + 1)
            self.moves += 1

    def begin_epoch(self) -> None:
        """Move the position to the start of the next epoch, if it is not at the start of an epoch."""
        if self._samples:
            self._to_epoch(self._epoch + 1)

    def advance(self) -> None:
        """Move the position past the batch that `iterate` has just yielded or skipped."""
        if (item := self._read) is None:
            return
        self._read = None
        self._places[item.worker] = item.place
        self._turn = (item.worker + 1) % len(self._places)
        self._samples, self.batch = self._samples + item.samples, self.batch + 1
        if self._is_last:
            self._to_epoch(self._epoch + 1)

    def skip_batches(self, count: int) -> None:
        """Skip the next `count` batches, also beyond the end of an epoch."""
        self._skip += count

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream, with the place of each worker."""
        return {
            "epoch": self._epoch,
            "samples": self._samples,
            "batch": self.batch,
            "skip": self._skip,
            "turn": self._turn,
            "workers": self._workers,
            "seed": self._batches.seed,
            "order": self._batches.order,
            "replayed": (self._batches.batch_size or 1) if self._batches.replays else 0,
            "places": copy.deepcopy(self._places),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the position from a `state_dict` of a stream with the same number of workers.

        Raises StateMismatchError, and changes nothing, for another number of workers, seed, order or replayed batch
        size.
        """
        own = self.state_dict()
        missing, unexpected = tuple(own.keys() - state_dict.keys()), tuple(state_dict.keys() - own.keys())
        if missing or unexpected:
            raise StateMismatchError("not the state of a stream's loader", missing=missing, unexpected=unexpected)
        if different := tuple(
            f"{name} is {state_dict[name]!r} in the checkpoint and {own[name]!r} here"
            for name in ("workers", "seed", "order", "replayed")
            if state_dict[name] != own[name]
        ):
            raise StateMismatchError(
                "the position belongs to a stream that is read in another way",
                different=different,
                hint="Each worker reads its own part of the stream: build the loader with the same num_workers and "
                "seed, give each shuffle a seed, and where an epoch is replayed keep its batch_size. To begin the "
                "stream anew, leave the loader out of what you restore.",
            )
        self._to_epoch(state_dict["epoch"] + (state_dict["samples"] == _ENDED))
        self._skip = state_dict["skip"]
        if state_dict["samples"] != _ENDED:
            self._samples, self.batch = state_dict["samples"], state_dict["batch"]
            self._turn, self._places = state_dict["turn"], copy.deepcopy(state_dict["places"])
        self.moves += 1

    def _to_epoch(self, epoch: int) -> None:
        self._epoch, self._samples, self.batch, self._turn = epoch, 0, 0, 0
        self._places = [None] * len(self._places)

    def _hand_out(self, items: Iterator[_Item], checks: int) -> Iterator[Any]:
        moves, epoch = self.moves, self._epoch
        for item in [*islice(items, checks)]:
            _check(item)
        ours = (item for item in items if _check(item))
        ahead = next(ours, None)
        if ahead is None and self._epoch == epoch:  # The epoch has no more batches.
            self._to_epoch(epoch + 1)
        while ahead is not None and (self.moves, self._epoch) == (moves, epoch):
            item, ahead = ahead, next(ours, None)
            self._read, self._is_last = item, ahead is None
            if self._skip:
                self._skip -= 1
                self.advance()
            else:
                yield item.batch


class StreamBatches(IterableDataset[Any]):
    """Makes the batches of a stream, in this process or in each worker, from the places in `start` on."""

    def __init__(
        self,
        stream: Any,
        batch_size: int | None,
        *,
        drop_last: bool,
        collate: Callable[[list[Any]], Any],
        seed: int,
        replay: bool,
    ):
        if isinstance(stream, Iterator):
            raise ConfigError(
                f"an iterator of type {type(stream).__name__} can be read only once",
                key="dataset",
                hint="Give an IterableDataset, whose __iter__ begins anew.",
            )
        if way := way_of(stream):
            raise ConfigError(
                f"a stream of type {type(stream).__name__} is not resumed in this way", key="dataset", hint=way
            )
        if not replay and (fault := why_inexact(stream)):
            raise ConfigError(
                f"{fault}: a resume could lose or repeat samples",
                key="dataset",
                hint="If the stream gives the same samples each time that it is read, write "
                "ResumableLoader(…, replay=True): a resume reads the epoch again up to its position.",
            )
        self.stream, self.batch_size, self.seed = stream, batch_size, seed
        self.order = order_of(stream)
        self._drop_last, self._collate, self.replays = drop_last, collate, replay
        self._epoch = torch.zeros((), dtype=torch.int64)  # Persistent workers read it from shared memory.
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        self.start: dict[str, Any] | None = None

    def begin(self, epoch: int) -> None:
        """Set the epoch for the next iterators."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[_Item]:
        info, epoch = get_worker_info(), int(self._epoch)
        worker = info.id if info else 0
        # Read a copy: it begins at the first sample, even if an earlier epoch changed the stream's attributes.
        reader = _Reader(self, worker, epoch, copy_of(self.stream))
        if self.start is None:
            yield from reader.batches(None)
            return
        place = self.start["places"][worker]
        # Each worker begins with one check, for the loader takes items from the workers in turn.
        if place or not reader.begins_with_a_check:
            yield _Item(worker, None, 0, reader.return_to(place))
        if worker < self.start["turn"]:
            yield _Item(worker, None, 0, None)  # Its batch of this round was yielded before the save: yield none now.
        yield from reader.batches(place)

    def read(self, samples: Iterator[Any], size: int | None) -> list[Any]:
        """Return the samples of the next batch; an empty list at the end."""
        batch = [*islice(samples, size or 1)]
        return [] if self._drop_last and len(batch) < (size or 1) else batch

    def collated(self, samples: list[Any]) -> Any:
        """Collate samples into a batch."""
        return self._collate(samples) if self.batch_size else samples[0]


class _Reader:
    """Reads one worker's part of a stream, for one epoch."""

    def __init__(self, of: StreamBatches, worker: int, epoch: int, stream: Any):
        self._of, self._worker, self._epoch, self._stream = of, worker, epoch, stream
        if callable(tell := getattr(stream, "set_epoch", None)):
            tell(epoch)
        self._samples: Iterator[Any] | None = None
        self.mark = ""  # A digest of the last batch; with `replay`, of all batches up to it.

    @property
    def begins_with_a_check(self) -> bool:
        """True if the epoch's first batch comes behind a check that a second reading is equal."""
        return self._of.replays and not self._epoch

    def return_to(self, place: Mapping[str, Any] | None) -> str | None:
        """Go to a place, and read its last batch again; return the name of this batch if it differs."""
        if place is None:
            return None
        number = place["batch"]
        if self._of.replays:
            for before in range(number):
                self._read(before, place["size"])
        elif place["stream"] is not None:
            return_state(self._stream, place["stream"])
        self._read(number, place["size"])
        return None if self.mark == place["mark"] else self._name(number)

    def batches(self, place: Mapping[str, Any] | None) -> Iterator[_Item]:
        """Yield the batches after a place to the end of the epoch."""
        number = 0 if place is None else place["batch"] + 1
        samples_before = 0 if place is None else place["samples"]
        while True:
            state = None if self._of.replays or not number else self._stream.state_dict()
            samples = self._read(number, self._of.batch_size)
            if not number and self.begins_with_a_check:
                again = _Reader(self._of, self._worker, 0, copy_of(self._of.stream))
                again._read(0, self._of.batch_size)
                yield _Item(self._worker, None, 0, None if again.mark == self.mark else self._name(0))
            if not samples:
                return
            samples_before += len(samples)
            place = {
                "batch": number,
                "samples": samples_before,
                "size": self._of.batch_size,
                "stream": state,
                "mark": self.mark,
            }
            with self._drawing(f"{number}/collate"):
                batch = self._of.collated(samples)
            yield _Item(self._worker, place, len(samples), batch)
            number += 1

    def _read(self, number: int, size: int | None) -> list[Any]:
        with self._drawing(number):
            if self._samples is None:
                self._samples = iter(self._stream)
            samples = self._of.read(self._samples, size)
        self.mark = mark_of(samples, self.mark if self._of.replays else "")
        return samples

    def _name(self, number: int) -> str:
        return f"batch {number} of worker {self._worker} in epoch {self._epoch}"

    def _drawing(self, what: object) -> AbstractContextManager[None]:
        return own_random_numbers(self._of.seed, self._epoch, f"{self._worker}/{what}/stream")


class _Item(NamedTuple):
    """A worker's batch with its place; without a place, the name of a batch that differs (None: no batch)."""

    worker: int
    place: dict[str, Any] | None
    samples: int
    batch: Any


def _check(item: _Item) -> bool:
    """Return True for an item with a batch; raise StateMismatchError if a worker has read other samples than before."""
    if item.place is None and item.batch is not None:
        raise StateMismatchError(
            "the stream does not come back as it was: read again, its last samples differ",
            different=(item.batch,),
            hint="Give each shuffle a seed, and draw random numbers of a sample from sample_generator(index). "
            "To begin the stream anew, leave the loader out of what you restore.",
        )
    return item.place is not None
