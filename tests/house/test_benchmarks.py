"""The benchmarks run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.peers import OURS, OVERLAPPED


@pytest.mark.timeout(240)
def test_every_row_has_its_contenders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Saves, restores and restarts run on a tiny state, unmeasured, and every row is in the table and the JSON."""
    main(
        [
            "--tiny",
            "--rounds",
            "1",
            "--only",
            "save_restore",
            "--dir",
            str(tmp_path),
            "--json",
            str(tmp_path / "it.json"),
        ]
    )
    rows = json.loads((tmp_path / "it.json").read_text())["save_restore"]["rows"]
    assert len(rows) == 5
    assert all(any(name.startswith("ckpt-tasks") for name in cells) for cells in rows.values())
    printed = capsys.readouterr().out
    assert all(row in printed for row in rows)


@pytest.mark.timeout(240)
def test_the_other_benchmarks_run(tmp_path: Path) -> None:
    """The other benchmarks run on tiny states; the cadence keeps its 1 %."""
    main(
        [
            "--tiny",
            "--rounds",
            "1",
            "--only",
            "loop",
            "reuse",
            "many",
            "ledger",
            "overlap",
            "cadence",
            "prefect",
            "--json",
            str(tmp_path / "it.json"),
        ]
    )
    figures = json.loads((tmp_path / "it.json").read_text())
    assert figures.keys() == {"machine", "loop", "reuse", "many", "ledger", "overlap", "cadence", "prefect"}
    assert all({OURS, OVERLAPPED} <= cells.keys() for cells in figures["loop"]["rows"].values())
    assert figures["cadence"]["worst"] < 0.01
