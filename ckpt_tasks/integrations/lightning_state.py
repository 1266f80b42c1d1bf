"""Lightning's own part of a checkpoint, as one stateful object: loops, callbacks, schedules, scaler, hooks, loaders.

Lightning's `dump_checkpoint` calls every hook, so the dump has all that a module, data module or callback adds. Weights
and optimizers are separate groups; the dump keeps weights only if a hook has replaced them. The dump is taken between
two batches, but its counters count the second batch as fetched: restored loops begin with that batch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.integrations.attached import gather_of_ranks
from ckpt_tasks.integrations.lightning_io import set_up_again
from ckpt_tasks.state.data.loader import ResumableLoader
from ckpt_tasks.state.data.sampler import ResumableSampler
from ckpt_tasks.state.kinds.differences import Differences
from ckpt_tasks.state.kinds.modules import Gradients
from ckpt_tasks.state.kinds.started import Started, note_changes, outline_of
from ckpt_tasks.state.tensors.tensors import identity

_log = logging.getLogger("ckpt_tasks")
_HYPER = ("hparams_name", "hyper_parameters", "hparams_type")


def logged_values(trainer: Trainer) -> dict[str, Any]:
    """Return the logged values; when an epoch begins, `trainer.callback_metrics` would average zero batches."""
    return trainer._logger_connector._callback_metrics


def place_loaders(trainer: Trainer) -> None:
    """Let the next setup of the data restore the positions of ResumableLoaders, of a run that has ended too.

    Lightning takes a run whose last epoch is complete for one that begins, and so its loaders would begin again.
    """
    loop: Any = trainer.fit_loop

    def place() -> None:
        del loop._load_combined_loader_states
        stateful = [one for one in loop._combined_loader.flattened if hasattr(one, "load_state_dict")]
        for loader, state in zip(stateful, loop._combined_loader_states_to_load, strict=False):
            if isinstance(loader, ResumableLoader):
                loader.load_state_dict(state)
            elif not loop.done:
                kind = type(loader).__name__
                _log.warning("The run had ended: %s may repeat its first epochs, a ResumableLoader would not", kind)

    if not loop.restarting:
        loop._load_combined_loader_states = place


def set_up_as_in(trainer: Trainer) -> None:
    """Let Lightning ask for its loaders every n epochs of the run, and not from the restored epoch on."""
    every = getattr(trainer, "reload_dataloaders_every_n_epochs")  # noqa: B009 (Lightning does not declare it)
    progress = trainer.fit_loop.epoch_progress.current
    epoch = progress.completed
    if every and epoch % every:
        progress.completed -= epoch % every
        try:
            trainer.fit_loop.setup_data()
        finally:
            progress.completed = epoch


class LightningState(Started):
    """The state of a Trainer; `apply` applies a restored state after the weights are restored."""

    effects: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("max_epochs", "max_steps"),
            "OneCycleLR keeps its length and raises at its end, CosineAnnealingLR rises again, a LambdaLR that reads "
            "this jumps: make a new schedule in on_train_start, at this step alone (it is saved too).",
        ),
        "lr_schedulers": "A new one continues at the run's step, and the rate may jump.",
        "seed": "The run's random streams are restored.",
        "data": "Where the order of samples depends on them, some come twice, others not at all.",
    }

    def __init__(self, trainer: Trainer, module: LightningModule):
        self._trainer = trainer
        self._module = module
        self.loaders: Callable[[], list[Any]] | None = None  # None: save the loaders' own states.
        self._given: dict[str, Any] | None = None
        self._own: dict[str, Any] = {}
        self._begun = False
        self._started: dict[str, Any] = {
            "max_epochs": trainer.max_epochs,
            "max_steps": trainer.max_steps,
            "lr_schedulers": [type(one.scheduler).__name__ for one in trainer.lr_scheduler_configs],
            "seed": os.environ.get("PL_GLOBAL_SEED"),
        }

    def covered(self) -> list[Any]:
        """Return what the dump has: the trainer, the module's callbacks and schedules, and gradients."""
        trainer: Any = self._trainer
        schedules = [one.scheduler for one in trainer.lr_scheduler_configs]
        gradients = [Gradients(self._module)] if self._accumulates() else []
        return [trainer, trainer.datamodule, *trainer.callbacks, *schedules, *gradients]

    def begin(self) -> None:
        """Use the dump from now on: the restore is complete, or the run had no checkpoint."""
        self._begun = True

    def state_dict(self) -> dict[str, Any]:
        """Return the dump without the parts in other groups; before training begins, return the restored state, if any.

        A restore from memory saves to storage at once, before Lightning's loops are restored; and callbacks may have no
        state before their `on_fit_start`.
        """
        if not self._begun:
            return self._given or {"started": self._started}
        trainer = self._trainer
        with _without_collectives(trainer, self._module):
            dump = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        for name in ("optimizer_states", *_HYPER):
            dump.pop(name, None)
        if _same(dump["state_dict"], self._module.state_dict()):
            del dump["state_dict"]
        loop = dump["loops"]["fit_loop"]
        progress = loop["epoch_loop.batch_progress"]
        if self.loaders is not None:
            loop["state_dict"] = {**loop["state_dict"], "combined_loader": self.loaders()}
            for counts in (progress["total"], progress["current"]):
                counts["ready"] = counts["started"] + 1
        # The next batch may be the last one of the epoch: without this the restored loop would end the epoch.
        progress["is_last_batch"] = False
        logged = {name: float(value) for name, value in logged_values(trainer).items()}
        dump["started"] = self._started
        dump["ckpt_tasks"] = {
            "should_stop": trainer.should_stop,
            # Each rank has its own values unless they are reduced over ranks.
            "of_ranks": gather_of_ranks(
                {"logged": logged, "sums": _sums(trainer), "metrics": _metric_states(self._module)}
            ),
            **self._set_at_epoch_start(),
        }
        if self._accumulates():
            dump["ckpt_tasks"]["gradients"] = Gradients(self._module).state_dict()
        return dump

    def _accumulates(self) -> bool:
        """Return whether gradients may outlast a step of the loop: with several optimizers, one may be accumulating."""
        return not self._module.automatic_optimization or is_overridden("optimizer_zero_grad", self._module)

    def _set_at_epoch_start(self) -> dict[str, Any]:
        """Return what Lightning's callbacks set at the start of an epoch, which a resumed epoch does not repeat."""
        callbacks: Any = _callbacks(self._trainer)
        set_there: dict[str, Any] = {}
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
            set_there["accumulate"] = self._trainer.accumulate_grad_batches
        if any(isinstance(callback, BaseFinetuning) for callback in callbacks):
            set_there["frozen"] = [name for name, p in self._module.named_parameters() if not p.requires_grad]
        return set_there

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember the saved state for `apply`."""
        self._given = state

    def apply(self) -> None:
        """Restore our checkpoint through Lightning's functions, as `ckpt_path` would; ignore a checkpoint of Lightning.

        Raises ConfigError if another number of ranks saved our checkpoint.
        """
        assert self._given is not None
        trainer, connector = self._trainer, self._trainer._checkpoint_connector
        own = self._given["ckpt_tasks"]
        saved, rank, ranks = own["of_ranks"], trainer.global_rank, trainer.world_size
        self._own = saved[rank] if len(saved) == ranks else _divided(saved, self._module, rank, ranks)
        connector._loaded_checkpoint = {"state_dict": self._module.state_dict(), **self._given}
        connector.restore_model()
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_loops()
        set_up_again(trainer)
        place_loaders(trainer)
        set_up_as_in(trainer)
        connector.restore_lr_schedulers()
        connector._loaded_checkpoint = {}
        trainer.should_stop = own["should_stop"]
        trainer.num_sanity_val_steps = 0  # It would take the metrics away that are restored below.
        for callback in _callbacks(trainer):
            if isinstance(callback, BaseFinetuning):
                # Otherwise the callback would restore the options with which the optimizers began.
                callback._restarting = False
        if "frozen" in own:
            for name, parameter in self._module.named_parameters():
                parameter.requires_grad_(name not in own["frozen"])
        trainer._logger_connector._callback_metrics.update(
            {name: torch.tensor(value) for name, value in self._own["logged"].items()}
        )

    def at_train_start(self) -> None:
        """Compare the data with the run's; make Lightning's count of batches fit the restored position."""
        loop: Any = self._trainer.fit_loop
        loaders = loop._combined_loader.flattened
        own = {
            "data": [outline_of(getattr(loader, "dataset", None)) for loader in loaders],
            "batch_sizes": [getattr(loader, "batch_size", None) for loader in loaders],
            "accumulate_grad_batches": self._trainer.accumulate_grad_batches,
            "ranks": getattr(self._trainer.strategy, "distributed_sampler_kwargs", {}).get("num_replicas", 1),
        }
        self._started |= own
        if self._given is None:
            return
        # A batch is counted when it is fetched, and the next batch has been fetched.
        progress = loop.epoch_loop.batch_progress
        progress.total.ready = progress.total.started
        noting = Differences({})
        note_changes(self, {"started": own}, self._given, noting)
        if "batch_sizes" in (was := self._given.get("started", {})):
            self._fit_batches(was, own, noting)
        if noting.replaced:
            step, lines = self._trainer.global_step, "\n  ".join(noting.replaced)
            _log.warning("The data differ from the run's at step %d (was → is):\n  %s", step, lines)

    def _fit_batches(self, was: dict[str, Any], own: dict[str, Any], noting: Differences) -> None:
        """Convert the completed batches to the current batch size; record the effects of another size."""
        loop: Any = self._trainer.fit_loop
        sizes, steps = zip(*((one["batch_sizes"], one["accumulate_grad_batches"]) for one in (was, own)), strict=True)
        ranks = was.get("ranks", own["ranks"]), own["ranks"]
        if sizes[0] == sizes[1] and steps[0] == steps[1] and ranks[0] == ranks[1]:
            return
        in_a_step = [[size and size * steps[n] * ranks[n] for size in sizes[n]] for n in (0, 1)]
        loaders, current, effect = loop._combined_loader.flattened, loop.epoch_loop.batch_progress.current, ""
        epochs = loop.epoch_progress.total
        if epochs.started == epochs.processed:
            current.completed = 0  # The run is at the end of an epoch.
        elif (
            len(loaders) == 1
            and isinstance(sampler := getattr(loaders[0], "sampler", None), ResumableSampler)
            and isinstance(loaders[0], ResumableLoader)
        ):
            current.completed = sampler.epoch_batches - len(sampler)
        elif sizes[0] != sizes[1] or ranks[0] != ranks[1]:
            effect = (
                f"The run has trained {current.completed} batches of the epoch, and its loader continues after as many "
                "of the present size: the samples between come twice, or not at all. A ResumableLoader counts samples."
            )
        if rest := current.completed % steps[1]:
            effect += f"The first step after this takes {steps[1] - rest} in place of {steps[1]} batches."
        if effect or in_a_step[0] != in_a_step[1]:
            _note_sizes(noting, in_a_step, ranks, effect)

    def at_first_batch(self) -> None:
        """Restore the counters that Lightning resets when training begins; call this at the first batch."""
        assert self._given is not None
        self.begin()
        loop, epoch_loop = self._given["loops"]["fit_loop"], self._trainer.fit_loop.epoch_loop
        epoch_loop._batches_that_stepped = loop["epoch_loop.state_dict"]["_batches_that_stepped"]
        epoch_loop.val_loop.batch_progress.load_state_dict(loop["epoch_loop.val_loop.batch_progress"])
        own = self._given["ckpt_tasks"]
        self._trainer.accumulate_grad_batches = own.get("accumulate", self._trainer.accumulate_grad_batches)
        if "gradients" in own:
            Gradients(self._module).load_state_dict(own["gradients"])
        _set_metric_states(self._module, self._own.get("metrics", {}))
        # At the end of a restarted epoch Lightning omits schedules that need metrics, because it has lost the metrics.
        self._trainer.fit_loop._restarting = False

    def after_first_batch(self) -> None:
        """Add the restored sums to the sums of the first batch: an epoch's mean must cover all of its batches."""
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


