"""The history of a run as moments, read from its ledger alone, for pages and reports.

No decision depends on the moments: events and their times are for people. `goodput.py` computes how the time was spent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_tasks.features import FEATURES
from ckpt_tasks.format.keys import LEDGER_PREFIX, MAX_STEP, is_steps, parse_ledger_name
from ckpt_tasks.format.ledger import Entry
from ckpt_tasks.format.parsing import seconds_of
from ckpt_tasks.process import in_threads
from ckpt_tasks.run.ledger.history import SYNCED, History

MOST_ENTRIES = 20_000  # These are about 10,000 commits, each followed by a retire.
_AT_ONCE = 16  # A remote store gets at most this many requests at once.
_LONGEST_TEXT = 300
# The parts of a resume in the order of time; docs/REPORT.md describes them.
_OF_FEATURES = [part for feature in FEATURES for part in feature.resumes]
RESUMED = ("start_s", "owner_s", *_OF_FEATURES, "read_s", "verify_s", "copy_s", "data_s", "step_s")
_MOST_S = 1e9  # This is about thirty years.
# The words of ownership.py for a lost owner. An owner that released the directory is not lost: it had committed.
_LOST = ("is gone", "has shown no life", "has been started anew", "has not released it within its grace")
_NOTES = {
    "failure": "failure",
    "fallback": "fallback",
    "rollback": "rollback",
    "gang": "gang",
    SYNCED: "copied",
    **{feature.note[0]: feature.note[0] for feature in FEATURES if feature.note},
}
_TOLD_BY = {
    "failure": ("because", "why"),
    "fallback": ("skipped",),
    "gang": ("on",),
    "copied": ("from",),
    **{feature.note[0]: feature.note[1:] for feature in FEATURES if feature.note},
}


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One event of a run, read from one ledger entry.

    `kind` is "commit", "failure" (an attempt that failed in a process that lived on), "lost" (an owner that followed a
    dead one), "taken" (any other new owner), "released", "evaluation", "fallback", "rollback", "gang", "pruned",
    "copied" or the note of a feature. `at_s` is in seconds since 1970 by the writer's
    clock. `text` is the entry's own text: why an owner took the run, what failed, which suite. A commit also has
    identities, and seconds: how long training waited, the time from snapshot to commit, the time of a step (None:
    unknown), the time of all its steps, and how long they waited for data. `steps` are name and digest of its table of
    steps; `resumed` has the parts of the preceding resume, by RESUMED; `again` is the first and the last step of a
    killed process that were repeated. `failed_saves` counts the failed saves between the previous commit and this one.
    """

    kind: str
    n: int
    epoch: int
    at_s: float
    step: int | None = None
    text: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    flow_run_id: str | None = None
    identity: str | None = None
    parent: str | None = None
    stall_s: float = 0.0
    flush_s: float = 0.0
    step_s: float | None = None
    trained_s: float = 0.0
    data_s: float = 0.0
    steps: tuple[str, str] | None = None
    resumed: Mapping[str, float] = field(default_factory=dict)
    again: tuple[int, int] | None = None
    failed_saves: int = 0


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The moments of a run, oldest first; counts of `damaged` entries, and of `older` ones that were not read."""

    moments: tuple[Moment, ...] = ()
    damaged: int = 0
    older: int = 0
    newest_n: int = -1

    @property
    def copied(self) -> bool:
        """Whether `ckpt sync` made this copy of the run: then the times are those of the copy."""
        return any(moment.kind == "copied" for moment in self.moments)

    def stands_in(self, history: History) -> bool:
        """Return True if the newest moment still agrees with its ledger entry: then this is the same run's ledger."""
        for last in self.moments[-1:]:
            good = history.good_entry(last.n)
            now = moment(good[0]) if good else None
            return now is not None and (now.at_s, now.epoch, now.identity) == (last.at_s, last.epoch, last.identity)
        return True


def read_timeline(history: History, most: int = MOST_ENTRIES, known: Timeline | None = None) -> Timeline:
    """Read the newest `most` entries of a ledger, several at once from a remote store.

    `known` is the result of an earlier call: then only newer entries are read. Unreadable entries are left out and
    counted. Raises StoreError if the store fails.
    """
    known = known or Timeline()
    listed = history.store.names(LEDGER_PREFIX, limit=most)
    numbers = sorted(n for name in listed if (n := parse_ledger_name(name)) is not None)
    new = [n for n in numbers if n > known.newest_n]
    entries = _read(history, new)
    moments = (*known.moments, *(entry for entry in entries if isinstance(entry, Moment)))
    first = numbers[0] if len(listed) == most else 0
    return Timeline(
        moments=tuple(entry for entry in moments if entry.n >= first),
        damaged=known.damaged + entries.count("damaged"),
        older=first,
        newest_n=max((known.newest_n, *new)),
    )


