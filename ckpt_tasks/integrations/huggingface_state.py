"""Trainer's own part of a checkpoint: counters, callbacks, the position in the data, and the arguments of the start.

The position is a number of samples of an epoch, so that another batch size continues at the same sample. Trainer draws
the order of an epoch when the epoch begins. So a checkpoint also has the states of the random streams and of the
samplers' generators at that moment. A resume restores these states before Trainer skips the trained samples.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.utils import send_to_device
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.integrations.attached import gather_of_ranks
from ckpt_tasks.integrations.huggingface_adapters import AdapterConfigs
from ckpt_tasks.state.kinds.started import Started, outline_of
from ckpt_tasks.state.tensors.random_streams import GENERATORS, current_streams, set_streams, stream_state

_log = logging.getLogger("ckpt_tasks")
_PROGRESS = (
    "epoch",
    "global_step",
    "train_batch_size",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
_SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_initial_num_input_tokens_seen")
_OF_TRL = ("_step", "_buffered_inputs", "_total_train_tokens")
_LIBRARIES = ("ckpt_tasks.", "sentence_transformers.", "transformers.", "trl.")
_LOADERS = ("_load_from_checkpoint", "_load_optimizer_and_scheduler")
_LENGTH = "Training ends there, and a schedule that depends on it jumps to its rate at this step."
_ORDER = "The epoch continues in another order: some of its samples come twice, others not at all."
_ARGUMENTS = ("num_train_epochs", "max_steps", "warmup_steps", "max_grad_norm", "label_smoothing_factor", "bf16")
_BY_BATCH = {"LengthGroupedSampler", "BatchRebalanceSampler", "RepeatSampler"}
_BATCH = "samples in a step"
_SEED = "data_seed, or seed"


class TrainerProgress(Started):
    """Trainer's own counters and sums, the states of its callbacks, and the position in the data."""

    effects: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("data", "sampler"), _ORDER),
        _SEED: "The run's is restored, and with it the order of the samples.",
        _BATCH: "The run continues behind the samples that it has trained; the schedule has another number of steps.",
        **dict.fromkeys(("num_train_epochs", "max_steps"), _LENGTH),
        "lr_scheduler": "The new one continues at the run's step, and the rate may jump.",
        "warmup_steps": "The schedule with this one continues at the run's step, and the rate may jump.",
        **dict.fromkeys(("max_grad_norm", "label_smoothing_factor", "bf16"), "It counts from this step on."),
        "callbacks": "States are restored by class, in order; a callback that has none in the run begins anew.",
    }

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.is_tried = bool(trainer.args.auto_find_batch_size)
        self._adapters = AdapterConfigs(trainer.accelerator.unwrap_model(trainer.model))
        self._given: dict[str, Any] | None = None
        self._epoch = self._first_step = 0
        self._epoch_steps: float = 0
        self._samplers: list[Any] = []
        self._begun: dict[str, Any] = {}  # The streams and samplers when the epoch began.
        self._to_begin: dict[str, Any] = {}  # The streams and samplers with which the resumed epoch begins.
        self._started: dict[str, Any] = {}
        self.logged: dict[str, Any] = {}

    def covered(self) -> list[Any]:
        """Return the parts of the trainer whose state is saved here or in other groups, or that need none."""
        trainer = self._trainer
        own = [trainer.accelerator, trainer.lr_scheduler, trainer.callback_handler, *trainer.callback_handler.callbacks]
        return [*own, *self._samplers, *trainer.accelerator._dataloaders]

    def begin(self, loader: Any, epoch_steps: int) -> None:
        """Record the arguments with which this training starts; `loader`: training draws batches from it."""
        trainer, args = self._trainer, self._trainer.args
        self._samplers = [*samplers_of(loader)]
        self._epoch_steps = epoch_steps if has_length(loader) else math.inf
        schedule = None if trainer._created_lr_scheduler else trainer.lr_scheduler
        kind = str(args.lr_scheduler_type.value) if schedule is None else type(schedule).__name__
        self._started = {
            "data": outline_of(trainer.train_dataset),
            **{name: getattr(args, name) for name in _ARGUMENTS},
            "sampler": type(self._samplers[-1]).__name__,
            _BATCH: trainer._train_batch_size * args.gradient_accumulation_steps * args.world_size,
            "lr_scheduler": f"{kind} {args.lr_scheduler_kwargs or ''}".strip(),
            "callbacks": sorted(type(callback).__name__ for callback in self._callbacks()),
        }
        if hasattr(self._samplers[-1], "initial_seed"):
            self._started[_SEED] = self._samplers[-1].initial_seed

    def begin_epoch(self, epoch: int, skipped: int) -> None:
        """Make Trainer draw the epoch's order as it did before; call this before the first batch is drawn.

        Also record the step at which the epoch began: a stream has no length from which to compute it.
        """
        self._epoch, self._first_step = epoch, self._trainer.state.global_step - skipped
        live = self._drawn_from()
        set_streams({name: (live[name][0], state) for name, state in self._to_begin.items() if name in live})
        # accelerate's sampler makes its generator when it draws: keep its restored state until then.
        self._to_begin, self._begun = {}, {**self._to_begin, **self._states()}

    def state_dict(self) -> dict[str, Any]:
        if self._given is not None:  # Until the first step, return the restored state.
            return self._given
        trainer, state = self._trainer, self._trainer.state
        steps = state.global_step - self._first_step
        done = steps >= self._epoch_steps  # If all steps are done, the next epoch is drawn from the current streams.
        own = {
            "progress": {name: getattr(state, name) for name in _PROGRESS},
            "callbacks": [[type(one).__name__, one.state()["attributes"]] for one in self._callbacks()],
            "stopped": trainer.control.should_training_stop and state.global_step < state.max_steps,
            "epoch": self._epoch + done,
            "steps_of_epoch": 0 if done else steps,
            "begun": self._states() if done else self._begun,
            "logged": dict(self.logged),
            "sums": {name: getattr(trainer, name, 0) for name in _SUMS},
            "loss": float(getattr(trainer, "_tr_loss", 0.0)),
            "flos": trainer.current_flos,
            "reused": _reused(trainer),
        }
        # Each rank has its own losses since the last log, and its own evaluation times.
        of_ranks = gather_of_ranks(own)
        if any(_is_overridden(trainer, name) for name in _LOADERS):
            files = gather_of_ranks(_own_files(trainer))
            of_ranks = [{**one, "files": files[rank]} for rank, one in enumerate(of_ranks)]
        return {"of_ranks": of_ranks, "started": self._started, **self._adapters.state_dict()}

    @property
    def restored_step(self) -> int:
        """The step that was restored and is not applied yet; 0 if training begins."""
        return self._given["of_ranks"][0]["progress"]["global_step"] if self._given else 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Step 0 has nothing to apply: the order of the first epoch is not drawn there.
        self._given = state if state["of_ranks"][0]["progress"]["global_step"] else None

    def apply(self) -> tuple[int, int]:
        """Restore Trainer's counters; return the epoch to begin with, and the number of its batches already trained.

        Raises ConfigError if the batch size or the number of ranks has changed and the epoch's order depends on it, or
        if another number of ranks has saved values that are each rank's own.
        """
        trainer, given = self._trainer, self._own()
        for name, value in given["progress"].items():
            setattr(trainer.state, name, value)
        by_class: dict[str, list[Any]] = {}
        for name, attributes in given["callbacks"]:
            by_class.setdefault(name, []).append(attributes)
        for callback in self._callbacks():
            if of_class := by_class.get(type(callback).__name__):
                vars(callback).update(of_class.pop(0))
        self.logged, self._to_begin = given["logged"], given.get("begun", {})
        if _SEED in self._started:
            self._started[_SEED] = self._samplers[-1].initial_seed = self._was(_SEED)
        epoch, steps = given["epoch"], self._fitted(given["steps_of_epoch"])
        if steps >= self._epoch_steps:
            epoch, steps, self._to_begin = epoch + 1, 0, {}
        self._set_length(epoch, steps)
        state = trainer.state
        if not given["stopped"] and state.global_step < state.max_steps and epoch < state.num_train_epochs:
            return epoch, steps * trainer.args.gradient_accumulation_steps
        if given["stopped"]:
            _log.warning("The run has stopped early at step %d", state.global_step)
        return sys.maxsize, 0

    def _fitted(self, steps: int) -> int:
        """Return how many steps of the current batch size correspond to `steps` that the run made in an epoch."""
        assert self._given is not None
        now: int = self._started[_BATCH]
        was: int = self._was(_BATCH)
        ranks: int = self._trainer.args.world_size
        ranks_were = len(self._given["of_ranks"])
        if not steps or (was, ranks_were) == (now, ranks):
            return steps
        if self._started["sampler"] in _BY_BATCH:
            raise ConfigError(
                f"{self._started['sampler']} makes another order with {now} {_BATCH} on {ranks} ranks than with {was} "
                f"on {ranks_were}",
                hint=f"Keep {was} in all: per_device_train_batch_size x gradient_accumulation_steps x ranks, and "
                "as many ranks. Or change it where an epoch begins.",
            )
        if again := steps * was % now:
            _log.warning(
                "%d %s do not fit to the position: the samples %d to %d of the epoch's order are trained twice",
                *(now, _BATCH, steps * was - again, steps * was - 1),
            )
        return steps * was // now

    def _set_length(self, epoch: int, steps: int) -> None:
        """Set `max_steps` again if the batch size or the data have changed, and so the number of steps of an epoch."""
        state, args = self._trainer.state, self._trainer.args
        changed = any(self._was(name) != self._started.get(name) for name in (_BATCH, "data"))
        if changed and args.max_steps <= 0:
            left = math.ceil(args.num_train_epochs * self._epoch_steps) - epoch * self._epoch_steps - steps
            state.max_steps = state.global_step + max(int(left), 0)

    def _was(self, name: str) -> Any:
        """Return an argument of the run's first start, or the current one if the checkpoint lacks it."""
        assert self._given is not None
        return self._given.get("started", {}).get(name, self._started.get(name))

    def at_first_step(self) -> None:
        """Restore the sums that Trainer resets at its start."""
        given, self._given = self._own(), None
        for name, value in given["sums"].items():
            setattr(self._trainer, name, value)
        self._trainer._tr_loss.fill_(given["loss"])
        self._trainer.current_flos = given["flos"]
        for name, value in given.get("reused", {}).items():
            if name not in _OF_TRL:
                _fill(vars(self._trainer).get(name, {}), value)
            else:
                setattr(self._trainer, name, send_to_device(value, self._trainer.args.device))

    def give_files(self, loader: str) -> None:
        """Call a class's own override of a loader of Trainer with the files that its own saving has written."""
        assert self._given is not None
        files = {name: value for one in self._given["of_ranks"] for name, value in one.get("files", {}).items()}
        if files and _is_overridden(self._trainer, loader):
            with _own_parts(self._trainer) as place:
                for name, value in files.items():
                    (place / name).parent.mkdir(parents=True, exist_ok=True)
                    (place / name).write_bytes(value.numpy().tobytes())
                getattr(self._trainer, loader)(str(place))

    def _own(self) -> dict[str, Any]:
        assert self._given is not None
        saved, args = self._given["of_ranks"], self._trainer.args
        own: dict[str, Any]
        own = saved[args.process_index] if len(saved) == args.world_size else _divided(saved, args.world_size)
        return own

    def _callbacks(self) -> Iterator[Any]:
        return (one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState))

    def _drawn_from(self) -> dict[str, tuple[Any, Any]]:
        """Return the streams and the samplers' generators, which decide an epoch's order, each with its state."""
        drawn = current_streams()
        for one in self._samplers:
            for name, value in vars(one).items():
                if isinstance(value, GENERATORS):
                    drawn[f"{type(one).__name__}.{name}"] = (value, stream_state(value))
        return drawn

    def _states(self) -> dict[str, Any]:
        return {name: state for name, (_, state) in self._drawn_from().items()}


