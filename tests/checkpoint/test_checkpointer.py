"""The facade: when it saves, what it restores, what it refuses, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.checkpoint.pausing import hold_signals
from ckpt_tasks.errors import ConfigError, RunMismatchError, StateError, UnsupportedStateError
from tests.support.interpreters import python


def _state(value: float = 0.0) -> dict[str, Any]:
    return {"weights": torch.full((4,), float(value)), "seen": [value]}


def _open(directory: Path, **options: Any) -> Checkpointer:
    return Checkpointer(CheckpointConfig(checkpoint_dir=str(directory), **options))


def _steps(ckpt: Checkpointer) -> list[int]:
    return [one.step for one in ckpt.checkpoints()]


def test_epochs_survive_a_resume(run_dir: Path) -> None:
    """`epoch_interval` counts completed epochs, and a resume within an epoch does not make a save due."""
    with _open(run_dir, epoch_interval=2, max_num_checkpoints=None) as ckpt:
        saved = [s for s in range(1, 13) if ckpt.step(s, _state(s), epoch=s // 3)]
        assert saved == [6, 12]
    with _open(run_dir, epoch_interval=2, max_num_checkpoints=None) as ckpt:
        ckpt.restore(_state())
        assert ckpt.step(13, _state(13.0), epoch=4) is False


def test_step_zero_is_a_step(run_dir: Path) -> None:
    """P27: step 0 is found, restored and pinned as any other, alone and beside later ones."""
    with _open(run_dir, max_num_checkpoints=None) as ckpt:
        assert ckpt.restore(_state()) == 0
        assert ckpt.last_restore is None
        ckpt.save(0, _state(7.0))
    for step in (None, 0):
        target = _state()
        with _open(run_dir, max_num_checkpoints=None) as ckpt:
            assert ckpt.restore(target, step=step) == 0
            assert ckpt.last_restore is not None
            assert target["seen"] == [7.0]
            ckpt.pin(0)
            ckpt.save(1, _state(1.0))
    run = open_run(str(run_dir))
    assert [*run.head().state.pins] == [run.find(0).manifest_digest]


def test_saving_over_a_run_without_restoring(run_dir: Path) -> None:
    """P33: a process that has not restored may not save over what is there; nor one that others have overtaken."""
    first = _open(run_dir)
    first.save(1, _state(1.0))
    first.close()
    second = _open(run_dir)
    with pytest.raises(ConfigError, match=r"restore\(\) first"):
        second.save(2, _state(2.0))
    second.restore(_state())
    second.save(2, _state(2.0))
    second.close()
    with pytest.raises(ConfigError, match=r"restore\(\) first"):
        first.save(2, _state(9.0))
    assert [c.step for c in open_run(str(run_dir)).checkpoints()] == [2, 1]


def test_a_bad_state_writes_nothing(run_dir: Path) -> None:
    """P7: what cannot be stored is refused by its path before anything is written, as is a step that is none."""
    ckpt = _open(run_dir)
    with pytest.raises(UnsupportedStateError) as caught:
        ckpt.save(1, {"model": nn.Linear(2, 2), "extra": {"lock": threading.Lock()}})
    assert caught.value.key == "extra/lock"
    for step in (-1, 1.5, True, "3", 10**12):
        with pytest.raises(StateError, match="whole number"):
            ckpt.save(step, _state())  # type: ignore[arg-type]
    assert not run_dir.exists()


def test_retention_keeps_what_it_must(run_dir: Path) -> None:
    """P60, P61, P62, P66: newest, best, pinned and the one that training went on from stay, over restarts; no NaN."""
    options: dict[str, Any] = {"max_num_checkpoints": 1, "keep_best": 1, "best_metric": "loss"}
    worse: list[dict[str, float]] = [{"loss": float("nan")}, {}, {"loss": 0.9}, {"loss": float("inf")}]
    for step, metrics in enumerate([{"loss": 0.5}, {"loss": 0.1}, *worse], start=1):
        with _open(run_dir, **options) as ckpt:
            ckpt.restore(_state())
            ckpt.save(step, _state(step), metrics=metrics)
            if step == 1:
                ckpt.pin(1, "the paper's")
    with _open(run_dir, **options) as ckpt:
        ckpt.restore(_state())
        ckpt.prune()
        assert _steps(ckpt) == [6, 2, 1]
        assert open_run(str(run_dir)).find("best").step == 2
        ckpt.unpin(1)
        verdicts = {v.step: v.keep for v in ckpt.prune()}
        assert not verdicts[1]
        assert _steps(ckpt) == [6, 2]
    on_disk = {path.name for path in run_dir.glob("checkpoint_*")}
    assert on_disk == {"checkpoint_000000000002", "checkpoint_000000000006"}


def test_the_last_good_one_is_not_pruned_for_a_bad_one(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P60: with one checkpoint to keep and a new one that is damaged on disk, the old one stays."""
    with _open(run_dir, max_num_checkpoints=1) as ckpt:
        ckpt.save(1, _state(1.0))
        put = ckpt.run.history.store.put

        def lying(name: str, body: Any) -> None:
            put(name, body)
            if name.endswith(".safetensors"):
                path = run_dir / name
                path.write_bytes(bytes(path.stat().st_size))  # what a power loss leaves where fsync lied

        ckpt.run.history.store.put = lying  # type: ignore[method-assign]
        ckpt.save(2, _state(2.0))
        assert _steps(ckpt) == [2, 1]
    target = _state()
    with _open(run_dir) as ckpt:
        assert ckpt.restore(target) == 1
        assert ckpt.last_restore is not None
        assert [step for step, _ in ckpt.last_restore.skipped] == [2]
    assert [one.message for one in caplog.records if one.message.startswith("Step 2 is passed over: ")]


