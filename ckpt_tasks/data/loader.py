"""A data loader with a position, for training loops that iterate epoch by epoch, such as Lightning's.

Invariants, in addition to the sampler's:

1. `len` counts the batches of a whole epoch, at any position.
2. The loader never changes a global random stream: in this process and in workers, the data set and `collate_fn` draw
   from streams that begin with each batch and depend only on (seed, epoch, batch).
3. An epoch ends when its iterator ends, not with its last batch. A checkpoint of the last batch lacks the effects of
   code after the iterator (a schedule's step). After a restore of that checkpoint, the next `iter` yields nothing, so
   that the loop runs this code.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from ckpt_tasks.checked import checked
from ckpt_tasks.data.drawing import own_random_numbers
from ckpt_tasks.data.sampler import ResumableSampler, SampleId
from ckpt_tasks.data.streams import StreamBatches, StreamPosition
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.objects.started import Started, outline_of
from ckpt_tasks.state.groups import objects_of
from ckpt_tasks.system import system
from ckpt_tasks.tensors.placements import cut_beside_data

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("ckpt_tasks")
_TOO_MANY = (
    "range(N) begins anew, and the restored position is in epoch %d (the first one is 0): the loop trains as many "
    "epochs too many. Write `for epoch in loader.epochs(N)`, which yields those that are left"
)
# Match no loop with a `break` or a `return`: it may end early.
_WHOLE_RANGE = re.compile(r"for .+ in .*range\((?:[01], )?[^,]*?(?:\)|, \w+=).*:\n(?!(?:.*\n)* +(?:break|return)\b)")
_FROM_NOUGHT = (
    "enumerate begins at 0, and the restored epoch goes on with batch %d: write enumerate(loader, loader.batch), or a "
    "loop that counts its batches (to accumulate gradients, or for the last one of an epoch) does another thing"
)
_STEP = "samples in a step"
_OURS = {"batch_sampler", "sampler", "generator"}


class ResumableLoader(Started):
    """Load a data set as DataLoader does; after a restore, continue in the middle of an epoch.

    ::

        loader = ResumableLoader(dataset, batch_size=32, shuffle=True, num_workers=2)
        state = {"model": model, "optimizer": optimizer, "data": loader}
        step = ckpt.restore(state)
        for epoch in loader.epochs(3):
            for batch in loader:  # the rest of the epoch
                ...

    `options` are those of DataLoader (`num_workers`, `pin_memory` and so on). The position moves when the loader yields
    a batch. Random numbers that the data set or `collate_fn` draws, from the streams of Python, NumPy or torch or from
    generators in their attributes, depend only on `seed`, the epoch and the batch (and on the seeds of these
    generators). Under torch.distributed each rank gets its part of every batch; `batch_size` is per rank. With tensor
    parallelism the ranks of one model need the same samples: give the data-parallel part of the mesh
    (`mesh=mesh["dp"]`), or the data-parallel `rank` and `world_size`.

    The data set may be a stream with `state_dict()` and `load_state_dict()`, such as a stream of datasets. Each worker
    reads its part; a resume needs as many workers. The loader calls the stream's `set_epoch(epoch)`. After a restore a
    worker reads its last batch again: if the batch differs, the loop raises StateMismatchError. `replay=True` accepts a
    stream without a state that repeats its samples: a resume reads the epoch again. A stream of batches needs
    `batch_size=None`. If each of several ranks reads its own part, save ``ByRank(loader)``.

    Raises ConfigError for a stream that cannot be resumed, a batch size that gives no batch, and a sampler of the user.
    """

    effects: ClassVar[Mapping[str, str]] = {
        _STEP: "The epoch goes on behind the samples that the run has trained.",
        "data": "The order is the same, and its samples are others.",
    }

    @checked
    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        replay: bool = False,
        mesh: DeviceMesh | None = None,
        rank: int = 0,
        world_size: int | None = None,
        **options: Any,
    ):
        if given := _OURS & options.keys():
            raise ConfigError(f"{', '.join(sorted(given))}: a ResumableLoader has its own", hint="Give it a seed.")
        self.dataset = dataset
        self.sampler: ResumableSampler | StreamPosition
        self._loader: Any = None  # For a stream, StreamPosition makes it.
        self._has_place = mesh is not None or world_size is not None
        collate, size = collate_fn or default_collate, batch_size
        self._outline = None
        if _is_stream(dataset):
            if shuffle or rank or self._has_place:
                raise ConfigError(
                    "a stream has no samples by number, to shuffle or to deal out to ranks",
                    key="shuffle" if shuffle else "rank",
                    hint="Write ShuffleBuffer(stream, size) for a shuffle, and give each rank its part of the stream.",
                )
            batches = StreamBatches(dataset, size, drop_last=drop_last, collate=collate, seed=seed, replay=replay)
            self.sampler = StreamPosition(batches, partial(_stream_loader, **options))
            self._has_place = True
        elif replay or size is None or not hasattr(dataset, "__len__"):
            lacks = "is no stream" if hasattr(dataset, "__len__") else "has no length"
            raise ConfigError(f"a dataset of type {type(dataset).__name__} {lacks}", key="dataset")
        else:
            self.sampler = ResumableSampler(
                len(dataset),
                size,
                shuffle=shuffle,
                seed=seed,
                drop_last=drop_last,
                rank=rank,
                world_size=world_size or 1,
                mesh=mesh,
            )
            self.sampler.name_epochs()
            self._outline = outline_of(dataset)
            ours = _Batches(dataset, collate, seed)
            self._loader = DataLoader(ours, batch_sampler=self.sampler, collate_fn=_as_it_is, **options)
        self._restored = False
        self._ending: int | None = None  # The epoch whose last batch was yielded, but which has not ended.
        self._ends_again = False
        self._numbered = False  # True if the loop has read `batch`.
        self._asked = False  # True if the loop has read `epoch` or called `epochs`.

    @property
    def epoch(self) -> int:
        """The number of epochs of which the loader has yielded all batches."""
        self._asked = True
        return self.sampler.epoch

    @checked
    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that remain of `count`; the loop then iterates over the loader for each.

        After a restore at the last batch of an epoch, yields this epoch once more, without batches, so that the code
        after the inner loop runs.
        """
        self._asked, self.nothing_left = True, self._restored and self.sampler.epoch >= count
        if self._restored and self._ending is not None and self._ending < count:
            self._ends_again = True
            yield self._ending
        yield from range(self.sampler.epoch, count)

    @property
    def batch(self) -> int:
        """The number of the next batch in its epoch, from 0 on: ``enumerate(loader, loader.batch)``."""
        self._numbered = True
        return self.sampler.batch

    @property
    def is_ending(self) -> bool:
        """True if the epoch's last batch has been yielded, but its iterator has not ended."""
        return self._ending is not None

    def end_epoch(self) -> None:
        """Move the position to the start of the next epoch, for a loop that leaves an epoch before its end."""
        self._ending = None
        self.sampler.begin_epoch()

    @property
    def batch_size(self) -> int:
        """The number of samples in a batch of one rank."""
        return self.sampler.batch_size

    def __repr__(self) -> str:
        return repr(self.sampler).replace("Sampler", "Loader", 1)

    def __len__(self) -> int:
        """Count the batches of a whole epoch. Raises TypeError for a stream."""
        self._take_place()
        return self.sampler.epoch_batches

    def __iter__(self) -> Iterator[Any]:
        """Begin a new epoch, or continue the restored epoch."""
        self._take_place()
        if self._ends_again:
            self._ends_again, self._ending = False, None
            return iter(())
        if not self._restored:
            self.sampler.begin_epoch()
        else:
            loops = _loops_around(inspect.currentframe())
            if self.sampler.epoch and not self._asked and _counts_anew(loops):
                _log.warning(_TOO_MANY, self.sampler.epoch)
            if self.sampler.samples and not self._numbered and loops and _numbers_from_nought(loops[-1]):
                _log.warning(_FROM_NOUGHT, self.batch)
        self._ending = None
        return self._hand_out(self.sampler.iterate(self._loader))

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the yielded batches."""
        self._take_place()
        started = {_STEP: self.batch_size * self.sampler.world_size, "data": self._outline}
        state = {**self.sampler.state_dict(), "started": started}
        if self._ending is None or self.sampler.samples:  # `samples` is not 0 after skipped batches.
            return state
        return {**state, "epoch": self._ending, "samples": self.sampler.size}

    @checked
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the position, at which the next `iter` continues. Raises StateMismatchError as the sampler does."""
        self.sampler.load_state_dict({name: state_dict[name] for name in state_dict if name != "started"})
        self._ending = state_dict["epoch"] if state_dict["samples"] == self.sampler.size else None
        self._ends_again = self._asked = False
        self._restored, self.found_s = True, None

    def skip_batches(self, count: int) -> None:
        """Skip the next `count` batches, for a rollback; a running loop discards prefetched batches."""
        self.sampler.skip_batches(count)
        self._restored = True  # The next `iter` continues after the skipped batches.

    def _take_place(self) -> None:
        """Take rank and world size of the process group, which frameworks start after the loader is made."""
        if not self._has_place and distributed.is_available() and distributed.is_initialized():
            assert isinstance(self.sampler, ResumableSampler)
            self.sampler.rank, self.sampler.world_size = distributed.get_rank(), distributed.get_world_size()

    def _hand_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        epoch, moves, began_s = self.sampler.epoch, self.sampler.moves, system().monotonic()
        while True:
            for batch in batches:
                if self._restored:
                    self._restored, self.found_s = False, system().monotonic() - began_s
                self.sampler.advance()
                self._ending = epoch if self.sampler.epoch > epoch else None
                yield batch
                if self.sampler.moves > moves:
                    break
            if self.sampler.moves == moves or self.sampler.epoch != epoch or self._ending is not None:
                break
            moves, batches = self.sampler.moves, self.sampler.iterate(self._loader)
        self._ending = None


