"""The benchmarks run, and their contenders do what they are timed for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import stall
from benchmarks.peers import CONTENDERS, OURS, Contender, State, TorchSave, differing, is_installed
from benchmarks.serve import make_root, measure
from benchmarks.states import build


def run(tmp_path: Path, *names: str) -> dict[str, Any]:
    """Run benchmarks on tiny states; return their figures, which are those of all that was asked for."""
    from benchmarks.__main__ import main

    main(["--tiny", "--rounds", "1", "--dir", str(tmp_path), "--json", str(tmp_path / "it.json"), "--only", *names])
    figures: dict[str, Any] = json.loads((tmp_path / "it.json").read_text())
    assert figures.keys() == {"machine", *names}
    return figures


def test_benchmarks_in_one_process_run(tmp_path: Path) -> None:
    """What needs no other process and no server runs on tiny states; the cadence keeps its 1 %."""
    figures = run(tmp_path, "reuse", "many", "ledger", "cadence")
    assert figures["cadence"]["worst"] < 0.01


@pytest.mark.slow
def test_the_page_of_runs_is_measured(tmp_path: Path) -> None:
    """A server over two short runs has all rows no sooner than the first ones, and says how much memory it holds."""
    make_root(tmp_path / "runs", runs=2, commits=5)
    figures = measure(tmp_path / "runs", opened=2)
    assert 0 < figures["listens_s"] <= figures["all_rows_s"]
    assert 20 < figures["peak_mib"] < 300


@pytest.mark.framework
@pytest.mark.slow  # a process for every contender, each row, and a server
@pytest.mark.timeout(1800)
def test_benchmarks_with_processes_run(tmp_path: Path) -> None:
    """Saves, restores, restarts, loops, ranks, and the flow against a bare loop: every row has its contenders.

    Every tool that is installed is in every row of the stall, after its last save was read back and compared.
    """
    figures = run(
        tmp_path, "save_restore", "stall", "loop", "prefect", "ranks", "scale", "gang", "frameworks", "hooks", "resumes"
    )
    rows = figures["save_restore"]["rows"]
    assert all(any(name.startswith("ckpt-tasks") for name in cells) for cells in rows.values())
    assert all(OURS in cells for name in ("ranks", "loop", "hooks") for cells in figures[name]["rows"].values())
    assert figures["gang"]["gang"]["lines"] == 0 < figures["gang"]["torchrun, dcp"]["lines"]
    absent = {name for name, kind in CONTENDERS.items() if not is_installed(kind)}
    assert absent == figures["stall"]["absent"].keys()


class Late(TorchSave):
    """It returns before it has looked at the state."""

    def save_async(self, state: State, path: Path) -> None:
        self._late = state, path

    def wait(self) -> None:
        super().save_async(*self._late)


@pytest.mark.parametrize(("kind", "torn"), [(TorchSave, False), (Late, True)])
def test_a_save_of_a_later_state_is_found(kind: type[Contender], torn: bool, tmp_path: Path) -> None:
    """What is read back must be the state of the call: a tool that copies too late does not pass as a fast one."""
    contender, trained = kind(tmp_path, "cpu"), build(tiny=True)
    expected = stall.copies(trained)
    contender.save_async(trained.state, tmp_path / "saved")
    with contender.updating():
        stall.in_step(trained, lambda: stall.change_all(trained))
    contender.wait()
    if torn:
        with pytest.raises(RuntimeError, match="not what was saved"):
            stall.check(contender, tmp_path / "saved", expected, tiny=True)
    else:
        stall.check(contender, tmp_path / "saved", expected, tiny=True)


def test_bits_are_compared_not_numbers() -> None:
    """NaN equals itself, -0.0 is not 0.0, and another dtype, another shape or a missing tensor is a difference."""
    one = {"nan": torch.tensor(float("nan")), "zero": torch.tensor(0.0), "some": torch.ones(2)}
    assert differing(one, {name: tensor.clone() for name, tensor in one.items()}) == []
    assert differing(one, {**one, "zero": torch.tensor(-0.0)}) == ["zero"]
    assert differing(one, {**one, "some": torch.ones(2, 1)}) == ["some"]
    assert differing(one, {"nan": one["nan"], "more": one["zero"]}) == ["more", "some", "zero"]
