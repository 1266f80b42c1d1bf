"""Where the time of a resume went: the first commit after a restore has it, and the report shows it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import StoreError
from ckpt_tasks.ledger.history import History
from ckpt_tasks.ledger.timeline import RESUMED
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.testing import FaultyStore, located
from tests.support.cli_runs import ckpt

_LOOP = """
import os, signal, sys, torch
from torch.utils.data import TensorDataset
from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableLoader

loader = ResumableLoader(TensorDataset(torch.zeros(64, 1)), batch_size=4)
state = {"weights": torch.zeros(4), "data": loader}
with Checkpointer(CheckpointConfig(checkpoint_dir=sys.argv[1], step_interval=1, memory_dir=None)) as ckpt:
    step = ckpt.restore(state)
    for batch in loader:
        step += 1
        ckpt.step(step, state)
        ckpt.wait()
        if step % 3 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def commits(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events of all commits, oldest first."""
    history = History(LocalStore(run_dir))
    events = [dict(history.read_entry(n)[0].event) for n in range(history.head().next_n)]
    return [event for event in events if event["kind"] == "commit"]


def opened(run_dir: Path) -> Checkpointer:
    return Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=None))


def test_the_first_commit_after_a_kill_says_where_the_time_went(run_dir: Path) -> None:
    """It names every part, which together took no longer than the process; no other commit has any."""
    lived_s = 0.0
    for _ in range(2):
        began_s = time.monotonic()
        killed = subprocess.run([sys.executable, "-c", _LOOP, str(run_dir)], check=False)
        lived_s = time.monotonic() - began_s
        assert killed.returncode == -signal.SIGKILL
    told = [event.get("resumed") for event in commits(run_dir)]
    assert [parts is not None for parts in told] == [False] * 3 + [True] + [False] * 2
    parts = told[3]
    assert parts is not None
    assert set(parts) == set(RESUMED) - {"compiled_s"}
    assert min(parts.values()) >= 0
    assert parts["start_s"] > 0.1, "torch was imported before the restore"
    assert sum(parts.values()) <= lived_s


def test_the_report_divides_a_return_in_order(run_dir: Path, tmp_path: Path) -> None:
    """With --json too: a row has the step of the first commit, and the time until the process began comes first.

    A part that no return has gets no column.
    """
    for _ in range(2):
        subprocess.run([sys.executable, "-c", _LOOP, str(run_dir)], check=False)
    place = tmp_path / "out.html"
    [row] = ckpt("report", run_dir, "--out", place, "--json").data["resumes"]
    assert (row["step"], row["noticed_s"] >= 0) == (4, True)
    assert set(row) == {"step", "noticed_s", *RESUMED} - {"compiled_s"}
    text = ckpt("report", run_dir, "--out", place).out
    for shown in (text, place.read_text()):
        table = shown.partition("From a death to the first step")[2]
        assert "verify" in table
        assert "compiled" not in table  # Compiled code is not kept, so the table has no column for it.


def test_a_retry_in_the_same_process_has_no_start(run_dir: Path) -> None:
    """A second restore of the same owner says how long it read, verified and copied, and nothing of the process."""
    state: dict[str, Any] = {"value": 1}
    with opened(run_dir) as first:
        first.save(1, state)
        first.restore(state)
        first.restore(state)
        first.save(2, state)
        first.restore(state)
        first.save(3, state)
    one, two, three = (event.get("resumed") for event in commits(run_dir))
    assert one is None
    assert two is not None
    assert three is not None
    assert "start_s" not in two.keys() & three.keys()
    assert {"read_s", "verify_s", "copy_s", "step_s"} == set(three)


def test_a_commit_that_fails_leaves_it_to_the_next_one(run_dir: Path) -> None:
    """The parts are in the first commit that succeeds."""
    state: dict[str, Any] = {"value": 1}
    with opened(run_dir) as first:
        first.save(1, state)
    store = FaultyStore(LocalStore(run_dir))
    with Checkpointer(CheckpointConfig(checkpoint_dir=located(store), memory_dir=None)) as second:
        second.restore(state)
        store.on("refused", verb="put_if_absent", name="ledger/", times=1)
        with pytest.raises(StoreError):
            second.save(2, state)
        second.save(3, state)
    assert [event["step"] for event in commits(run_dir) if "resumed" in event] == [3]
