"""A batch sampler that resumes at any step, and random numbers that belong to a sample.

Invariants

1. The order of an epoch depends only on (seed, epoch, size): not on the position, the ranks, the workers or the past.
2. The position counts the samples that the loop has received, over all ranks; prefetching in workers does not move it.
3. The position always has a batch after it: the last batch of an epoch moves it to the start of the next one.
4. The sampler neither draws from a global random stream nor changes one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from ckpt_tasks.checked import checked
from ckpt_tasks.errors import ConfigError, StateMismatchError
from ckpt_tasks.state.data.drawing import OwnNumbers, seed_of
from ckpt_tasks.state.data.order import ORDER_VERSION, Permutation
from ckpt_tasks.state.data.seen import Position, Seen

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MAX_SIZE = 2**62
_MOST_EPOCHS = 2**63

_log = logging.getLogger("ckpt_tasks")


class SampleId(int):
    """A sample's id together with its epoch, also in a worker process."""

    epoch: int

    def __new__(cls, value: int, epoch: int = 0) -> Self:
        sample = super().__new__(cls, value)
        sample.epoch = epoch
        return sample


class ResumableSampler(Position, Sampler[list[int]]):
    """Yield every sample of a data set once per epoch, in batches; resume at any batch immediately.

    ::

        sampler = ResumableSampler(len(dataset), batch_size=32)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
        state = {"model": model, "optimizer": optimizer, "data": sampler}
        for batch in sampler.follow(loader):  # epoch after epoch, without end
            ...

    `batch_size` is per rank; `mesh` is the data-parallel part of a DeviceMesh, in place of `rank` and `world_size`. A
    step takes the next batch_size x world_size samples of the epoch's order and assigns them to the ranks in turn. So a
    run can resume with another number of ranks or another batch size: no sample of the epoch is lost or repeated, and
    while batch_size x world_size stays the same, every step gets the same samples.

    All ranks make the same number of steps. `drop_last=True` leaves out samples that do not fill a last batch of all
    ranks together; otherwise the last batches are smaller, and as even as possible. If fewer samples than ranks remain
    (`batch_size=1`, or after a change of the world size), some ranks get an empty list.

    Raises ConfigError for invalid sizes, or if an epoch would have no batch.
    """

    @checked
    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        rank: int = 0,
        world_size: int = 1,
        mesh: DeviceMesh | None = None,
    ):
        if mesh is not None:
            rank, world_size = _place_in(mesh)
        check_count("size", size, least=1, most=_MAX_SIZE)
        check_count("batch_size", batch_size, least=1, most=_MAX_SIZE)
        check_count("world_size", world_size, least=1, most=_MAX_SIZE)
        check_count("rank", rank, least=0, most=world_size - 1)
        check_count("seed", seed, least=0, most=2**64 - 1)
        least = batch_size * world_size if drop_last else world_size
        if size < least:
            raise ConfigError(
                f"{size} samples do not make one batch: {world_size} rank(s) with batch_size {batch_size} need {least}",
                key="size",
                hint="Use a smaller batch_size, or drop_last=False" if drop_last else "Use fewer ranks",
            )
        self.size, self.batch_size, self.shuffle, self.seed = size, batch_size, bool(shuffle), seed
        self.drop_last, self.rank, self.world_size = bool(drop_last), rank, world_size
        self.has_mesh = mesh is not None
        Position.__init__(self)
        self._seen = Seen()
        self._named = 0  # So many ids of a batch are SampleIds.
        self._drawn = self._drawn_before = 0  # Batches drawn until now, and until the last state_dict.
        self._stands = True  # True until the position moves.

    @property
    def batch(self) -> int:
        """The number of the next batch within its epoch, from 0 on."""
        return -(-self._samples // (self.batch_size * self.world_size))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} in epoch {self._epoch}, after {self._samples} of {self.size} samples>"

    def __len__(self) -> int:
        """Return the number of remaining batches in this epoch, equal in all ranks."""
        return self._count(self.size - self._samples)

    @property
    def epoch_batches(self) -> int:
        """The number of batches in a whole epoch, equal in all ranks."""
        return self._count(self.size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches from the position to the end of the epoch, without moving the position."""
        # This method is not a generator: it must take the position now, not at the first batch.
        return self._batches(self._epoch, self._samples)

    def follow(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the loader's batches without end, and move the position with each batch.

        Raises ConfigError if the loader's `batch_sampler` is not this sampler. After `load_state_dict` the next batch
        is the batch at the new position; prefetched batches are discarded. Wrap the data set in `seeded` if it draws
        random numbers: a resume does not restore the streams of workers. If the loader has a `state_dict`, leave the
        loader out of the state.
        """
        if loader.batch_sampler is not self:
            raise ConfigError(
                "the loader draws its batches from another sampler", hint="Pass it batch_sampler=sampler."
            )
        return self._follow(loader)

    def iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the loader's batches to the end of the epoch as `follow` does, but without moving the position."""
        self._stands = False  # The caller moves the position with each batch that it yields.
        generator = torch.Generator()
        generator.manual_seed(seed_of(f"{self.seed}/{self._epoch}/{self._samples}/{self.rank}"))
        theirs, loader.generator = loader.generator, generator
        try:
            return iter(loader)
        finally:
            loader.generator = theirs

    def whole(self, loader: DataLoader[Any], epoch: int) -> Iterator[Any]:
        """Yield the loader's batches of a whole epoch, and leave the position as it is."""
        position, self._epoch, self._samples = (self._epoch, self._samples), epoch, 0
        try:
            return self.iterate(loader)
        finally:
            self._epoch, self._samples = position

    def end_epoch(self, epoch: int) -> None:
        """Move the position to the start of the epoch after `epoch`, if it is in `epoch`; end a running pass."""
        if self._epoch == epoch:
            self._to_next_epoch()
            self.moves += 1

    def begin_epoch(self) -> None:
        """Move the position to the start of the next epoch, if it is not at the start of an epoch."""
        if self._samples:
            self._to_next_epoch()

    def name_epochs(self, most: int = _MAX_SIZE) -> None:
        """Yield SampleIds from now on, for the first `most` samples of each batch."""
        self._named = max(self._named, most)

    def advance(self) -> None:
        """Move the position past the next batch, for a loop that iterates over the loader itself."""
        self._stands = False
        self._samples += self._taken(self.size - self._samples)
        self._skip_empty_epoch()

    def skip_batches(self, count: int) -> None:
        """Skip the next `count` batches; a running `follow` discards prefetched batches."""
        check_count("count", count, least=0, most=_MAX_SIZE)
        self._seen.add(self._epoch, self._samples)
        for _ in range(count):
            self._samples += self._taken(self.size - self._samples)
            self._seen.begin = self._samples
            self._skip_empty_epoch()
        self._stands = False
        self.moves += 1

    def seeded(self, dataset: Dataset[Any]) -> Dataset[Any]:
        """Wrap `dataset` so that the random numbers it draws depend only on (seed, epoch, sample id).

        Augmentation is then equal after a resume and with any number of workers or ranks. This covers the global
        streams of Python, NumPy and torch's CPU, and generators in attributes of the data set. After this call the
        sampler's batches consist of SampleIds; use the wrapped data set only with them.
        """
        self.name_epochs()
        return _Seeded(dataset, self.seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the settings of the order as plain numbers, equal in all ranks."""
        # Prefetched batches alone cause no warning: workers draw them before the first batch.
        if self._stands and 0 < self._drawn_before < self._drawn:
            self._stands = False  # Warn only once.
            _log.warning(
                "A loader draws batches of a ResumableSampler whose position does not move: a resume begins the epoch "
                "again. Iterate sampler.follow(loader), or call sampler.advance() after each batch"
            )
        self._drawn_before = self._drawn
        return {**self._position(), "seen": self._seen.state(self._epoch, self._samples)}

    def _position(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "samples": self._samples,
            "size": self.size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "order_version": ORDER_VERSION,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the position from a `state_dict`, also of another number of ranks or another batch size.

        Raises StateMismatchError, and changes nothing, if it belongs to other data or another order.
        """
        own = self._position()
        missing, unexpected = tuple(own.keys() - state_dict.keys()), tuple(state_dict.keys() - own.keys() - {"seen"})
        if missing or unexpected:
            raise StateMismatchError("not the state of this sampler", missing=missing, unexpected=unexpected)
        ranges = {"epoch": range(_MOST_EPOCHS), "samples": range(self.size + 1)}
        different = tuple(
            f"{name} is {state_dict[name]!r} in the checkpoint and {own[name]!r} here"
            for name in own
            if type(state_dict[name]) is not type(own[name])
            or (state_dict[name] not in ranges[name] if name in ranges else state_dict[name] != own[name])
        )
        if different:
            raise StateMismatchError(
                "the position belongs to other data, or to another order of it",
                different=different,
                hint="Build the sampler over the same data set, with the same seed and shuffle.",
            )
        self._epoch, self._samples = state_dict["epoch"], state_dict["samples"]
        self.moves += 1
        self._seen.begin = self._samples
        self._skip_empty_epoch()
        # A state of an older version has no record: begin one here.
        self._seen.set(state_dict.get("seen") or {"since": [self._epoch, self._samples], "rows": []})

    def _count(self, samples: int) -> int:
        global_batch = self.batch_size * self.world_size
        return samples // global_batch if self.drop_last else -(-samples // global_batch)

    def _skip_empty_epoch(self) -> None:
        """Move to the next epoch if this epoch has no more batches."""
        if not self._taken(self.size - self._samples):
            self._to_next_epoch()

    def _to_next_epoch(self) -> None:
        self._seen.add(self._epoch, self._samples)
        self._epoch, self._samples, self._seen.begin = self._epoch + 1, 0, 0

    def _taken(self, left: int) -> int:
        """Return how many of the `left` samples the next batch of all ranks takes; 0 ends the epoch."""
        global_batch = self.batch_size * self.world_size
        if left <= global_batch:
            return left if left == global_batch or not self.drop_last else 0
        # Take fewer samples now if the last batch would otherwise have fewer samples than ranks.
        if not self.drop_last and left - global_batch < self.world_size and left >= 2 * self.world_size:
            return left - self.world_size
        return global_batch

    def _batches(self, epoch: int, samples: int) -> Iterator[list[int]]:
        permutation = Permutation(self.size, f"{self.seed}/{epoch}") if self.shuffle else None
        steps = self._positions(samples)
        # Map many samples per call: a thousand take 1 µs each, a single one 300 µs.
        while several := list(islice(steps, max(1, 1024 // self.batch_size))):
            order = permutation(np.concatenate(several)) if permutation else np.concatenate(several)
            for mine in np.split(order, np.cumsum([len(positions) for positions in several[:-1]])):
                ids: list[int] = mine.tolist()
                self._drawn += 1
                ids[: self._named] = [SampleId(i, epoch) for i in ids[: self._named]]
                yield ids

    def _positions(self, samples: int) -> Iterator[NDArray[np.int64]]:
        """Yield this rank's positions in the epoch's order, an array for each step."""
        while taken := self._taken(self.size - samples):
            yield np.arange(samples + self.rank, samples + taken, self.world_size, dtype=np.int64)
            samples += taken

    def _follow(self, loader: DataLoader[Any]) -> Iterator[Any]:
        while True:
            moves = self.moves
            for batch in self.iterate(loader):
                self.advance()
                yield batch
                if self.moves != moves:
                    break


def _place_in(mesh: DeviceMesh) -> tuple[int, int]:
    if not hasattr(mesh, "get_coordinate"):
        raise ConfigError(f"mesh must be a DeviceMesh, not {mesh!r:.80}", key="mesh", hint='Write mesh=mesh["dp"].')
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError("this rank is not in the mesh of its data", key="mesh")
    rank = 0
    for at, size in zip(coordinate, mesh.shape, strict=True):
        rank = rank * size + at
    return rank, mesh.size()


class _Seeded(Dataset[Any]):
    def __init__(self, dataset: Dataset[Any], seed: int):
        self.dataset = dataset
        self.own = OwnNumbers(seed)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # a map-style data set has a length, says torch's Dataset

    def __getitem__(self, sample: SampleId) -> Any:
        what = f"{int(sample)}/sample"
        return self.own.make(lambda: self.dataset[int(sample)], sample.epoch, what, self.dataset)


def check_length(dataset: Any, sampler: object) -> None:
    """Raise ConfigError if a data set has another length than when its sampler was made."""
    if isinstance(sampler, ResumableSampler) and len(dataset) != sampler.size:
        raise ConfigError(
            f"the data set has {len(dataset)} samples, and had {sampler.size} when the loader was made",
            key="dataset",
            hint="Make a loader for each stage of a data set that changes in the loop (docs/RECIPES.md, Curriculum).",
        )


def check_count(name: str, value: object, *, least: int, most: int) -> None:
    """Raise ConfigError if an argument is not an int within these bounds."""
    if type(value) is not int or not least <= value <= most:  # This refuses bool, too.
        raise ConfigError(f"{name} must be an int from {least} to {most}, not {value!r}", key=name)