def check_dealt(state: Mapping[str, Any]) -> None:
    """Raise ConfigError if a loader or sampler gives different samples to ranks with parts of one model."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    objects = [*objects_of(state)]
    for dealer in objects:
        sampler = dealer.sampler if isinstance(dealer, ResumableLoader) else dealer
        if isinstance(dealer, ResumableLoader):
            dealer._take_place()
        if not isinstance(sampler, ResumableSampler) or sampler.has_mesh:
            continue
        if sampler.world_size == distributed.get_world_size() > 1:
            names = (cut_beside_data(value, sampler.world_size) for value in objects if isinstance(value, nn.Module))
            if key := next((name for name in names if name), None):
                raise ConfigError(
                    f"the {type(dealer).__name__} gives every rank other samples, and ranks that hold parts of one "
                    "model need the same ones",
                    key=key,
                    hint='Give it the data-parallel part of the mesh (mesh=mesh["dp"]), or rank= and world_size= of '
                    "data parallelism: rank=0, world_size=1 where there is none.",
                )


def _loops_around(iterating: FrameType | None) -> list[ast.For | ast.While]:
    """Return the loops around the statement that calls iter(loader); the last is the loop over the loader."""
    caller = iterating and iterating.f_back
    while caller is not None and caller.f_globals.get("__name__", "").startswith(("tqdm", "ckpt_tasks.checkpoint.")):
        caller = caller.f_back
    if caller is None:
        return []
    try:
        source = ast.parse("".join(linecache.getlines(caller.f_code.co_filename, caller.f_globals)))
    except (SyntaxError, ValueError):  # The source is not Python.
        return []
    statements = [node for node in ast.walk(source) if isinstance(node, ast.For | ast.While)]
    loops = [node for node in statements if node.lineno <= caller.f_lineno <= (node.end_lineno or 0)]
    return loops if loops and loops[-1].lineno == caller.f_lineno else []


def _counts_anew(loops: list[ast.For | ast.While]) -> bool:
    """Return True if all loops around the loop over the loader are over range(N): a restore does not shorten them."""
    return len(loops) > 1 and all(_WHOLE_RANGE.match(ast.unparse(loop)) for loop in loops[:-1])


def _numbers_from_nought(loop: ast.For | ast.While) -> bool:
    """Return True if a loop numbers its items by `enumerate` from 0 on."""
    calls = [node for node in ast.walk(getattr(loop, "iter", loop)) if isinstance(node, ast.Call)]
    return any(
        ast.unparse(call.func) == "enumerate" and len(call.args) + len(call.keywords) == 1
        for call in calls
        if isinstance(loop, ast.For)
    )


class _Batches(Dataset[Any]):
    """Makes whole collated batches, each with its own random streams."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], seed: int):
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]  # checked by the loader

    def __getitems__(self, samples: list[SampleId]) -> Any:
        if not samples:
            return self._collate([])
        what = f"{int(samples[0])}/batch"
        with own_random_numbers(self._seed, samples[0].epoch, what, self._dataset, self._collate):
            several = getattr(self._dataset, "__getitems__", None)
            ids = [int(sample) for sample in samples]
            return self._collate(several(ids) if several else [self._dataset[i] for i in ids])


def _is_stream(dataset: Any) -> bool:
    """Return True for a stream, which torch calls an iterable-style data set."""
    return isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") or hasattr(dataset, "__getitem__"))


def _stream_loader(batches: StreamBatches, **options: Any) -> DataLoader[Any]:
    if not options.get("in_order", True):
        raise ConfigError("workers that overtake each other have no order to resume", key="in_order")
    generator = torch.Generator()  # Without it, the loader would draw from torch's stream.
    return DataLoader(batches, batch_size=None, collate_fn=_as_it_is, generator=generator, **options)


def _as_it_is(batch: Any) -> Any:
    return batch
