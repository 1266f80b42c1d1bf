"""Lightning: a callback that saves, and resumes by itself.

The callback saves step k just before Lightning fetches the next batch: the checkpoint then includes validation, epoch
ends, schedules and the decisions of other callbacks. A resume restores the random streams at the same point: Lightning
draws from them earlier (a sanity check, workers' seeds); the data set and the hooks of a batch's transfer draw later.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.pausing import note_step
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.integrations.attached import numbers, with_extra
from ckpt_tasks.integrations.lightning_state import (
    LightningState,
    logged_values,
)
from ckpt_tasks.run.ledger.config import CheckpointConfig, config_of
from ckpt_tasks.state.tensors.random_streams import current_streams, set_streams


class CkptCallback(Callback):
    """Save the steps of `Trainer.fit` into a run, and resume there when `fit` is called again.

    ::

        trainer = Trainer(max_epochs=3, callbacks=[CkptCallback("runs/first")])

    `checkpoint` is a directory, a URL or a CheckpointConfig. `state` names objects of your own that are saved too. Give
    the trainer a ResumableLoader, or any loader with a state; a plain DataLoader that shuffles keeps no position.
    `fit(ckpt_path=…)` is used only while the run has no checkpoint. SIGTERM and Ctrl-C end the training after the
    current step, with a commit. A step is one of Lightning's `global_step`; what is logged becomes the step's metrics.

    Raises ConfigError for a strategy other than one device, DDP or ModelParallelStrategy, and for
    StochasticWeightAveraging, and what Checkpointer's `restore` and `step` raise.
    """

    def __init__(
        self, checkpoint: str | os.PathLike[str] | CheckpointConfig, *, state: Mapping[str, Any] | None = None
    ):
        self.config = config_of(checkpoint)
        self.ckpt: Checkpointer | None = None
        self._extra = state
        self._state: dict[str, Any] = {}
        self._positions = _LoaderPositions()
        self._streams: Any = None  # Set by a restore, cleared by the first batch.
        self._resuming = False
        self._seen_step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Move this callback before all others: what the others do when a batch starts belongs to that batch."""
        if stage == "fit":
            every: Any = trainer
            every.callbacks = [self, *(callback for callback in _callbacks(trainer) if callback is not self)]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the run: by now the model and optimizers are on their devices, and no step is trained yet."""
        if type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy):
            raise ConfigError(
                f"CkptCallback cannot save with the strategy {type(trainer.strategy).__name__}",
                hint="Train on one device, with strategy='ddp', or sharded with ModelParallelStrategy.",
            )
        if any(isinstance(one, StochasticWeightAveraging) for one in _callbacks(trainer)):
            raise ConfigError(
                "StochasticWeightAveraging does not resume in the middle of an epoch, or after its last one",
                hint="Take Lightning's WeightAveraging or EMAWeightAveraging.",
            )
        self.ckpt = Checkpointer(self.config)
        self._lightning = LightningState(trainer, pl_module)
        own = {"model": pl_module, "optimizers": [*trainer.optimizers], "lightning": self._lightning}
        self._state = with_extra(own, self._extra)
        self.ckpt.restore(self._state)
        self._resuming = self.ckpt.last_restore is not None
        if self._resuming:
            self._streams = current_streams()
            self._lightning.apply()
        else:
            self._lightning.begin()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hold signals back from now on, since Lightning has set its own handlers; listen for fetches of batches."""
        assert self.ckpt is not None
        self._lightning.at_train_start()
        loop: Any = trainer.fit_loop.epoch_loop
        fetching = loop._on_before_fetch

        def before_fetch() -> None:
            if not _fetches_in_step(trainer):
                self._between_batches(trainer)
            fetching()

        loop._on_before_fetch = before_fetch  # Lightning has no hook for callbacks before a fetch.
        self.ckpt.__enter__()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make streams of data sets begin each epoch after the first at their beginning."""
        if trainer.current_epoch:
            _begin_streams(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Report the previous step, if `training_step` itself fetches batches."""
        if _fetches_in_step(trainer):
            self._between_batches(trainer)

    def _between_batches(self, trainer: Trainer) -> None:
        """Report the previous step, which is complete; before the first batch, restore the streams instead."""
        assert self.ckpt is not None
        loaders = self._lightning.loaders = self._positions.before_next(trainer)
        if self._streams is not None:
            self._lightning.at_first_batch()
            set_streams(self._streams)
            self._streams, self._seen_step = None, trainer.global_step
            return
        if loaders is None:
            return  # This fetch is ahead of the training.
        # Save nothing within an accumulation: a checkpoint would lack its gradients.
        step, seen = trainer.global_step, self._seen_step
        self._seen_step = step
        if step > seen and step > self.ckpt.position:
            metrics = numbers(logged_values(trainer))
            self.ckpt.step(step, self._state, metrics=metrics, epoch=trainer.current_epoch)
            if trainer.received_sigterm:  # Lightning's own handler has received the signal.
                raise SIGTERMException

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the step before a validation in the middle of training, which is reported after it."""
        if self.ckpt is not None and trainer.global_step > self.ckpt.position:
            note_step(self.ckpt, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the restored sums of the epoch to the sums of the first batch."""
        if self._resuming:
            self._resuming = False
            self._lightning.after_first_batch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step of `fit`."""
        assert self.ckpt is not None
        self._lightning.loaders = None
        if trainer.global_step > self.ckpt.position:
            self.ckpt.save(trainer.global_step, self._state, metrics=numbers(trainer.callback_metrics))
        self._end(trainer, None)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """If no step remained to train, put averages of weights into the module, since Lightning does not."""
        if self._streams is not None:
            for callback in _callbacks(trainer):
                if isinstance(callback, WeightAveraging):
                    callback.on_train_end(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Release the run; snapshots in memory stay for a restart."""
        self._end(trainer, exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the run if no step remained to train."""
        self._end(trainer, None)

    def _end(self, trainer: Trainer, error: BaseException | None) -> None:
        ckpt, self.ckpt = self.ckpt, None
        if ckpt is not None:
            self._state = {}
            loop: Any = trainer.fit_loop.epoch_loop
            vars(loop).pop("_on_before_fetch", None)
            ckpt.__exit__(type(error) if error else None, error, None)


def _callbacks(trainer: Any) -> list[Callback]:
    """Return the trainer's callbacks; mypy does not see where Lightning sets them."""
    return list(trainer.callbacks)


class _LoaderPositions:
    """The positions of the training loaders before the next batch is fetched.

    If a loader has no length, Lightning fetches a batch ahead: the position of the next batch is then one fetch older.
    """

    def __init__(self) -> None:
        self._seen: deque[list[Any]] = deque(maxlen=2)

    def before_next(self, trainer: Trainer) -> Callable[[], list[Any]] | None:
        """Remember the positions before a fetch; what returns those before the next batch, or None if unknown."""
        fetcher: Any = trainer.fit_loop._data_fetcher
        if _fetches_in_step(trainer) or fetcher.length is not None:
            return partial(_positions, trainer)  # Only a save asks.
        if not fetcher.fetched:
            self._seen.clear()
            return None  # A stream would not continue, but begin its epoch again.
        self._seen.append(_positions(trainer))
        return partial(list, self._seen[0]) if len(self._seen) > 1 else None


def _fetches_in_step(trainer: Trainer) -> bool:
    """Return True if the module's `training_step` takes an iterator and fetches its batches itself."""
    return isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher)


def _begin_streams(trainer: Trainer) -> None:
    """Make streams of Hugging Face's datasets begin an epoch at their beginning.

    A restored stream starts every epoch at the restored position, unless set_epoch() is called: Lightning calls it only
    on samplers.
    """
    datasets = sys.modules.get("datasets")
    combined = trainer.fit_loop._combined_loader
    for loader in combined.flattened if combined is not None else []:
        stream = getattr(loader, "dataset", None)
        if datasets is not None and isinstance(stream, datasets.IterableDataset):
            # A stream ignores the state of another epoch, and so begins at its start.
            stream.load_state_dict({**stream.state_dict(), "epoch": -1})


def _positions(trainer: Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    loaders: list[Any] = combined.flattened if combined is not None else []
    return [one.state_dict() for one in loaders if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]
