"""Decide which checkpoints stay, and why: a pure function from facts to verdicts.

Whatever the policy says, these stay: the newest checkpoint, the newest verified one, the checkpoint from which training
was restored, and every pinned or leased checkpoint. Rules add up: a checkpoint stays if any rule keeps it. The form (a
plan with reasons, which is then executed) follows restic's forget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Candidate(Protocol):
    """The properties of a checkpoint on which retention depends."""

    @property
    def step(self) -> int: ...
    @property
    def saved_at_s(self) -> float | None: ...
    @property
    def manifest_digest(self) -> str: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def abandoned(self) -> bool: ...
    @property
    def interim(self) -> bool: ...


class Save(NamedTuple):
    """A save that may not be committed yet: its step, and its time in seconds since 1970."""

    step: int
    at_s: float | None


class Rule(NamedTuple):
    """A rule that keeps checkpoints for ever: its option, its test of a save, and its reason for verdicts.

    `keeps(value, save, before)`: `value` is the option's value, `before` the save before this one, or None.
    """

    option: str
    keeps: Callable[[Any, Save, Save | None], bool]
    reason: str


# Each rule's option is a field of RetentionPolicy and of CheckpointConfig; None switches the rule off.
RULES = (Rule("keep_every_n_steps", lambda n, save, before: save.step % n == 0, "every {} steps"),)


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Keeps the newest `max_num_checkpoints` (None: all), every n-th step, and the best by a metric ("min" or "max").

    Interim checkpoints, and checkpoints whose step was saved again, count among the newest only if there are too few
    others; they never displace any other checkpoint.
    """

    max_num_checkpoints: int | None = None
    keep_every_n_steps: int | None = None
    keep_best: int = 0
    best_metric: str | None = None
    best_mode: str = "min"

    @property
    def grows(self) -> bool:
        """Whether the number of kept checkpoints grows without limit."""
        return self.max_num_checkpoints is None or any(getattr(self, rule.option) is not None for rule in RULES)

    def preserves(self, save: Save, before: Save | None) -> tuple[str, ...]:
        """Return one reason for each rule that keeps a save for ever; `before` is the save before it."""
        values = ((rule, getattr(self, rule.option)) for rule in RULES)
        return tuple(
            rule.reason.format(value) for rule, value in values if value is not None and rule.keeps(value, save, before)
        )

    def preserved(self, newest_first: Sequence[Candidate]) -> dict[str, tuple[str, ...]]:
        """Return the checkpoints that are kept for ever, by identity, each with its reasons."""
        again = _saved_again(newest_first)
        line = [one for one in newest_first if not one.abandoned and one.manifest_digest not in again]
        saves = [Save(one.step, one.saved_at_s) for one in line]
        reasons = map(self.preserves, saves, [*saves[1:], None])
        return {one.manifest_digest: why for one, why in zip(line, reasons, strict=True) if why}


@dataclass(frozen=True)
class Verdict:
    """The decision on one checkpoint: `reasons` say why it stays; if it goes, they are one reason."""

    step: int
    manifest_digest: str
    keep: bool
    reasons: tuple[str, ...]


def plan_retention(
    newest_first: Sequence[Candidate],
    policy: RetentionPolicy,
    *,
    pins: Mapping[str, str],
    leased: Mapping[str, str],
    verified: frozenset[str],
    restored_from: str | None,
    metrics: Mapping[str, Mapping[str, float]],
) -> list[Verdict]:
    """Decide for each checkpoint; `newest_first` and the result are in the order of commits, newest first.

    `pins` and `leased` map identities (manifest digests) to reasons; `verified` holds the identities that this process
    has verified; `metrics` adds evaluation results to a checkpoint's own metrics. No clock is used.
    """
    best = {c.manifest_digest: place for place, c in enumerate(rank_best(newest_first, policy, metrics), start=1)}
    limit, again, preserved = policy.max_num_checkpoints, _saved_again(newest_first), policy.preserved(newest_first)
    first = sorted(newest_first, key=lambda c: c.interim or c.manifest_digest in again)
    counted = {c.manifest_digest for c in first[:limit]}
    newest_verified = next((c.manifest_digest for c in newest_first if c.manifest_digest in verified), None)
    verdicts = []
    for place, candidate in enumerate(newest_first):
        digest, step = candidate.manifest_digest, candidate.step
        rules = [
            (place == 0, "newest"),
            (limit is None, "all are kept"),
            (limit is not None and digest in counted, f"one of the newest {limit}"),
            *((True, reason) for reason in preserved.get(digest, ())),
            (digest in best, f"number {best.get(digest)} by {policy.best_metric}"),
            (digest in pins, f"pinned: {pins.get(digest)}"),
            (digest in leased, f"leased by {leased.get(digest)}"),
            (digest == newest_verified, "newest verified"),
            (digest == restored_from, "training was restored from it"),
        ]
        why = tuple(reason for holds, reason in rules if holds)
        old = "interim, and no longer the newest" if candidate.interim else f"older than the newest {limit}"
        gone = "on a line that was left" if candidate.abandoned else "saved again since" if digest in again else old
        verdicts.append(Verdict(step, digest, bool(why), why or (gone,)))
    return verdicts


def _saved_again(newest_first: Sequence[Candidate]) -> set[str]:
    """Return the identities of checkpoints whose step was saved again later, neither interim nor abandoned."""
    steps: set[int] = set()
    again: set[str] = set()
    for candidate in newest_first:
        if candidate.step in steps:
            again.add(candidate.manifest_digest)
        if not (candidate.interim or candidate.abandoned):
            steps.add(candidate.step)
    return again


def rank_best(
    newest_first: Sequence[Candidate], policy: RetentionPolicy, metrics: Mapping[str, Mapping[str, float]]
) -> list[Candidate]:
    """Return the best `keep_best` checkpoints, best first; of equal ones the oldest.

    A loop may report an earlier step's value again; the first step that reported it is the one that measured it.
    A checkpoint without a finite value, or with any metric that is not finite, is never among them.
    """
    if not policy.keep_best or policy.best_metric is None:
        return []
    sign = 1.0 if policy.best_mode == "min" else -1.0
    scored = []
    for place, candidate in enumerate(newest_first):
        value = {**candidate.metrics, **metrics.get(candidate.manifest_digest, {})}.get(policy.best_metric)
        if value is not None and all(map(math.isfinite, (value, *candidate.metrics.values()))):
            scored.append((sign * value, -place, candidate))
    scored.sort(key=lambda item: item[:2])
    return [candidate for _, _, candidate in scored[: policy.keep_best]]
