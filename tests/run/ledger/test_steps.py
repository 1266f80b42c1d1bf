"""The metrics of every step are committed with the checkpoints, and read as one curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.extensions.step_metrics import StepLog
from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.checkpoint.save.listening import Listener
from ckpt_tasks.checkpoint.transfer.syncing import plan_sync, run_sync
from ckpt_tasks.format.layout.steps import StepMetrics
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.testing import die
from tests.support import pipelines
from tests.support.cli_runs import ckpt, flip, only
from tests.support.pipelines import Refusing, state_at


def opened(run_dir: Path, **options: Any) -> Checkpointer:
    return Checkpointer(CheckpointConfig(checkpoint_dir=run_dir, **{"step_interval": 10, "memory_dir": None} | options))


def train(ckpt: Checkpointer, state: dict[str, Any], start: int, end: int, line: float) -> None:
    """Report steps, whose loss tells the line and is written in place, and save the last one."""
    loss: Any = torch.tensor(line + start, requires_grad=True)
    for step in range(start + 1, end + 1):
        loss.data.add_(1)
        ckpt.step(step, state, metrics={"loss": loss, "lr": 0.1})
    ckpt.save(end, state)


def losses(run_dir: Path, *, abandoned: bool = False) -> dict[int, float]:
    curve = open_run(run_dir).curve()
    assert not curve.damaged
    return {one.step: one.metrics["loss"] for one in curve.steps if one.abandoned is abandoned}


def test_every_step_is_there_once_though_saves_are_few_and_some_are_superseded(tmp_path: Path) -> None:
    """A commit brings all steps since its parent, also those whose own snapshot a newer one has replaced."""
    heard: list[StepMetrics] = []
    with opened(tmp_path, step_interval=1) as ckpt:
        ckpt.listen(Listener(measured=heard.extend))
        train(ckpt, {"at": 0}, 0, 57, 0.0)
    assert losses(tmp_path) == {step: float(step) for step in range(1, 58)}
    assert [one.step for one in heard] == [*range(1, 58)], "a listener hears of each step once, when it is committed"
    assert heard[-1].metrics == {"loss": 57.0, "lr": 0.1}


def test_steps_that_were_never_committed_leave_nothing_on_the_curve(tmp_path: Path) -> None:
    """What a process trained after its last commit is trained again, and only the second time counts."""
    with opened(tmp_path) as ckpt:
        train(ckpt, {"at": 0}, 0, 20, 0.0)
        for step in range(21, 26):
            ckpt.step(step, {"at": 0}, metrics={"loss": -1.0})
    with opened(tmp_path) as ckpt:
        assert ckpt.restore({"at": 0}) == 20
        train(ckpt, {"at": 0}, 20, 30, 1000.0)
    assert losses(tmp_path) == {step: step + (1000.0 if step > 20 else 0.0) for step in range(1, 31)}


def test_a_prune_takes_no_steps_and_a_copy_brings_those_of_its_checkpoints(tmp_path: Path) -> None:
    """The tables stay when their checkpoints go; `ckpt sync` verifies and copies what it commits."""
    source, target = tmp_path / "source", tmp_path / "target"
    with opened(source, max_num_checkpoints=1) as ckpt:
        train(ckpt, {"at": 0}, 0, 45, 0.0)  # no multiple of the interval: the last save is of a step of its own
    assert losses(source) == {step: float(step) for step in range(1, 46)}
    run = open_run(source)
    assert len(run.checkpoints()) <= 2
    store = LocalStore(target)
    run_sync(run, store, plan_sync(run, store))
    copied = losses(target)
    assert copied
    assert copied.items() <= losses(source).items()


def test_a_damaged_table_is_counted_and_named_and_nothing_else_is_lost(tmp_path: Path) -> None:
    """A bit flips in a table of steps: the other steps are read, `ckpt verify` names it, a restore goes on."""
    with opened(tmp_path) as writer:
        train(writer, {"at": 0}, 0, 20, 0.0)
    table = only(tmp_path, "steps/000000000010-*")
    flip(table, -30)
    curve = open_run(tmp_path).curve()
    assert (curve.damaged, [one.step for one in curve.steps]) == (1, [*range(11, 21)])
    answer = ckpt("verify", tmp_path, "--json")
    assert not answer.data["good"]
    assert any(table.name in fault for fault in answer.data["damaged"])
    with opened(tmp_path) as reader:
        assert reader.restore({"at": 0}) == 20


def attached(log: StepLog, after: int) -> tuple[StepMetrics, ...]:
    found = log.attached(after)
    return found.steps if found is not None else ()


def test_the_log_forgets_what_is_committed_and_thins_what_never_is(tmp_path: Path) -> None:
    """Steps are kept until a commit has them; of very many without a commit every second one goes."""
    log = StepLog(CheckpointConfig(checkpoint_dir=tmp_path), None, None)
    for step in range(10):
        log.stepped(step, {}, {"loss": step})
    log.stepped(9, {}, {"grad_norm": 2.0})
    log.stepped(10, {}, {})
    assert [(one.step, dict(one.metrics)) for one in attached(log, 7)] == [
        (8, {"loss": 8.0}),
        (9, {"loss": 9.0, "grad_norm": 2.0}),
    ]
    log.most = 4
    for step in range(10, 16):
        log.stepped(step, {}, {"loss": step})
    kept = [one.step for one in attached(log, 9)]
    assert len(kept) <= 4
    assert kept[-1] == 15


def test_a_restart_from_memory_has_the_steps_that_storage_lacks(tmp_path: Path) -> None:
    """A process dies before its snapshot is committed: the next one commits it, with the steps that led to it."""
    run_dir, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    writer = pipelines.opened(run_dir, step_interval=10, memory_dir=memory)
    writer.restore(state_at(0))
    train(writer, state_at(0), 0, 10, 0.0)
    pipelines.give_calls(writer, Refusing())
    for step in range(11, 21):
        writer.step(step, state_at(step), metrics={"loss": float(step)})
    die(writer)
    with pipelines.opened(run_dir, step_interval=10, memory_dir=memory) as ckpt:
        assert ckpt.restore(state_at(0)) == 20
        train(ckpt, state_at(20), 20, 25, 0.0)
    assert losses(run_dir) == {step: float(step) for step in range(1, 26)}
