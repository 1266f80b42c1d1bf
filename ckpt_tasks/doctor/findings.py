"""The findings of `measuring.py` about a store, and the verdict whether it is fit for checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

EXCLUSIVE = "put if absent"
# Checkpoints need all of these abilities; the value is the message if one is missing.
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
    """Whether something works (None: not tried), and the observation that shows it."""

    works: bool | None
    seen: str = ""


@dataclass(frozen=True)
class Latency:
    """How long one request takes, in seconds; of `tries` requests, `failed` were unanswered or refused."""

    median_s: float
    p90_s: float
    tries: int
    failed: int = 0


@dataclass(frozen=True)
class Disk:
    """The disk of a local directory: the cost of an fsync, the file system's abilities, and free bytes."""

    fsync: Latency
    o_direct: Ability
    link: Ability
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The measurements of one store; `left` names objects that could not be deleted."""

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
        """Estimate the seconds of a save: send its bytes, list, and commit (a read, a put, a read)."""
        if self.up_bytes_per_s is None:
            return None
        commit_s = [self.latencies[name].median_s for name in ("list", "get", "put", "get") if name in self.latencies]
        return size_bytes / self.up_bytes_per_s + sum(one_s for one_s in commit_s if math.isfinite(one_s))

    def restore_s(self, size_bytes: int) -> float | None:
        """Estimate the seconds for which a restore reads."""
        return None if self.down_bytes_per_s is None else size_bytes / self.down_bytes_per_s


@dataclass(frozen=True)
class StoreVerdict:
    """The verdict: whether the store is fit for checkpoints, and why, in words."""

    fit: bool
    words: str


def judge(findings: Findings) -> StoreVerdict:
    """Judge whether a store is fit for checkpoints; a test that was not run is not a fault."""
    abilities = findings.abilities
    for name, matter in _NEEDED.items():
        ability = abilities.get(name, Ability(None))
        if ability.works is False:
            return StoreVerdict(False, f"not fit: {matter}" + (f" ({ability.seen})" if ability.seen else ""))
    exclusive = abilities.get(EXCLUSIVE, Ability(None, "put if absent was not tried"))
    if exclusive.works:
        return StoreVerdict(True, "fit for checkpoints")
    if findings.endpoint is None:  # A local directory has no other way to commit.
        return StoreVerdict(False, f"not fit: of two writers of one name none loses ({exclusive.seen})")
    return StoreVerdict(False, f"only with single_writer=True: {exclusive.seen}")


def summarize(samples_s: Sequence[float], failed: int = 0) -> Latency:
    """Return median and 90th percentile (by nearest rank) of durations; NaN if there are none."""
    if not samples_s:
        return Latency(math.nan, math.nan, failed, failed)
    ranked = sorted(samples_s)
    return Latency(median(ranked), ranked[math.ceil(0.9 * len(ranked)) - 1], len(ranked) + failed, failed)