def moment(entry: Entry) -> Moment | None:
    """Return the moment of an entry; None if the entry is not part of the history, or has no time."""
    owner, event, at_s = entry.state.owner, entry.event, seconds_of(entry.at)
    if at_s is None:
        return None  # Without a time, an entry does not show how long anything took.
    about: dict[str, Any] = {
        "n": entry.n,
        "epoch": owner.epoch if owner else entry.epoch,  # A new owner's own entry still has the previous epoch.
        "at_s": at_s,
        "flow_run_id": owner.flow_run_id if owner else None,
    }
    match event["kind"]:
        case "commit":
            return _commit(entry, about)
        case "evaluation":
            return _evaluation(entry, about)
        case "retire":  # A retire without checkpoints only gave up objects of dead owners.
            gone = event.get("checkpoints")
            return Moment(**about, kind="pruned", text=_count(gone)) if gone else None
        case "owner":
            lost = any(words in str(event.get("because")) for words in _LOST)
            return Moment(
                **about, kind="lost" if lost else "taken", step=_step(event), text=_text(event, "because", "why")
            )
        case "release":
            return Moment(**about, kind="released", step=_step(event))
        case "note" if kind := _NOTES.get(str(event.get("note"))):
            text = _rolled_back(event) if kind == "rollback" else _text(event, *_TOLD_BY[kind])
            return Moment(**about, kind=kind, step=_step(event), text=text, step_s=_seconds(event, "step_s"))
    return None


def _read(history: History, numbers: list[int]) -> list[Moment | str | None]:
    def read(n: int) -> Moment | str | None:
        good = history.good_entry(n)
        return "damaged" if good is None else moment(good[0])

    alone = history.store.near or len(numbers) < _AT_ONCE
    return in_threads(read, numbers, 1 if alone else _AT_ONCE, "ckpt-timeline")


def _commit(entry: Entry, about: Mapping[str, Any]) -> Moment:
    event, made = entry.event, next((c for c in reversed(entry.state.live) if c.n == entry.n), None)
    # Old entries have only `cost_s`: their saves were synchronous and waited for the flush.
    cost_s = made.cost_s if made else 0.0
    stall_s, flush_s = _seconds(event, "stall_s"), _seconds(event, "flush_s")
    return Moment(
        **about,
        kind="commit",
        step=made.step if made else _step(event),
        metrics=made.metrics if made else {},
        identity=made.manifest_digest if made else None,
        parent=made.parent if made else None,
        stall_s=cost_s if stall_s is None else stall_s,
        flush_s=cost_s if flush_s is None else flush_s,
        step_s=_seconds(event, "step_s"),
        trained_s=_seconds(event, "trained_s") or 0.0,
        data_s=_seconds(event, "data_s") or 0.0,
        steps=steps_of(event, made.step) if made else None,
        resumed=_resumed(event.get("resumed")),
        again=_again(event.get("again")),
        failed_saves=failed if type(failed := event.get("failed_saves")) is int and failed > 0 else 0,
    )


def _resumed(parts: Any) -> dict[str, float]:
    read = {name: _seconds(parts, name) for name in RESUMED} if isinstance(parts, dict) else {}
    return {name: part_s for name, part_s in read.items() if part_s is not None}


def _again(steps: Any) -> tuple[int, int] | None:
    match steps:
        case [int(first), int(last)] if 0 < first <= last <= MAX_STEP:
            return first, last
    return None


def _evaluation(entry: Entry, about: Mapping[str, Any]) -> Moment:
    suite = _text(entry.event, "suite")
    made = next((e for e in reversed(entry.state.evaluations) if e.suite == suite), None)
    step, metrics = (made.step, made.metrics) if made else (_step(entry.event), {})
    return Moment(**about, kind="evaluation", step=step, text=suite, metrics=metrics)


def _step(event: Mapping[str, Any]) -> int | None:
    step = event.get("step")
    return step if type(step) is int and 0 <= step <= MAX_STEP else None


def steps_of(event: Mapping[str, Any], step: int) -> tuple[str, str] | None:
    """Return name and digest of the table of steps that a commit's event names; None if it names none."""
    match event.get("steps"):
        case [str(name), str(digest)] if is_steps(name, step):
            return name, digest
    return None


def _text(event: Mapping[str, Any], *names: str) -> str:
    return next((str(event[name])[:_LONGEST_TEXT] for name in names if event.get(name)), "")


def _rolled_back(event: Mapping[str, Any]) -> str:
    """Return why training went back, and which batches it skips."""
    failed, began = event.get("failed"), event.get("began")
    failed = "" if failed is None else f"step {failed} was not finite"
    if began is not None:
        failed = f"a metric spiked in steps {began} to {event.get('failed')}"
    why = failed or _text(event, "why")
    match event.get("skip"):
        case [first, last]:
            return f"{why}; batches {first} to {last} are left out"[:_LONGEST_TEXT]
    return why


def _count(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else ""


def _seconds(event: Mapping[str, Any], name: str) -> float | None:
    value = event.get(name)
    if not isinstance(value, int | float) or not 0 <= value <= _MOST_S:
        return None  # NaN and infinity are written as strings.
    return round(float(value), 6)  # Rates of a span below 1e-6 s could be infinite.
