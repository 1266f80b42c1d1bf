"""Saves whose copy runs during the next forward and backward: every checkpoint is one moment of training."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import CheckpointNotFoundError, TornSnapshotError
from ckpt_tasks.gang.local import StateSession
from ckpt_tasks.state import overlap
from ckpt_tasks.state.tensors import same_bits


class Training:
    """A small model with batch norm, AdamW, and a copy of what it was at every step."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.moments: dict[int, dict[str, torch.Tensor]] = {}

    def train_step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 64)).square().mean().backward()
        self.optimizer.step()
        self.moments[step] = self.now()

    def now(self) -> dict[str, torch.Tensor]:
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        for number, kept in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{name}": value.clone() for name, value in kept.items()}
        return found


def _opened(run_dir: Path, **options: Any) -> Checkpointer:
    return Checkpointer(
        CheckpointConfig(
            checkpoint_dir=str(run_dir),
            step_interval=1,
            max_num_checkpoints=None,
            memory_dir=None,
            capture="overlapped",
            **options,
        )
    )


def _check(run_dir: Path, moments: dict[int, dict[str, torch.Tensor]]) -> list[int]:
    """Compare every committed checkpoint with its moment; return the steps."""
    run = open_run(str(run_dir))
    for checkpoint in run.checkpoints():
        fresh = Training()
        run.restore(checkpoint, fresh.state)
        found = fresh.now()
        assert found.keys() == moments[checkpoint.step].keys()
        assert all(same_bits(value, moments[checkpoint.step][name]) for name, value in found.items()), checkpoint.step
    return [checkpoint.step for checkpoint in reversed(run.checkpoints())]


def test_every_checkpoint_is_the_moment_of_its_step(run_dir: Path) -> None:
    """P1: parameters, moments and batch-norm counters of every checkpoint are those of one step, bit for bit."""
    training = Training()
    with _opened(run_dir) as ckpt:
        for step in range(1, 21):
            training.train_step(step)
            ckpt.step(step, training.state)
    steps = _check(run_dir, training.moments)
    assert steps[0] == 1
    assert steps[-1] == 20


def test_what_changes_outside_of_the_step_is_found_and_taken_again(run_dir: Path) -> None:
    """P1: a parameter written between call and optimizer step condemns the snapshot; the next step takes one."""
    training = Training()
    with _opened(run_dir) as ckpt:
        training.train_step(1)
        ckpt.save(1, training.state)
        training.train_step(2)
        ckpt.step(2, training.state)
        with torch.no_grad():
            next(training.model.parameters()).add_(1)
        training.train_step(3)
        ckpt._saver.settle()
        ckpt._last = ckpt._last.__class__(step=4, epoch=None, clock_s=0.0)  # by policy alone nothing is due
        training.train_step(4)
        assert ckpt.step(4, training.state)
    steps = _check(run_dir, training.moments)
    assert 2 not in steps
    assert steps[-1] == 4
    run = open_run(str(run_dir))
    events = [run.history.read_entry(n)[0].event for n in range(run.head().next_n)]
    assert [2] in [event.get("superseded") for event in events]


def test_a_torn_snapshot_that_nothing_follows_is_told(run_dir: Path) -> None:
    """P28, P72: without a further step `wait` says what was not saved, and a save after it makes it good."""
    training = Training()
    with _opened(run_dir) as ckpt:
        _tear(ckpt, training)
        with pytest.raises(TornSnapshotError, match=r"given up.*step 2.*save\(\) after it"):
            ckpt.wait()
        ckpt.wait()  # it is told once
        training.moments[2] = training.now()
        ckpt.save(2, training.state)
        ckpt.wait()
    assert _check(run_dir, training.moments) == [1, 2]


def test_a_task_whose_last_snapshot_is_torn_commits_another(run_dir: Path) -> None:
    """P28: the save at a task's end makes it good, and so it is no failure; a pin says what there is not to pin."""
    training = Training()
    with _opened(run_dir) as ckpt:
        _tear(ckpt, training)
        with pytest.raises(CheckpointNotFoundError):
            ckpt.pin(2)
        training.moments[2] = training.now()
        StateSession(ckpt, training.state).save(2)
    assert _check(run_dir, training.moments) == [1, 2]


def test_a_run_that_ends_with_a_torn_snapshot_does_not_end_well(run_dir: Path) -> None:
    """P28, P72: `close` says as well what was not saved; what was committed before it stays."""
    training, ckpt = Training(), _opened(run_dir)
    _tear(ckpt, training)
    with pytest.raises(TornSnapshotError, match=r"given up.*step 2"):
        ckpt.close()
    assert _check(run_dir, training.moments) == [1]


