"""What training reports: steps that count on, metrics that are numbers, a best that is measured; signals at the end."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import CkptError, StateError


def weights(value: float = 0.0) -> dict[str, Any]:
    return {"weights": torch.full((4,), float(value))}


def opened(directory: Path, **options: Any) -> Checkpointer:
    return Checkpointer(CheckpointConfig(checkpoint_dir=str(directory), **options))


def test_steps_count_on(run_dir: Path) -> None:
    """A count that begins anew in every epoch would save nothing more: it is refused; `step()` says what it did."""
    with opened(run_dir, step_interval=3) as ckpt:
        assert [ckpt.step(step, weights(step)) for step in range(1, 8)] == [step % 3 == 0 for step in range(1, 8)]
        assert not ckpt.step(7, weights(7))
        for report in (ckpt.step, ckpt.save):
            with pytest.raises(StateError, match="step 1 comes after step 7"):
                report(1, weights(8))
        assert ckpt.save(7, weights(9)).step == 7
        assert ckpt.restore(weights(), step=3) == 3
        assert not ckpt.step(4, weights(4))


def test_steps_of_which_nothing_was_committed_are_taken_again(run_dir: Path) -> None:
    """P32: a retry that finds nothing to restore begins with step 1, though more were reported before."""
    with opened(run_dir, step_interval=100) as ckpt:
        for step in (1, 2, 3):
            ckpt.step(step, weights(step))
        assert ckpt.restore(weights()) == 0
        assert ckpt.position == 0
        assert not ckpt.step(1, weights(1))
        ckpt.save(2, weights(2))


def test_none_is_best_by_what_is_not_measured(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A policy that keeps the best by a metric that no checkpoint has says so, once, and not before 20 commits."""
    told: list[str] = []
    with opened(run_dir, max_num_checkpoints=1, keep_best=1, best_metric="los") as ckpt:
        for step in range(1, 23):
            ckpt.save(step, weights(step), metrics={"loss": float(step)})
            ckpt.wait()
            told = [record.message for record in caplog.records if "kept as the best" in record.message]
            assert len(told) == (step >= 20), step
    assert told == ["None is kept as the best so far: no checkpoint has the metric 'los': only loss"]


def test_a_first_evaluation_may_come_late(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run whose metric comes with its tenth commit is not warned that none is kept as the best."""
    with opened(run_dir, max_num_checkpoints=1, keep_best=1, best_metric="val") as ckpt:
        for step in range(1, 31):
            ckpt.save(step, weights(step), metrics={"val": 1.0} if step == 10 else {"loss": 1.0})
            ckpt.prune()
        assert [checkpoint.step for checkpoint in ckpt.checkpoints()] == [30, 10]
    assert not [record for record in caplog.records if "kept as the best" in record.message]


def test_a_signal_is_handed_on_after_a_last_save_that_fails(run_dir: Path) -> None:
    """P69: whoever sent the signal wants this process to end, also where the last snapshot cannot be committed."""
    called: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    try:
        with ExitStack() as stack:
            ckpt = stack.enter_context(opened(run_dir, step_interval=1))
            ckpt.save(1, weights(1.0))
            (run_dir / "ledger").rename(run_dir / "elsewhere")
            (run_dir / "ledger").write_text("no directory")
            ckpt.step(2, weights(2.0))
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(CkptError):
                stack.close()
        assert called == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
