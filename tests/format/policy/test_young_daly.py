"""How often to save: as Young and Daly say, within what flush and cap allow, from a failure rate that is learnt."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.format.policy.cadence import (
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


@given(st.floats(-7, 0.3), st.floats(-2, 2))
def test_no_other_interval_is_better(log_ratio: float, log_factor: float) -> None:
    """From a stall of 10⁻⁷ MTBF to one of two, no interval has a goodput that is 0.5 % above that of Daly's."""
    mtbf_s = 1e4
    stall_s = mtbf_s * 10**log_ratio
    ours = daly_interval_s(stall_s, mtbf_s)
    there = [goodput(s, stall_s=stall_s, flush_s=0.0, mtbf_s=mtbf_s) for s in (ours, ours * 10**log_factor)]
    assert there[0] >= there[1] * 0.995


# ── the rate of failures ─────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(1, 20), st.floats(0.0, 1e6))
def test_the_estimate_is_the_mean_of_the_posterior(failures: int, trained_s: float) -> None:
    """One over the estimate is the mean rate under the Gamma prior, integrated by hand."""
    top = 40.0 * (PRIOR_FAILURES + failures) / (PRIOR_FAILURES * PRIOR_MTBF_S + trained_s)
    rates = [top * (n + 0.5) / 2_000 for n in range(2_000)]

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
    failing = seen(stall_s=30.0, flush_s=30.0, failures=1_000_000, trained_s=6e8)  # One failure in 600 s.
    often = recommend(failing)
    assert often.decided_by == "cap"
    assert often.interval_s == pytest.approx(970.0)
    assert recommend(failing, overhead_cap=0.5).decided_by == "optimum"


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


# ── hysteresis ───────────────────────────────────────────────────────────────────────────────────────────────


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


# ── edges and options ────────────────────────────────────────────────────────────────────────────────────────


def test_at_the_edges_formulas_are_what_they_should_be() -> None:
    """A stall of two MTBF gives the MTBF; intervals of nothing and without end; a failure costs half an interval."""
    assert daly_interval_s(1200.0, 600.0) == daly_interval_s(9e9, 600.0) == 600.0
    assert 500 < daly_interval_s(1199.9, 600.0) < 600
    assert goodput(0.0, stall_s=0.0, flush_s=0.0, mtbf_s=600.0) == 1.0
    assert goodput(0.0, stall_s=1.0, flush_s=0.0, mtbf_s=600.0) == 0.0
    assert goodput(1e9, stall_s=1.0, flush_s=0.0, mtbf_s=600.0) == 0.0
    lost = 1 - goodput(100.0, stall_s=0.0, flush_s=20.0, mtbf_s=1e6, restart_s=30.0)
    assert lost == pytest.approx((100 / 2 + 20 + 30) / 1e6, rel=1e-3)


def test_options_stay_with_the_cadence() -> None:
    """The first interval, the cap and the prior are these; the user's decide at every update, and not only at first."""
    assert (AutoCadence().interval_s, OVERHEAD_CAP, PRIOR_MTBF_S) == (10.0, 0.03, 86_400.0)
    cadence = AutoCadence(overhead_cap=0.5, prior_mtbf_s=600.0).updated(seen(stall_s=30.0, flush_s=30.0))
    assert cadence == AutoCadence(interval_s=daly_interval_s(30.0, 600.0), overhead_cap=0.5, prior_mtbf_s=600.0)
    begin = SavePoint(step=3, epoch=None, clock_s=0.0)
    due = [cadence.due(begin, replace(begin, step=4, clock_s=cadence.interval_s + more_s)) for more_s in (-0.1, 0.1)]
    assert due == [False, True]


@pytest.mark.parametrize(
    ("name", "values"),
    [("overhead_cap", [0.0, 1.0, math.nan]), ("prior_mtbf_s", [0.0, -1.0, math.inf])],
)
def test_options_that_mean_nothing_are_refused(name: str, values: list[float]) -> None:
    """A cap outside of 0 to 1 and a time that is none are a ConfigError, for the cadence and the recommendation."""
    for value in values:
        with pytest.raises(ConfigError):
            recommend(seen(), **{name: value})
        with pytest.raises(ConfigError):
            AutoCadence(**{name: value})
    with pytest.raises(ConfigError):
        AutoCadence(interval_s=-1.0)
