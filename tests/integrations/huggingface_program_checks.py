"""A Trainer as a program: what is said where it cannot go on, what a fork changes, and that nothing of it stays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments, set_seed

from ckpt_tasks import Checkpointer
from ckpt_tasks.errors import ConfigError, ProgramError
from ckpt_tasks.flows.session.local_session import LocalSession
from ckpt_tasks.integrations.huggingface import CkptTrainer
from ckpt_tasks.integrations.huggingface_program import TrainerProgram
from tests.integrations.huggingface_second_starts_checks import Net, rows
from tests.support.cli_runs import ckpt
from tests.support.forks import config, fork

PROGRAM = f"{__name__}:training"
NOTHING: Mapping[str, Any] = {}
TASK: ContextVar[str] = ContextVar("task")


def trainer(lr: float = 0.01, max_steps: int = 9, more: Mapping[str, Any] = NOTHING, **options: Any) -> CkptTrainer:
    """Make a Trainer whose rate rises for 4 steps and falls until the last one."""
    args = TrainingArguments(
        "out", max_steps=max_steps, learning_rate=lr, warmup_steps=4, per_device_train_batch_size=4, logging_steps=1,
        label_names=["number"], save_strategy="no", report_to=[], use_cpu=True, **options,
    )  # fmt: skip
    set_seed(args.seed)
    return CkptTrainer(model=Net(), args=args, train_dataset=rows(), **more)


def training(lr: float = 0.01, max_steps: int = 9) -> TrainerProgram:
    return TrainerProgram(trainer(lr, max_steps))


def trained(run_dir: Path, until: int, **params: Any) -> list[dict[str, Any]]:
    """Train as a flow does, and commit; return the metrics of each step."""
    with Checkpointer(config(run_dir)) as ckpt:
        session = LocalSession(ckpt, PROGRAM, params)
        session.restore()
        session.run(until)
        session.save(until)
        return [dict(step.metrics) for step in ckpt.run.curve().steps]


def test_a_trainer_that_has_ended_says_at_which_step(run_dir: Path) -> None:
    """A flow that wants more steps than Trainer has ends with the step and what to give, and goes on with that."""
    for _ in range(2):  # the second time from the last step
        with pytest.raises(ProgramError, match=r"Trainer has ended at step 9.*num_train_epochs or max_steps"):
            trained(run_dir, 10)
        trained(run_dir, 9)
    assert len(trained(run_dir, 12, max_steps=12)) == 12


def test_a_run_in_pieces_has_every_bit_of_a_whole_one(run_dir: Path, tmp_path: Path) -> None:
    """P73: `ckpt diff` finds nothing, also where a piece begins within a later epoch, whose sampler is new."""
    for until in (3, 8, 9):
        trained(run_dir, until)
    trained(tmp_path / "whole", 9)
    found = ckpt("diff", f"{run_dir}@latest", f"{tmp_path / 'whole'}@latest")
    assert found.status == 0, found.out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"more": {"checkpoint": "runs/first"}}, "without `checkpoint`"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    ],
)
def test_what_a_program_cannot_do_is_refused(options: dict[str, Any], says: str) -> None:
    """A Trainer with a run of its own, and one that begins again with a smaller batch, are refused by their name."""
    with pytest.raises(ConfigError, match=says):
        TrainerProgram(trainer(**options))


def test_an_evaluation_is_trainers_and_draws_nothing() -> None:
    """All data sets, or the one that the evaluation set names, without times; without any the error says so."""
    more = {"eval_dataset": {"near": rows(4), "far": rows(9)}}
    expected = trainer(more=more).evaluate()
    losses = {name: expected[name] for name in ("eval_near_loss", "eval_far_loss")}
    program, streams = TrainerProgram(trainer(more=more)), torch.get_rng_state()
    assert program.evaluate("quick") == losses
    assert program.evaluate("far") == {"eval_far_loss": losses["eval_far_loss"]}
    assert torch.equal(torch.get_rng_state(), streams)
    with pytest.raises(ProgramError, match="no eval_dataset"):
        training().evaluate("quick")


class Looking(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seen.append(TASK.get())


def test_trainer_runs_in_the_context_of_its_task() -> None:
    """A callback finds the context variables of the task that asks for the step, as Prefect's logger does."""
    looking = Looking()
    program = TrainerProgram(trainer(more={"callbacks": [looking]}))
    for name in ("steps 0 to 1", "steps 1 to 2"):
        TASK.set(name)
        program.train_step()
    assert looking.seen == ["steps 0 to 1", "steps 1 to 2"]


@pytest.mark.parametrize("step", [0, 3, 6])
def test_a_fork_has_another_learning_rate(step: int, run_dir: Path, tmp_path: Path) -> None:
    """P14: a rate that a fork changes holds in each step from the fork on, wherever the schedule is."""
    for until in (3, 6):
        trained(run_dir, until)
    fork(run_dir, step, tmp_path / "fork", {"lr": 0.1})
    rates = [metrics["learning_rate"] for metrics in trained(tmp_path / "fork", 9, lr=0.1)]
    whole = [metrics["learning_rate"] for metrics in trained(tmp_path / "whole", 9, lr=0.1)]
    assert rates == pytest.approx(whole[step:])


def test_a_program_that_is_dropped_leaves_nothing(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A retry builds the program anew: Python frees the old model at once, and the paused Trainer prints nothing."""
    with Checkpointer(config(run_dir)) as ckpt:
        session = LocalSession(ckpt, PROGRAM, {})
        session.restore()
        session.run(2)
        model = weakref.ref(session.state["model"])
        capfd.readouterr()
        session.discard()
        gc.collect()
        assert model() is None
        assert capfd.readouterr() == ("", "")
        assert session.restore() == 0
        session.run(3)
