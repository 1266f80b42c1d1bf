"""The ledger: the numbered history of a run, whose highest entry is the truth.

Invariants (MUST: breaking one loses data)

1. Entry n is put if absent and never changed or deleted; numbers have no gaps. So of two writers of entry n one wins.
2. An entry holds the whole state of the run after it: to read a run, a reader lists one name and reads one object.
3. Only the owner commits and retires: the state before such an entry names the writer as owner.
4. No later commit names an object that a retire entry has named.

This module does no I/O: a state is a value, an event turns a state into the next, and `history.py` puts entries into a
store. The shape follows Delta Lake's log and icechunk's ref files (github.com/earth-mover/icechunk), with the state
inline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from ckpt_tasks.errors import ConfigError, FormatVersionError, IntegrityError, StateError
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.keys import MAX_EPOCH, Names, fold, ledger_name, parse_attempt, unfold
from ckpt_tasks.format.live import Segment, joined_segments, read_live, write_live
from ckpt_tasks.format.parsing import (
    FORMAT_VERSION,
    Count,
    Digest,
    Name,
    Time,
    check_version,
    declared,
    finite_json,
    parse_json,
    typed,
    well_formed,
)
from ckpt_tasks.format.records import (
    Checkpoint,
    Epoch,
    Evaluation,
    Lease,
    Origin,
    Owner,
    Rollback,
    RunCheck,
    attempt_objects,
    read_check,
    read_checkpoint,
    read_evaluation,
)

BestMode = Literal["min", "max"]
EVENTS = ("owner", "release", "commit", "retire", "pin", "lease", "evaluation", "note")
MAX_ENTRY_BYTES = 64 << 20


@declared
@dataclass(frozen=True, kw_only=True)
class State:
    """The whole state of a run after a committed ledger entry."""

    owner: Owner | None = None
    """Who holds the directory, or held it last."""
    live: tuple[Checkpoint, ...] = ()
    """In the order of their commits; of more than 128, the older ones in segments."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """Identity → reason."""
    leases: tuple[Lease, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    """Of live checkpoints, in the order in which they were recorded."""
    retired: tuple[Name, ...] = ()
    """Objects of attempts that are given up, and whose deletion may not be done; the names are folded."""
    stalled_flow_run: str | None = None
    """The flow run that `stalled_attempts` counts."""
    stalled_attempts: Count = 0
    """How often it took the directory or failed an attempt since a new step was committed; a release takes one off."""
    best_metric: str | None = None
    """The metric that says what "best" means."""
    best_mode: BestMode = "min"
    spared_epochs: Epoch = 0
    """A damaged entry may have named attempts of owner epochs up to this one: they are never swept."""
    origin: Origin | None = None
    params: Mapping[str, Any] | None = None
    program: str | None = None
    """What a flow trains, as `module:Factory`."""
    rollback: Rollback | None = None
    checks: tuple[RunCheck, ...] = ()
    """Of each kind the last good one, and after it the last one if that was bad."""

    def with_owner(self, owner: Owner, best_metric: str | None, best_mode: BestMode) -> State:
        """Return the state after this owner took the run; `best_metric`, if not None, changes the meaning of "best".

        Raises ConfigError if no owner epoch is left.
        """
        if owner.epoch > MAX_EPOCH:
            raise ConfigError(
                f"the run has had {MAX_EPOCH} owners, the most there can be", hint="Use another directory."
            )
        state = replace(self, owner=owner).with_stall(owner.flow_run_id)
        return state if best_metric is None else replace(state, best_metric=best_metric, best_mode=best_mode)

    def sparing(self, epoch: int) -> State:
        """Return the state that protects orphans of this owner epoch and earlier epochs from the sweep."""
        return replace(self, spared_epochs=max(epoch, self.spared_epochs))

    def with_stall(self, flow_run_id: str | None) -> State:
        """Return the state after a stalled attempt of a flow run; for a new flow run the count starts at 1."""
        again = flow_run_id is not None and flow_run_id == self.stalled_flow_run
        return replace(self, stalled_flow_run=flow_run_id, stalled_attempts=self.stalled_attempts + 1 if again else 1)

    def released(self, deleted: frozenset[str] = frozenset()) -> State:
        """Return the state after its owner released the run; `deleted`: the retired objects that the owner deleted.

        An attempt that ends with a release, for example after a preemption, does not count as stalled.
        """
        owner = replace(self.owner, released=True) if self.owner else None
        stalled = max(0, self.stalled_attempts - 1)
        return replace(self.without_deleted(deleted), owner=owner, stalled_attempts=stalled)

    def with_checkpoint(self, checkpoint: Checkpoint, deleted: frozenset[str]) -> State:
        """Return the state after a commit; `deleted`: the retired objects that the owner deleted."""
        parent = self.by_identity.get(checkpoint.parent or "")
        state = replace(self.without_deleted(deleted), live=(*_follow(self.live, checkpoint.parent), checkpoint))
        if parent is None or checkpoint.step > parent.step:
            state = replace(state, stalled_flow_run=None, stalled_attempts=0)
        if state.rollback is not None:
            state = replace(state, rollback=state.rollback.after(checkpoint.step))
        return state

    def rolled_back(self, rollback: Rollback) -> State:
        """Return the state after a rollback: its checkpoint is the newest again, and later ones are abandoned."""
        return replace(self, live=_follow(self.live, rollback.identity), rollback=rollback)

    @cached_property
    def by_identity(self) -> Mapping[str, Checkpoint]:
        """The live checkpoints by identity, in the order of their commits."""
        return {checkpoint.manifest_digest: checkpoint for checkpoint in self.live}

    @property
    def evaluated(self) -> dict[str, dict[str, float]]:
        """The metrics of evaluations, by checkpoint identity; a later evaluation replaces earlier values."""
        metrics: dict[str, dict[str, float]] = {}
        for evaluation in self.evaluations:
            metrics.setdefault(evaluation.manifest_digest, {}).update(evaluation.metrics)
        return metrics

    @property
    def metric_names(self) -> frozenset[str]:
        """The names of all metrics that live checkpoints have from their saves or evaluations."""
        measured = [record.metrics for record in self.live] + [record.metrics for record in self.evaluations]
        return frozenset(name for metrics in measured for name in metrics)

    def keeps(self, name: str) -> bool:
        """Return True if an object belongs to a live checkpoint, or a live checkpoint reuses it."""
        attempt = parse_attempt(name)
        attempts, reused = self._kept
        return attempt is not None and ((attempt.step, attempt.name) in attempts or name in reused)

    @cached_property
    def _kept(self) -> tuple[frozenset[tuple[int, str]], Names]:
        attempts = frozenset((c.step, c.attempt) for c in self.live)
        return attempts, Names(name for c in self.live for name in c.reuses)

    def has_retired(self, name: str) -> bool:
        """Return True if an object is retired, so that it may be deleted at any time."""
        return name in self._retired

    @cached_property
    def _retired(self) -> Names:
        return Names(self.retired)

    def without_deleted(self, deleted: frozenset[str]) -> State:
        """Return the state without retired objects that the owner deleted."""
        if not deleted or not self.retired:
            return self
        return replace(self, retired=fold(name for name in unfold(self.retired) if name not in deleted))

    def retire(self, digests: frozenset[str], objects: tuple[str, ...], deleted: frozenset[str]) -> State:
        """Return the state without the checkpoints of these `digests`, and with their `objects` retired."""
        state = self.without_deleted(deleted)
        return replace(
            state,
            live=tuple(c for c in state.live if c.manifest_digest not in digests),
            evaluations=tuple(e for e in state.evaluations if e.manifest_digest not in digests),
            leases=tuple(lease for lease in state.leases if lease.manifest_digest not in digests),
            pins={digest: why for digest, why in state.pins.items() if digest not in digests},
            retired=fold((*state.retired, *objects)),
        )

    def with_pin(self, digest: str, reason: str | None) -> State:
        """Return the state with a checkpoint pinned, or unpinned if `reason` is None."""
        pins = {other: why for other, why in self.pins.items() if other != digest}
        return replace(self, pins=pins if reason is None else {**pins, digest: reason})

    def with_lease(self, lease: Lease, now: float) -> State:
        """Return the state with one more lease, and without expired leases."""
        return replace(self, leases=(*(x for x in self.leases if x.expires_at > now and x.id != lease.id), lease))

    def without_lease(self, lease_id: str) -> State:
        """Return the state without the lease of this id."""
        return replace(self, leases=tuple(x for x in self.leases if x.id != lease_id))

    def with_evaluation(self, evaluation: Evaluation) -> State:
        """Return the state with one more evaluation."""
        return replace(self, evaluations=(*self.evaluations, evaluation))

    def with_check(self, check: RunCheck) -> State:
        """Return the state with the result of a check."""
        bad = check.fault is not None
        kept = (one for one in self.checks if one.kind != check.kind or (bad and one.fault is None))
        return replace(self, checks=(*kept, check))

    def checks_of(self, kind: str) -> tuple[RunCheck, ...]:
        """Return the last good check of a kind, and after it the last one if that was bad."""
        return tuple(check for check in self.checks if check.kind == kind)


@declared
@dataclass(frozen=True, kw_only=True)
class Entry:
    """One ledger entry.

    `segments` hold the older live checkpoints. `partial`: the reader left older live checkpoints out of the state. An
    entry stores neither of the two, but segments in the field `live` of its state.
    """

    n: Count
    """Its number, as in the name; numbers are dense, from 0 on."""
    epoch: Epoch
    """The owner epoch before the event; 0 without an owner."""
    nonce: str
    """32 hex digits, new for every event."""
    previous: Digest | None
    """The entry whose state this one was made from: the highest good one before it."""
    at: Time
    event: Mapping[str, Any]
    """What happened, for people; a program reads `state`."""
    state: State
    """Everything that is true after the event."""
    segments: tuple[Segment, ...] = ()  # They hold the older live checkpoints.
    partial: bool = False

    def to_bytes(self, *, parse: bool = True) -> tuple[bytes, str]:
        """Return the entry's bytes and their digest; raise StateError if a reader would refuse the entry.

        Without `parse`, check only what a commit adds: the newest checkpoint, and the bounds of the whole JSON.
        """
        tail = self.state.live[sum(len(segment.checkpoints) for segment in self.segments) :]
        state = asdict(replace(self.state, live=tail))
        state["live"] = write_live(state["live"], self.segments)
        try:
            body = {
                "version": FORMAT_VERSION,
                "n": self.n,
                "epoch": self.epoch,
                "nonce": self.nonce,
                "previous": self.previous,
                "at": self.at,
                "event": finite_json(self.event),
                "state": finite_json(state),
            }
            digest = digest_hex(canonical_json(body))
            data = canonical_json({**body, "digest": digest})
            if len(data) > MAX_ENTRY_BYTES:
                raise ValueError(f"it has {len(data)} bytes, more than the {MAX_ENTRY_BYTES} that are read")
            if parse:
                Entry.from_bytes(data, ledger_name(self.n))  # Check every bound as a reader does.
            else:
                self._check_newest(state["live"])
        except (ValueError, RecursionError, IntegrityError, FormatVersionError) as error:
            raise StateError(f"the ledger entry could not be read back: {error}") from error
        return data, digest

    def _check_newest(self, live: Any) -> None:
        """Raise IntegrityError if a reader would refuse the newest checkpoint; `live`: the entry's field."""
        with well_formed("the newest checkpoint"):
            newest = read_checkpoint(read_live(live)[1][-1])
            if newest.n > self.n:
                raise ValueError(f"it is of a later entry than number {self.n}")

    def is_in(self, data: bytes, digest: str) -> bool:
        """Return True if these bytes are the entry, as `to_bytes` wrote it; `digest`: the entry's digest."""
        return digest_hex(_digested(data, self.at, digest)) == digest

    def with_segments(self, segments: tuple[Segment, ...]) -> Entry:
        """Return a parsed entry to which the checkpoints of its segments are added, before its own (the tail)."""
        live = joined_segments(segments, self.state.live)
        return replace(self, segments=segments, state=replace(self.state, live=live))

    @classmethod
    def from_bytes(cls, data: bytes, name: str, newest: int | None = None) -> tuple[Entry, str]:
        """Read an entry; return it and its digest. `newest`: read only so many of its newest live checkpoints.

        Raises IntegrityError for torn or foreign bytes: the caller skips such an entry. Raises FormatVersionError for a
        newer version or an unknown event: the caller must not skip such an entry.
        """
        with well_formed("the ledger entry", name):
            body = parse_json(data)
            digest = body.pop("digest")
            if digest_hex(_digested(data, body["at"], digest)) != digest and digest_hex(canonical_json(body)) != digest:
                raise IntegrityError("the ledger entry's bytes are not what was written", key=name)
            check_version(body.pop("version"), name)
            if body["event"]["kind"] not in EVENTS:
                raise FormatVersionError(
                    f"the ledger holds the unknown event {body['event']['kind']!r:.40}",
                    key=name,
                    hint="Upgrade ckpt-tasks.",
                )
            segments, tail = read_live(body["state"]["live"])
            older = 0 if newest is None else max(0, len(tail) - newest)
            partial = older > 0 or (newest is not None and bool(segments))
            state = _state({**body.pop("state"), "live": tail[older:]})
            entry = typed({**body, "state": {}, "segments": [], "partial": partial}, cls)
            entry = replace(entry, state=state, segments=segments)
        if any(checkpoint.n > entry.n for checkpoint in entry.state.live):
            # The next commit must have a higher number than all live checkpoints.
            raise IntegrityError(f"a checkpoint of a later entry than number {entry.n}", key=name)
        return entry, str(digest)


