"""Sessions in this process: what they restore, save, throw away, and refuse to build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.errors import ProgramError
from ckpt_tasks.flows.session.local_session import LocalSession, StateSession, build_program
from ckpt_tasks.run.ledger.config import CheckpointConfig

TINY = "tests.support.tiny:Tiny"


def config(run_dir: Path, **options: Any) -> CheckpointConfig:
    return CheckpointConfig(checkpoint_dir=str(run_dir), **options)


def weights(session: LocalSession) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in session.program.state["model"].parameters()])


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("tests.support.tiny", {}, "package.module:Factory"),
        (":Tiny", {}, "package.module:Factory"),
        ("tests.support.tiny:", {}, "package.module:Factory"),
        ("tests.support.absent:Tiny", {}, "cannot be imported"),
        ("tests.support.tiny:Absent", {}, "no factory 'Absent'"),
        ("tests.support.tiny:__name__", {}, "no factory '__name__'"),
        ("tests.support.tiny:Tiny", {"widht": 3}, "widht"),
        ("collections:Counter", {}, "is not a program: it has no train_step and no evaluate"),
        ("builtins:dict", {}, "cannot be called"),
    ],
)
def test_a_program_that_cannot_be_built_is_named(name: str, params: dict[str, Any], says: str) -> None:
    """A wrong program, factory or parameter is a ProgramError that says which one."""
    with pytest.raises(ProgramError, match=says):
        build_program(name, params)


def test_what_the_factory_raises_passes_through() -> None:
    """A factory's own error is not a ProgramError: it may go away by itself, and is worth a retry."""
    with pytest.raises(RuntimeError, match="negative dimension"):
        build_program(TINY, {"width": -1})


def test_first_restore_saves_the_start(run_dir: Path) -> None:
    """P27: the first restore of a run without a checkpoint commits step 0: a retry has something to restore."""
    with Checkpointer(config(run_dir)) as ckpt:
        session = LocalSession(ckpt, TINY)
        assert session.restore() == 0
        assert [one.step for one in ckpt.checkpoints()] == [0]
        start = weights(session)
        session.run(3)
        assert not torch.equal(weights(session), start)
        session.discard()
        assert session.restore() == 0
        assert torch.equal(weights(session), start)


def test_discard_drops_gradients_of_a_failed_step(run_dir: Path) -> None:
    """Gradients of a failed step never reach its retry: no checkpoint holds them, so a restore cannot undo them."""
    model = torch.nn.Linear(2, 2)
    frozen = torch.nn.Parameter(torch.ones(3))
    state: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD([*model.parameters(), frozen], lr=0.1)}
    (model(torch.ones(2)).sum() + frozen.sum()).backward()
    with Checkpointer(config(run_dir)) as ckpt:
        StateSession(ckpt, state).discard()
    assert model.weight.grad is None
    assert frozen.grad is None


def test_metrics_must_be_named(run_dir: Path) -> None:
    """A train step that returns no mapping is a ProgramError, not a TypeError from somewhere below."""
    with Checkpointer(config(run_dir)) as ckpt:
        session = LocalSession(ckpt, TINY)
        session.program.train_step = lambda: 0.5  # type: ignore[method-assign,assignment,return-value]
        with pytest.raises(ProgramError, match="returned a value of type float"):
            session.run(1)
    with pytest.raises(Exception, match="there is no run at"):
        open_run(str(run_dir))
