"""Two lines in any loop: a loader and epochs that save and restore by themselves.

Invariants

1. A step ends when the loop asks for its next batch or, after an epoch's last batch, for its next epoch. So all work of
   the step is done, and the loop's work at the end of an epoch as well.
2. A batch counts as a step if an optimizer of the state has stepped since the loop got the batch.
3. A signal is held back only while the loop runs. After an exception has ended the loop, Ctrl-C acts at once.
"""

from __future__ import annotations

import dis
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ckpt_tasks.checked import checked
from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.counting import Steps
from ckpt_tasks.checkpoint.pausing import hold_within
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.run.ledger.config import CheckpointConfig, config_of
from ckpt_tasks.state.data.loader import ResumableLoader, stood_in_for
from ckpt_tasks.state.rebinding import refuse_rebound
from ckpt_tasks.storage.locations import Location

_log = logging.getLogger("ckpt_tasks")
_DATA = "data"
_UNSAVED = (
    "The loop was left before its epochs were over, and steps %d to %d are not saved: no save was due. Call "
    "epochs.save() before a `break`, or let the epochs end"
)
_OPTIONS = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)
_BY_HAND = "Write the loop with a Checkpointer: call its step() after each step."


@checked
def resumable(
    checkpoint: str | Location | CheckpointConfig,
    loader: DataLoader[Any] | ResumableLoader,
    epochs: int | range,
    /,
    **state: Any,
) -> tuple[Any, Epochs]:
    """Restore the newest good checkpoint into the objects of a loop; return a loader and epochs that save its steps.

    ::

        loader, epochs = resumable("runs/first", loader, range(3), model=model, optimizer=optimizer)
        for epoch in epochs:
            for batch in loader:
                ...

    `checkpoint` is a directory, a URL or a CheckpointConfig; `state`: the objects to save, by name, as for
    `Checkpointer`. A DataLoader becomes a ResumableLoader over the same data set, with the same options but another
    order, which depends on the seed of its generator, or else on torch's seed. The data set may be a stream that has a
    state.

    A batch after which no optimizer of the state has stepped belongs to the next step. SIGTERM and Ctrl-C end the loop
    after the current step, with a commit. The last step is committed when the epochs are over; after a `break`, steps
    for which no save was due are not saved.

    Raises ConfigError for a loader whose order cannot be resumed, for a value that the loop cannot change in place (a
    number, a text, a tuple of them) or to which it gives a new object, and what `Checkpointer.restore` raises.
    """
    if _DATA in state:
        raise ConfigError(f"the name {_DATA!r} is the loader's", key=_DATA, hint="Give your object another name.")
    refuse_rebound(state, _caller(inspect.currentframe()))
    numbers = range(epochs) if isinstance(epochs, int) else epochs
    ours = loader if isinstance(loader, ResumableLoader) else _resumable_loader(loader)
    config = config_of(checkpoint)
    for former in [*_open]:  # In a notebook the same cell may run again.
        if former.ckpt.config.checkpoint_dir == config.checkpoint_dir:
            former.leave()
    loop = Epochs(Checkpointer(config), ours, numbers, {**state, _DATA: ours})
    return StepLoader(ours, loop), loop


