"""Simulate training under random failures: the cadence that learns, against the best fixed interval.

`python -m benchmarks.cadence [--tiny] [--json FILE]`. Nothing is timed and every run is the same: the seeds are fixed.

A run has so many seconds of training to do, in steps. A save makes training wait for `stall_s`; its flush goes on
beside training and commits `flush_s` later; the next save waits until it has. Failures come at a constant rate, at the
same moments for every contender. One takes back what is not committed and costs `restart_s`, and may come during a
restart. The cadence knows only what a run's ledger would tell it: costs, failures and seconds of training between
commits, of as many entries as are read, and after every failure it begins from those. The best fixed interval is
chosen afterwards, by the same failures that it is then compared on.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from bisect import bisect_right
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from ckpt_tasks.format.policy.cadence import OVERHEAD_CAP, AutoCadence, Observed, daly_interval_s
from ckpt_tasks.run.ledger.observing import ENTRIES_READ
from ckpt_tasks.run.report.words import span

__all__ = ["BLOCKING", "CLAIMED", "Failures", "Learner", "Scenario", "main", "measure", "run_auto", "run_fixed"]

_DAY_S = 86_400.0
_SHORTEST_MTBF_S = 600.0
_LIFTED_CAP = 0.9
_GIVEN_UP = 50  # a run that takes that many times as long as its training has the goodput that it has by then


@dataclass(frozen=True)
class Scenario:
    """What training costs, in seconds: a step, a save's stall, its flush, and a restart."""

    name: str
    step_s: float
    stall_s: float
    flush_s: float
    restart_s: float


CLAIMED = (Scenario("light", 0.5, 0.05, 0.5, 30.0), Scenario("heavy", 0.5, 2.0, 60.0, 120.0))
# Saves that block training: here the overhead cap decides over five decades, and what it costs is shown, not claimed.
BLOCKING = Scenario("blocking", 0.5, 30.0, 30.0, 120.0)


class Failures:
    """The moments of failures: exponential, of one seed, made as they are asked for."""

    def __init__(self, mtbf_s: float, seed: int):
        self._random = random.Random(seed)
        self._rate = 1 / mtbf_s
        self._at_s = [0.0]

    def after(self, now_s: float) -> float:
        """Return when the first failure after `now_s` comes."""
        while self._at_s[-1] <= now_s:
            self._at_s.append(self._at_s[-1] + self._random.expovariate(self._rate))
        return self._at_s[bisect_right(self._at_s, now_s)]

    def restart(self, now_s: float, restart_s: float) -> tuple[float, float]:
        """Return when training goes on that failed at `now_s`, and when it fails again."""
        while (next_s := self.after(now_s)) <= now_s + restart_s:
            now_s = next_s
        return now_s + restart_s, next_s


class Learner:
    """A cadence and the part of its ledger that it may look at: two entries a save, and one a failure."""

    def __init__(self, scenario: Scenario, overhead_cap: float):
        self._scenario = scenario
        self._fresh = AutoCadence(overhead_cap=overhead_cap)
        self._entries: deque[tuple[int, int, float]] = deque()  # (entries, failures, seconds trained)
        self._totals = (0, 0, 0.0)
        self._measured = False
        self.cadence = self._fresh
        self.changes = 0

    def committed(self, trained_s: float) -> None:
        """Learn from a commit, so many seconds of training after the one before."""
        self._measured = True
        self._append(2, 0, trained_s)  # a commit, and a retire as the oldest checkpoint makes room
        updated = self.cadence.updated(self._observed())
        self.changes += updated is not self.cadence
        self.cadence = updated

    def failed(self) -> None:
        """Begin anew, in another process, from what the ledger says."""
        self._append(1, 1, 0.0)
        self.cadence = self._fresh.updated(self._observed()) if self._measured else self._fresh

    def _append(self, *entry: float) -> None:
        self._entries.append((int(entry[0]), int(entry[1]), entry[2]))
        self._totals = _sum(self._totals, self._entries[-1], 1)
        while self._totals[0] > ENTRIES_READ:
            self._totals = _sum(self._totals, self._entries.popleft(), -1)

    def _observed(self) -> Observed:
        now, (_, failures, trained_s) = self._scenario, self._totals
        return Observed(
            step_s=now.step_s,
            stall_s=now.stall_s,
            flush_s=now.flush_s,
            failures=failures,
            trained_s=max(0.0, trained_s),  # what comes and goes in floats may leave less than 0
        )


def run_auto(
    scenario: Scenario, mtbf_s: float, work_s: float, seed: int, overhead_cap: float = OVERHEAD_CAP
) -> tuple[float, AutoCadence, int]:
    """Train with a cadence that learns: (goodput, the cadence at the end, how often it changed between failures)."""
    failures, learner = Failures(mtbf_s, seed), Learner(scenario, overhead_cap)
    left, now_s, fails_s = round(work_s / scenario.step_s), 0.0, failures.after(0.0)
    while now_s <= _GIVEN_UP * work_s:
        committed_s = now_s
        while True:
            steps = min(_steps(scenario, learner.cadence.interval_s), left)
            snapshot_s = now_s + steps * scenario.step_s + scenario.stall_s
            if snapshot_s + scenario.flush_s > fails_s:
                break
            left, now_s = left - steps, snapshot_s
            learner.committed(now_s + scenario.flush_s - committed_s)
            committed_s = now_s + scenario.flush_s
            if not left:
                return work_s / committed_s, learner.cadence, learner.changes
        learner.failed()
        now_s, fails_s = failures.restart(fails_s, scenario.restart_s)
    return (work_s - left * scenario.step_s) / now_s, learner.cadence, learner.changes


