"""Saves in the background of training: nothing is torn, lost, reordered or hidden if the store is slow or broken."""

from __future__ import annotations

import logging
import re
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import open_run
from ckpt_tasks.errors import StoreError
from ckpt_tasks.run.ledger.observing import LearningCadence
from ckpt_tasks.testing import elapse, images_of, under_way
from tests.support.interpreters import python
from tests.support.pipelines import SIZE, Gate, committed, opened, restored, state_at
from tests.support.sweeps import quick_first
from tests.support.systems import Told
from tests.support.waiting import until


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
    run_dir: Path, gate: Gate, clock: Told, caplog: pytest.LogCaptureFixture
) -> None:
    """P43: after the deadline snapshots are kept in memory only, it is said, and `wait` raises; later all is well."""
    ckpt = opened(run_dir, gate, flush_timeout_s=2.0, keep_every_n_steps=1)
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        ckpt.step(1, state_at(1))
        gate.reached.wait()
        clock.now_s += 2.5
        for step in range(2, 8):
            ckpt.step(step, state_at(step))
    assert caplog.text.count("kept in memory only") == 1
    with pytest.raises(StoreError, match="has taken nothing"):
        ckpt.wait()
    gate.opened.set()
    until(lambda: not under_way(ckpt).stuck)
    ckpt.close()
    assert committed(run_dir) == [1, 7]


@pytest.mark.parametrize("under_way", quick_first([None, ValueError("a bug"), KeyboardInterrupt()]))
def test_a_stuck_store_does_not_take_the_place_of_what_ended_the_block(
    run_dir: Path, gate: Gate, under_way: BaseException | None, caplog: pytest.LogCaptureFixture
) -> None:
    """P43: the end waits for a stuck store until its deadline and says so; the error under way leaves the block.

    That the store is stuck is a note beside that error, and an error that a later try may mend if there is no other.
    """

    def train() -> None:
        with opened(run_dir, gate, flush_timeout_s=1.0 if under_way is None else 0.2) as ckpt:
            ckpt.step(1, state_at(1))
            gate.reached.wait(30)
            if under_way is not None:
                raise under_way

    with pytest.raises(type(under_way) if under_way else StoreError) as caught:
        train()
    gate.opened.set()
    if isinstance(caught.value, StoreError):
        assert caught.value.transient
        told = [one.getMessage() for one in caplog.records if "Waiting until step 1 is" in one.getMessage()]
        assert len(told) == 1
        assert re.search(r"The wait ends at \d\d:\d\d:\d\d .*Ctrl-C", told[0])
    else:
        assert caught.value is under_way
    assert any("has taken nothing" in text for text in (str(caught.value), *getattr(under_way, "__notes__", [])))


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
"""


def test_the_last_snapshot_is_committed_before_the_interpreter_ends(run_dir: Path) -> None:
    """P72: a process that ends right after its last step, without wait or close, has committed it."""
    done = python("-c", textwrap.dedent(END).format(run=str(run_dir)))
    first = committed(run_dir)[0]
    assert (done.returncode, done.stderr) == (0, f"ckpt: Step {first} is saved in {run_dir}\n")
    assert committed(run_dir)[-1] == 3


class Dear:
    """A state whose snapshot takes half a second: saves of it at most every 16 s are within the cap on their cost."""

    def state_dict(self) -> dict[str, Any]:
        time.sleep(0.5)
        return {"at": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def dear_at(step: int) -> dict[str, Any]:
    return {**state_at(step), "dear": Dear()}


def test_the_automatic_cadence_learns_and_a_restart_remembers(run_dir: Path) -> None:
    """With cadence="auto" the interval follows from what saves cost, and the next process begins with it."""
    with opened(run_dir, step_interval=None, cadence="auto") as ckpt:
        ckpt.restore(dear_at(0))
        assert not ckpt.step(0, dear_at(0))
        first_s = LearningCadence(ckpt.run.history).interval_s
        for step in (1, 2, 3):
            ckpt.save(step, dear_at(step))
        learned_s = LearningCadence(ckpt.run.history).interval_s
    assert learned_s > 1.25 * first_s  # a nearer one would not be taken
    with opened(run_dir, step_interval=None, cadence="auto") as ckpt:
        ckpt.restore(dear_at(0))
        assert not ckpt.step(4, dear_at(4))
        elapse(ckpt, learned_s * 1.4)
        assert ckpt.step(5, dear_at(5))
