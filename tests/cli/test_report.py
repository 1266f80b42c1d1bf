"""`ckpt report`: the table, the JSON and the HTML file, and what it does not overwrite."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tasks.format.policy.cadence import recommend
from ckpt_tasks.run.ledger.observing import observe
from tests.support.cli_runs import ckpt
from tests.support.histories import LOST, Told, trained

COSTS = {"stall_s": 0.5, "flush_s": 0.0, "step_s": 1.0}


@pytest.fixture
def run(run_dir: Path) -> Path:
    """A run of 20 s, of which it was down for 9 and waited 1 s for saves."""
    told = trained(Told(run_dir).taken(), 1, every_s=5.5, steps=5, **COSTS)
    trained(told.after(9).taken(LOST), 1, every_s=5.5, steps=5, **COSTS)
    return run_dir


def test_a_key_never_leads_out_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run directory's key is anybody's text: no part of it becomes a path."""
    Told(tmp_path / "run", "../../evil/<b>").taken()
    monkeypatch.chdir(tmp_path / "run")
    assert ckpt("report", tmp_path / "run").status == 0
    assert [one.name for one in (tmp_path / "run").glob("*.html")] == ["evil-b-report.html"]


def test_resumes_and_the_longest_stall_are_counted(run_dir: Path, tmp_path: Path) -> None:
    """A start is no resume: of two owners the second resumed, and said which steps it trained again.

    The median of stalls does not hide a long one, nor that of steps what all of them took.
    """
    told = trained(Told(run_dir).taken(), 1, every_s=5.5, steps=5, **COSTS | {"stall_s": 2.5})
    trained(told.after(9).taken(LOST), 1, every_s=5.5, steps=5, **COSTS, trained_s=3.0, again=[6, 9])
    trained(told, 1, every_s=5.5, steps=5, **COSTS, trained_s=4.0)
    shown = [" ".join(line.split()) for line in ckpt("report", run_dir, "--out", tmp_path / "out.html").out.split("\n")]
    assert "resumed 1 time, in 1 flow run; 4 steps trained again" in shown
    assert "a step takes 1.0 s (median), 700 ms on average" in shown
    assert "a save blocks training 500 ms (median), 2.5 s at most, 3.5 s in all" in shown


def test_it_says_how_often_to_save(run_dir: Path, tmp_path: Path) -> None:
    """The interval is what the cadence recommends for the figures of the ledger; before a save there is none."""
    costs = {"stall_s": 0.05, "flush_s": 0.5, "step_s": 0.5}
    told, out = Told(run_dir).taken(), ("--out", tmp_path / "out.html")
    assert ckpt("report", run_dir, *out, "--json").data["cadence"] is None
    trained(told, 20, every_s=60.0, steps=120, **costs)
    observed = observe(told.history)
    assert observed is not None
    found = ckpt("report", run_dir, *out, "--json").data["cadence"]
    assert found["observed"] == {**costs, "failures": 0, "trained_s": 1200.0}
    assert found["recommended"]["interval_s"] == recommend(observed).interval_s == pytest.approx(99.2, rel=0.01)
    assert (found["recommended"]["steps"], found["recommended"]["decided_by"]) == (199, "optimum")
    assert "99.2 s, 199 steps" in ckpt("report", run_dir, *out).out
