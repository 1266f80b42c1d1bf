"""Hugging Face: a mixin for Trainer that saves and resumes by itself, and the state of an Accelerator.

A callback would come too late: Trainer decides how many epochs and batches to skip before it calls the first callback.
So the mixin restores everything when Trainer creates its own state. Some parts do not exist yet then (the schedule), or
Trainer resets them later (sums of the loss): the mixin restores these parts as soon as possible.

The mixin saves step k after Trainer has fetched the batches of the next step: the checkpoint then includes logs,
evaluation, epoch ends and the decisions of callbacks. A resume restores the random streams at the same point.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler, SkipBatchSampler
from torch.utils.data import RandomSampler
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import ConfigError, StateError
from ckpt_tasks.integrations.attached import numbers, with_extra
from ckpt_tasks.integrations.huggingface_adapters import AdaLoraRanks, AdapterConfigs, without_base
from ckpt_tasks.integrations.huggingface_state import TrainerProgress, samplers_of, warn_of_own_files
from ckpt_tasks.run.ledger.config import CheckpointConfig, config_of
from ckpt_tasks.state.kinds.modules import Gradients
from ckpt_tasks.state.tensors.random_streams import current_streams, set_streams

OF_THE_CLOCK = ("runtime", "per_second", "preparation_time", "epoch")
__all__ = ["AdaLoraRanks", "AdapterConfigs", "CkptMixin", "CkptTrainer", "state_of", "without_base"]
_OURS = "the run"  # Trainer gets this as its checkpoint; we override all methods that would read it.


class CkptMixin(Trainer if TYPE_CHECKING else object):  # type: ignore[misc]  # Trainer ships no types
    """Save the steps of a Trainer's `train` into a run, and resume there when `train` is called again.

    For a Trainer of your own: ``class MyTrainer(CkptMixin, Seq2SeqTrainer)``. `checkpoint` is a directory, a URL or a
    CheckpointConfig; leave it out for TrainerProgram. `state` names objects of your own that are saved too; `base` is
    the name of a frozen base, whose tensors are then not stored (see `without_base`).
    `train(resume_from_checkpoint=…)` is used only until the run has a checkpoint; from then on Trainer's own
    checkpoints are not read. SIGTERM and Ctrl-C end the training after the current step, with a commit. What Trainer
    logs becomes the metrics of the step.

    Raises ConfigError for FSDP, DeepSpeed and `ignore_data_skip`, and what Checkpointer's `restore` and `step` raise.
    """

    def __init__(
        self,
        *args: Any,
        checkpoint: str | os.PathLike[str] | CheckpointConfig | None = None,
        state: Mapping[str, Any] | None = None,
        base: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        _refuse(self)
        self._base_source = base
        self.ckpt: Any = None if checkpoint is None else Checkpointer(config_of(checkpoint))
        self._own_state = state
        self._ckpt_state: dict[str, Any] = {}
        self._progress = TrainerProgress(self)
        warn_of_own_files(self)
        self._resumed = False
        self._theirs: str | bool | None = None  # Trainer's own checkpoint, used if the run has none.
        self._streams: Any = None  # Set by a restore, cleared by the first step.
        self._loader: Any = None  # Training draws batches from this loader.

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Continue the run; if it has no checkpoint, do what Trainer does with `resume_from_checkpoint`.

        Raises ConfigError if CkptTrainer was made without `checkpoint`, and for True if neither the run nor Trainer's
        output directory has a checkpoint.
        """
        if self.ckpt is None:
            raise ConfigError("CkptTrainer has no run to save in", hint='Name its place: checkpoint="runs/first".')
        self._theirs = resume_from_checkpoint or None
        return super().train(None, *args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self.ckpt:
            return super()._inner_training_loop(*args, **kwargs)

    def _init_training_state(
        self, max_steps: int, epoch_steps: int, epochs: int, _: None, trial: Any
    ) -> tuple[int, int]:
        """Restore everything that exists by now; return the first epoch, and the number of its trained batches."""
        begin: tuple[int, int] = super()._init_training_state(max_steps, epoch_steps, epochs, None, trial)
        optimizer = self.create_optimizer()
        if self.accelerator.is_fsdp2:
            # Shard now: a restore fills the shards, and the optimizer gets other parameters.
            model, optimizer = self.accelerator.prepare(self.model, optimizer)
            for name, value in (("model", model), ("model_wrapped", model), ("optimizer", optimizer)):
                setattr(self, name, value)
        self._progress.begin(self._loader, epoch_steps)
        self._schedule = _Later(lambda: self.lr_scheduler)
        is_given = self.lr_scheduler is not None and not self._created_lr_scheduler
        state = {
            "model": self.model,
            # accelerate has wrapped a sharded model's optimizer, and any in a second train().
            "optimizer": getattr(optimizer, "optimizer", optimizer),
            "schedule": self.lr_scheduler if is_given else self._schedule,
            "trainer": self._progress,
        }
        if self._base_source is not None:
            state |= without_base(self.model, self._base_source)
            state.pop("adapters", None)  # The group `trainer` has the adapters.
        if self.accelerator.scaler is not None:
            state["scaler"] = self.accelerator.scaler
        if hasattr(getattr(self.model, "base_model", None), "rankallocator"):
            state["ranks"] = AdaLoraRanks(self.model)
        if getattr(self.args, "sync_ref_model", False):  # TRL moves the reference model towards the model.
            state["ref_model"] = self.accelerator.unwrap_model(self.ref_model)
        self._ckpt_state = with_extra(state, self._own_state)
        self.ckpt.restore(self._ckpt_state)
        self._resumed = self._progress.restored_step > 0  # A flow saves step 0, where training begins.
        if self._resumed:
            self._theirs = None
            self._streams = current_streams()
            begin = self._progress.apply()
            self._progress.give_files("_load_from_checkpoint")
            options = self._ckpt_state["optimizer"].param_groups
            self._options = [{name: value for name, value in one.items() if name != "params"} for one in options]
        elif self._theirs is not None:
            self._theirs = _newest_of(self.args.output_dir) if self._theirs is True else self._theirs
            if not self.accelerator.is_fsdp2:  # Trainer reads the weights of a sharded model when it prepares it.
                self._load_from_checkpoint(self._theirs)
            begin = super()._init_training_state(max_steps, epoch_steps, epochs, self._theirs, trial)
        return begin

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Remember the loader from which training draws, whichever code made it."""
        self._loader = dataloader
        return super().set_initial_training_values(args, dataloader)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, _: None) -> Any:
        max_steps = self.state.max_steps if self._resumed else max_steps
        if self.accelerator.is_fsdp2:
            # accelerate finds parameters by their addresses, and all empty shards have one: prepare only once.
            self.accelerator.__dict__["prepare"] = lambda *prepared: prepared
        try:
            prepared = super()._prepare_for_training(max_steps, train_dataloader, self._theirs)
        finally:
            self.accelerator.__dict__.pop("prepare", None)
        self._schedule.apply()
        if self._resumed:
            # Making a schedule sets the optimizer to the schedule's first learning rate: undo this.
            for group, options in zip(self.optimizer.param_groups, self._options, strict=True):
                group.update(options)
            self._progress.give_files("_load_optimizer_and_scheduler")
        return prepared

    def _run_epoch(self, **kwargs: Any) -> None:
        kwargs["resume_from_checkpoint"] = _OURS if self._resumed else self._theirs
        skipped = kwargs["epoch"] == kwargs["epochs_trained"] and kwargs["steps_trained_in_current_epoch"]
        self._progress.begin_epoch(kwargs["epoch"], int(skipped) // self.args.gradient_accumulation_steps)
        super()._run_epoch(**kwargs)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if not self._resumed:
            super()._load_rng_state(checkpoint)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Report the previous step, which is now complete; before the first step, restore the random streams."""
        batches = super().get_batch_samples(*args, **kwargs)
        if self._streams is not None:
            self._progress.at_first_step()
            set_streams(self._streams)
            self._streams = None
            loader, whole = self.accelerator.gradient_state.active_dataloader, self._loader
            size = getattr(whole, "total_batch_size", None)  # A sampler of batches of many sizes has none.
            is_skipped = isinstance(getattr(loader, "batch_sampler", None), SkipBatchSampler)
            if is_skipped and size and not whole.batch_sampler.drop_last:
                # Without it accelerate gathers the samples twice that fill up the epoch's last batch.
                loader.remainder = whole.total_dataset_length % size
        elif self.state.global_step > self.ckpt.position:
            self.ckpt.step(
                self.state.global_step,
                self._ckpt_state,
                metrics=numbers(self._progress.logged),
                epoch=int(self.state.epoch),
            )
        return batches

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Remember logged values as metrics of the next checkpoint.

        With fp16 a non-finite norm of gradients is omitted: the scaler skips such a step.
        """
        super().log(logs, *args, **kwargs)
        self._progress.logged |= {name: value for name, value in logs.items() if not name.endswith(OF_THE_CLOCK)}
        if self.accelerator.scaler is not None and not math.isfinite(logs.get("grad_norm", 0.0)):
            # `optimizer_step_was_skipped` does not show this: a fused optimizer is called, and skips the step itself.
            del self._progress.logged["grad_norm"]

    def _finalize_training(self, *args: Any) -> Any:
        if self._streams is not None:  # No step remained to train.
            self._progress.at_first_step()
            self._streams = None
        if self.state.global_step > self.ckpt.position:
            self.ckpt.save(self.state.global_step, self._ckpt_state, metrics=numbers(self._progress.logged))
        return super()._finalize_training(*args)


class CkptTrainer(CkptMixin, Trainer):  # type: ignore[misc]  # Trainer ships no types
    """Hugging Face's Trainer whose steps are saved in a run.

    ::

        trainer = CkptTrainer(model=model, args=args, train_dataset=dataset, checkpoint="runs/first")
    """


def state_of(accelerator: Accelerator) -> dict[str, Any]:
    """Return the state of everything that an Accelerator has prepared or registered, for Checkpointer.

    Call this after `prepare`. The state includes loaders with a state (`use_stateful_dataloader`); add a
    ResumableLoader yourself. With gradient_accumulation_steps it includes the gradients and the position among them.

    Raises ConfigError for a loader that shuffles and would continue with other batches after a resume.
    """
    state: dict[str, Any] = {
        "models": [accelerator.unwrap_model(model) for model in accelerator._models],
        "optimizers": [optimizer.optimizer for optimizer in accelerator._optimizers],
        "schedules": [schedule.scheduler for schedule in accelerator._schedulers],
        "loaders": [one for one in map(_Loader, accelerator._dataloaders) if one.has_state],
        "objects": [*accelerator._custom_objects],
    }
    adaptive = [one for one in state["models"] if hasattr(getattr(one, "base_model", None), "rankallocator")]
    state["ranks"] = [*map(AdaLoraRanks, adaptive)]
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    if accelerator.gradient_state.num_steps > 1:
        state["gradients"] = [Gradients(model) for model in accelerator._models]
        state["accumulation"] = _Accumulation(accelerator)
    return {name: value for name, value in state.items() if value != []}


class _Loader:
    """The position of a loader that an Accelerator has prepared: batches of the epoch, and epochs.

    Raises ConfigError for a loader that shuffles, if its order would be different after a resume.
    """

    def __init__(self, loader: Any):
        self._loader = loader
        self.has_state = getattr(loader, "use_stateful_dataloader", False)
        *_, sampler = samplers_of(loader)
        # accelerate gives workers the first epoch's order before it sets the seeded sampler.
        is_seeded = isinstance(sampler, SeedableRandomSampler) and not loader.num_workers
        if isinstance(sampler, RandomSampler) and not (self.has_state and is_seeded):
            raise ConfigError(
                f"a prepared loader that draws by {type(sampler).__name__} continues with other batches after a resume",
                hint="Take a ResumableLoader, without prepare, or prepare one without workers with "
                "DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True).",
            )

    def covered(self) -> list[Any]:
        """Return the loader and the one that it iterates."""
        return [self._loader, self._loader.base_dataloader]

    def state_dict(self) -> dict[str, Any]:
        state = self._loader.state_dict()
        in_epoch = self._loader in self._loader.gradient_state.dataloader_references
        # After an epoch's last batch the next epoch begins, but accelerate counts it only when the loop has ended.
        return {**state, "iteration": self._loader.iteration + (in_epoch and state["_iterator_finished"])}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the position, and make the next iterator now: making it draws from streams, which are set later."""
        own = {**state_dict}
        self._loader.set_epoch(own.pop("iteration"))
        self._loader.load_state_dict(own)
        self._loader.base_dataloader.state_dict()


class _Accumulation:
    """The position of an Accelerator within the accumulation of gradients."""

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        """Return the batches since the last optimizer step; raise StateError if ranks have different gradients."""
        batches = self._accelerator.step % self._accelerator.gradient_state.num_steps
        if batches and self._accelerator.num_processes > 1:
            raise StateError(
                "gradients are being accumulated, and differ between the ranks",
                hint="Call ckpt.step only where accelerator.sync_gradients is true.",
            )
        return {"batches": batches}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self._accelerator.step = state_dict["batches"]


class _Later:
    """A substitute for a stateful object that does not exist yet: it keeps the restored state until `apply`.

    Until then `state_dict` returns the restored state, since a restore from memory saves to storage at once.
    """

    def __init__(self, find: Callable[[], Any]):
        self._find = find
        self._given: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        if self._given is not None:
            return self._given
        target = self._find()
        return {} if target is None else dict(target.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._given = state

    def apply(self) -> None:
        if self._given is not None:
            self._find().load_state_dict(self._given)
            self._given = None


def _newest_of(output_dir: str) -> str:
    newest: str | None = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None  # type: ignore[no-untyped-call]
    if newest is None:
        raise ConfigError(
            f"neither the run nor {output_dir} has a checkpoint to resume from",
            hint="Leave resume_from_checkpoint=True out: CkptTrainer resumes by itself.",
        )
    return newest


def _refuse(trainer: Any) -> None:
    for what, used in (
        ("FSDP1", trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2),
        ("DeepSpeed", trainer.is_deepspeed_enabled),
        ("ignore_data_skip", trainer.args.ignore_data_skip),
    ):
        if used:
            raise ConfigError(
                f"CkptTrainer cannot resume bit for bit with {what}",
                hint="Call Checkpointer in a loop of your own." if what != "ignore_data_skip" else "Leave it out.",
            )
