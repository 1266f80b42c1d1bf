"""How often to save: as Young and Daly say, within what flush and cap allow, from a failure rate that is learnt."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.policy.cadence import (
    FIRST_INTERVAL_S,
    OVERHEAD_CAP,
    PRIOR_FAILURES,
    PRIOR_MTBF_S,
    AutoCadence,
    Observed,
    SavePoint,
    daly_interval_s,
    estimate_mtbf_s,
    goodput,
    recommend,
    trade_off,
    trade_off_at,
)

COST_S = st.floats(0.0, 600.0)
INTERVAL_S = st.floats(0.01, 1e6)
MTBF_S = st.floats(60.0, 1e9)
OBSERVED = st.builds(
    Observed,
    step_s=st.none() | st.floats(0.001, 100.0),
    stall_s=COST_S,
    flush_s=COST_S,
    failures=st.integers(0, 1000),
    trained_s=st.floats(0.0, 1e8),
)


def seen(**more: float) -> Observed:
    facts = {"step_s": 0.5, "stall_s": 0.05, "flush_s": 0.5, "trained_s": 0.0, **more}
    return Observed(failures=int(facts.pop("failures", 0)), **facts)


# ── the optimum ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("mtbf_min", "published"), [(24 * 60, "117"), (6 * 60, "57"), (15, "9.1")])
def test_dalys_own_figures_come_out(mtbf_min: float, published: str) -> None:
    """The three optima that Daly publishes for a dump of five minutes (2006, figures 3 to 5) are ours."""
    digits = len(published.partition(".")[2])
    assert f"{daly_interval_s(300.0, 60 * mtbf_min) / 60:.{digits}f}" == published


def test_youngs_is_the_limit() -> None:
    """Where a save costs next to nothing, the optimum is Young's sqrt(2 stall MTBF)."""
    assert daly_interval_s(1e-3, 1e6) == pytest.approx(math.sqrt(2e3), rel=1e-4)


def test_a_save_that_costs_more_than_failures_leave() -> None:
    """Where a stall takes two MTBF and more, the interval is the MTBF; just below it is close to that."""
    assert daly_interval_s(1200.0, 600.0) == daly_interval_s(9e9, 600.0) == 600.0
    assert 500 < daly_interval_s(1199.9, 600.0) < 600


@given(st.floats(-7, 0.3), st.floats(-2, 2))
def test_no_other_interval_is_better(log_ratio: float, log_factor: float) -> None:
    """From a stall of 10⁻⁷ MTBF to one of two, no interval has a goodput that is 0.5 % above that of Daly's."""
    mtbf_s = 1e4
    stall_s = mtbf_s * 10**log_ratio
    ours = daly_interval_s(stall_s, mtbf_s)
    there = [goodput(s, stall_s=stall_s, flush_s=0.0, mtbf_s=mtbf_s) for s in (ours, ours * 10**log_factor)]
    assert there[0] >= there[1] * 0.995


@given(st.tuples(INTERVAL_S, INTERVAL_S), st.tuples(COST_S, COST_S, COST_S), MTBF_S)
def test_flush_and_restart_do_not_move_the_optimum(
    intervals_s: tuple[float, float], costs_s: tuple[float, float, float], mtbf_s: float
) -> None:
    """Flush and restart take the same part of the goodput at every interval."""
    stall_s, flush_s, restart_s = costs_s

    def parts(interval_s: float) -> tuple[float, float]:
        bare = goodput(interval_s, stall_s=stall_s, flush_s=0.0, mtbf_s=mtbf_s)
        return goodput(interval_s, stall_s=stall_s, flush_s=flush_s, mtbf_s=mtbf_s, restart_s=restart_s), bare

    (one, one_bare), (other, other_bare) = (parts(interval_s) for interval_s in intervals_s)
    assert one * other_bare == pytest.approx(other * one_bare, rel=1e-9)


def test_a_failure_costs_half_an_interval_and_the_flush() -> None:
    """To first order a failure loses half an interval, the flush under way and the restart."""
    lost = 1 - goodput(100.0, stall_s=0.0, flush_s=20.0, mtbf_s=1e6, restart_s=30.0)
    assert lost == pytest.approx((100 / 2 + 20 + 30) / 1e6, rel=1e-3)


def test_goodput_stays_a_part() -> None:
    """Intervals of nothing, and such as outlast every failure, give 1 and 0 and no error."""
    assert goodput(0.0, stall_s=0.0, flush_s=0.0, mtbf_s=600.0) == 1.0
    assert goodput(0.0, stall_s=1.0, flush_s=0.0, mtbf_s=600.0) == 0.0
    assert goodput(1e9, stall_s=1.0, flush_s=0.0, mtbf_s=600.0) == 0.0


