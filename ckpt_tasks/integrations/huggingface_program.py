"""A Hugging Face Trainer as a program of `ckpt train`: its loop runs from one step to the next when the flow asks.

Trainer owns its loop, and a flow wants one step at a time. So Trainer's `train` runs in a greenlet: a stack of its own
in the same thread. It stops wherever Trainer would call its Checkpointer, and continues there at the next `train_step`.
Signals, errors and autograd are as in a plain call.

The greenlet refers to the trainer, and Python's garbage collector does not see it. So nothing that the trainer refers
to may refer to the greenlet or to the program: both would stay in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]
from transformers import PrinterCallback, ProgressCallback

from ckpt_tasks.errors import ConfigError, ProgramError
from ckpt_tasks.integrations.attached import numbers
from ckpt_tasks.integrations.huggingface import OF_THE_CLOCK, CkptMixin
from ckpt_tasks.state.groups import ByRank
from ckpt_tasks.state.tensors.random_streams import preserved_rng


class TrainerProgram:
    """Let a flow train a CkptTrainer, which is made without `checkpoint`: the flow names the run.

    ::

        def training(lr: float = 1e-3) -> TrainerProgram:
            args = TrainingArguments("out", learning_rate=lr, max_steps=1000, save_strategy="no")
            return TrainerProgram(CkptTrainer(model=Net(), args=args, train_dataset=dataset))

        # ckpt train my_module:training --ranks 2 --steps 1000

    The metrics of a step are what Trainer has logged, and `samples`, which it has trained in this rank. `evaluate`
    returns what `trainer.evaluate` does (`eval_loss` …) without times; if `eval_dataset` is a dict that has the
    evaluation set's name, of this data set alone.

    Raises ConfigError for a trainer that is no CkptTrainer, has a `checkpoint`, or uses `auto_find_batch_size`.
    """

    def __init__(self, trainer: Any):
        if not isinstance(trainer, CkptMixin) or trainer.ckpt is not None:
            raise ConfigError(
                "TrainerProgram takes a CkptTrainer without `checkpoint`",
                hint="The flow names the run: ckpt train --checkpoint-dir DIR, and options such as --step-interval.",
            )
        if trainer.args.auto_find_batch_size:
            raise ConfigError("a program cannot use auto_find_batch_size", hint="Set per_device_train_batch_size.")
        for shown in (PrinterCallback, ProgressCallback):  # The flow shows its own line, and --json prints JSON alone.
            trainer.remove_callback(shown)
        trainer.ckpt = _Flow(trainer)
        self._trainer = trainer
        # accelerate wraps the model only when training begins: this shows already now that each rank has its own data.
        self._rank = ByRank(trainer.args.process_index) if trainer.args.world_size > 1 else None
        self._greenlet = greenlet(trainer.train)
        self.state: dict[str, Any] = self._continue()

    def train_step(self) -> Mapping[str, Any]:
        """Make one step of Trainer's; raise ProgramError if Trainer has ended."""
        answer: Any = None if self._greenlet.dead else self._continue()
        trainer, args = self._trainer, self._trainer.args
        if self._greenlet.dead:
            raise ProgramError(
                f"Trainer has ended at step {trainer.state.global_step}",
                hint="Give no more --steps than this, or Trainer more num_train_epochs or max_steps.",
            )
        self.state, metrics = answer
        return {**metrics, "samples": trainer._train_batch_size * args.gradient_accumulation_steps}

    def evaluate(self, suite: str) -> dict[str, Any]:
        """Evaluate as Trainer does; raise ProgramError if it has no `eval_dataset`."""
        trainer = self._trainer
        if trainer.eval_dataset is None:
            raise ProgramError("Trainer has no eval_dataset to evaluate", hint="Give it one where you make it.")
        of_suite = isinstance(trainer.eval_dataset, dict) and suite in trainer.eval_dataset
        with preserved_rng():
            found = trainer.evaluate(suite, metric_key_prefix=f"eval_{suite}") if of_suite else trainer.evaluate()
        return numbers({name: value for name, value in found.items() if not name.endswith(OF_THE_CLOCK)})

    def _continue(self) -> Any:
        """Run Trainer up to its next call of the Checkpointer, with the context variables of the caller."""
        self._greenlet.gr_context = getcurrent().gr_context
        return self._greenlet.switch()


class _Flow:
    """Trainer's Checkpointer in a flow: each call stops Trainer, and the flow's session does what was asked."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.position = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: the flow's session ends the run."""

    def restore(self, state: dict[str, Any]) -> None:
        """Wait until the session has restored `state`; until then a schedule is in it that Trainer makes later."""
        trainer, later = self._trainer, state["schedule"]
        schedule = trainer.lr_scheduler or _schedule(trainer, state["optimizer"])
        trainer.is_in_train = False  # An evaluation before the first step is no part of a training.
        getcurrent().parent.switch({**state, "schedule": schedule})
        trainer.is_in_train = True
        self.position = state["trainer"].restored_step
        if self.position and later is not schedule:
            later.load_state_dict(schedule.state_dict())

    def step(self, step: int, state: dict[str, Any], *, metrics: Mapping[str, Any], epoch: int = 0) -> None:
        """Return from `train_step`, and wait for the next one."""
        self.position = step
        getcurrent().parent.switch((state, metrics))

    save = step


def _schedule(trainer: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Make the schedule that Trainer makes later, for another optimizer: making one changes the optimizer's rates."""
    groups = [{**group, "params": [torch.nn.Parameter(torch.empty(0))]} for group in optimizer.param_groups]
    own, trainer.optimizer = trainer.optimizer, torch.optim.Optimizer(groups, {})
    trainer.create_scheduler(num_training_steps=trainer.state.max_steps)
    schedule, trainer.lr_scheduler, trainer.optimizer = trainer.lr_scheduler, None, own
    return schedule