def _digested(data: bytes, at: Any, digest: Any) -> bytes:
    """Return the bytes that an entry's digest covers: all but the digest; b"" if `to_bytes` did not write them.

    Writing the parsed entry again would take twice as long as parsing it.
    """
    before, own = canonical_json({"at": at})[:-1], b"," + canonical_json({"digest": digest})[1:-1]
    return before + data[len(before) + len(own) :] if data.startswith(before + own) else b""


def lineage(live: tuple[Checkpoint, ...]) -> list[Checkpoint]:
    """Order live checkpoints as a restore tries them: newest commit first, abandoned checkpoints last.

    The newest checkpoint is the one committed last, not the one with the highest step: after a fall-back the run
    repeats steps, and a higher step on the abandoned line must not win.
    """
    return sorted(live, key=lambda c: (c.abandoned, -c.n))


def _follow(live: tuple[Checkpoint, ...], parent: str | None) -> tuple[Checkpoint, ...]:
    """Mark the checkpoints that are abandoned if training continues from `parent`."""
    known = {c.manifest_digest: c for c in live}
    at = known.get(parent) if parent is not None else None
    if at is None:
        return live
    line: set[int] = set()
    while at is not None and at.n not in line:
        line.add(at.n)
        at = known.get(at.parent) if at.parent is not None else None
    # The ancestors of the oldest checkpoint on this line may be pruned, so leave all older checkpoints as they are.
    oldest = min(line)

    def follow(c: Checkpoint) -> Checkpoint:
        abandoned = c.n not in line and (c.abandoned or c.n > oldest)
        return c if c.abandoned == abandoned else replace(c, abandoned=abandoned)

    return tuple(map(follow, live))


def _state(body: dict[str, Any]) -> State:
    state = replace(
        typed({**body, "live": (), "evaluations": (), "checks": ()}, State),
        live=tuple(read_checkpoint(item) for item in body["live"]),
        evaluations=tuple(read_evaluation(item) for item in body["evaluations"]),
        checks=tuple(read_check(item) for item in body["checks"]),
    )
    attempt_objects(state.retired)
    return state