# ── the rate of failures ─────────────────────────────────────────────────────────────────────────────────────


def test_the_prior_decides_until_something_is_known() -> None:
    """Before any history the mean time between failures is the prior's: 24 h, or what the user says."""
    assert estimate_mtbf_s(0, 0.0) == PRIOR_MTBF_S == 86_400.0
    assert estimate_mtbf_s(0, 0.0, 3_600.0) == 3_600.0


def test_history_decides_afterwards() -> None:
    """After ten failures the estimate is within a factor of 2.5 of what they say, after a hundred within 15 %."""
    assert 600 < estimate_mtbf_s(10, 6_000.0) < 1500
    assert estimate_mtbf_s(100, 60_000.0) == pytest.approx(600, rel=0.15)
    assert estimate_mtbf_s(100, 60_000.0, 600.0) == pytest.approx(600, rel=0.01)


@given(st.integers(1, 20), st.floats(0.0, 1e6))
def test_the_estimate_is_the_mean_of_the_posterior(failures: int, trained_s: float) -> None:
    """One over the estimate is the mean rate under the Gamma prior, integrated by hand."""
    top = 40.0 * (PRIOR_FAILURES + failures) / (PRIOR_FAILURES * PRIOR_MTBF_S + trained_s)
    rates = [top * (n + 0.5) / 20_000 for n in range(20_000)]

    def weight(rate: float) -> float:
        exposure_s = PRIOR_FAILURES * PRIOR_MTBF_S + trained_s
        return math.exp((PRIOR_FAILURES - 1 + failures) * math.log(rate / top) - exposure_s * rate)

    weights = [weight(rate) for rate in rates]
    mean = math.fsum(r * w for r, w in zip(rates, weights, strict=True)) / math.fsum(weights)
    assert 1 / estimate_mtbf_s(failures, trained_s) == pytest.approx(mean, rel=0.02)


# ── the recommendation ───────────────────────────────────────────────────────────────────────────────────────


@given(OBSERVED, st.floats(0.001, 0.9))
def test_never_below_the_flush_nor_above_the_cap(observed: Observed, cap: float) -> None:
    """P44: an interval is at least the flush time, so that saves do not queue, and its overhead at most the cap."""
    found = recommend(observed, overhead_cap=cap)
    assert found.interval_s >= observed.flush_s
    assert found.interval_s >= found.optimum_s
    assert trade_off_at(found.interval_s, observed, found.mtbf_s).overhead <= cap * (1 + 1e-9)
    assert found.interval_s in (found.optimum_s, found.least_s)


def test_what_decides_is_said() -> None:
    """The optimum decides where it is allowed, else the flush or the cap, whichever asks for more."""
    assert recommend(seen()).decided_by == "optimum"
    slow = recommend(seen(flush_s=900.0))
    assert (slow.decided_by, slow.interval_s) == ("flush", 900.0)
    often = recommend(seen(stall_s=30.0, flush_s=30.0), mtbf_s=600.0)
    assert often.decided_by == "cap"
    assert often.interval_s == pytest.approx(970.0)
    assert recommend(seen(stall_s=30.0, flush_s=30.0), mtbf_s=600.0, overhead_cap=0.5).decided_by == "optimum"


def test_the_interval_in_steps_is_what_is_saved_at() -> None:
    """A save comes with the first step that ends at or after the interval: rounded up, one at least."""
    assert recommend(seen(step_s=0.7, flush_s=100.0, stall_s=0.0)).steps == 143
    assert recommend(seen(step_s=500.0)).steps == 1
    unknown = Observed(step_s=None, stall_s=0.1, flush_s=0.1, failures=0, trained_s=0.0)
    assert recommend(unknown).steps is None


def test_a_save_that_costs_nothing() -> None:
    """Without stall the flush alone decides; without flush as well, every step is saved."""
    assert recommend(seen(stall_s=0.0)).interval_s == 0.5
    free = recommend(seen(stall_s=0.0, flush_s=0.0))
    assert (free.interval_s, free.steps) == (0.0, 1)
    assert AutoCadence().updated(seen(stall_s=0.0, flush_s=0.0)).interval_s == 0.0


@pytest.mark.parametrize(
    "options",
    [
        {"overhead_cap": 0.0},
        {"overhead_cap": 1.0},
        {"overhead_cap": math.nan},
        {"prior_mtbf_s": 0.0},
        {"prior_mtbf_s": math.inf},
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, float]) -> None:
    """A cap outside of 0 to 1 and a prior that is no time are a ConfigError, for the cadence and the recommendation."""
    with pytest.raises(ConfigError):
        AutoCadence(**options)
    with pytest.raises(ConfigError):
        recommend(seen(), **options)


