"""The ledger: the numbered history of a run, whose highest entry is the truth.

Invariants (MUST: breaking one loses data)

1. Entry n is put if absent and never changed or deleted; numbers are dense. So of two writers one wins.
2. An entry holds the whole state after it: reading a run is one listing of one name and one read.
3. Commit and retire are the owner's alone: an entry of theirs is made only from a state whose owner is the writer.
4. What a retire entry names, no later commit names.

Everything here is pure: states are values, events turn one into the next, and `history.py` puts them into a store.
The shape follows Delta Lake's log and icechunk's ref files (github.com/earth-mover/icechunk), with the state inline.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ckpt_tasks.errors import FormatVersionError, IntegrityError
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.keys import is_object_name, parse_attempt
from ckpt_tasks.format.manifest import FORMAT_VERSION, check_version

__all__ = [
    "EVENTS",
    "MAX_ENTRY_BYTES",
    "MAX_INLINE_CHECKPOINTS",
    "Checkpoint",
    "Entry",
    "Evaluation",
    "Lease",
    "Owner",
    "State",
    "lineage",
    "read_live_list",
    "write_live_list",
]

EVENTS = ("owner", "release", "commit", "retire", "pin", "lease", "evaluation", "note")
MAX_ENTRY_BYTES = 64 << 20
MAX_INLINE_CHECKPOINTS = 256

# What reading JSON of another form can raise.
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Who holds the run directory for writing. `epoch` grows by one with every owner; `id` is this owner's nonce."""

    epoch: int
    id: str
    flow_run_id: str | None
    host: str
    machine_id: str
    boot_id: str
    pid_namespace: str
    pid: int
    process_start: str
    taken_at: str
    released: bool = False


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One committed checkpoint, as the ledger holds it.

    `manifest` names its manifest and `manifest_digest` (hex) is its identity; `parent` is the identity of the
    checkpoint that the training which led here was restored from or last committed; `n` is the ledger entry that
    committed it; `cost_s` is how long training had waited when the entry was put, in seconds; `epochs` counts
    completed epochs, where the loop reported them. `abandoned`: training went back to an older checkpoint and on from
    there, so that this one lies on a line that was left. `reuses` names the objects of older attempts that it is made
    of: what had not changed was not written again.
    """

    step: int
    attempt: str
    manifest: str
    manifest_digest: str
    parent: str | None
    n: int
    metrics: Mapping[str, float]
    size_bytes: int
    objects: int
    saved_at: str
    cost_s: float
    epochs: int | None = None
    abandoned: bool = False
    reuses: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A reader's claim that a checkpoint stays until `expires_at` (seconds since 1970)."""

    id: str
    manifest_digest: str
    holder: str
    expires_at: float


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What one suite measured on one checkpoint; `table` names the Arrow object with its rows."""

    manifest_digest: str
    step: int
    suite: str
    metrics: Mapping[str, float]
    table: str
    table_digest: str
    evaluated_at: str


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything that is true of a run after one ledger entry.

    `live` holds the checkpoints in the order of their commits; `pins` maps identities to reasons; `retired` names
    objects whose deletion may not be done yet; `stalled_attempts` counts how often the flow run `stalled_flow_run`
    has taken the directory or failed an attempt since the last commit of a new step; `best_metric` and
    `best_mode` say what the name "best" means. `spared_epochs`: when the owner of this epoch came, an entry could not
    be read; what attempts up to it have left may be what that entry named, and is never swept.
    """

    owner: Owner | None = None
    live: tuple[Checkpoint, ...] = ()
    pins: Mapping[str, str] = field(default_factory=dict)
    leases: tuple[Lease, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    retired: tuple[str, ...] = ()
    stalled_flow_run: str | None = None
    stalled_attempts: int = 0
    best_metric: str | None = None
    best_mode: str = "min"
    spared_epochs: int = 0

    def with_owner(self, owner: Owner, best_metric: str | None, best_mode: str) -> State:
        """Return the state after this owner took the directory; its word on what "best" means counts, if it has one."""
        state = replace(self, owner=owner).with_stall(owner.flow_run_id)
        return state if best_metric is None else replace(state, best_metric=best_metric, best_mode=best_mode)

    def sparing(self, epoch: int) -> State:
        """Return the state in which nothing of owner epochs up to this one is swept."""
        return replace(self, spared_epochs=max(epoch, self.spared_epochs))

    def with_stall(self, flow_run_id: str | None) -> State:
        """Return the state after one more attempt of a flow run; another flow run begins to count anew."""
        again = flow_run_id is not None and flow_run_id == self.stalled_flow_run
        return replace(self, stalled_flow_run=flow_run_id, stalled_attempts=self.stalled_attempts + 1 if again else 1)

    def released(self) -> State:
        """Return the state after its owner let the directory go."""
        return replace(self, owner=replace(self.owner, released=True) if self.owner else None)

    def with_checkpoint(self, checkpoint: Checkpoint, deleted: frozenset[str]) -> State:
        """Return the state after a commit; `deleted` are retired objects that are gone by now."""
        parent = next((c for c in self.live if c.manifest_digest == checkpoint.parent), None)
        state = replace(self.without_deleted(deleted), live=(*_follow(self.live, checkpoint.parent), checkpoint))
        if parent is None or checkpoint.step > parent.step:
            state = replace(state, stalled_flow_run=None, stalled_attempts=0)
        return state

    def keeps(self, name: str) -> bool:
        """Say whether an object is one of a live checkpoint's own, or one that a live checkpoint reuses."""
        attempt = parse_attempt(name)
        return attempt is not None and any(
            (c.step, c.attempt) == (attempt.step, attempt.name) or name in c.reuses for c in self.live
        )

    def without_deleted(self, deleted: frozenset[str]) -> State:
        """Return the state without the retired objects that are gone by now."""
        return replace(self, retired=tuple(name for name in self.retired if name not in deleted))

    def retire(self, digests: frozenset[str], objects: tuple[str, ...], deleted: frozenset[str]) -> State:
        """Return the state after checkpoints were taken out of the run and their objects given up for deletion."""
        state = self.without_deleted(deleted)
        return replace(
            state,
            live=tuple(c for c in state.live if c.manifest_digest not in digests),
            evaluations=tuple(e for e in state.evaluations if e.manifest_digest not in digests),
            leases=tuple(lease for lease in state.leases if lease.manifest_digest not in digests),
            pins={digest: why for digest, why in state.pins.items() if digest not in digests},
            retired=(*state.retired, *(name for name in objects if name not in state.retired)),
        )

    def with_pin(self, digest: str, reason: str | None) -> State:
        """Return the state with a checkpoint pinned, or unpinned where `reason` is None."""
        pins = {other: why for other, why in self.pins.items() if other != digest}
        return replace(self, pins=pins if reason is None else {**pins, digest: reason})

    def with_lease(self, lease: Lease, now: float) -> State:
        """Return the state with one more lease, and without those that have expired."""
        return replace(self, leases=(*(x for x in self.leases if x.expires_at > now and x.id != lease.id), lease))

    def without_lease(self, lease_id: str) -> State:
        """Return the state without a lease."""
        return replace(self, leases=tuple(x for x in self.leases if x.id != lease_id))

    def with_evaluation(self, evaluation: Evaluation) -> State:
        """Return the state with one more evaluation."""
        return replace(self, evaluations=(*self.evaluations, evaluation))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry: its number, who wrote it when, what happened, and the state after it."""

    n: int
    epoch: int
    nonce: str
    previous: str | None
    at: str
    event: Mapping[str, Any]
    state: State
    live_list: tuple[str, str] | None = None  # (name, digest) of the object that holds a long list of checkpoints

    def to_bytes(self) -> tuple[bytes, str]:
        """Write the entry: (its bytes, its digest)."""
        state = asdict(self.state)
        if self.live_list is not None:
            state["live"] = {"object": self.live_list[0], "digest": self.live_list[1]}
        body = {
            "version": FORMAT_VERSION,
            "n": self.n,
            "epoch": self.epoch,
            "nonce": self.nonce,
            "previous": self.previous,
            "at": self.at,
            "event": _out(self.event),
            "state": _out(state),
        }
        digest = digest_hex(canonical_json(body))
        return canonical_json({**body, "digest": digest}), digest

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> tuple[Entry, str]:
        """Read an entry: (entry, its digest).

        Raises IntegrityError for torn or foreign bytes, which count as "nothing happened", and FormatVersionError for
        a newer version or an unknown event, which never do.
        """
        try:
            body = json.loads(data)
            digest = body.pop("digest")
            if digest_hex(canonical_json(body)) != digest:
                raise IntegrityError("the ledger entry's bytes are not what was written", key=name)
            check_version(body["version"], name)
            if body["event"]["kind"] not in EVENTS:
                raise FormatVersionError(
                    f"the ledger holds the unknown event {body['event']['kind']!r:.40}",
                    key=name,
                    hint="Upgrade ckpt-tasks.",
                )
            live = body["state"]["live"]
            pointer = (_object_name(live["object"]), str(live["digest"])) if isinstance(live, dict) else None
            entry = cls(
                n=int(body["n"]),
                epoch=int(body["epoch"]),
                nonce=str(body["nonce"]),
                previous=body["previous"],
                at=str(body["at"]),
                event=body["event"],
                state=_state({**body["state"], "live": [] if pointer else live}),
                live_list=pointer,
            )
        except _MALFORMED as error:
            raise IntegrityError(f"the ledger entry is malformed: {error!r:.200}", key=name) from error
        return entry, str(digest)


def write_live_list(live: tuple[Checkpoint, ...]) -> bytes:
    """Write a list of checkpoints as an object of its own."""
    return canonical_json({"version": FORMAT_VERSION, "live": [_out(asdict(c)) for c in live]})


def read_live_list(data: bytes, *, digest: str, name: str) -> tuple[Checkpoint, ...]:
    """Read a list of checkpoints whose digest is known; raise IntegrityError where the bytes are not those."""
    if digest_hex(data) != digest:
        raise IntegrityError("the list of checkpoints is not the one that was committed", key=name)
    try:
        body = json.loads(data)
        check_version(body["version"], name)
        return tuple(_checkpoint(item) for item in body["live"])
    except _MALFORMED as error:
        raise IntegrityError(f"the list of checkpoints is malformed: {error!r:.200}", key=name) from error


def lineage(live: tuple[Checkpoint, ...]) -> list[Checkpoint]:
    """Order live checkpoints as a restore tries them: newest commit first, and abandoned lines last.

    The newest is the one that was committed last, whatever its step: after a fall-back the run trains the same steps
    once more, and what stands on the line that it left must not win by its step number.
    """
    return sorted(live, key=lambda c: (c.abandoned, -c.n))


def _follow(live: tuple[Checkpoint, ...], parent: str | None) -> tuple[Checkpoint, ...]:
    """Mark which checkpoints training has left behind, now that it goes on from `parent`."""
    known = {c.manifest_digest: c for c in live}
    at = known.get(parent) if parent is not None else None
    if at is None:
        return live
    line: set[int] = set()
    while at is not None and at.n not in line:
        line.add(at.n)
        at = known.get(at.parent) if at.parent is not None else None
    # Below the oldest that the line is known down to, a pruned parent may hide who belongs to it: marks stay there.
    return tuple(replace(c, abandoned=c.n not in line and (c.abandoned or c.n > min(line))) for c in live)


def _state(body: Mapping[str, Any]) -> State:
    return State(
        owner=Owner(**body["owner"]) if body["owner"] else None,
        live=tuple(_checkpoint(item) for item in body["live"]),
        pins={str(k): str(v) for k, v in body["pins"].items()},
        leases=tuple(Lease(**item) for item in body["leases"]),
        evaluations=tuple(Evaluation(**{**item, "metrics": _metrics(item["metrics"])}) for item in body["evaluations"]),
        retired=tuple(_object_name(name) for name in body["retired"]),
        stalled_flow_run=body["stalled_flow_run"],
        stalled_attempts=int(body["stalled_attempts"]),
        best_metric=body["best_metric"],
        best_mode=str(body["best_mode"]),
        spared_epochs=int(body["spared_epochs"]),
    )


def _checkpoint(item: Mapping[str, Any]) -> Checkpoint:
    reuses = tuple(_object_name(name) for name in item.get("reuses", ()))
    manifest, metrics = _object_name(item["manifest"]), _metrics(item["metrics"])
    return Checkpoint(**{**item, "manifest": manifest, "metrics": metrics, "reuses": reuses})


def _object_name(name: Any) -> str:
    if not isinstance(name, str) or not is_object_name(name):
        raise ValueError(f"{name!r:.80} is no object name")
    return name


def _metrics(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}


def _out(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by what float() reads back."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {key: _out(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_out(item) for item in value]
    return value
