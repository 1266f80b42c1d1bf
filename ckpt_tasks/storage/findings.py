"""What was seen of a store, and what it is fit for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

__all__ = ["EXCLUSIVE", "Ability", "Disk", "Findings", "Latency", "Verdict", "judge", "summarize"]

EXCLUSIVE = "put if absent"
# Without these there are no checkpoints; the value says what is the matter where one is lacking.
_NEEDED = {
    "list": "it cannot be listed",
    "write": "it cannot be written to",
    "read": "what was written cannot be read at once",
    "delete": "nothing can be deleted, so that nothing would ever be pruned",
    "ordered listing": "it does not list in order, at once, what is there",
    "ranged reads": "parts of an object cannot be read",
    "large objects": "a large object does not come through",
}


@dataclass(frozen=True)
class Ability:
    """Whether something works (None: it was not tried), and what was seen."""

    works: bool | None
    seen: str = ""


@dataclass(frozen=True)
class Latency:
    """How long one request takes, in seconds; of `tries`, `failed` were not answered or refused."""

    median_s: float
    p90_s: float
    tries: int
    failed: int = 0


@dataclass(frozen=True)
class Disk:
    """What is below a local directory: the cost of an fsync, what the file system takes, and free bytes."""

    fsync: Latency
    o_direct: Ability
    link: Ability
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was measured of one store; bandwidths in bytes a second, and `left` names what could not be deleted."""

    url: str
    endpoint: str | None
    abilities: Mapping[str, Ability]
    latencies: Mapping[str, Latency] = field(default_factory=dict)
    large_bytes: int = 0
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    disk: Disk | None = None
    left: tuple[str, ...] = ()

    def save_s(self, size_bytes: int) -> float | None:
        """How long a save would be on its way: its bytes up, and the commit, which looks, puts and reads back."""
        if self.up_bytes_per_s is None:
            return None
        commit_s = [self.latencies[name].median_s for name in ("list", "get", "put", "get") if name in self.latencies]
        return size_bytes / self.up_bytes_per_s + sum(one_s for one_s in commit_s if math.isfinite(one_s))

    def restore_s(self, size_bytes: int) -> float | None:
        """How long its bytes would take to come down."""
        return None if self.down_bytes_per_s is None else size_bytes / self.down_bytes_per_s


@dataclass(frozen=True)
class Verdict:
    """The answer: whether checkpoints may go there without a thought, and in words what to know."""

    fit: bool
    words: str


def judge(findings: Findings) -> Verdict:
    """Say what a store is fit for; what was not tried is no fault."""
    abilities = findings.abilities
    for name, matter in _NEEDED.items():
        found = abilities.get(name, Ability(None))
        if found.works is False:
            return Verdict(False, f"not fit: {matter}" + (f" ({found.seen})" if found.seen else ""))
    exclusive = abilities.get(EXCLUSIVE, Ability(None, "put if absent was not tried"))
    if exclusive.works:
        return Verdict(True, "fit for checkpoints")
    if findings.endpoint is None:  # a local directory: there is no other way to commit
        return Verdict(False, f"not fit: of two writers of one name none loses ({exclusive.seen})")
    return Verdict(False, f"only with single_writer=True: {exclusive.seen}")


def summarize(samples_s: Sequence[float], failed: int = 0) -> Latency:
    """Return median and 90th percentile (by nearest rank) of durations; NaN where nothing was answered."""
    if not samples_s:
        return Latency(math.nan, math.nan, failed, failed)
    ranked = sorted(samples_s)
    return Latency(median(ranked), ranked[math.ceil(0.9 * len(ranked)) - 1], len(ranked) + failed, failed)
