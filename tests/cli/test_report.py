"""`ckpt report`: the table, the JSON and the HTML file, and what it does not overwrite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.format.keys import LEDGER_PREFIX
from tests.support.cli_runs import ckpt, config, flip, save_steps
from tests.support.histories import LOST, Told, trained

COSTS = {"stall_s": 0.5, "flush_s": 0.0, "step_s": 1.0}


@pytest.fixture
def run(run_dir: Path) -> Path:
    """A run of 20 s, of which it was down for 9 and waited 1 s for saves."""
    told = trained(Told(run_dir).taken(), 1, every_s=5.5, steps=5, **COSTS)
    trained(told.after(9).taken(LOST), 1, every_s=5.5, steps=5, **COSTS)
    return run_dir


def test_the_page_says_why_checkpoints_stay(run_dir: Path, tmp_path: Path) -> None:
    """The table of checkpoints has the reasons that `ckpt ls` shows."""
    save_steps(run_dir, 1, 2, 3, best_metric="loss", best_mode="max")
    with Checkpointer(config(run_dir)) as one:
        one.acquire()
        one.pin(2, "release <1>")
    assert ckpt("report", run_dir, "--out", tmp_path / "out.html").status == 0
    page = (tmp_path / "out.html").read_text()
    for words in ("kept because", "newest", "best loss", "pinned: release &lt;1&gt;"):
        assert words in page


def test_the_file_is_named_after_the_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --out it lies in the current directory, and a second report takes the first one's place."""
    monkeypatch.chdir(tmp_path)
    assert ckpt("report", run).status == 0
    assert ckpt("report", run).status == 0
    assert [one.name for one in tmp_path.glob("*.html")] == ["lm-7-report.html"]


def test_a_key_never_leads_out_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run directory's key is anybody's text: no part of it becomes a path."""
    Told(tmp_path / "run", "../../evil/<b>").taken()
    monkeypatch.chdir(tmp_path / "run")
    assert ckpt("report", tmp_path / "run").status == 0
    assert [one.name for one in (tmp_path / "run").glob("*.html")] == ["evil-b-report.html"]


def test_what_is_no_report_is_not_replaced(run: Path, tmp_path: Path) -> None:
    """A file of another kind stays as it is, and the command says so."""
    place = tmp_path / "thesis.html"
    place.write_text("mine")
    done = ckpt("report", run, "--out", place)
    assert done.status == 1
    assert "is no report, and is not replaced" in done.err
    assert place.read_text() == "mine"
    assert ckpt("report", run, "--out", tmp_path / "no such" / "x.html").status == 1


@pytest.mark.parametrize("verb", ["report", "plan"])
@pytest.mark.parametrize("kind", ["dangling link", "link", "pipe", "directory"])
def test_only_a_regular_file_is_replaced(run: Path, tmp_path: Path, verb: str, kind: str) -> None:
    """A link is not followed, a pipe is not waited for, and no part of a file is left behind."""
    place, elsewhere = tmp_path / "out" / "page", tmp_path / "elsewhere"
    place.parent.mkdir()
    option = "--out" if verb == "report" else "--svg"
    if kind == "link":
        assert ckpt(verb, run, option, elsewhere).status == 0
    before = elsewhere.read_bytes() if elsewhere.exists() else None
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to(elsewhere)
    done = ckpt(verb, run, option, place)
    assert done.status == 1
    assert "is not replaced" in done.err
    assert (elsewhere.read_bytes() if elsewhere.exists() else None) == before
    assert [path.name for path in place.parent.iterdir()] == ["page"]


@pytest.mark.parametrize(("verb", "option"), [("report", "--out"), ("plan", "--svg")])
def test_its_own_file_is_replaced(run: Path, tmp_path: Path, verb: str, option: str) -> None:
    """What the same verb wrote is written anew, and nothing else lies beside it."""
    for _ in range(2):
        assert ckpt(verb, run, option, tmp_path / "made").status == 0
        (tmp_path / "made").write_text((tmp_path / "made").read_text() + "<!-- older -->")
    assert ckpt(verb, run, option, tmp_path / "made").status == 0
    assert "older" not in (tmp_path / "made").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"made", run.name}


def test_damage_is_said(run_dir: Path, tmp_path: Path) -> None:
    """A damaged entry is left out, counted, and pointed at `ckpt verify`."""
    save_steps(run_dir, 1, 2, 3)
    flip(sorted((run_dir / LEDGER_PREFIX).iterdir())[2], 30)
    done = ckpt("report", run_dir, "--out", tmp_path / "out.html")
    assert done.status == 0
    assert "1 ledger entry cannot be read" in done.out