class Epochs(Iterator[int]):
    """The numbers of the remaining epochs; `resumable` makes this object.

    Asking for the next number ends the current epoch. After the last epoch the last step is committed, and the run is
    released.
    """

    def __init__(self, ckpt: Checkpointer, loader: ResumableLoader, numbers: range, state: dict[str, Any]):
        self.ckpt = ckpt
        self._loader, self._range, self._state = loader, numbers, state
        self._metrics: dict[str, Any] = {}
        self._numbers: Iterator[int] | None = None
        self._epoch = self._passes = 0
        self._from_start = True  # True if this process has begun the epoch.
        self._saved_here = False  # True from save() to the next batch.
        optimizers = [getattr(value, "optimizer", value) for value in state.values()]
        optimizers = [one for one in optimizers if isinstance(one, torch.optim.Optimizer)]
        self._steps = Steps(ckpt.restore(state), counts_batches=not optimizers)
        hooks = [one.register_step_post_hook(self._steps.note) for one in optimizers]
        self._hooks = hooks
        self._left = weakref.finalize(self, _freed, ckpt, self._steps, hooks)
        _open.add(self)

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return self._steps.number

    def log(self, **metrics: Any) -> None:
        """Record metrics of the current step: numbers, or tensors of one element."""
        self._metrics.update(metrics)

    def save(self) -> None:
        """Count the current batch as a step, and commit now. Raises what `Checkpointer.save` raises.

        A `break` out of the epochs right behind it ends the run: another start has nothing left to train.
        """
        self._end_step(last=True)
        self._saved_here = True

    def leave(self) -> None:
        """Wait for saves under way and release the run before the epochs are over; later calls do nothing."""
        self._left()

    def __iter__(self) -> Iterator[int]:  # noqa: PYI034 (only the loop refers to the generator: it learns of a break)
        """Yield the numbers; a `break` right behind `save()` ends the run."""
        try:
            yield from iter(partial(next, self, None), None)
        except GeneratorExit:
            if _is_at_break(inspect.currentframe()) and self._left.alive and self._saved_here:
                self._end_here()
            raise

    def __next__(self) -> int:
        if not self._left.alive:
            raise StopIteration
        with self._leaving():
            sampler = self._loader.sampler
            if self._numbers is None:
                self._numbers = self._loader.epochs(len(self._range))
                self.ckpt.__enter__()
                self._hold_signals(inspect.currentframe())
            elif not self._passes and self._steps.has_stepped:
                raise self._wrong_passes("0 times")
            left = sampler.epoch == self._epoch and sampler.samples > 0
            epoch = next(self._numbers, None)
            self._end_step(last=epoch is None, left=left)
            self._steps.end_epoch(whole=self._from_start)
            if epoch is not None:
                self._epoch, self._passes, self._from_start = epoch, 0, sampler.samples == 0
                return self._range[epoch]
        self._finish(None)
        raise StopIteration

    def _hold_signals(self, here: FrameType | None) -> None:
        loop = here and here.f_back
        while loop is not None and loop.f_code.co_flags & inspect.CO_GENERATOR:
            loop = loop.f_back  # This frame is a progress bar's: it is suspended while the loop runs.
        if loop is not None:
            hold_within(self.ckpt, loop.f_code)

    def batches(self) -> Iterator[Any]:
        """Return the batches of an epoch. Raises ConfigError outside the loop over the epochs."""
        if self._numbers is None:
            raise ConfigError(
                "the epochs have not begun", hint="Write `for epoch in epochs:` around the loader's loop."
            )
        one = iter(self._loader)
        self._passes += 1
        if one.is_plain:
            one.on_next = partial(self._check_plain, self._steps.taken)
        else:
            one.on_next, one.on_batch = self._next_batch, self._handed_out
        return one

    def _next_batch(self) -> None:
        if not self._loader.is_ending:  # The last step of an epoch ends with the epoch.
            with self._leaving():
                self._end_step()

    def _handed_out(self) -> None:
        self._saved_here = False
        self._steps.handed_out()

    def _check_plain(self, taken: int) -> None:
        if self._steps.taken > taken:
            with self._leaving():
                raise self._wrong_passes(f"{self._passes} times, and trained in more than the first pass")

    def _wrong_passes(self, times: str) -> ConfigError:
        return ConfigError(
            f"epoch {self._epoch} iterated the loader {times}",
            key="loader",
            hint="Train in one loop in each epoch, the first one over the loader that resumable() returned. Other "
            "passes are for measuring: a resume begins them anew.",
        )

    def _end_step(self, *, last: bool = False, left: bool = False) -> None:
        """Report the step that has just ended, if any.

        If `last`, also commit steps for which no save was due, and the end of an epoch that the loop has `left`.
        """
        steps, epoch = self._steps, self._loader.sampler.epoch
        stepped = steps.end()
        if not stepped and not (last and (steps.unsaved or left)):
            return
        metrics, self._metrics = self._metrics, {}
        report = self.ckpt.save if last else self.ckpt.step
        if report(steps.number, self._state, metrics=metrics, epoch=epoch):
            steps.saved = steps.number

    def _end_here(self) -> None:
        """Commit that all epochs have ended, for a loop that a `break` leaves behind its `save()`."""
        sampler, epoch = self._loader.sampler, self._loader.sampler.epoch
        self._loader.end_epoch()
        for number in range(sampler.epoch, len(self._range)):
            sampler.end_epoch(number)
        self.ckpt.save(self._steps.number, self._state, epoch=epoch)

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """Release the run if the block raises, because the loop itself cannot see the exception."""
        try:
            yield
        except BaseException as error:
            self._finish(error)
            raise

    def _finish(self, error: BaseException | None) -> None:
        if self._left.detach():
            _leave(self.ckpt, self._steps, self._hooks, error)