def _divided(saved: list[dict[str, Any]], ranks: int) -> dict[str, Any]:
    """Return what each of `ranks` ranks restores of what another number of them has saved.

    Trainer logs the mean of the ranks' losses, and the sum of their operations. All else is alike in them, or refused.
    """
    first = saved[0]
    for name, value in first["reused"].items():
        is_own = name == "_buffered_inputs" and value is not None
        if is_own or not all(_alike(value, one["reused"][name]) for one in saved):
            raise ConfigError(
                f"the number of ranks was {len(saved)} and is now {ranks}, and each rank has its own {name}",
                hint=f"Start {len(saved)}, or begin a new run from the weights: `ckpt export RUN OUT` writes them.",
            )
    loss, flos = (sum(one[name] for one in saved) for name in ("loss", "flos"))
    return {**first, "loss": loss / len(saved), "flos": flos / ranks}


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_alike(value, other[name]) for name, value in one.items())
    return bool(np.array_equal(np.asarray(one), np.asarray(other)))


def _reused(trainer: Any) -> dict[str, Any]:
    """Return what a class below Trainer keeps between steps: sums of metrics, and of TRL's tokens and generations."""
    sums = {name: _plain(value) for name, value in vars(trainer).items() if _is_sums(value)}
    is_trls = any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)
    own = {name: vars(trainer)[name] for name in _OF_TRL if is_trls and name in vars(trainer)}
    if "_buffered_inputs" in own:
        every = getattr(trainer.args, "steps_per_generation", 1) * getattr(trainer, "num_iterations", 1)
        own["_buffered_inputs"] = send_to_device(own["_buffered_inputs"], "cpu") if own["_step"] % every else None
    return {**own, **sums}