def _tear(ckpt: Checkpointer, training: Training) -> None:
    """Save step 1, and step 2 while something outside of a step changes it."""
    training.train_step(1)
    ckpt.save(1, training.state)
    training.train_step(2)
    ckpt.step(2, training.state)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(0.5)


def test_a_process_that_ends_with_a_torn_snapshot_says_so(run_dir: Path) -> None:
    """P72: at the interpreter's end, without `close`, the step that was not saved is named."""
    script = f"""
        import torch
        from tests.unit.test_overlapped_saves import Training, _opened, _tear
        from pathlib import Path
        ckpt = _opened(Path({str(run_dir)!r}))
        _tear(ckpt, Training())
    """
    assert "step 2 was not saved: the state changed while it was copied" in _run(script)


def test_a_process_whose_trainer_was_a_thread_that_is_gone_ends(run_dir: Path) -> None:
    """P72: a copy that nobody who trains will settle any more is settled by who waits for it, and committed."""
    script = f"""
        import threading
        from pathlib import Path
        from tests.unit.test_overlapped_saves import Training, _opened
        ckpt, training = _opened(Path({str(run_dir)!r})), Training()

        def train():
            for step in (1, 2):
                training.train_step(step)
                ckpt.step(step, training.state)

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    """
    assert _run(script) == ""
    assert [c.step for c in open_run(str(run_dir)).checkpoints()] == [2, 1]


def _run(script: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stderr


def test_what_is_moved_to_other_memory_is_saved_as_it_was(run_dir: Path) -> None:
    """P1: moments whose `.data` is set right after the call (moved to the host, say) are those of the call, untorn."""
    training = Training()
    with _opened(run_dir) as ckpt:
        for step in (1, 2):
            training.train_step(step)
            ckpt.step(step, training.state)
            for kept in training.optimizer.state.values():
                kept["exp_avg"].data = torch.full_like(kept["exp_avg"], float("nan"))
            ckpt.wait()
            for number, kept in enumerate(training.optimizer.state.values()):
                kept["exp_avg"].data = training.moments[step][f"{number}.exp_avg"].clone()
    assert _check(run_dir, training.moments) == [1, 2]


def test_a_copy_that_nobody_takes_over_has_ended(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P28: where a snapshot is refused for want of a thread, nothing goes on writing into its slot."""
    training, start = Training(), threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        if thread.name == "ckpt-seal":
            raise RuntimeError("can't start new thread")
        start(thread)

    with _opened(run_dir) as ckpt:
        training.train_step(1)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", starting)
            with pytest.raises(RuntimeError, match="can't start"):
                ckpt.step(1, training.state)
        assert not overlap._running
        training.train_step(2)
        ckpt.step(2, training.state)
    assert _check(run_dir, training.moments) == [2]


def test_the_last_step_needs_no_further_one(run_dir: Path) -> None:
    """P72: without another optimizer step `wait` finishes the copy; `save` and a preserved step copy at once."""
    training = Training()
    with _opened(run_dir, keep_every_n_steps=2) as ckpt:
        for step in (1, 2, 3):
            training.train_step(step)
            ckpt.step(step, training.state)
            ckpt.wait()
    assert _check(run_dir, training.moments) == [1, 2, 3]


def test_a_process_that_ends_right_after_a_step_has_saved_it(run_dir: Path) -> None:
    """P72: the interpreter's end finishes the copy and commits it."""
    code = f"""
        import torch
        from ckpt_tasks import CheckpointConfig, Checkpointer
        from torch import nn
        model = nn.Linear(512, 512)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ckpt = Checkpointer(CheckpointConfig(
            checkpoint_dir={str(run_dir)!r}, step_interval=1, memory_dir=None, capture="overlapped"))
        for step in (1, 2):
            model(torch.randn(4, 512)).sum().backward()
            optimizer.step()
            ckpt.step(step, {{"model": model, "optimizer": optimizer}})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert open_run(str(run_dir)).checkpoints()[0].step == 2


@pytest.mark.parametrize("capture", ["eager", "overlapped"])
def test_a_state_without_optimizers_is_copied_at_once(run_dir: Path, capture: str) -> None:
    """P3: with nothing to wait for, overlapped capture is eager."""
    state = {"weights": torch.ones(1 << 16)}
    config = CheckpointConfig(checkpoint_dir=str(run_dir), step_interval=1, memory_dir=None, capture=capture)
    with Checkpointer(config) as ckpt:
        ckpt.step(1, state)
        state["weights"].zero_()
    run, found = open_run(str(run_dir)), {"weights": torch.zeros(1 << 16)}
    run.restore(run.find("latest"), found)
    assert bool((found["weights"] == 1).all())
