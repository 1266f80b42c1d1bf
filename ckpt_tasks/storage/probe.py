"""Test whether a store does what commits need; some accept the condition of a put and ignore it.

The tests are for faults that real stores have had: a second writer of a name, one after the other and eight at once;
and reading, listing in order and partial reads right after a write.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

from ckpt_tasks.errors import ConfigError, ObjectNotFoundError, StoreError
from ckpt_tasks.storage.port import Store

__all__ = ["EXCLUSIVE", "Ability", "Disk", "Findings", "Latency", "Verdict", "judge", "prove", "summarize"]

_RACERS = 8
_ROUNDS = 5
_TRIES = 5
_HINT = (
    "Use another store, or set single_writer=True if you make sure yourself that one process at a time writes to this"
    " directory."
)


def prove(store: Store, *, single_writer: bool) -> dict[str, bool]:
    """Test a store below `probe/` and return the results by name; nothing is left there.

    Raises ConfigError if a second writer wins (unless `single_writer`), or if a written object is not visible at once.
    """
    place = f"probe/{secrets.token_hex(8)}"
    written: list[str] = []
    try:
        exclusive = single_writer or (_refuses_second(store, place, written) and _one_of_many(store, place, written))
        if not exclusive:
            raise ConfigError(f"{store.url} lets a second writer replace what the first one wrote", hint=_HINT)
        if not _shows(store, place, written):
            raise ConfigError(f"{store.url} does not show at once what was written", hint="Use another store.")
        return {"put_if_absent": not single_writer, "read_after_write": True, "ordered_listing": True}
    finally:
        with suppress(StoreError):  # a few bytes may stay; no run uses the names
            store.delete_all(written)


def _refuses_second(store: Store, place: str, written: list[str]) -> bool:
    name = f"{place}/twice"
    written.append(name)
    failures = [_put(store, name, body) for body in (b"first", b"second")]
    return _keeps_word(store, name, {b"first": failures[0], b"second": failures[1]})


def _one_of_many(store: Store, place: str, written: list[str]) -> bool:
    bodies = [f"{racer}".encode() for racer in range(_RACERS)]
    with ThreadPoolExecutor(_RACERS, thread_name_prefix="ckpt-probe") as threads:
        for round_ in range(_ROUNDS):
            name = f"{place}/race-{round_}"
            written.append(name)
            failures = [*threads.map(lambda body, name=name: _put(store, name, body), bodies)]
            if not _keeps_word(store, name, dict(zip(bodies, failures, strict=True))):
                return False
    return True


def _shows(store: Store, place: str, written: list[str]) -> bool:
    names = [f"{place}/shown-{n}" for n in (2, 0, 1)]
    for name in names:
        written.append(name)
        store.put(name, [b"0123456789"])
    part = bytearray(3)
    store.read(names[0], 4, memoryview(part))
    listed = [name for name in store.names(f"{place}/") if "/shown-" in name]
    return (
        bytes(part) == b"456" and listed == sorted(names) and store.names(f"{place}/", limit=1) == sorted(written)[:1]
    )


def _put(store: Store, name: str, body: bytes) -> StoreError | None:
    """Return None if the store said "done", else its error. No run uses the name, so a blind second write is safe."""
    failure: StoreError | None = None
    for _ in range(_TRIES):
        try:
            store.put_if_absent(name, body)
        except StoreError as error:
            failure = error
        else:
            return None
        if not failure.transient:
            break
    return failure


def _keeps_word(store: Store, name: str, answers: Mapping[bytes, StoreError | None]) -> bool:
    """Say whether the object has the bytes of every writer that was told "done"; another's answer may be lost.

    Raises a writer's error if the object is missing.
    """
    try:
        there = store.get(name, 16)
    except ObjectNotFoundError as error:
        raise next((failure for failure in answers.values() if failure is not None), error) from None
    return all(body == there for body, failure in answers.items() if failure is None)


EXCLUSIVE = "put if absent"
# Checkpoints need all of these; the value is the message if one is missing.
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
    """Whether something works (None: not tried), and what was seen."""

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
    """The disk below a local directory: the cost of an fsync, abilities of the file system, and free bytes."""

    fsync: Latency
    o_direct: Ability
    link: Ability
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The measurements of one store; bandwidths in bytes per second; `left` names what could not be deleted."""

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
        """Estimate the seconds of a save: sending its bytes, a list of them, and the commit: a look, a put, a look."""
        if self.up_bytes_per_s is None:
            return None
        commit_s = [self.latencies[name].median_s for name in ("list", "get", "put", "get") if name in self.latencies]
        return size_bytes / self.up_bytes_per_s + sum(one_s for one_s in commit_s if math.isfinite(one_s))

    def restore_s(self, size_bytes: int) -> float | None:
        """Estimate the seconds of reading its bytes."""
        return None if self.down_bytes_per_s is None else size_bytes / self.down_bytes_per_s


@dataclass(frozen=True)
class Verdict:
    """The answer: whether the store is fit for checkpoints, and why, in words."""

    fit: bool
    words: str


def judge(findings: Findings) -> Verdict:
    """Judge whether a store is fit for checkpoints; a test that was not run is not a fault."""
    abilities = findings.abilities
    for name, matter in _NEEDED.items():
        ability = abilities.get(name, Ability(None))
        if ability.works is False:
            return Verdict(False, f"not fit: {matter}" + (f" ({ability.seen})" if ability.seen else ""))
    exclusive = abilities.get(EXCLUSIVE, Ability(None, "put if absent was not tried"))
    if exclusive.works:
        return Verdict(True, "fit for checkpoints")
    if findings.endpoint is None:  # a local directory: there is no other way to commit
        return Verdict(False, f"not fit: of two writers of one name none loses ({exclusive.seen})")
    return Verdict(False, f"only with single_writer=True: {exclusive.seen}")


def summarize(samples_s: Sequence[float], failed: int = 0) -> Latency:
    """Return median and 90th percentile (by nearest rank) of durations; NaN if there are none."""
    if not samples_s:
        return Latency(math.nan, math.nan, failed, failed)
    ranked = sorted(samples_s)
    return Latency(median(ranked), ranked[math.ceil(0.9 * len(ranked)) - 1], len(ranked) + failed, failed)
