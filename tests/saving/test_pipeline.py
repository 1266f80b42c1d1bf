"""Saves in the background of training: nothing is torn, lost, reordered or hidden if the store is slow or broken."""

from __future__ import annotations

import logging
import re
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import open_run
from ckpt_tasks.errors import FencedError, StoreError
from ckpt_tasks.ledger.observing import LearningCadence
from ckpt_tasks.saving.listening import Listener
from ckpt_tasks.snapshot.memory import PrivateMemory
from ckpt_tasks.tensors.tensors import same_bits
from ckpt_tasks.testing import elapse, images_of, settle, under_way
from tests.support.interpreters import python
from tests.support.pipelines import SIZE, Gate, committed, opened, restored, state_at
from tests.support.waiting import until


def test_every_snapshot_has_its_own_values_and_its_own_structure(run_dir: Path) -> None:
    """P2: the plan is kept while the structure stays, and never the values; a changed structure is planned again."""
    with opened(run_dir) as ckpt:
        for step in (1, 2, 3):
            ckpt.step(step, state_at(step))
            ckpt.wait()
        ckpt.step(4, {"weights": torch.full((SIZE + 1,), 4.0), "step": 4, "more": torch.ones(3)})
    run = open_run(str(run_dir))
    for step in (1, 2, 3):
        assert torch.equal(restored(run_dir, step)["weights"], torch.full((SIZE,), float(step)))
    state: dict[str, Any] = {"weights": torch.zeros(SIZE + 1), "step": 0, "more": torch.zeros(3)}
    run.restore(run.find(4), state)
    assert same_bits(state["weights"], torch.full((SIZE + 1,), 4.0))


def test_of_many_snapshots_the_newest_wins_and_the_drop_is_recorded(run_dir: Path, gate: Gate) -> None:
    """P44: with a slow store two snapshots are held; newer ones take the place of the one that waits, in order."""
    with opened(run_dir, gate) as ckpt:
        ckpt.step(1, state_at(1))
        gate.reached.wait(30)
        for step in range(2, 11):
            ckpt.step(step, state_at(step))
        held = len(images_of(ckpt))
        gate.opened.set()
    assert held == 2
    assert committed(run_dir) == [1, 10]
    run = open_run(str(run_dir))
    entries = [run.history.read_entry(n)[0].event for n in range(run.head().next_n)]
    assert [e["superseded"] for e in entries if e["kind"] == "commit" and "superseded" in e] == [[*range(2, 10)]]
    assert restored(run_dir)["step"] == 10


def test_a_step_that_must_be_kept_is_never_superseded(run_dir: Path, gate: Gate) -> None:
    """P44: a step that the retention preserves waits for the store rather than be dropped."""
    with opened(run_dir, gate, keep_every_n_steps=2) as ckpt:
        ckpt.step(1, state_at(1))
        gate.reached.wait(30)
        ckpt.step(2, state_at(2))
        threading.Timer(0.3, gate.opened.set).start()
        ckpt.step(3, state_at(3))
    assert committed(run_dir) == [1, 2, 3]


def test_a_snapshot_that_waits_is_committed_before_it_is_pinned(run_dir: Path, gate: Gate) -> None:
    """`pin` of a step that waits for the store returns when that is committed, and later saves do not prune it."""
    with opened(run_dir, gate, max_num_checkpoints=1) as ckpt:
        ckpt.step(1, state_at(1))
        assert gate.reached.wait(30)
        ckpt.step(2, state_at(2))
        assert under_way(ckpt).steps == [1, 2]
        threading.Timer(0.3, gate.opened.set).start()
        ckpt.pin(2, "the paper's")
        pinned = next(c for c in ckpt.checkpoints() if c.step == 2)
        assert ckpt.run.history.head().state.pins == {pinned.manifest_digest: "the paper's"}
        for step in (3, 4):
            ckpt.save(step, state_at(step))
    assert committed(run_dir) == [2, 4]
    assert restored(run_dir, 2)["step"] == 2


