"""Two lines in any loop: a loader and epochs that save and restore by themselves.

Invariants

1. A step ends when the loop asks for its next batch or, after an epoch's last batch, for its next epoch. So all work of
   the step is done, and the loop's work at the end of an epoch as well.
2. A batch counts as a step if an optimizer of the state has stepped since the loop got the batch.
3. A signal is held back only while the loop runs. After an exception has ended the loop, Ctrl-C acts at once.
"""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ckpt_tasks.checked import checked
from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.pausing import hold_within
from ckpt_tasks.data.loader import ResumableLoader
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.ledger.config import CheckpointConfig, config_of
from ckpt_tasks.state.unsaved import stands_in_for
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

    Raises ConfigError for a loader whose order cannot be resumed, and what `Checkpointer.restore` raises.
    """
    if _DATA in state:
        raise ConfigError(f"the name {_DATA!r} is the loader's", key=_DATA, hint="Give your object another name.")
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
        self._epoch = 0
        optimizers = [getattr(value, "optimizer", value) for value in state.values()]
        optimizers = [one for one in optimizers if isinstance(one, torch.optim.Optimizer)]
        self._steps = _Steps(ckpt.restore(state), counts_batches=not optimizers)
        hooks = [one.register_step_post_hook(self._steps.note) for one in optimizers]
        self._left = weakref.finalize(self, _leave, ckpt, self._steps, hooks)
        _open.add(self)

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return self._steps.number

    def log(self, **metrics: Any) -> None:
        """Record metrics of the current step: numbers, or tensors of one element."""
        self._metrics.update(metrics)

    def save(self) -> None:
        """Count the current batch as a step, and commit now. Raises what `Checkpointer.save` raises."""
        self._end_step(last=True)

    def leave(self) -> None:
        """Wait for saves under way and release the run before the epochs are over; later calls do nothing."""
        self._left()

    def __next__(self) -> int:
        if not self._left.alive:
            raise StopIteration
        with self._leaving():
            if self._numbers is None:
                self._numbers = self._loader.epochs(len(self._range))
                self.ckpt.__enter__()
                self._hold_signals(inspect.currentframe())
            else:
                self._end_epoch()
            epoch = next(self._numbers, None)
            self._end_step(last=epoch is None)
            if epoch is not None:
                self._epoch = epoch
                return self._range[epoch]
        self._finish(over=True)
        raise StopIteration

    def _hold_signals(self, here: FrameType | None) -> None:
        loop = here and here.f_back
        while loop is not None and loop.f_code.co_flags & inspect.CO_GENERATOR:
            loop = loop.f_back  # This frame is a progress bar's: it is suspended while the loop runs.
        if loop is not None:
            hold_within(self.ckpt, loop.f_code)

    def batches(self) -> Iterator[Any]:
        """Yield the batches of an epoch. Raises ConfigError outside the loop over the epochs."""
        if self._numbers is None:
            raise ConfigError(
                "the epochs have not begun", hint="Write `for epoch in epochs:` around the loader's loop."
            )
        for batch in self._loader:
            self._steps.handed_out()
            yield batch
            if not self._loader.is_ending:  # The last step of an epoch ends with the epoch.
                with self._leaving():
                    self._end_step()

    def _end_epoch(self) -> None:
        """Begin the next epoch in the data; raise ConfigError if the loop did not iterate the loader once."""
        self._loader.end_epoch()
        times = self._loader.epoch - self._epoch
        if times > 1 or (not times and self._steps.has_stepped):
            raise ConfigError(
                f"epoch {self._epoch} iterated the loader {times} times",
                key="loader",
                hint="Write one loop in each epoch, over the loader that resumable() returned.",
            )

    def _end_step(self, *, last: bool = False) -> None:
        """Report the step that has just ended, if any; if `last`, also commit steps for which no save was due."""
        steps, epoch = self._steps, self._loader.epoch
        stepped = steps.end()
        if not stepped and not (last and steps.unsaved):
            return
        metrics, self._metrics = self._metrics, {}
        report = self.ckpt.save if last else self.ckpt.step
        if report(steps.number, self._state, metrics=metrics, epoch=epoch):
            steps.saved = steps.number

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """Release the run if the block raises, because the loop itself cannot see the exception."""
        try:
            yield
        except BaseException as error:
            self._finish(error=error)
            raise

    def _finish(self, **how: Any) -> None:
        if left := self._left.detach():
            _leave(*left[2], **how)


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


class _Steps:
    """Counts the batches after which an optimizer has stepped."""

    def __init__(self, number: int, *, counts_batches: bool):
        self.number = self.saved = number
        self._counts_batches = counts_batches
        self.has_stepped = False

    @property
    def unsaved(self) -> bool:
        return self.number > self.saved

    def note(self, *_: Any) -> None:
        """Record that an optimizer has stepped; each optimizer calls this as a hook."""
        self.has_stepped = True

    def handed_out(self) -> None:
        self.has_stepped = self.has_stepped or self._counts_batches

    def end(self) -> bool:
        """End the current step if one has begun."""
        stepped, self.has_stepped = self.has_stepped, False
        self.number += stepped
        return stepped


def _leave(
    ckpt: Checkpointer, steps: _Steps, hooks: list[Any], *, error: BaseException | None = None, over: bool = False
) -> None:
    """End the Checkpointer like the end of its `with` block, since a loop has no block.

    `over`: the epochs are over. `error`: the exception that ended them. If neither is given, a `break` or an exception
    has ended the loop.
    """
    for hook in hooks:
        hook.remove()
    if over:
        ckpt.__exit__(None, None, None)
        return
    if error is None:
        error = GeneratorExit()
        steps.end()
        if steps.unsaved and getattr(sys, "last_value", None) is None:
            _log.warning(_UNSAVED, steps.saved + 1, steps.number)
    ckpt.__exit__(type(error), error, None)


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
    stands_in_for(loader)
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