class StepLoader:
    """The loader of a loop that `resumable` saves; it has the attributes of its ResumableLoader."""

    def __init__(self, loader: ResumableLoader, epochs: Epochs):
        self._loader, self._epochs = loader, epochs

    def __iter__(self) -> Iterator[Any]:
        return self._epochs.batches()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _caller(here: FrameType | None) -> FrameType | None:
    while here is not None and here.f_globals.get("__name__", "").startswith("ckpt_tasks."):
        here = here.f_back
    return here


def _is_at_break(here: FrameType | None) -> bool:
    """Return True if a loop closes this generator by `break` or `return`, and not by an exception."""
    loop = here and here.f_back
    while loop is not None and loop.f_code.co_flags & inspect.CO_GENERATOR:
        loop = loop.f_back  # This frame is a progress bar's.
    return loop is not None and loop.f_code.co_code[loop.f_lasti] == dis.opmap["POP_TOP"]


def _freed(ckpt: Checkpointer, steps: Steps, hooks: list[Any]) -> None:
    """End a loop that a `break` or an exception has left."""
    for hook in hooks:
        hook.remove()
    is_failing = sys.exception() is not None or getattr(sys, "last_value", None) is not None
    if not is_failing:
        steps.end_run()
    steps.end()
    if steps.unsaved and not is_failing:
        _log.warning(_UNSAVED, steps.saved + 1, steps.number)
    ckpt.__exit__(GeneratorExit, GeneratorExit(), None)


def _leave(ckpt: Checkpointer, steps: Steps, hooks: list[Any], error: BaseException | None) -> None:
    """End the Checkpointer as the end of its `with` block does, since a loop has no block; `error` has ended it."""
    for hook in hooks:
        hook.remove()
    if error is None:
        steps.end_run()
    ckpt.__exit__(None if error is None else type(error), error, None)


def _resumable_loader(loader: DataLoader[Any]) -> ResumableLoader:
    """Return a loader over the same data with the same options; raise ConfigError if the loader has its own order."""
    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset) and type(loader).__iter__ is DataLoader.__iter__:
        return _over(loader, shuffle=False, generator=loader.generator)
    if loader.batch_size is None or type(loader).__iter__ is not DataLoader.__iter__ or type(sampler) not in _SHUFFLES:
        own = "batches" if loader.batch_size is None else type(sampler).__name__
        raise ConfigError(
            f"the loader's order is its own ({type(loader).__name__}, {own})", key="loader", hint=_BY_HAND
        )
    shuffle = _SHUFFLES[type(sampler)](sampler)
    if shuffle is None:
        raise ConfigError("the loader draws samples more than once, or not all", key="loader", hint=_BY_HAND)
    return _over(loader, shuffle=shuffle, generator=getattr(sampler, "generator", None) or loader.generator)


def _over(loader: DataLoader[Any], *, shuffle: bool, generator: torch.Generator | None) -> ResumableLoader:
    stood_in_for.add(loader)
    return ResumableLoader(
        loader.dataset,
        loader.batch_size,
        shuffle,
        seed=(generator or torch).initial_seed() % 2**64,
        drop_last=loader.drop_last,
        **{name: getattr(loader, name) for name in _OPTIONS},
    )


def _drawn_once(sampler: RandomSampler) -> bool | None:
    return None if sampler.replacement or sampler.num_samples != len(sampler.data_source) else True


_SHUFFLES: dict[type, Callable[[Any], bool | None]] = {
    SequentialSampler: lambda _: False,
    RandomSampler: _drawn_once,
    DistributedSampler: lambda sampler: sampler.shuffle,
}
_open: weakref.WeakSet[Epochs] = weakref.WeakSet()
