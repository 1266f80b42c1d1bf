"""Lightning's own part of a checkpoint, as one stateful: loops, callbacks, schedules, scaler, hooks, loaders.

Lightning's `dump_checkpoint` calls every hook, so it has all that a module, data module or callback adds. Weights and
optimizers are separate groups; the dump keeps weights only if a hook has replaced them. It is taken at the start of a
batch that is not trained yet, so restored loops begin with that batch.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from torchmetrics import Metric, MetricCollection

from ckpt_tasks.integrations.attached import gather_of_ranks, own_of_ranks
from ckpt_tasks.state.loader import ResumableLoader

__all__ = ["LightningState", "LoaderPositions", "begin_streams"]

_HYPER = ("hparams_name", "hyper_parameters", "hparams_type")


class LoaderPositions:
    """The positions of the training loaders before the current batch.

    A loader's own state counts the batches handed out: the current batch, and one more if Lightning fetches ahead. So
    the states of the last batches are kept.
    """

    def __init__(self) -> None:
        self._seen: deque[list[Any]] = deque(maxlen=3)

    def note(self, trainer: Trainer, batch_idx: int) -> None:
        """Remember the positions of the loaders, after a batch was fetched."""
        if batch_idx == 0:
            self._seen.clear()
        if not all(isinstance(loader, ResumableLoader) for loader in _stateful(trainer)):
            self._seen.append([loader.state_dict() for loader in _stateful(trainer)])

    def before(self, trainer: Trainer) -> list[Any] | None:
        """Return the states before the current batch; None if they are not known (an epoch's first batches)."""
        loaders = _stateful(trainer)
        if all(isinstance(loader, ResumableLoader) for loader in loaders):
            return [loader.state_before() for loader in loaders]
        fetcher: Any = trainer.fit_loop._data_fetcher
        ahead = getattr(fetcher, "prefetch_batches", 0) if fetcher.length is None else 0
        return self._seen[-2 - ahead] if len(self._seen) >= 2 + ahead else None


def begin_streams(trainer: Trainer) -> None:
    """Make streams of Hugging Face's datasets start an epoch at their beginning.

    A restored stream starts every epoch at the restored position, unless set_epoch() is called: Lightning calls it only
    on samplers.
    """
    datasets = sys.modules.get("datasets")
    combined = trainer.fit_loop._combined_loader
    for loader in combined.flattened if combined is not None else []:
        stream = getattr(loader, "dataset", None)
        if datasets is not None and isinstance(stream, datasets.IterableDataset):
            stream.load_state_dict({**stream.state_dict(), "epoch": -1})  # the state of another epoch is ignored


def _stateful(trainer: Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    loaders = combined.flattened if combined is not None else []
    return [loader for loader in loaders if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")]


class LightningState:
    """A stateful over a Trainer; `apply` applies a restored state, after the weights are restored."""

    def __init__(self, trainer: Trainer, module: LightningModule):
        self._trainer = trainer
        self._module = module
        self.loaders: list[Any] | None = None  # positions to save; None: the loaders' own states
        self._given: dict[str, Any] | None = None
        self._own: dict[str, Any] = {}
        self._begun = True

    def state_dict(self) -> dict[str, Any]:
        """Return the dump without the other groups' parts; before training begins, return the restored state.

        A restore from memory saves to storage at once, before Lightning's loops are restored.
        """
        if not self._begun:
            assert self._given is not None
            return self._given
        trainer = self._trainer
        dump = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        for name in ("optimizer_states", *_HYPER):
            dump.pop(name, None)
        if _same(dump["state_dict"], self._module.state_dict()):
            del dump["state_dict"]
        loop = dump["loops"]["fit_loop"]
        if self.loaders is not None:
            loop["state_dict"] = {**loop["state_dict"], "combined_loader": self.loaders}
        # The batch in hand may be the epoch's last one: the restored loop would regard the epoch as done.
        loop["epoch_loop.batch_progress"] = {**loop["epoch_loop.batch_progress"], "is_last_batch": False}
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        dump["ckpt_tasks"] = {
            "should_stop": trainer.should_stop,
            # Values that are not reduced over ranks are each rank's own.
            "of_ranks": gather_of_ranks(
                {"logged": logged, "sums": _sums(trainer), "metrics": _metric_states(self._module)}
            ),
            **self._set_at_epoch_start(),
        }
        return dump

    def _set_at_epoch_start(self) -> dict[str, Any]:
        """Return what Lightning's callbacks set where an epoch starts: a resumed epoch does not start again."""
        callbacks: Any = _callbacks(self._trainer)
        set_there: dict[str, Any] = {}
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
            set_there["accumulate"] = self._trainer.accumulate_grad_batches
        if any(isinstance(callback, BaseFinetuning) for callback in callbacks):
            set_there["frozen"] = [name for name, p in self._module.named_parameters() if not p.requires_grad]
        return set_there

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember the saved state for `apply`."""
        self._given, self._begun = state, False

    def apply(self) -> None:
        """Restore through Lightning's own functions, as `ckpt_path` does; ignore its own checkpoint, if any.

        Raises ConfigError if another number of ranks has saved it.
        """
        assert self._given is not None
        trainer, connector = self._trainer, self._trainer._checkpoint_connector
        own = self._given["ckpt_tasks"]
        self._own = own_of_ranks(own["of_ranks"], trainer.global_rank, trainer.world_size)
        connector._loaded_checkpoint = {"state_dict": self._module.state_dict(), **self._given}
        connector.restore_model()
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_loops()
        connector.restore_lr_schedulers()
        connector._loaded_checkpoint = {}
        trainer.should_stop = own["should_stop"]
        for callback in _callbacks(trainer):
            if isinstance(callback, BaseFinetuning):
                callback._restarting = False  # it would put back the options that the optimizers began with
        if "frozen" in own:
            for name, parameter in self._module.named_parameters():
                parameter.requires_grad_(name not in own["frozen"])
        trainer._logger_connector._callback_metrics.update(
            {name: torch.tensor(value) for name, value in self._own["logged"].items()}
        )

    def at_train_start(self) -> None:
        """Undo the count of the current batch, which is fetched again."""
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress
        progress.total.ready = progress.total.started

    def at_first_batch(self) -> None:
        """Restore the counters that Lightning resets when training begins; call it at the first batch."""
        assert self._given is not None
        self._begun = True
        loop, epoch_loop = self._given["loops"]["fit_loop"], self._trainer.fit_loop.epoch_loop
        epoch_loop._batches_that_stepped = loop["epoch_loop.state_dict"]["_batches_that_stepped"]
        epoch_loop.val_loop.batch_progress.load_state_dict(loop["epoch_loop.val_loop.batch_progress"])
        own = self._given["ckpt_tasks"]
        self._trainer.accumulate_grad_batches = own.get("accumulate", self._trainer.accumulate_grad_batches)
        _set_metric_states(self._module, self._own.get("metrics", {}))
        # At the end of a restarted epoch Lightning leaves out the schedules that need metrics: it has lost the metrics.
        self._trainer.fit_loop._restarting = False

    def after_first_batch(self) -> None:
        """Add the restored sums to those of the first batch: an epoch's mean must cover all of its batches."""
        assert self._given is not None
        sums, self._given = self._own["sums"], None
        for name, metric in self._trainer.fit_loop.epoch_loop._results.items():
            if name in sums and metric.meta.on_epoch:
                before = sums[name]
                if metric.meta.is_mean_reduction:
                    metric.cumulated_batch_size = metric.cumulated_batch_size + before["count"].to(metric.value.device)
                value = before["value"].to(metric.value.device)
                adds = metric.meta.is_mean_reduction or metric.meta.is_sum_reduction
                metric.value = metric.value + value if adds else metric.meta.reduce_fx(metric.value, value)


def _sums(trainer: Trainer) -> dict[str, Any]:
    results = trainer.fit_loop.epoch_loop._results
    return {
        name: {"value": metric.value.cpu(), "count": getattr(metric, "cumulated_batch_size", torch.tensor(0)).cpu()}
        for name, metric in results.items()
        if metric.is_tensor and metric.meta.on_epoch
    }


def _callbacks(trainer: Trainer) -> list[Any]:
    return getattr(trainer, "callbacks")  # type: ignore[no-any-return]  # noqa: B009 (Lightning does not declare it)


def _metric_states(module: LightningModule) -> dict[str, Any]:
    """Return what torchmetrics have summed up since the epoch began: a module's state does not have it."""
    for collection in module.modules():
        if isinstance(collection, MetricCollection):
            collection.values(copy_state=False)  # metrics that share one state all show it
    return {
        name: {
            "updates": metric._update_count,
            "state": {key: _moved(value, torch.device("cpu")) for key, value in metric.metric_state.items()},
        }
        for name, metric in module.named_modules()
        if isinstance(metric, Metric)
    }


def _set_metric_states(module: LightningModule, states: dict[str, Any]) -> None:
    for name, metric in module.named_modules():
        if isinstance(metric, Metric) and name in states:
            for key, value in states[name]["state"].items():
                setattr(metric, key, _moved(value, metric.device))
            metric._update_count, metric._computed = states[name]["updates"], None


def _moved(value: Any, device: torch.device) -> Any:
    """Return a state of a metric, a tensor or a list of them, on a device."""
    return [one.detach().to(device) for one in value] if isinstance(value, list) else value.detach().to(device)


def _same(some: dict[str, Any], own: dict[str, Any]) -> bool:
    return some.keys() == own.keys() and all(
        isinstance(value, torch.Tensor) and value.data_ptr() == own[name].data_ptr() for name, value in some.items()
    )
