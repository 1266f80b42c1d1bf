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
    Number,
    Seconds,
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
    """The process that may write to the run directory. `epoch` grows by one with every owner; `id` is its own nonce."""

    epoch: Epoch
    id: str
    flow_run_id: str | None
    host: str
    machine_id: str
    boot_id: str
    pid_namespace: str
    pid: _Pid
    process_start: str
    taken_at: str
    released: bool = False


@declared
@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint, as the ledger holds it.

    `manifest` names its manifest and `manifest_digest` (hex) is its identity; `parent` is the identity of the
    checkpoint from which training continued to this one; `n` is the number of the ledger entry that committed it;
    `cost_s` is how many seconds training had waited for the save before the commit; `epochs` counts completed epochs,
    if the loop reported them. `abandoned`: training went back to an older checkpoint, and this checkpoint is not on the
    new line. `reuses` has the folded names of objects of older attempts that this checkpoint reuses. `interim`: saved
    because a batch or the process ended, not because an interval had passed; retention does not count it among the
    newest checkpoints. `why`: "signal", "batch" (it ended) or "call" (of `save()`, also at the end of training); "" if
    it was due by step, epoch or time.
    """

    step: Step
    attempt: str
    manifest: str
    manifest_digest: str
    parent: str | None
    n: Annotated[int, Meta(ge=-1, le=MAX_LEDGER_NUMBER)]
    metrics: Mapping[str, float]
    size_bytes: Count
    objects: Count
    saved_at: str
    cost_s: Seconds
    epochs: Count | None = None
    abandoned: bool = False
    reuses: tuple[str, ...] = ()
    interim: bool = False
    why: str = ""

    @property
    def saved_at_s(self) -> float | None:
        """`saved_at` in seconds since 1970; None if it is not a time."""
        return seconds_of(self.saved_at)


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A reader's claim that a checkpoint stays until `expires_at` (seconds since 1970)."""

    id: str
    manifest_digest: str
    holder: str
    expires_at: Number


@declared
@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics that one suite measured on one checkpoint; `table` names the Arrow object with its rows."""

    manifest_digest: str
    step: Step
    suite: str
    metrics: Mapping[str, float]
    table: str
    table_digest: str
    evaluated_at: str


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The checkpoint of another run from which this run was forked.

    `url`, `run_key`, `step` and `manifest_digest` describe the source. `identity` is the identity of the copy in this
    run; the copy's manifest has this run's key. `set` holds the parameters that the fork changed; `params` holds the
    source's parameters (None: the source has none).
    """

    url: str
    run_key: str
    step: Step
    manifest_digest: str
    identity: str
    set: Mapping[str, Any]
    params: Mapping[str, Any] | None


@declared
@dataclass(frozen=True, kw_only=True)
class Rollback:
    """The last rollback: its checkpoint, and the batches that training skips because of it.

    `skip`: the first and the last step that had trained on these batches. `pending`: no commit after the rollback has a
    position in the data beyond these batches. `by`: the flow run that requested the rollback.
    """

    identity: str
    step: Step
    skip: tuple[Step, Step] | None = None
    pending: bool = True
    by: str | None = None

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
    """The result of a check of the run on a host; `fault` is the first thing that was wrong, None: all was good.

    `kind` is one of CHECKS. "drill": fresh processes restored a checkpoint of `step` into a program, one for each of
    the `ranks` that had saved it; `start_s`: seconds until the program was built, `restore_s`: seconds of the restore.
    "verify": every byte of the `checkpoints` was read; `damaged_records` counts other damaged objects, such as ledger
    entries.
    """

    kind: str
    at: str
    host: str
    fault: str | None
    figures: Mapping[str, Seconds]


# The figures of each kind of check: whole numbers, then seconds, which a failed check may lack.
CHECKS = {
    "drill": (("step", "ranks"), ("start_s", "restore_s")),
    "verify": (("checkpoints", "damaged_checkpoints", "damaged_records"), ()),
}


def read_checkpoint(item: Mapping[str, Any], *, uncommitted: bool = False) -> Checkpoint:
    """Read a checkpoint; its manifest's name must have its step and attempt. `uncommitted`: `n` may be -1."""
    # `why` is missing in checkpoints from before December 2026.
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
    """Read an evaluation from JSON data; its table's name must have its step and suite."""
    one = typed({**item, "metrics": _metrics(item["metrics"])}, Evaluation)
    if not is_evaluation(one.table, one.step, one.suite):
        raise ValueError(f"{one.table!r:.80} is not a table of step {one.step} and the suite {one.suite!r:.80}")
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
    """The mark of a complete snapshot: the checkpoint that its commit creates or would create.

    When the snapshot was taken, `newest` was the identity of the newest committed checkpoint, and `in_flight` the
    identity of the previous snapshot if its save was under way or had failed. A process may restore the snapshot while
    one of the two is the newest in the ledger, or if the snapshot is committed. `checkpoint.n` is -1: only the ledger
    knows whether the checkpoint is committed. `compared`: digests that many ranks compare before they restore the
    snapshot.
    """

    run_key: str
    checkpoint: Checkpoint
    newest: str | None
    in_flight: str | None
    compared: Compared = field(default_factory=dict)

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