def test_a_store_that_blocks_forever_does_not_stop_training(
    run_dir: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """P43: after the deadline snapshots are kept in memory only, it is said, and `wait` raises; later all is well."""
    ckpt = opened(run_dir, gate, flush_timeout_s=2.0, keep_every_n_steps=1)
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        ckpt.step(1, state_at(1))
        gate.reached.wait(30)
        time.sleep(2.5)
        started = time.monotonic()
        for step in range(2, 8):
            ckpt.step(step, state_at(step))
        assert time.monotonic() - started < 30
    assert caplog.text.count("kept in memory only") == 1
    with pytest.raises(StoreError, match="has taken nothing"):
        ckpt.wait()
    gate.opened.set()
    while under_way(ckpt).stuck:
        time.sleep(0.01)
    ckpt.close()
    assert committed(run_dir) == [1, 7]


@pytest.mark.parametrize("name", ["ckpt-seal", "ckpt-flush"])
def test_without_a_further_thread_a_snapshot_is_refused(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """P28: whoever can have no thread is told at once, and a later snapshot is saved when there is one again."""
    start = threading.Thread.start
    refused: list[threading.Thread] = []

    def starting(thread: threading.Thread) -> None:
        if thread.name == name and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    with opened(run_dir) as ckpt:
        with pytest.raises(StoreError, match="cannot start another thread"):
            ckpt.step(1, state_at(1))
        ckpt.step(2, state_at(2))
        ckpt.step(3, state_at(3))
        ckpt.wait()
    assert committed(run_dir)[-1] == 3
    assert float(restored(run_dir)["weights"][0]) == 3


def test_closing_does_not_wait_for_a_stuck_store(run_dir: Path, gate: Gate) -> None:
    """P43: `close` raises once the flush is stuck, and does not hang in letting the directory go."""
    ckpt = opened(run_dir, gate, flush_timeout_s=0.2)
    ckpt.step(1, state_at(1))
    gate.reached.wait(30)
    with pytest.raises(StoreError, match="has taken nothing") as caught:
        ckpt.close()
    assert caught.value.transient  # a later try may find it well: a flow run is resumed
    gate.opened.set()
    settle(ckpt)


@pytest.mark.parametrize("under_way", [ValueError("a bug"), FencedError("taken"), KeyboardInterrupt()])
def test_a_stuck_store_does_not_take_the_place_of_what_ended_the_block(
    run_dir: Path, gate: Gate, under_way: BaseException
) -> None:
    """P43: the error under way, an interrupt too, leaves the block; that the store is stuck is a note beside it."""

    def train() -> None:
        with opened(run_dir, gate, flush_timeout_s=0.2) as ckpt:
            ckpt.step(1, state_at(1))
            gate.reached.wait(30)
            raise under_way

    with pytest.raises(type(under_way)) as caught:
        train()
    assert caught.value is under_way
    assert any("has taken nothing" in note for note in under_way.__notes__)


def test_nothing_follows_what_lost_the_run(run_dir: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """P33: a snapshot that is being copied when the one before it finds the directory lost is not written."""
    first, failed = opened(run_dir, gate), []
    first.listen(Listener(failed=lambda step, error: failed.append(step)))
    first.step(1, state_at(1))
    gate.reached.wait(30)
    second = opened(run_dir, take_over=True)
    second.restore(state_at(0))
    unseal = PrivateMemory.unseal

    def late(memory: PrivateMemory, slot: str) -> None:
        gate.opened.set()
        until(lambda: under_way(first).steps == [])
        unseal(memory, slot)

    monkeypatch.setattr(PrivateMemory, "unseal", late)
    with pytest.raises(FencedError):
        first.step(2, state_at(2))
    settle(first)
    assert failed == [1]
    first.wait()  # it has no further failure to raise


def test_a_fenced_process_learns_it_at_its_next_step(run_dir: Path) -> None:
    """P33: the flush of a process that lost the directory commits nothing, and the next step raises FencedError."""
    first = opened(run_dir)
    first.save(1, state_at(1))
    second = opened(run_dir, take_over=True)
    second.restore(state_at(0))
    first.step(2, state_at(2))
    settle(first)
    with pytest.raises(FencedError):
        first.step(3, state_at(3))
    second.save(2, state_at(20))
    second.close()
    assert restored(run_dir)["step"] == 20


def test_a_structure_that_changes_while_a_flush_is_under_way(run_dir: Path, gate: Gate) -> None:
    """P2: the old structure's snapshot is committed whole before its memory goes."""
    with opened(run_dir, gate) as ckpt:
        ckpt.step(1, state_at(1))
        gate.reached.wait(30)
        threading.Timer(0.2, gate.opened.set).start()
        ckpt.step(2, {"other": torch.full((10,), 2.0)})
    assert committed(run_dir) == [1, 2]
    assert torch.equal(restored(run_dir, 1)["weights"], torch.ones(SIZE))


END = """
    import torch
    from ckpt_tasks import CheckpointConfig, Checkpointer
    ckpt = Checkpointer(CheckpointConfig(checkpoint_dir={run!r}, step_interval=1, memory_dir=None))
    for step in (1, 2, 3):
        ckpt.step(step, {{"weights": torch.full((1 << 22,), float(step))}})
    {end}
"""


@pytest.mark.parametrize("end", ["", pytest.param("raise SystemExit(0)", marks=pytest.mark.slow)])
def test_the_last_snapshot_is_committed_before_the_interpreter_ends(run_dir: Path, end: str) -> None:
    """P72: a process that ends right after its last step, without wait or close, has committed it."""
    code = textwrap.dedent(END).format(run=str(run_dir), end=end)
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert committed(run_dir)[-1] == 3


def test_the_end_waits_for_the_snapshot_that_a_daemon_thread_is_taking(run_dir: Path) -> None:
    """P69: step 2 has made way for step 3, which is being taken when the process ends: step 3 is committed."""
    code = f"""
        import threading
        from pathlib import Path
        import torch
        from ckpt_tasks.testing import images_of, under_way
        from tests.support.pipelines import Gate, opened, state_at
        from tests.support.waiting import until
        ckpt = opened(Path({str(run_dir)!r}), gate := Gate())
        ckpt.restore(state_at(0))
        ckpt.step(1, state_at(1))
        gate.reached.wait(30)
        ckpt.step(2, state_at(2))
        # Another structure is planned once nothing is under way: between the slot and the submission.
        taken = {{**state_at(3), "more": torch.ones(3)}}
        threading.Thread(target=ckpt.step, args=(3, taken), daemon=True).start()
        until(lambda: under_way(ckpt).superseded == [2])
        opening = threading.Timer(0.3, gate.opened.set)
        opening.daemon = True
        opening.start()
    """
    assert python("-c", textwrap.dedent(code)).returncode == 0
    assert committed(run_dir) == [1, 3]


def test_a_failure_at_the_very_end_is_said(run_dir: Path) -> None:
    """P72: where the last snapshot cannot be committed, the process says so before it ends."""
    code = textwrap.dedent(END).format(run=str(run_dir), end="import shutil; ckpt.wait(); ckpt.step(4, {'weights': 0})")
    code = code.replace("ckpt.wait();", f"ckpt.wait(); shutil.rmtree({str(run_dir)!r}); open({str(run_dir)!r}, 'w');")
    done = python("-c", code)
    assert "step 4 is not committed, and it is lost with this process" in done.stderr


def test_the_automatic_cadence_learns_and_a_restart_remembers(run_dir: Path) -> None:
    """With cadence="auto" the interval follows from what saves cost, and the next process begins with it."""
    with opened(run_dir, step_interval=None, cadence="auto") as ckpt:
        ckpt.restore(state_at(0))
        assert not ckpt.step(0, state_at(0))
        first_s = LearningCadence(ckpt.run.history).interval_s
        for step in (1, 2, 3):
            ckpt.save(step, state_at(step))
        learned_s = LearningCadence(ckpt.run.history).interval_s
    assert learned_s != first_s
    with opened(run_dir, step_interval=None, cadence="auto") as ckpt:
        ckpt.restore(state_at(0))
        assert not ckpt.step(4, state_at(4))
        elapse(ckpt, learned_s * 1.4)
        assert ckpt.step(5, state_at(5))


def test_a_silent_store_is_named_while_it_is_waited_for(
    run_dir: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """Who waits for a store that takes nothing is told for which step, until when, and how to leave; once."""
    with suppress(StoreError), opened(run_dir, gate, flush_timeout_s=1.0) as ckpt:  # its end fails as well
        ckpt.step(1, state_at(1))
        assert gate.reached.wait(30)
        with pytest.raises(StoreError, match="nothing for 1 s"):
            ckpt.wait()
    gate.opened.set()
    told = [record.getMessage() for record in caplog.records if "Waiting until step 1 is" in record.getMessage()]
    assert len(told) == 1
    assert re.search(r"The wait ends at \d\d:\d\d:\d\d .*Ctrl-C", told[0])
