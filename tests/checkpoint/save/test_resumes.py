"""Where the time of a resume went: the first commit after a restore has it, and the report shows it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.checkpoint.restore.restore import RestoreReport
from ckpt_tasks.checkpoint.save.tenure import Resume
from ckpt_tasks.errors import StoreError
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.timeline import RESUMED
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.testing import FaultyStore, located
from tests.support.cli_runs import ckpt
from tests.support.interpreters import python

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


def resumed(run_dir: Path) -> list[Any]:
    """Return what each commit says of a resume, oldest first."""
    history = History(LocalStore(run_dir))
    events = [history.read_entry(n)[0].event for n in range(history.head().next_n)]
    return [event.get("resumed") for event in events if event["kind"] == "commit"]


def test_the_first_commit_after_a_kill_says_where_the_time_went(run_dir: Path, tmp_path: Path) -> None:
    """It names every part, which together took no longer than the process; no other commit has any.

    The report has a row for it, with the time until the process began, and no column for a part that no return has.
    """
    assert python("-c", _LOOP, run_dir).returncode == -signal.SIGKILL
    began_s = time.monotonic()
    killed = subprocess.run([sys.executable, "-c", _LOOP, str(run_dir)], check=False)  # which imports torch by itself
    lived_s = time.monotonic() - began_s
    assert killed.returncode == -signal.SIGKILL
    told = resumed(run_dir)
    assert [parts is not None for parts in told] == [False] * 3 + [True] + [False] * 2
    parts = told[3]
    assert set(parts) == set(RESUMED) - {"compiled_s"}
    assert min(parts.values()) >= 0
    assert parts["start_s"] > 0.1, "torch was imported before the restore"
    assert sum(parts.values()) <= lived_s
    place = tmp_path / "out.html"
    [row] = ckpt("report", run_dir, "--out", place, "--json").data["resumes"]
    assert (row["step"], row["noticed_s"] >= 0) == (4, True)
    assert set(row) == {"step", "noticed_s", *RESUMED} - {"compiled_s"}
    for shown in (ckpt("report", run_dir, "--out", place).out, place.read_text()):
        table = shown.partition("From each restart to the first step")[2]
        assert "verify" in table
        assert re.search(r"resumed from\s+3\W+first saved at\s+4\s|<td[^>]*>3</td><td[^>]*>4</td>", table)
        assert "compiled" not in table


@pytest.mark.slow
def test_the_first_commit_that_succeeds_has_the_parts(run_dir: Path) -> None:
    """A commit that fails leaves them to the next one; a second restore of one owner says nothing of a start."""
    state: dict[str, Any] = {"value": 1}
    store = FaultyStore(LocalStore(run_dir))
    with Checkpointer(CheckpointConfig(checkpoint_dir=located(store), memory_dir=None)) as trainer:
        trainer.save(1, state)
        trainer.restore(state)
        trainer.save(2, state)
        trainer.restore(state)
        store.on("refused", verb="put_if_absent", name="ledger/", times=1)
        with pytest.raises(StoreError):
            trainer.save(3, state)
        trainer.save(4, state)
    one, two, three = resumed(run_dir)
    assert one is None
    assert "start_s" in two
    assert {"read_s", "verify_s", "copy_s", "step_s"} == set(three)


def test_a_first_step_that_ends_during_a_commit_is_told_by_the_next_one() -> None:
    """A resume from memory commits at once, and training goes on meanwhile: no resume is missing in the report."""
    resume = Resume()
    resume.restored(RestoreReport(3, "memory", 0, 0, 0.0), {}, 0.0)
    event = {name: value for name, value in resume.untold().items() if value}
    resume.stepped()
    resume.tell(event)
    assert {"read_s", "step_s"} <= {*resume.parts}
    resume.tell({name: value for name, value in resume.untold().items() if value})
    assert resume.parts == {}
