"""The records of a ledger: owners, checkpoints, leases, evaluations and others.

A matching digest proves that the bytes are unchanged, not that they make sense. So every field is declared with its
type and bounds, which `parsing.typed` checks, and `read_…` also checks what fields say together: later code never
computes with a text, or makes a path of a foreign name. Both raise one of `parsing.MALFORMED`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from msgspec import Meta, convert

from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.keys import (
    MANIFEST_NAME,
    MAX_EPOCH,
    MAX_FOLDED,
    MAX_LEDGER_NUMBER,
    MAX_RETIRED,
    MAX_STEP,
    attempt_prefix,
    folded_count,
    is_attempt_object,
    is_evaluation,
    is_folded,
    is_shard,
    parse_attempt,
)
from ckpt_tasks.format.parsing import (
    FORMAT_VERSION,
    Count,
    Digest,
    Name,
    Number,
    Seconds,
    Time,
    check_version,
    declared,
    parse_json,
    seconds_of,
    typed,
    well_formed,
)

Epoch = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
Step = Annotated[int, Meta(ge=0, le=MAX_STEP)]
_Pid = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # The number becomes part of a path in /proc.


@declared
@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that may write to the run directory, or the last one. What a system does not tell is ""."""

    epoch: Epoch
    """One more than the last owner's."""
    id: str
    """32 random hex digits."""
    flow_run_id: str | None
    host: str
    machine_id: str
    boot_id: str
    """Changes with every boot of the machine."""
    pid_namespace: str
    """The namespace in which `pid` counts."""
    pid: _Pid
    process_start: str
    """When the process began, in clock ticks since boot."""
    taken_at: Time
    released: bool = False


@declared
@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint, as the ledger holds it. Several live ones may have the same step."""

    step: Step
    attempt: str
    """As in the names of its objects."""
    manifest: Name
    manifest_digest: Digest
    """Of all bytes of the manifest: the identity of the checkpoint."""
    parent: Digest | None
    """Identity of the checkpoint from which training continued to this one; it may have been pruned."""
    n: Annotated[int, Meta(ge=-1, le=MAX_LEDGER_NUMBER)]
    """Number of the ledger entry that committed it; -1 in a seal."""
    metrics: Mapping[str, float]
    size_bytes: Count
    """Of all its objects, index and manifest included."""
    objects: Count
    """How many these are."""
    saved_at: Time
    cost_s: Seconds
    """Seconds that training waited for the snapshot."""
    epochs: Count | None = None
    """Completed epochs, if the loop reported them."""
    abandoned: bool = False
    """Training went back to an older checkpoint, and this one is not on the new line."""
    reuses: tuple[Name, ...] = ()
    """Objects of older attempts that the manifest names; the names are folded."""
    interim: bool = False
    """Saved because a batch or the process ended; retention does not count it among the newest checkpoints."""
    why: str = ""
    """Empty if the save was due; else "signal", "batch" (it ended), or "call" (of `save()`, or the end of training)."""

    @property
    def saved_at_s(self) -> float | None:
        """`saved_at` in seconds since 1970; None if it is not a time."""
        return seconds_of(self.saved_at)


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A reader's claim that a checkpoint stays."""

    id: str
    """16 hex digits."""
    manifest_digest: Digest
    holder: str
    expires_at: Number
    """Seconds since 1970."""


@declared
@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics that one evaluation set measured on one checkpoint."""

    manifest_digest: Digest
    step: Step
    suite: str
    """Name of the evaluation set."""
    metrics: Mapping[str, float]
    table: Name
    """The Arrow file."""
    table_digest: Digest
    evaluated_at: Time


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The checkpoint of another run from which this run was forked."""

    url: str
    run_key: str
    step: Step
    manifest_digest: Digest
    """The checkpoint there."""
    identity: Digest
    """The same checkpoint in this run; its manifest has this run's key."""
    set: Mapping[str, Any]
    """The parameters that the fork changed."""
    params: Mapping[str, Any] | None
    """The parameters of the source."""


@declared
@dataclass(frozen=True, kw_only=True)
class Rollback:
    """The last rollback."""

    identity: Digest
    """The checkpoint to which training goes back."""
    step: Step
    skip: tuple[Step, Step] | None = None
    """The first and the last step that had trained on the batches to skip."""
    pending: bool = True
    """No commit since has a position in the data beyond these batches."""
    by: str | None = None
    """The flow run that requested it."""

    @property
    def skips_at(self) -> int:
        """The step after which training skips the batches."""
        return self.step if self.skip is None else self.skip[0] - 1

    def after(self, step: int) -> Rollback:
        """Return the rollback after a commit of `step`; it is no longer pending if `step` reaches `skips_at`."""
        return replace(self, pending=self.pending and step < self.skips_at)


