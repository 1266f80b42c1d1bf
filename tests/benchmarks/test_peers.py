"""The peers of the benchmarks do what they are timed for."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks import reborn, stall
from benchmarks.__main__ import reference
from benchmarks.peers import (
    CONTENDERS,
    OURS,
    CkptTasks,
    Contender,
    State,
    TorchSave,
    differing,
    flat,
    is_installed,
    states,
)
from benchmarks.states import build

ROWS = 6


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return stall.measure(tmp_path_factory.mktemp("bench") / "stall", tiny=True, rounds=1)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", CONTENDERS)
def test_a_contender_that_is_installed_saves_what_was_there(name: str, measured: dict[str, Any]) -> None:
    """Every tool that is installed is in every row, after its last save was read back and compared, to the bit."""
    if not is_installed(CONTENDERS[name]):
        assert measured["absent"][name] == "not installed"
        pytest.skip("not installed")
    assert name not in measured["absent"]
    assert len(measured["rows"]) == ROWS
    for row, cells in measured["rows"].items():
        (seconds,) = [cells[label] for label in cells if label in (name, f"{name} + fsync") or label == _done(name)]
        assert 0 < seconds["min_s"] <= seconds["median_s"] <= seconds["max_s"], row


def _done(name: str) -> str:
    return f"{name} ({'fsync' if CONTENDERS[name].synced else 'no fsync'})"


@pytest.mark.slow
def test_the_limits_are_measured_in_the_same_run(measured: dict[str, Any]) -> None:
    """A copy to memory stands beside what training waits for, a write past the page cache beside what is on disk.

    Beside the first save stands what new memory takes, too.
    """
    limits = {row: {label for label in cells if label.startswith("limit")} for row, cells in measured["rows"].items()}
    assert limits["first save: training waits"] == {"limit: copy to memory", "limit: write to new files in memory"}
    assert limits["later saves: training waits"] == {"limit: copy to memory"}
    assert limits["first save: until it is on disk"] == {"limit: O_DIRECT write"}
    assert limits["later saves: until it is on disk"] == {"limit: O_DIRECT write"}


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


def test_a_save_of_ours_that_came_to_nothing_is_not_timed(tmp_path: Path) -> None:
    """A snapshot that a newer one took the place of is not a cheap save but the benchmark's end."""
    contender, trained = CkptTasks(tmp_path, "cpu"), build(tiny=True)
    contender.save_async(trained.state, tmp_path / "1")
    contender.wait()
    contender.commits.clear()
    with pytest.raises(RuntimeError, match="0 of 1 saves"):
        contender.wait()
    contender.close()


def test_the_step_in_which_a_benchmark_acts_changes_nothing() -> None:
    """Acting in a step comes after what a tool has hooked before steps, once, and the step itself leaves every bit."""
    trained = build(tiny=True)
    before, order = stall.copies(trained), list[str]()
    hook = register_optimizer_step_pre_hook(lambda *_: order.append("tool"))
    try:
        stall.in_step(trained, lambda: order.append("benchmark"))
        trained.optimizer.step()
    finally:
        hook.remove()
    assert order == ["tool", "benchmark", "tool"]
    assert differing(before, flat(states(trained.state))) == []


@pytest.mark.parametrize(
    ("names", "ours"),
    [
        ((OURS, f"{OURS}, anew", "torch.save"), OURS),
        ((reborn.OURS, reborn.ANEW, reborn.MEMORY), reborn.OURS),
        (("ckpt-tasks to S3", "a local directory"), "ckpt-tasks to S3"),
        (("torch.save",), None),
    ],
)
def test_ratios_are_to_ours_whatever_the_order(names: tuple[str, ...], ours: str | None) -> None:
    """Every table's ratios refer to ours and to none of its variants, in whatever order they were measured."""
    assert {reference(ordered) for ordered in permutations(names)} == {ours}


def test_bits_are_compared_not_numbers() -> None:
    """NaN equals itself, -0.0 is not 0.0, and another dtype, another shape or a missing tensor is a difference."""
    one = {"nan": torch.tensor(float("nan")), "zero": torch.tensor(0.0), "some": torch.ones(2)}
    assert differing(one, {name: tensor.clone() for name, tensor in one.items()}) == []
    assert differing(one, {**one, "zero": torch.tensor(-0.0)}) == ["zero"]
    assert differing(one, {**one, "some": torch.ones(2, 1)}) == ["some"]
    assert differing(one, {**one, "some": torch.ones(2, dtype=torch.float64)}) == ["some"]
    assert differing(one, {"nan": one["nan"], "more": one["zero"]}) == ["more", "some", "zero"]
