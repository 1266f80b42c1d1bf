"""When to save: a pure decision from the steps, epochs and seconds since the last save; and the best interval.

Saving costs time: training waits `stall_s` at every save. Failures cost time as well: the training since the newest
committed snapshot is repeated. A longer interval means less waiting and more repeated training. `AutoCadence` turns a
run's measurements into an interval; nothing here reads a clock or a store.

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974) 530–531; J. T.
Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006) 303–312.
docs/internals/CADENCE.md derives and tests our additions: flushes during training, and a failure rate that is learnt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ckpt_tasks.errors import ConfigError

OVERHEAD_CAP = 0.03  # Waiting for saves takes at most this share of the time.
PRIOR_MTBF_S = 86_400.0
PRIOR_FAILURES = 0.1  # A prior of one whole failure would outweigh the data for days.
HYSTERESIS = 0.25  # The optimum is flat: an interval that is off by a quarter costs 2.5 % more than the best.
# The first save comes early: it measures the cost of a save, and gives a checkpoint to a run that is killed soon. It
# costs a run one more save.
FIRST_INTERVAL_S = 10.0


@dataclass(frozen=True, kw_only=True)
class SavePoint:
    """A point in training: steps completed, epochs completed, and a monotonic clock in seconds."""

    step: int
    epoch: int | None
    clock_s: float


@dataclass(frozen=True, kw_only=True)
class SavePolicy:
    """Saves when a number of steps, epochs or seconds has passed, whichever comes first; None switches a rule off."""

    step_interval: int | None = None
    epoch_interval: int | None = None
    save_interval_secs: float | None = None

    def due(self, last: SavePoint, now: SavePoint) -> bool:
        """Return True if a save is due at `now`; `last` is the last save (or the start of training).

        Steps and epochs count from 0, not from the last save, so that a resumed run saves at the same steps as an
        uninterrupted one; if steps are reported in larger strides, a save is due when a multiple is crossed.
        """
        if now.step <= last.step:
            return False
        crossed = self.step_interval is not None and now.step // self.step_interval > last.step // self.step_interval
        if crossed:
            return True
        if self.epoch_interval is not None and now.epoch is not None:
            before = (last.epoch if last.epoch is not None else 0) // self.epoch_interval
            if now.epoch // self.epoch_interval > before:
                return True
        return self.save_interval_secs is not None and now.clock_s - last.clock_s >= self.save_interval_secs


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A run's own measurements.

    `step_s` is the time of a step without saves (None: not known yet), `stall_s` how long training waits at a save,
    `flush_s` how long it takes from the snapshot to the commit: medians, in seconds. `failures` counts the
    failures in `trained_s` seconds of training.
    """

    step_s: float | None
    stall_s: float
    flush_s: float
    failures: int
    trained_s: float


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A recommended interval between saves, and why.

    `interval_s` is the training between two saves, `steps` the same in steps (None: the time of a step is unknown).
    `optimum_s` is Daly's interval for `mtbf_s`; `least_s` is the shortest that flush and overhead cap allow.
    `decided_by` is "optimum", or the limit that made the interval longer: "flush" or "cap".
    """

    interval_s: float
    steps: int | None
    optimum_s: float
    least_s: float
    mtbf_s: float
    decided_by: str


@dataclass(frozen=True)
class TradeOff:
    """The expected cost of one interval between saves, each as a share of all time.

    `overhead` is spent waiting for saves, `expected_loss` on repeating lost training; restarts, which cost the same at
    every interval, are left out. `total` is the sum; goodput is 1 - total.
    """

    interval_s: float
    overhead: float
    expected_loss: float
    total: float


@dataclass(frozen=True, kw_only=True)
class AutoCadence:
    """Saves at the interval that is best by a run's measurements; immutable: `updated` returns a new cadence.

    `interval_s` is the first interval, until there are measurements. Raises ConfigError, which is a ValueError.
    """

    interval_s: float = FIRST_INTERVAL_S
    overhead_cap: float = OVERHEAD_CAP
    prior_mtbf_s: float = PRIOR_MTBF_S

    def __post_init__(self) -> None:
        _check_seconds("interval_s", self.interval_s, zero=True)
        _check_options(self.overhead_cap, self.prior_mtbf_s)

    def updated(self, observed: Observed) -> AutoCadence:
        """Return a cadence for new measurements, or this one if its interval is within a quarter of the best.

        An interval that is too short now, for a flush or for the overhead cap, is changed at once, however little.
        """
        wanted = recommend(observed, overhead_cap=self.overhead_cap, prior_mtbf_s=self.prior_mtbf_s)
        margin = 1 + HYSTERESIS
        near = self.interval_s <= wanted.interval_s * margin and wanted.interval_s <= self.interval_s * margin
        if near and self.interval_s >= wanted.least_s:
            return self
        return replace(self, interval_s=wanted.interval_s)

    def due(self, last: SavePoint, now: SavePoint) -> bool:
        """Return True if a save is due: a new step, and `interval_s` seconds since the last save."""
        return SavePolicy(save_interval_secs=self.interval_s).due(last, now)


def recommend(
    observed: Observed,
    *,
    overhead_cap: float = OVERHEAD_CAP,
    prior_mtbf_s: float = PRIOR_MTBF_S,
) -> Recommendation:
    """Recommend an interval: Daly's optimum, but not below the flush time, and with an overhead under the cap.

    Raises ConfigError for invalid numbers.
    """
    _check_options(overhead_cap, prior_mtbf_s)
    mtbf_s = estimate_mtbf_s(observed.failures, observed.trained_s, prior_mtbf_s)
    optimum_s = daly_interval_s(observed.stall_s, mtbf_s)
    capped_s = observed.stall_s * (1 / overhead_cap - 1)  # This solves stall / (interval + stall) = cap.
    least_s = max(observed.flush_s, capped_s)
    interval_s = max(optimum_s, least_s)
    longer_by = "cap" if capped_s > observed.flush_s else "flush"
    return Recommendation(
        interval_s=interval_s,
        steps=max(1, math.ceil(interval_s / observed.step_s - 1e-6)) if observed.step_s else None,
        optimum_s=optimum_s,
        least_s=least_s,
        mtbf_s=mtbf_s,
        decided_by="optimum" if interval_s == optimum_s else longer_by,
    )


def estimate_mtbf_s(failures: int, trained_s: float, prior_mtbf_s: float = PRIOR_MTBF_S) -> float:
    """Estimate the mean time between failures: from the prior before the first failure, then from the data.

    The rate of failures has a Gamma prior of mean 1 / `prior_mtbf_s` with the weight of a tenth of a failure; the
    result is one over the mean of the posterior (NIST/SEMATECH e-Handbook of Statistical Methods, 8.4.6). Losses are
    linear in the rate to first order, so the interval that is best for the posterior's mean has the lowest expected
    cost.
    """
    return (PRIOR_FAILURES * prior_mtbf_s + trained_s) / (PRIOR_FAILURES + failures)


def daly_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Return how long to train between two saves: Daly's estimate (2006, eq. 37); Young's is sqrt(2 stall MTBF).

    The other costs of a failure (the flush under way, the restart) are the same at every interval and do not move the
    optimum.
    """
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def goodput(interval_s: float, *, stall_s: float, flush_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Return the share of all time that is spent on training that is not lost, at a constant failure rate.

    After every failure `restart_s` seconds pass (and begin again after another failure), then intervals and stalls
    alternate. A save counts once it is committed, `flush_s` after its stall: flushing acts like a longer restart.
    """
    beat = (interval_s + stall_s) / mtbf_s
    if beat <= 0:
        return math.exp(-(flush_s + restart_s) / mtbf_s)
    if beat > 700:  # exp() overflows at 709; at 700, hardly any save is ever committed.
        return 0.0
    kept = interval_s / (interval_s + stall_s)
    return kept * beat / math.expm1(beat) * math.exp(-(flush_s + restart_s) / mtbf_s)


def trade_off_at(interval_s: float, observed: Observed, mtbf_s: float) -> TradeOff:
    """Return the expected costs of saving every `interval_s` seconds: waiting for saves, and repeating steps."""
    overhead = observed.stall_s / (interval_s + observed.stall_s) if observed.stall_s else 0.0
    total = 1 - goodput(interval_s, stall_s=observed.stall_s, flush_s=observed.flush_s, mtbf_s=mtbf_s)
    return TradeOff(interval_s, overhead, max(0.0, total - overhead), total)


def trade_off(
    observed: Observed, recommended: Recommendation, *, points: int = 33, reach: float = 16.0
) -> list[TradeOff]:
    """Return the costs of intervals from 1/`reach` to `reach` times the optimal and the recommended one.

    Intervals grow by a constant factor. Those below `recommended.least_s` are included, although they are not allowed.
    """
    # Use at least 1 ms, since the intervals are divisors.
    ends = [max(s, 1e-3) for s in (recommended.optimum_s, recommended.interval_s)]
    first_s, last_s = min(ends) / reach, max(ends) * reach
    ratio = last_s / first_s
    return [trade_off_at(first_s * ratio ** (n / (points - 1)), observed, recommended.mtbf_s) for n in range(points)]


def _check_options(overhead_cap: float, prior_mtbf_s: float) -> None:
    if not 1e-9 <= overhead_cap < 1:
        raise ConfigError(f"the overhead cap must be a part of all time between 1e-9 and 1, not {overhead_cap!r}")
    _check_seconds("prior_mtbf_s", prior_mtbf_s)


def _check_seconds(name: str, value_s: float, *, zero: bool = False) -> None:
    if not 0 <= value_s < math.inf or (value_s == 0 and not zero):
        raise ConfigError(f"{name} must be a number of seconds {'from 0 on' if zero else 'above 0'}, not {value_s!r}")