@declared
@dataclass(frozen=True, kw_only=True)
class RunCheck:
    """The result of a check of the run on a host."""

    kind: str
    """"drill": fresh processes restored a checkpoint into the program. "verify": every byte of the run was read."""
    at: Time
    host: str
    fault: str | None
    """The first thing that was wrong; null if all was good."""
    figures: Mapping[str, Seconds]
    """By name. Of a drill: `step`, `ranks`, and if good `start_s` (until the program was built) and `restore_s`.
    Of a verification: `checkpoints`, `damaged_checkpoints`, and `damaged_records` (other damaged objects).
    """


# The figures of each kind of check: whole numbers, then seconds, which a failed check may lack.
CHECKS = {
    "drill": (("step", "ranks"), ("start_s", "restore_s")),
    "verify": (("checkpoints", "damaged_checkpoints", "damaged_records"), ()),
}


def read_checkpoint(item: Mapping[str, Any], *, uncommitted: bool = False) -> Checkpoint:
    """Read a checkpoint; its manifest's name must have its step and attempt. `uncommitted`: `n` may be -1."""
    # Older checkpoints lack `why`.
    checkpoint = typed({"why": "", **item, "metrics": _metrics(item["metrics"])}, Checkpoint)
    attempt = parse_attempt(checkpoint.manifest)
    if (
        attempt is None
        or (attempt.step, attempt.name) != (checkpoint.step, checkpoint.attempt)
        or checkpoint.manifest != attempt_prefix(attempt) + MANIFEST_NAME
    ):
        raise ValueError(f"{checkpoint.manifest!r:.80} is not a manifest of this step and attempt")
    if checkpoint.n < 0 and not uncommitted:
        raise ValueError("a checkpoint of no ledger entry")
    _check_folded(checkpoint.reuses, is_shard, "a shard", MAX_FOLDED)
    return checkpoint


def checkpoint_item(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint as JSON data for `read_checkpoint`, with metrics as texts, since a metric may be NaN."""
    return {**asdict(checkpoint), "metrics": {name: repr(value) for name, value in checkpoint.metrics.items()}}


def read_evaluation(item: Mapping[str, Any]) -> Evaluation:
    """Read an evaluation from JSON data; its table's name must have its step and evaluation set."""
    one = typed({**item, "metrics": _metrics(item["metrics"])}, Evaluation)
    if not is_evaluation(one.table, one.step, one.suite):
        raise ValueError(
            f"{one.table!r:.80} is not a table of step {one.step} and the evaluation set {one.suite!r:.80}"
        )
    return one


def read_check(item: Mapping[str, Any]) -> RunCheck:
    """Read the result of a check from JSON data, with the figures of its kind."""
    check = typed(item, RunCheck)
    counts, seconds = CHECKS[check.kind]
    figures: dict[str, float] = {name: convert(item["figures"][name], Count) for name in counts}
    return replace(check, figures=figures | {name: check.figures[name] for name in seconds if name in check.figures})


def attempt_objects(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of objects to delete; raise ValueError if a name is not that of an attempt's object."""
    _check_folded(names, is_attempt_object, "an object", MAX_RETIRED)
    return names


def _check_folded(names: tuple[str, ...], is_one: Callable[[str], bool], what: str, most: int) -> None:
    for name in names:
        if not (is_one(name) or is_folded(name)):
            raise ValueError(f"{name!r:.80} is not {what} of an attempt")
    if folded_count(names) > most:
        raise ValueError(f"more than {most} objects")


def _metrics(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}


SEAL_NAME = "seal.json"
Compared = Mapping[str, Mapping[str, str]]  # Digests by name that must be equal in all ranks.
MAX_SEAL_BYTES = 8 << 20


@declared
@dataclass(frozen=True, kw_only=True)
class Seal:
    """The mark of a complete snapshot.

    A process may restore the snapshot if its checkpoint is live, or if the newest live checkpoint is the one that
    `newest` or `in_flight` names.
    """

    run_key: str
    checkpoint: Checkpoint
    """The checkpoint that the commit creates or would create, with its metrics as texts."""
    newest: Digest | None
    """The newest committed checkpoint at that time."""
    in_flight: Digest | None
    """The snapshot in the other slot, if storage did not have that one yet."""
    compared: Compared = field(default_factory=dict)
    """Digests that the ranks compare before they restore the snapshot."""

    def to_bytes(self) -> bytes:
        """Write the seal as JSON with its own digest."""
        body = {**asdict(self), "checkpoint": checkpoint_item(self.checkpoint), "version": FORMAT_VERSION}
        return canonical_json({**body, "digest": digest_hex(canonical_json(body))})

    @classmethod
    def from_bytes(cls, data: bytes) -> Seal:
        """Read a seal; raise IntegrityError if it is damaged, FormatVersionError if a newer version wrote it."""
        with well_formed("the seal of a snapshot"):
            body = parse_json(data)
            digest = body.pop("digest")
            if digest_hex(canonical_json(body)) != digest:
                raise IntegrityError("the seal of a snapshot has changed")
            check_version(body.pop("version"), SEAL_NAME)
            checkpoint = read_checkpoint(body["checkpoint"], uncommitted=True)
            seal = typed({**body, "checkpoint": {**body["checkpoint"], "metrics": {}}}, cls)
            return replace(seal, checkpoint=checkpoint)