def _is_sums(value: Any) -> bool:
    """Return True for numbers, or lists of them, in a defaultdict by name, or in a dict of these by mode."""
    if not isinstance(value, defaultdict):
        by_mode = value.values() if type(value) is dict else ()
        return bool(by_mode) and all(isinstance(one, defaultdict) and _is_sums(one) for one in by_mode)
    items = [one for item in value.values() for one in (item if isinstance(item, list) else [item])]
    return all(isinstance(one, (int, float, np.generic, torch.Tensor)) or _is_sums(one) for one in items)


def _plain(sums: Any) -> Any:
    return {name: _plain(value) for name, value in sums.items()} if isinstance(sums, dict) else sums


def _fill(sums: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    for name, value in saved.items():
        if isinstance(value, Mapping):
            _fill(sums[name], value)
        else:
            sums[name] = value


class _Base(Trainer):
    """Trainer without its own files, for `super()` in an override: our checkpoint has Trainer's part already."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.save_model(os.path.join(self._get_output_dir(trial=trial), _folder(self)), _internal_call=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        os.makedirs(output_dir or str(self.args.output_dir), exist_ok=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None: ...

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None: ...


@contextmanager
def _own_parts(trainer: Any) -> Iterator[Path]:
    """Yield a temporary directory as Trainer's checkpoint directory; in the block overrides write and read only it.

    The trainer's class gets `_Base` behind the classes that override Trainer's methods: its `super()` calls end there.
    """
    kind, output_dir = type(trainer), trainer.args.output_dir
    with TemporaryDirectory(prefix="ckpt-tasks-") as place:
        quiet = {"create_model_card": lambda self, *args, **kwargs: None, "__module__": kind.__module__}
        trainer.__class__ = type(kind.__name__, (kind, _Base), quiet)
        trainer.args.output_dir = place
        try:
            yield Path(place, _folder(trainer))
        finally:
            trainer.__class__, trainer.args.output_dir = kind, output_dir


def _own_files(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the files that the class's own overrides write into a checkpoint directory, as bytes by name."""
    with _own_parts(trainer) as place:
        trainer._save_checkpoint(trainer.model, None)
        paths = sorted(path for path in place.rglob("*") if path.is_file())
        return {str(path.relative_to(place)): torch.from_numpy(np.fromfile(path, dtype=np.uint8)) for path in paths}


def _folder(trainer: Any) -> str:
    return f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"


def warn_of_own_files(trainer: Any) -> None:
    """Warn of a class, not a library's, that writes into Trainer's checkpoints and has no override that reads them."""
    own = next(one for one in type(trainer).__mro__ if "_save_checkpoint" in vars(one))
    if not own.__module__.startswith(_LIBRARIES) and not any(_is_overridden(trainer, name) for name in _LOADERS):
        _log.warning(
            "%s overrides _save_checkpoint, and nothing that reads what it writes: it is not in the run's checkpoints. "
            "If training resumes from it, override _load_from_checkpoint too: both are called then",
            own.__qualname__,
        )


def _is_overridden(trainer: Any, name: str) -> bool:
    """Return True if a class below Trainer, of a user or of another library, has its own method of this name."""
    return getattr(type(trainer), name) is not getattr(Trainer, name)


def samplers_of(loader: Any) -> Iterator[Any]:
    """Yield a loader that accelerate has prepared, its batch samplers, and the sampler from which they draw."""
    one = getattr(loader, "base_dataloader", loader)
    while one is not None:
        yield one
        inner = getattr(one, "batch_sampler", None)
        one = getattr(one, "sampler", None) if inner is None else inner
