"""`ckpt ls` and `ckpt show`: what is in a run, and in one checkpoint."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.storage.local import LocalStore
from tests.support.cli_runs import ckpt, config, flip, save_steps, some_state
from tests.support.ledgers import made


def test_ls_says_why_a_checkpoint_stays(run_dir: Path) -> None:
    """The newest, the best, pinned ones with the reason as it is written, and leased ones are marked."""
    save_steps(run_dir, 1, 2, 3, best_metric="loss", best_mode="max")
    with Checkpointer(config(run_dir)) as ckpt_:
        ckpt_.acquire()
        ckpt_.pin(2, "release [bold]1.0[/bold]")
        assert ckpt("ls", run_dir, "--json").data["owner"]["released"] is False
    run = open_run(str(run_dir))
    run.record_evaluation(run.find(2), "quick", {"odd": math.nan})
    with run.lease(run.find(2), "evaluate"):
        rows = {row["step"]: row for row in ckpt("ls", run_dir, "--json").data["checkpoints"]}
        shown = ckpt("ls", run_dir).out
    assert [ckpt("show", f"{run_dir}{at}", "--json").data["step"] for at in ("", "@latest", "@best")] == [3, 3, 1]
    assert rows[2]["evaluations"] == {"quick": {"odd": "nan"}}
    assert rows[3]["kept_because"] == ["newest"]
    assert rows[1]["kept_because"] == ["best loss"]
    assert rows[2]["kept_because"][0] == "pinned: release [bold]1.0[/bold]"
    assert rows[2]["kept_because"][1].startswith("leased by evaluate, ")
    assert rows[2]["leases"][0]["expires_at"] > time.time()
    assert "pinned: release [bold]1.0[/bold]" in shown
    assert "leased" not in ckpt("ls", run_dir).out


def test_ls_says_why_a_step_between_two_intervals_was_saved(run_dir: Path) -> None:
    """Each step that was not due is named with its reason, and none where no save is due by itself."""
    with Checkpointer(config(run_dir)) as ckpt_:
        ckpt_.save(0, some_state(0))
    assert "not by the interval" not in ckpt("ls", run_dir).out
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with Checkpointer(replace(config(run_dir), step_interval=10, max_num_checkpoints=None)) as ckpt_:
            ckpt_.restore(some_state())
            ckpt_.step(10, some_state(10))
            ckpt_.save(13, some_state(13), interim=True)
            os.kill(os.getpid(), signal.SIGTERM)
            ckpt_.step(15, some_state(15))
    finally:
        signal.signal(signal.SIGTERM, before)
    (stopped,) = ckpt("ls", run_dir.parent, "--json").data["runs"]
    assert (stopped["state"], "the next start resumes it" in stopped["why"]) == ("stopped", True)
    out = run_dir.parent / "report.html"
    told = " ".join(ckpt("report", run_dir, "--out", out).out.split())
    assert "state stopped by a signal; the next start resumes it" in told
    with Checkpointer(replace(config(run_dir), step_interval=10)) as ckpt_:
        ckpt_.restore(some_state())
        ckpt_.save(16, some_state(16))
    rows = ckpt("ls", run_dir, "--json").data["checkpoints"]
    assert ckpt("ls", run_dir.parent, "--json").data["runs"][0]["state"] == "ended"
    assert [(row["step"], row["why"]) for row in rows] == [
        (16, "call"),
        (15, "signal"),
        (13, "batch"),
        (10, ""),
        (0, "call"),
    ]
    said = "16 (save() or the end of training), 15 (a signal), 13 (end of a batch), 0 (first save)."
    listed = " ".join(ckpt("ls", run_dir).out.split())
    assert f"Saved not by the interval: {said}" in listed
    assert "Rows without a reason: within max_num_checkpoints, or not pruned yet." in listed
    with Checkpointer(replace(config(run_dir), step_interval=10)) as ckpt_:
        ckpt_.restore(some_state())
        ckpt_.save(20, some_state(20))
    assert f"Saved not by the interval: {said}" in " ".join(ckpt("ls", run_dir).out.split())  # 20 was due.
    assert "state ended from" in " ".join(ckpt("report", run_dir, "--out", out).out.split())
    assert ">ended<" in out.read_text()


def test_ls_marks_a_line_that_was_left(run_dir: Path) -> None:
    """P71: checkpoints of a line that training left are marked, and are not the newest."""
    save_steps(run_dir, 1, 2)
    with Checkpointer(config(run_dir)) as ckpt_:
        ckpt_.restore(some_state(), step=1)
        ckpt_.save(2, some_state(2))
    rows = ckpt("ls", run_dir, "--json").data["checkpoints"]
    assert [(row["step"], row["abandoned"]) for row in rows] == [(2, False), (1, False), (2, True)]
    assert ["newest" in row["kept_because"] for row in rows] == [True, False, False]
    assert "discarded branch" in ckpt("ls", run_dir).out


def test_ls_says_which_ledger_entries_are_damaged(run_dir: Path) -> None:
    """P49: a ledger entry that cannot be read is named, and the list is that of the newest good one."""
    save_steps(run_dir, 1, 2)
    newest = min((run_dir / "ledger").iterdir())
    flip(newest, 40)
    answer = ckpt("ls", run_dir)
    assert answer.status == 0
    assert f"ledger/{newest.name}" in answer.out
    assert ckpt("ls", run_dir, "--json").data["ledger"]["damaged"] == [f"ledger/{newest.name}"]


def test_show_names_the_parent_and_the_notes_of_the_run(run_dir: Path) -> None:
    """The parent of a checkpoint is named by its step; --all shows the run's notes, long ones in part."""
    save_steps(run_dir, 1, 2)
    with Checkpointer(config(run_dir)) as ckpt_:
        ckpt_.acquire()
        ckpt_.note("failure", error="CUDA out of memory \x1b[2J", attempt=2, values=list(range(301)))
    assert "notes" not in ckpt("show", run_dir, "--json").data
    about = ckpt("show", run_dir, "--all", "--json").data
    sizes = [(run_dir / one["name"]).stat().st_size for one in about["objects"]]
    assert [one["size_bytes"] for one in about["objects"]] == sizes
    assert sum(sizes) == about["size_bytes"]
    assert about["parent_step"] == 1
    assert [note["error"] for note in about["notes"]] == ["CUDA out of memory \x1b[2J"]
    shown = ckpt("show", run_dir, "--all").out
    assert "CUDA out of memory" in shown
    assert "… (--json)" in shown
    assert "1, 2, 3" in shown
    assert "299, 300" not in shown
    assert "\x1b" not in shown


def test_ls_shows_the_newest_of_many_checkpoints(run_dir: Path) -> None:
    """Of 300 checkpoints the newest 50 are shown, with a line that says so; --all shows every one, as --json does."""
    history = History(LocalStore(run_dir))
    history.create("many")
    live = tuple(replace(made(step, 0, metrics={"loss": 0.5}), manifest_digest=f"{step:032x}") for step in range(300))
    history.append({"kind": "note", "note": "many"}, lambda state, n: replace(state, live=live), owner=None)

    def steps(shown: str) -> list[int]:
        return [int(line.split()[0]) for line in shown.splitlines() if " B " in line]

    listed = [row["step"] for row in ckpt("ls", run_dir, "--json").data["checkpoints"]]
    assert len(listed) == 300
    short = ckpt("ls", run_dir).out
    assert steps(short) == listed[:50]
    assert "The newest 50 of 300 checkpoints; --all shows every one." in short
    whole = ckpt("ls", run_dir, "--all").out
    assert steps(whole) == listed
    assert "--all" not in whole