def run_fixed(scenario: Scenario, mtbf_s: float, work_s: float, seed: int, interval_s: float) -> float:
    """Train with a fixed interval and return the goodput; from failure to failure at once, as nothing changes."""
    failures, steps = Failures(mtbf_s, seed), _steps(scenario, interval_s)
    beat_s = steps * scenario.step_s + scenario.stall_s
    left, now_s, fails_s = round(work_s / scenario.step_s), 0.0, failures.after(0.0)
    while True:
        end_s = now_s + left * scenario.step_s + math.ceil(left / steps) * scenario.stall_s + scenario.flush_s
        if end_s <= fails_s:
            return work_s / end_s
        if now_s > _GIVEN_UP * work_s:
            return (work_s - left * scenario.step_s) / now_s
        left -= steps * max(0, math.floor((fails_s - now_s - scenario.flush_s) / beat_s))
        now_s, fails_s = failures.restart(fails_s, scenario.restart_s)


def measure(*, tiny: bool) -> dict[str, Any]:
    """Compare the cadence with the best fixed interval over five orders of failure rate.

    `rows` holds the claim, `blocking` what the overhead cap costs where a save stalls training for long; `worst` is
    how far the cadence falls short of the best at most, as a part of the best, over `rows`.
    """
    exponents = range(6) if tiny else [n / 2 for n in range(11)]
    mtbfs_s = [_SHORTEST_MTBF_S * 10**exponent for exponent in exponents]
    plans = [(1, 4)] if tiny else [(1, 40), (7, 20), (30, 5)]  # (days of training, runs)
    rows = [
        _compare(scenario, mtbf_s, days, runs, OVERHEAD_CAP)
        for scenario in CLAIMED
        for days, runs in plans
        for mtbf_s in mtbfs_s
    ]
    days, runs = plans[0] if tiny else plans[1]
    blocking = [
        _compare(BLOCKING, mtbf_s, days, runs, cap) for cap in (OVERHEAD_CAP, _LIFTED_CAP) for mtbf_s in mtbfs_s
    ]
    return {
        "scenarios": [asdict(scenario) for scenario in (*CLAIMED, BLOCKING)],
        "overhead_cap": OVERHEAD_CAP,
        "rows": rows,
        "blocking": blocking,
        "worst": max(row["short"] for row in rows),
    }


def _compare(scenario: Scenario, mtbf_s: float, days: int, runs: int, overhead_cap: float) -> dict[str, Any]:
    work_s, seeds = days * _DAY_S, range(runs)
    optimum_s = daly_interval_s(scenario.stall_s, mtbf_s)
    grid_s = [optimum_s * 2 ** (n / 3) for n in range(-9, 22)]  # an eighth of the optimum to beyond 100 times it
    fixed = {s: fmean(run_fixed(scenario, mtbf_s, work_s, seed, s) for seed in seeds) for s in grid_s}
    best_s = max(fixed, key=lambda s: fixed[s])
    learnt = [run_auto(scenario, mtbf_s, work_s, seed, overhead_cap) for seed in seeds]
    auto = fmean(goodput for goodput, _, _ in learnt)
    return {
        "scenario": scenario.name,
        "overhead_cap": overhead_cap,
        "mtbf_s": mtbf_s,
        "days": days,
        "runs": runs,
        "best_interval_s": _steps(scenario, best_s) * scenario.step_s,
        "best_goodput": fixed[best_s],
        "auto_interval_s": fmean(cadence.interval_s for _, cadence, _ in learnt),
        "auto_goodput": auto,
        "auto_changes": fmean(changes for _, _, changes in learnt),
        "short": 1 - auto / fixed[best_s],
    }


def _steps(scenario: Scenario, interval_s: float) -> int:
    """Return the steps from save to save: whole ones, and as many as the flush before takes."""
    return max(1, math.ceil(max(interval_s, scenario.flush_s) / scenario.step_s - 1e-9))


def _sum(totals: tuple[int, int, float], entry: tuple[int, int, float], sign: int) -> tuple[int, int, float]:
    return totals[0] + sign * entry[0], totals[1] + sign * entry[1], totals[2] + sign * entry[2]


def main(argv: list[str] | None = None) -> None:
    """Simulate, print the tables, and write the figures as JSON where a file is named."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cadence", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--tiny", action="store_true", help="four runs of one day, and half of the rates")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args(argv)
    figures = measure(tiny=options.tiny)
    _show(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def _show(figures: dict[str, Any]) -> None:
    console = Console()
    groups: dict[tuple[str, float, int, int], list[dict[str, Any]]] = {}
    for row in (*figures["rows"], *figures["blocking"]):
        groups.setdefault((row["scenario"], row["overhead_cap"], row["days"], row["runs"]), []).append(row)
    for (name, cap, days, runs), rows in groups.items():
        title = f"{name}: {runs} runs of {span(days * 86_400)} of training, overhead cap {100 * cap:.0f} %"
        table = Table(title=title, title_justify="left")
        for heading in ("MTBF", "best fixed", "goodput", "auto, at the end", "goodput", "short of the best"):
            table.add_column(heading, justify="right")
        for row in rows:
            table.add_row(
                span(round(row["mtbf_s"])),
                span(row["best_interval_s"]),
                f"{row['best_goodput']:.4f}",
                span(row["auto_interval_s"]),
                f"{row['auto_goodput']:.4f}",
                f"{100 * row['short']:.2f} %",
            )
        console.print(table)
    console.print(f"Without blocking saves, auto falls short of the best by {100 * figures['worst']:.2f} % at most.")


if __name__ == "__main__":
    main()