@pytest.mark.parametrize("mtbf_s", [0.0, -1.0, math.inf, math.nan])
def test_a_given_mtbf_is_a_time(mtbf_s: float) -> None:
    """A mean time between failures that is given is above 0 and finite."""
    with pytest.raises(ConfigError, match="mtbf_s"):
        recommend(seen(), mtbf_s=mtbf_s)
    with pytest.raises(ConfigError, match="interval_s"):
        AutoCadence(interval_s=-1.0)


# ── hysteresis ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_interval_holds_until_something_is_measured() -> None:
    """Nothing measured: a save after ten seconds, which tells what a save costs."""
    assert AutoCadence().interval_s == FIRST_INTERVAL_S == 10.0


@given(OBSERVED, OBSERVED)
def test_a_quarter_is_near_enough(first: Observed, then: Observed) -> None:
    """The interval stays while it is within a quarter of what is wanted and allowed, and else becomes just that."""
    before = AutoCadence().updated(first)
    after, wanted = before.updated(then), recommend(then)
    near = before.interval_s / 1.25 <= wanted.interval_s <= before.interval_s * 1.25
    apart = abs(wanted.interval_s / (before.interval_s or 1.0) - 1)
    assume(abs(apart - 0.25) > 1e-6)
    assume(abs(apart - 0.2) > 1e-6)
    if near and before.interval_s >= wanted.least_s:
        assert after is before
    else:
        assert after.interval_s == wanted.interval_s
    assert after.interval_s >= wanted.least_s
    assert after.updated(then) is after


def test_a_slow_drift_changes_the_interval_rarely() -> None:
    """While the estimate grows tenfold step by step, the interval changes a handful of times and is never far off."""
    cadence, changes = AutoCadence().updated(seen()), 0
    for hour in range(1, 217):
        observed = seen(trained_s=3600.0 * hour)
        updated = cadence.updated(observed)
        changes += updated is not cadence
        cadence = updated
        assert 0.8 - 1e-9 <= cadence.interval_s / recommend(observed).interval_s <= 1.25 + 1e-9
    assert 4 <= changes <= 10


def test_what_is_forbidden_is_left_at_once() -> None:
    """A flush that takes a little longer than the interval moves it, however near it is."""
    cadence = AutoCadence().updated(seen(flush_s=200.0))
    assert cadence.interval_s == 200.0
    assert cadence.updated(seen(flush_s=201.0)).interval_s == 201.0
    assert cadence.updated(seen(flush_s=199.0)) is cadence


def test_options_stay_with_the_cadence() -> None:
    """The user's cap and prior decide at every update, and not only at the first."""
    cadence = AutoCadence(overhead_cap=0.5, prior_mtbf_s=600.0).updated(seen(stall_s=30.0, flush_s=30.0))
    assert cadence.interval_s == daly_interval_s(30.0, 600.0)
    assert (cadence.overhead_cap, cadence.prior_mtbf_s) == (0.5, 600.0)
    assert AutoCadence().overhead_cap == OVERHEAD_CAP == 0.03


def test_a_save_is_due_by_seconds() -> None:
    """P53: due when a new step is done and the interval has passed since the last save, never by a clock gone back."""
    cadence, last = AutoCadence(interval_s=10.0), SavePoint(step=3, epoch=None, clock_s=100.0)

    def due(step: int, clock_s: float) -> bool:
        return cadence.due(last, SavePoint(step=step, epoch=None, clock_s=clock_s))

    assert (due(4, 109.9), due(4, 110.0), due(3, 999.0), due(4, -1e6)) == (False, True, False, False)


# ── the curve ────────────────────────────────────────────────────────────────────────────────────────────────


@given(OBSERVED)
def test_the_curve_adds_up(observed: Observed) -> None:
    """Intervals rise by one factor around the optimum and the recommended one; what they cost are parts of 1."""
    found = recommend(observed)
    curve = trade_off(observed, found, points=9, reach=4.0)
    assert len(curve) == 9
    assert curve[0].interval_s <= max(found.optimum_s, 1e-3) / 3.9
    assert curve[-1].interval_s >= found.interval_s * 3.9
    factors = [after.interval_s / before.interval_s for before, after in pairwise(curve)]
    assert max(factors) == pytest.approx(min(factors), rel=1e-6)
    for point in curve:
        assert point.overhead + point.expected_loss == pytest.approx(point.total, abs=1e-12)
        assert 0 <= point.overhead <= 1
        assert 0 <= point.total <= 1