_CHILD = """
    import os, signal, sys, time
    import torch
    from ckpt_tasks import CheckpointConfig, Checkpointer
    state = {"x": torch.zeros(2)}
    with Checkpointer(CheckpointConfig(checkpoint_dir=sys.argv[1])) as ckpt:
        step = ckpt.restore(state)
        while step < 1000:
            state["x"] += 1
            step += 1
            if step == 5:
                for _ in range(int(sys.argv[3])):
                    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
                time.sleep(0.05)
                state["x"] += 0  # still in the step
            ckpt.step(step, state)
"""


@pytest.mark.parametrize(("name", "times"), [("SIGTERM", 1), ("SIGINT", 2)])
def test_a_signal_waits_for_the_step_and_its_commit(name: str, times: int, run_dir: Path) -> None:
    """P69: SIGTERM and Ctrl-C, also twice, within a step end the process after it, saved and released."""
    found = python("-c", textwrap.dedent(_CHILD), run_dir, name, times)
    assert found.returncode == -getattr(signal, name), found.stderr
    head = open_run(str(run_dir)).head()
    assert [c.step for c in head.state.live] == [5]
    assert head.state.owner is not None
    assert head.state.owner.released


def test_signals_are_chained_and_given_back(run_dir: Path) -> None:
    """P69: the handler that was there before is called after the commit, and is back in place at the end."""
    called: list[list[int]] = []
    before = signal.signal(
        signal.SIGTERM, lambda *_: called.append([c.step for c in open_run(str(run_dir)).checkpoints()])
    )
    mine = signal.getsignal(signal.SIGTERM)
    try:
        with _open(run_dir) as ckpt:
            os.kill(os.getpid(), signal.SIGTERM)
            assert called == []
            ckpt.step(1, _state(1.0))
            assert called == [[1]]
            ckpt.step(2, _state(2.0))  # its handler returned: training goes on
            ckpt.save(3, _state(3.0))
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_ctrl_c_that_is_ignored_stays_ignored(run_dir: Path) -> None:
    """A shell's background job ignores Ctrl-C: it does not release its run for another process to take."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _open(run_dir) as ckpt:
            ckpt.save(1, _state())
            owner = ckpt.run.head().state.owner
            signal.raise_signal(signal.SIGINT)
            ckpt.step(2, _state())
            ckpt.save(3, _state())
            assert ckpt.run.head().state.owner == owner
            assert _steps(ckpt) == [3, 1]
    finally:
        signal.signal(signal.SIGINT, before)


def test_off_the_main_thread_signals_are_left_alone(run_dir: Path) -> None:
    """P70: in a thread that cannot set handlers the context manager works and touches none."""
    before, errors = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        try:
            with _open(run_dir) as ckpt:
                ckpt.save(1, _state(1.0))
                assert signal.getsignal(signal.SIGTERM) is before
        except BaseException as error:  # noqa: BLE001 (the test's thread hands every failure to the test)
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
    assert [c.step for c in open_run(str(run_dir)).checkpoints()] == [1]


def test_signals_can_be_let_through_between_attempts(run_dir: Path) -> None:
    """P69: where nothing trains a signal acts at once, also one that came before; then they are held back again."""
    called: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    try:
        with _open(run_dir) as ckpt:
            os.kill(os.getpid(), signal.SIGTERM)
            assert called == []
            hold_signals(ckpt, False)
            assert len(called) == 1
            os.kill(os.getpid(), signal.SIGTERM)
            assert len(called) == 2
            hold_signals(ckpt, True)
            os.kill(os.getpid(), signal.SIGTERM)
            assert len(called) == 2
            ckpt.step(1, _state(1.0))
            assert len(called) == 3
        hold_signals(ckpt, True)  # Outside of the block nothing would deliver what is held back.
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(called) == 4
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_directory_of_another_run_whose_description_is_damaged(run_dir: Path) -> None:
    """P49, P52: where format.json cannot say whose run it is, each manifest does, before the state is touched."""
    with _open(run_dir, run_key="one") as ckpt:
        ckpt.save(1, _state(1.0))
    (run_dir / "format.json").write_bytes(b"torn")
    state = _state()
    with _open(run_dir, run_key="two") as ckpt, pytest.raises(RunMismatchError, match="'one'"):
        ckpt.restore(state)
    assert state["seen"] == [0.0]


def train_steps(ckpt: Checkpointer, state: dict[str, Any], steps: range) -> None:
    for step in steps:
        ckpt.step(step, state)


@pytest.mark.parametrize("form", ["steps", "epochs", "function", "best"])
def test_a_start_that_trains_nothing_is_told(form: str, run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another fold in the directory of an ended run is named at the end of its block, whatever the state holds.

    A start that trains is not named, even if it goes back at its end; nor is a block that only restores and reads.
    """
    state = {"weight": torch.zeros(2), "step": 0}
    config = CheckpointConfig(checkpoint_dir=run_dir, step_interval=1, memory_dir=None)

    def fold(steps: int) -> list[str]:
        caplog.clear()
        with Checkpointer(config) as ckpt:
            done = ckpt.restore(state)
            if form == "function":
                train_steps(ckpt, state, range(done + 1, steps + 1))
            for epoch in range(done // 2, steps // 2) if form == "epochs" else range(0):
                for step in range(2 * epoch, 2 * epoch + 2):
                    ckpt.step(step + 1, state)
            for step in range(done, steps) if form in ("steps", "best") else range(0):
                ckpt.step(step + 1, state)
            if form == "best":
                ckpt.restore(state)
        return [told for told in caplog.messages if "Nothing was left to train" in told]

    assert fold(4) == []
    assert len(fold(4)) == 1
    assert fold(6) == []
    with Checkpointer(config) as ckpt:
        ckpt.restore(state)
        assert [name for name in state if name] == ["weight", "step"]
    with Checkpointer(config) as ckpt:
        ckpt.restore(state, only=["weight"])
        for step in range(ckpt.position, 6):
            ckpt.step(step + 1, state)
    assert caplog.messages == []