def _note_sizes(noting: Differences, in_a_step: list[list[Any]], ranks: tuple[int, int], effect: str) -> None:
    """Record that a step has other samples than the run's, from each loader, or comes from other ranks."""
    before, now = in_a_step
    if before != now:
        end = "ends before its last rates." if sum(filter(None, now)) > sum(filter(None, before)) else "may raise."
        effect = f"{effect or 'The epoch continues behind the samples trained.'} OneCycleLR keeps its length, and {end}"
    if before == now and ranks[0] != ranks[1]:
        noting.change("ranks", *ranks, effect)
    else:
        was, here = (before[0], now[0]) if len(before) == len(now) == 1 else (before, now)
        noting.change("samples in a step", was, here, effect)


@contextmanager
def _without_collectives(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """In the block, dump no optimizers of ModelParallelStrategy, and of the model what this rank holds.

    Lightning would copy all of it, and make an optimizer step where the optimizer has no state yet.
    """
    strategy = vars(trainer.strategy)
    own = {"lightning_module_state_dict": module.state_dict, "optimizer_state": lambda _: {}}
    own = own if isinstance(trainer.strategy, ModelParallelStrategy) else {}
    strategy |= own
    try:
        yield
    finally:
        for name in own:
            del strategy[name]


def _sums(trainer: Trainer) -> dict[str, Any]:
    results = trainer.fit_loop.epoch_loop._results
    return {
        name: {
            "value": metric.value.cpu(),
            "count": getattr(metric, "cumulated_batch_size", torch.tensor(0)).cpu(),
            "reduction": metric.meta.reduce_fx.__name__,
        }
        for name, metric in results.items()
        if metric.is_tensor and metric.meta.on_epoch
    }


def _divided(saved: list[dict[str, Any]], module: LightningModule, rank: int, ranks: int) -> dict[str, Any]:
    """Return what a rank restores of what another number of ranks has saved: together they have the same sums.

    Each rank gets an equal share of Lightning's sums, since some are logged without a reduction over the ranks. Raises
    ConfigError for a metric whose states cannot be put together.
    """
    sums: dict[str, Any] = {}
    for name, one in saved[0]["sums"].items():
        values, counts = (torch.stack([each["sums"][name][key] for each in saved]) for key in ("value", "count"))
        extreme = {"max": torch.max, "min": torch.min}.get(one["reduction"])
        value = values.sum(0) / ranks if extreme is None else extreme(values)
        sums[name] = {"value": value, "count": counts.sum(0) / ranks}
    metrics = {**saved[0]["metrics"]}
    for name, metric in module.named_modules():
        if name in metrics and isinstance(metric, Metric) and any(one["metrics"][name]["updates"] for one in saved):
            of_all = [one["metrics"][name]["state"] for one in saved]
            state = {key: _together(metric, key, [one[key] for one in of_all], rank) for key in of_all[0]}
            metrics[name] = {**metrics[name], "state": state}
    return {**saved[0], "sums": sums, "metrics": metrics}


def _together(metric: Metric, key: str, values: list[Any], rank: int) -> Any:
    """Return a rank's part of a metric's state; sums and lists are rank 0's, and the others begin anew."""
    reduce = metric._reductions[key]
    if isinstance(values[0], list):
        return [item for value in values for item in value] if rank == 0 else []
    if reduce is dim_zero_sum:
        return torch.stack(values).sum(0) if rank == 0 else metric._defaults[key]
    if reduce in (dim_zero_mean, dim_zero_max, dim_zero_min):
        return reduce(torch.stack(values))
    raise ConfigError(
        f"the state {key} of {type(metric).__name__} cannot be put together from other ranks' states",
        hint="Start as many ranks as before, or change their number where an epoch begins.",
    )


def _callbacks(trainer: Trainer) -> list[Any]:
    return getattr(trainer, "callbacks")  # type: ignore[no-any-return]  # noqa: B009 (Lightning does not declare it)


def _metric_states(module: LightningModule) -> dict[str, Any]:
    """Return the sums of torchmetrics since the epoch began: a module's state does not have them."""
    for collection in module.modules():
        if isinstance(collection, MetricCollection):
            collection.values(copy_state=False)  # All metrics that share one state then show it.
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
    """Return a metric's state, a tensor or a list of tensors, on a device."""
    return [one.detach().to(device) for one in value] if isinstance(value, list) else value.detach().to(device)


def _same(some: dict[str, Any], own: dict[str, Any]) -> bool:
    return some.keys() == own.keys() and all(
        isinstance(value, torch.Tensor) and identity(value) == identity(own[name]) for name, value in some.items()
    )
