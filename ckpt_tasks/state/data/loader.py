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

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from ckpt_tasks.checked import checked
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.state.data.drawing import MadeBatches
from ckpt_tasks.state.data.ends import Ends, moments
from ckpt_tasks.state.data.loops import counts_anew
from ckpt_tasks.state.data.passes import CYCLED, Form, Pass, check_form, form_of, loop_frame, loop_place
from ckpt_tasks.state.data.sampler import ResumableSampler, check_length
from ckpt_tasks.state.data.streams import StreamBatches, StreamPosition
from ckpt_tasks.state.kinds.started import Started, outline_of
from ckpt_tasks.system import system

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("ckpt_tasks")
_TOO_MANY = (
    "range(N) begins anew, and the restored position is in epoch %d (the first one is 0): the loop trains as many "
    "epochs too many. Write `for epoch in loader.epochs(N)`, which yields those that are left"
)
_FROM_NOUGHT = (
    "enumerate begins at 0, and the restored epoch resumes at batch %d: write enumerate(loader, loader.batch), or a "
    "loop that counts its batches (to accumulate gradients, or for the last one of an epoch) does another thing"
)
_NONE_LEFT = (
    "epochs(%d) yields nothing: it counts all epochs of the loader, and %d of them are over. For as many more, write "
    "epochs(%d)"
)
_STEP = "samples in a step"
_NOT_OF_SAMPLER = {"ends", "over", "started"}
_OURS = {"batch_sampler", "sampler", "generator"}
stood_in_for: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()  # A ResumableLoader is iterated in their place.


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
        _STEP: "The epoch continues behind the samples that the run has trained.",
        "data": "The order is the same, and its samples are others.",
    }

    _epoch: int | None = None  # The epoch that epochs() has yielded last; None before epochs().
    _passed = False  # True if that epoch has had its training's pass.
    _over = True  # True if no loop over epochs() runs.
    _home: dict[str, Any] | None = None  # The position before a pass outside epochs().
    _pass: Callable[[], Pass | None] = staticmethod(lambda: None)  # The last pass of the training.
    _plain: Callable[[], Pass | None] = staticmethod(lambda: None)  # The last other pass.
    _cycled: Form | None = None  # The form of a loop over cycle(loader).
    _owner: ClassVar[Callable[[], Any]] = staticmethod(lambda: None)  # The loader whose epochs() have begun last.
    place: tuple[Any, int] | None = None  # Where the last pass has taken its first batch.
    _loop_at: tuple[Any, int] | None = None  # Where the loop over epochs() is.
    _again = False  # True if a restore of this moment must enter the epoch again, though this loader's pass is over.
    _saved_below: tuple[int, int] | None = None  # The epoch and the step of the last save below the pass.
    _tells_below = True
    # When the last batch was yielded, and a reference to a tensor of it.
    handed: tuple[int, Callable[[], Any] | None] | None = None

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
            self.sampler.name_epochs(most=1)
            self._outline = outline_of(dataset)
            ours = MadeBatches(dataset, collate, seed)
            self._loader = DataLoader(ours, batch_sampler=self.sampler, collate_fn=_as_it_is, **options)
        self._restored = False
        self._ending: int | None = None  # The epoch whose last batch was yielded, but which has not ended.
        self._ends_again = False
        self._numbered = False  # True if the loop has read `batch`.
        self._forms: dict[tuple[Any, int], Form] = {}  # By the code and the line of the loop.
        self._asked = False  # True if the loop has read `epoch` or called `epochs`.
        self._ends = Ends()

    @property
    def epoch(self) -> int:
        """The number of epochs of which the loader has yielded all batches."""
        self._asked = True
        self._epoch = None if self._over else self._epoch  # The loop counts its epochs by this number from now on.
        return self.sampler.epoch

    @checked
    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that remain of `count`; the loop then iterates over the loader for each.

        The first pass over the loader in an epoch is the training's, and moves the position. Any other pass yields the
        epoch from its begin, and moves nothing. An epoch ends where the loop asks for the next one, even if it has left
        the loader before its end. After a restore at the last batch of an epoch, yields this epoch once more, without
        batches, so that the code after the inner loop runs.
        """
        self._leave_out_peek()
        if not self._restored and self.sampler.epoch >= count > 0:
            _log.warning(_NONE_LEFT, count, self.sampler.epoch, self.sampler.epoch + count)
        self._asked, self._over = True, False
        try:
            while (epoch := self._begun_epoch()) < count:
                self._epoch, self._passed, moves = epoch, False, self.sampler.moves
                self._ends.begin_epoch()
                self._loop_at = loop_place(getattr(inspect.currentframe(), "f_back", None))
                ResumableLoader._owner = weakref.ref(self)
                yield epoch
                # Else a restore or a skip has moved the position.
                if not self._restored or self.sampler.moves == moves:
                    if self._passed and not self._ends_again:
                        self._ends.add(self.sampler.batch, is_left=self.sampler.epoch == epoch and self._ending is None)
                    self._ends_again, self._ending = False, None
                    self.sampler.end_epoch(epoch)
        finally:
            self._over = True

    def _begun_epoch(self) -> int:
        self._ends_again = self._restored and self._ending is not None
        return self._ending if self._ends_again and self._ending is not None else self.sampler.epoch

    def _leave_out_peek(self) -> None:
        """Go back before a pass that has taken some batches of an epoch before the loop over the epochs."""
        if self._home and not self._restored and self._home["epoch"] == self.sampler.epoch:
            self.load_state_dict(self._home)
        elif not self._restored:
            self.sampler.begin_epoch()
        self._home = None

    @property
    def batch(self) -> int:
        """The number of the next batch in its epoch, from 0 on: ``enumerate(loader, loader.batch)``.

        Before a pass, it is the number of the first batch of that pass.
        """
        self._numbered = True
        if self._ends_again:
            return self._total() or 0
        last = self._pass()
        return self.sampler.batch if self._restored or (last and last.is_open) else 0

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

    def __iter__(self) -> Pass:
        """Begin a new epoch, or continue the restored epoch; in an epoch of `epochs()`, only the first pass does."""
        self._take_place()
        check_length(self.dataset, self.sampler)
        if self._epoch is not None and self._passed:
            other = Pass(self.sampler.whole(self._loader, self._epoch), is_plain=True)
            self._plain = weakref.ref(other)
            return other
        self._passed = True
        owner = ResumableLoader._owner()
        is_inside = owner is not None and owner is not self and not owner._over and owner._has_pass
        if self._ends.empty and not is_inside:
            self._ends.empty -= 1
            self._restored = self._ends.empty > 0 or self._ends.goes_on
            self._ends.begin_pass()
            return Pass(iter(()))
        if not is_inside:
            self._ends.begin_pass()
        if self._ends_again:
            self._ends_again, self._ending = False, None
            return Pass(iter(()), behind=0 if self._numbered else self._total() or 0)
        if self._epoch is None and self._home is None:
            self._home = self.state_dict()
        if not self._restored:
            self.sampler.begin_epoch()
        self._ending, self._ends.begin = None, self.sampler.batch
        behind = self.sampler.batch if self._restored and not self._numbered else 0
        batches = self._hand_out(self.sampler.iterate(self._loader))
        one = Pass(batches, self._look, behind=behind, total=self._total())
        self._pass = weakref.ref(one)
        return one

    def _look(self, one: Pass, caller: FrameType | None) -> int | None:
        """Warn of a loop that begins anew in a restored epoch; return how many batches an islice() leaves of it."""
        behind = self.sampler.batch if self._restored and self.sampler.samples else 0
        self.place = where = loop_place(caller)
        if where is None or (self._epoch is None and not self._restored and one.is_direct):
            return None
        if where not in self._forms or behind:
            self._forms[where] = form_of(one, caller, self._total())
        one.form = form = self._forms[where]
        self._cycled = form if form.fault is CYCLED else self._cycled
        if self._restored and self.sampler.epoch and not self._asked and counts_anew(loop_frame(caller)):
            _log.warning(_TOO_MANY, self.sampler.epoch)
        if not behind or self._numbered:
            return None
        if form.from_nought:
            _log.warning(_FROM_NOUGHT, behind)
        return None if form.most is None or self._epoch is None else max(0, form.most - behind)

    def _total(self) -> int | None:
        return self.sampler.epoch_batches if isinstance(self.sampler, ResumableSampler) else None

    @property
    def _has_pass(self) -> bool:
        one = self._pass()
        return one is not None and one.is_open

    @property
    def is_in_for(self) -> bool:
        """True in the body of a `for` statement over the loader, whose next batch a resume begins with."""
        one = self._pass()
        return one is not None and one.is_open and one.in_for

    def _check_passes(self) -> None:
        """Raise ConfigError if a save now, in a pass of `epochs()`, would not go on with the same batches."""
        other, one = self._plain(), self._pass()
        if other and other.is_open and other.count:
            raise ConfigError(
                f"a save in a second pass over the loader: the first one of epoch {self._epoch} is the training's, and "
                "a resume begins any other pass anew",
                key="loader",
                hint="Train in the first pass of each epoch, and measure behind it or over a DataLoader of its own.",
            )
        if self._cycled:
            check_form(self._cycled, numbered=False, here=None)
        if self._epoch is not None and one and one.is_open and one.form and not self.is_ending:
            check_form(one.form, numbered=self._numbered, here=inspect.currentframe())

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the yielded batches."""
        self._take_place()
        started = {_STEP: self.batch_size * self.sampler.world_size, "data": self._outline}
        state = {**self.sampler.state_dict(), "started": started, **self._ends.state()}
        ending = self._epoch if self._again else None if self.sampler.samples else self._ending  # After a skip: not 0.
        return state if ending is None else {**state, "epoch": ending, "samples": self.sampler.size}

    @checked
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the position, at which the next `iter` continues. Raises StateMismatchError as the sampler does."""
        self.sampler.load_state_dict({name: state_dict[name] for name in state_dict if name not in _NOT_OF_SAMPLER})
        self._ends.set(state_dict.get("ends", ()), state_dict.get("over", (0, False)))
        self._ending = state_dict["epoch"] if state_dict["samples"] == self.sampler.size else None
        self._restored, self._passed, self._home, self.found_s, self.waited_s = True, False, None, None, 0.0
        self._again = self._ends_again = self._asked = False
        self._epoch = None if self._over else self._epoch

    def skip_batches(self, count: int) -> None:
        """Skip the next `count` batches, for a rollback; a running loop discards prefetched batches."""
        self.sampler.skip_batches(count)
        self._restored, self._passed = True, False  # The next `iter` continues after the skipped batches.

    def _take_place(self) -> None:
        """Take rank and world size of the process group, which frameworks start after the loader is made."""
        if not self._has_place and distributed.is_available() and distributed.is_initialized():
            assert isinstance(self.sampler, ResumableSampler)
            self.sampler.rank, self.sampler.world_size = distributed.get_rank(), distributed.get_world_size()

    def _hand_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        epoch, moves, asked_s = self.sampler.epoch, self.sampler.moves, system().monotonic()
        while True:
            for batch in batches:
                self.waited_s += (waited_s := system().monotonic() - asked_s)
                if self._restored or self.found_s is None:
                    self._restored, self._passed, self.found_s = False, True, waited_s
                self.sampler.advance()
                self._ending = epoch if self.sampler.epoch > epoch else None
                self.handed = next(moments), _reference_to(batch)
                yield batch
                asked_s = system().monotonic()
                if self.sampler.moves > moves:
                    break
            if self.sampler.moves == moves or self.sampler.epoch != epoch or self._ending is not None:
                break
            moves, batches = self.sampler.moves, self.sampler.iterate(self._loader)
        self._ending = None


def _reference_to(batch: Any) -> Callable[[], Any] | None:
    """Return a weak reference to the first tensor of a batch."""
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else [batch]
    first = next(iter(items), None)
    return weakref.ref(first) if isinstance(first, torch.Tensor) else None


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
