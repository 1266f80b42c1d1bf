"""The benchmarks run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import save_restore
from benchmarks.__main__ import main
from benchmarks.peers import OURS
from benchmarks.serve import make_root, measure
from benchmarks.states import build


@pytest.mark.slow  # every contender restores twice, each time in a new process
def test_every_row_has_its_contenders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Saves, restores and restarts run on a tiny state, unmeasured, and every row is in the table and the JSON."""
    rows = run(tmp_path, "save_restore")["save_restore"]["rows"]
    assert len(rows) == 6
    assert all(any(name.startswith("ckpt-tasks") for name in cells) for cells in rows.values())
    printed = capsys.readouterr().out
    assert all(row in printed for row in rows)


def test_benchmarks_in_one_process_run(tmp_path: Path) -> None:
    """What needs no other process and no server runs on tiny states; the cadence keeps its 1 %."""
    figures = run(tmp_path, "reuse", "many", "ledger", "cadence")
    assert figures["cadence"]["worst"] < 0.01


def test_the_page_of_runs_is_measured(tmp_path: Path) -> None:
    """A server over two short runs has all rows no sooner than the first ones, and says how much memory it holds."""
    make_root(tmp_path / "runs", runs=2, commits=5)
    figures = measure(tmp_path / "runs", opened=2)
    assert 0 < figures["listens_s"] <= figures["all_rows_s"]
    assert 20 < figures["peak_mib"] < 300


@pytest.mark.parametrize("turn", [pytest.param(1, marks=pytest.mark.slow), -1])
def test_chance_may_put_any_contender_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    """Saves in a row and reused files are measured in this order of the contenders and in the reverse one."""
    monkeypatch.setattr(random, "sample", lambda names, count: [*names][::turn][:count])
    rows = save_restore._in_a_row(tmp_path, build(tiny=True), 1, "cpu")
    assert [len(times) for times in rows.values()] == [1, 1]
    run(tmp_path, "reuse", "many")


@pytest.mark.slow  # a process for every contender, and a server
def test_benchmarks_with_processes_run(tmp_path: Path) -> None:
    """The training loop under every contender, ranks, and the flow against a bare loop, run on tiny states."""
    figures = run(tmp_path, "loop", "prefect", "ranks", "scale", "gang", "frameworks", "resumes")
    assert all(OURS in cells for cells in figures["ranks"]["rows"].values())
    assert figures["gang"]["gang"]["lines"] == 0 < figures["gang"]["torchrun, dcp"]["lines"]
    assert all(OURS in cells for cells in figures["loop"]["rows"].values())


def run(tmp_path: Path, *names: str) -> dict[str, Any]:
    """Run benchmarks on tiny states; return their figures, which are those of all that was asked for."""
    main(["--tiny", "--rounds", "1", "--dir", str(tmp_path), "--json", str(tmp_path / "it.json"), "--only", *names])
    figures: dict[str, Any] = json.loads((tmp_path / "it.json").read_text())
    assert figures.keys() == {"machine", *names}
    return figures
