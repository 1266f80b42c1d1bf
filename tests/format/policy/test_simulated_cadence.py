"""The cadence that learns, against the best fixed interval: a simulation, the same on every machine."""

from __future__ import annotations

import json
from statistics import fmean
from typing import Any

import pytest

from benchmarks import cadence
from benchmarks.cadence import BLOCKING, CLAIMED, Scenario, run_auto, run_fixed
from ckpt_tasks.format.policy.cadence import goodput

DAY_S = 86_400.0


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the command writes where it is told to."""
    path = tmp_path_factory.mktemp("cadence") / "it.json"
    cadence.main(["--tiny", "--json", str(path)])
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_goodput_is_within_a_percent_of_the_best_fixed_interval(figures: dict[str, Any]) -> None:
    """Over five orders of failure rate, with light and heavy saves, learning costs less than 1 % of the goodput."""
    rows = figures["rows"]
    assert len(rows) == 12
    mtbfs_s = [row["mtbf_s"] for row in rows]
    assert max(mtbfs_s) / min(mtbfs_s) >= 1e5
    assert {row["scenario"] for row in rows} == {"light", "heavy"}
    assert {row["overhead_cap"] for row in rows} == {0.03}
    assert all(0.3 < row["best_goodput"] <= 1 for row in rows)
    assert [row for row in rows if row["auto_goodput"] < 0.99 * row["best_goodput"]] == []
    assert figures["worst"] == max(row["short"] for row in rows)


def test_where_the_cap_decides_it_costs_what_is_said(figures: dict[str, Any]) -> None:
    """Saves that stall for 30 s while failures come every 10 min: the cap is kept, and costs most of the goodput."""
    capped, lifted = (
        next(r for r in figures["blocking"] if r["mtbf_s"] == 600.0 and (r["overhead_cap"] == 0.03) is is_capped)
        for is_capped in (True, False)
    )
    assert capped["auto_interval_s"] == pytest.approx(970.0)
    assert capped["short"] > 0.3
    assert lifted["short"] < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [*CLAIMED, BLOCKING], ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("mtbf_s", [600.0, 6_000.0])
def test_the_simulator_agrees_with_the_formula(scenario: Scenario, mtbf_s: float) -> None:
    """What fixed intervals achieve in 30 days, failures and restarts thrown, is what the formula says to within 3 %."""
    for interval_s in (60.0, 180.0, 600.0):
        found = fmean(run_fixed(scenario, mtbf_s, 30 * DAY_S, seed, interval_s) for seed in range(4))
        expected = goodput(
            interval_s,
            stall_s=scenario.stall_s,
            flush_s=scenario.flush_s,
            mtbf_s=mtbf_s,
            restart_s=scenario.restart_s,
        )
        assert found == pytest.approx(expected, rel=0.03)


@pytest.mark.slow
def test_both_simulations_are_one() -> None:
    """Where the flush alone decides, the cadence never changes, and save by save is as from failure to failure."""
    still = Scenario("still", step_s=0.5, stall_s=0.0, flush_s=10.0, restart_s=120.0)
    for seed in range(5):
        stepwise, last, changes = run_auto(still, 6_000.0, DAY_S, seed)
        assert (last.interval_s, changes) == (10.0, 0)
        assert stepwise == pytest.approx(run_fixed(still, 6_000.0, DAY_S, seed, 10.0), rel=1e-9)
