"""`ckpt ls` and `ckpt show`: what is in a run, and in one checkpoint."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.layout.regions import Box
from ckpt_tasks.ledger.history import History
from ckpt_tasks.reading.reading import open_run
from ckpt_tasks.storage.local import LocalStore
from tests.support.cli_runs import ckpt, config, flip, save_steps, some_state
from tests.support.exports import parts


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
    assert rows[2]["evaluations"] == {"quick": {"odd": "nan"}}
    assert rows[3]["kept_because"] == ["newest"]
    assert rows[1]["kept_because"] == ["best loss"]
    assert rows[2]["kept_because"][0] == "pinned: release [bold]1.0[/bold]"
    assert rows[2]["kept_because"][1].startswith("leased by evaluate, ")
    assert rows[2]["leases"][0]["expires_at"] > time.time()
    assert "pinned: release [bold]1.0[/bold]" in shown
    assert "leased" not in ckpt("ls", run_dir).out


def test_ls_marks_a_line_that_was_left(run_dir: Path) -> None:
    """P71: checkpoints of a line that training left are marked, and are not the newest."""
    save_steps(run_dir, 1, 2)
    with Checkpointer(config(run_dir)) as ckpt_:
        ckpt_.restore(some_state(), step=1)
        ckpt_.save(2, some_state(2))
    rows = ckpt("ls", run_dir, "--json").data["checkpoints"]
    assert [(row["step"], row["abandoned"]) for row in rows] == [(2, False), (1, False), (2, True)]
    assert ["newest" in row["kept_because"] for row in rows] == [True, False, False]
    assert "left behind" in ckpt("ls", run_dir).out


def test_ls_says_which_ledger_entries_are_damaged(run_dir: Path) -> None:
    """P49: a ledger entry that cannot be read is named, and the list is that of the newest good one."""
    save_steps(run_dir, 1, 2)
    newest = min((run_dir / "ledger").iterdir())
    flip(newest, 40)
    answer = ckpt("ls", run_dir)
    assert answer.status == 0
    assert f"ledger/{newest.name}" in answer.out
    assert ckpt("ls", run_dir, "--json").data["ledger"]["damaged"] == [f"ledger/{newest.name}"]


def test_show_sums_up_the_objects_of_many_ranks(tmp_path: Path) -> None:
    """Of many objects each group has a row and the ten largest are listed; --all and --json have every one."""
    boxes = [Box((n,), (1 + n // 15,)) for n in range(16)]  # sixteen ranks, the last one with two elements
    store = LocalStore(tmp_path / "run")
    checkpoint = parts(store, torch.arange(17.0), boxes)
    history = History(store)
    history.create("r")
    history.append({"kind": "commit"}, lambda state, n: replace(state, live=(replace(checkpoint, n=n),)), owner=None)
    objects = ckpt("show", tmp_path / "run", "--json").data["objects"]
    shown, every = ckpt("show", tmp_path / "run").out, ckpt("show", tmp_path / "run", "--all").out
    assert sum(record["name"] in every for record in objects) == 16  # and the index, by its short name
    assert sum(record["name"] in shown for record in objects) == 9
    assert "… and 7 smaller ones (--all)" in shown
    assert re.search(r"x +of older checkpoints +16 +132 B +8 B +12 B", shown)
    assert "of older checkpoints" not in every


def test_show_names_the_parent_and_the_notes_of_the_run(run_dir: Path) -> None:
    """The checkpoint that training went on from is named by its step; notes are shown, long ones in part."""
    save_steps(run_dir, 1, 2)
    with Checkpointer(config(run_dir)) as ckpt_:
        ckpt_.acquire()
        ckpt_.note("failure", error="CUDA out of memory \x1b[2J", attempt=2, values=list(range(301)))
    about = ckpt("show", run_dir, "--json").data
    assert about["parent_step"] == 1
    assert [note["error"] for note in about["notes"]] == ["CUDA out of memory \x1b[2J"]
    shown = ckpt("show", run_dir).out
    assert "CUDA out of memory" in shown
    assert "… (--json)" in shown
    assert "1, 2, 3" in shown
    assert "299, 300" not in shown
    assert "\x1b" not in shown


def test_show_finds_latest_and_best(run_dir: Path) -> None:
    """@latest is the newest commit and the default, @best what the run calls best, an error without a metric."""
    save_steps(run_dir, 1, 2, best_metric="loss", best_mode="max")
    assert ckpt("show", f"{run_dir}@latest", "--json").data["step"] == ckpt("show", run_dir, "--json").data["step"] == 2
    assert ckpt("show", f"{run_dir}@best", "--json").data["step"] == 1
    nameless = save_steps(run_dir.with_name("nameless"), 1)
    assert ckpt("show", f"{nameless}@best", "--json").data["error"]["type"] == "ConfigError"


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_word_is_broken_on_a_narrow_screen(run_dir: Path, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics that have no room are left out, training's loss last, and named; ages, names and headings stay whole."""
    with Checkpointer(config(run_dir, best_metric="heldout_loss")) as made:
        made.save(100, some_state(), metrics={"grad_norm": 0.5, "learning_rate": 0.1, "loss": 1.25})
    run = open_run(str(run_dir))
    for suite in ("quick", "full"):
        run.record_evaluation(run.find("latest"), suite, {"heldout_bytes": 87420.0, "heldout_loss": 1.5})
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = ckpt("ls", run_dir).out.splitlines()
    assert max(map(len, lines)) <= max(columns, len(lines[0]))
    table, _, left_out = " ".join(" ".join(lines[1:]).split()).partition("No room for ")
    for whole in ("step", "saved", "kept because", "size", "cost", "newest", "now", "KiB"):
        assert whole in table
    shown = [name for name in ("loss", "heldout_loss", "grad_norm", "heldout_bytes") if f" {name} " in table]
    assert shown == ["loss", "heldout_loss"]
    assert table.count("heldout_loss") == {60: 1, 80: 2, 120: 3}[columns]  # one of them says why it is kept
    named = "quick/heldout_loss, full/heldout_loss: --metrics NAME,NAME chooses."
    assert left_out.split(" No process")[0] == {60: named, 80: named.partition(" ")[2], 120: ""}[columns]
