"""The records of a ledger: owners, checkpoints, leases, evaluations and others.

A matching digest proves that the bytes are unchanged, not that they make sense. So every `read_…` checks each field's
type and bounds: later code never computes with a text, or makes a path of a foreign name. Every `read_…` raises one of
`parsing.MALFORMED` if a field is missing or wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

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
    check_version,
    finite,
    flag,
    optional,
    parse_json,
    seconds_of,
    text,
    well_formed,
    whole,
)

_MAX_PID = 2**31 - 1
_MAX_S = 1e9  # No duration is longer (30 years).


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that may write to the run directory. `epoch` grows by one with every owner; `id` is its own nonce."""

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
    """A committed checkpoint, as the ledger holds it.

    `manifest` names its manifest and `manifest_digest` (hex) is its identity; `parent` is the identity of the
    checkpoint from which training continued to this one; `n` is the number of the ledger entry that committed it;
    `cost_s` is how many seconds training had waited for the save before the commit; `epochs` counts completed epochs,
    if the loop reported them. `abandoned`: training went back to an older checkpoint, and this checkpoint is not on the
    new line. `reuses` has the folded names of objects of older attempts that this checkpoint reuses. `interim`: saved
    because a batch or the process ended, not because an interval had passed; retention does not count it among the
    newest checkpoints.
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
    interim: bool = False

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
    expires_at: float


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics that one suite measured on one checkpoint; `table` names the Arrow object with its rows."""

    manifest_digest: str
    step: int
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
    step: int
    manifest_digest: str
    identity: str
    set: Mapping[str, Any]
    params: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """The last rollback: its checkpoint, and the batches that training skips because of it.

    `skip`: the first and the last step that had trained on these batches. `pending`: no commit after the rollback has a
    position in the data beyond these batches. `by`: the flow run that requested the rollback.
    """

    identity: str
    step: int
    skip: tuple[int, int] | None = None
    pending: bool = True
    by: str | None = None

    @property
    def skips_at(self) -> int:
        """The step after which training skips the batches."""
        return self.step if self.skip is None else self.skip[0] - 1

    def after(self, step: int) -> Rollback:
        """Return the rollback after a commit of `step`; it is no longer pending if `step` reaches `skips_at`."""
        return replace(self, pending=self.pending and step < self.skips_at)


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
    figures: Mapping[str, float]


# The figures of each kind of check: whole numbers, then seconds, which a failed check may lack.
CHECKS = {
    "drill": (("step", "ranks"), ("start_s", "restore_s")),
    "verify": (("checkpoints", "damaged_checkpoints", "damaged_records"), ()),
}


def read_owner(item: Mapping[str, Any]) -> Owner:
    """Read an owner from JSON data."""
    texts = ("id", "host", "machine_id", "boot_id", "pid_namespace", "process_start", "taken_at")
    checked = {
        "epoch": whole(item["epoch"], MAX_EPOCH),
        "flow_run_id": optional(item["flow_run_id"]),
        "pid": whole(item["pid"], _MAX_PID),  # The number becomes part of a path in /proc.
        "released": flag(item["released"]),
    }
    return Owner(**{**item, **{name: text(item[name]) for name in texts}, **checked})


def read_checkpoint(item: Mapping[str, Any], *, uncommitted: bool = False) -> Checkpoint:
    """Read a checkpoint; its manifest's name must have its step and attempt. `uncommitted`: `n` may be -1."""
    checked = {
        "step": whole(item["step"], MAX_STEP),
        "manifest_digest": text(item["manifest_digest"]),
        "parent": optional(item["parent"]),
        "n": -1 if uncommitted and item["n"] == -1 else whole(item["n"], MAX_LEDGER_NUMBER),
        "metrics": _metrics(item["metrics"]),
        "size_bytes": whole(item["size_bytes"]),
        "objects": whole(item["objects"]),
        "saved_at": text(item["saved_at"]),
        "cost_s": finite(item["cost_s"], most=_MAX_S),
        "epochs": _epochs(item["epochs"]),
        "abandoned": flag(item["abandoned"]),
        "reuses": _reuses(item["reuses"]),
        "interim": flag(item["interim"]),
    }
    attempt = parse_attempt(text(item["manifest"]))
    if (
        attempt is None
        or (attempt.step, attempt.name) != (checked["step"], item["attempt"])
        or item["manifest"] != attempt_prefix(attempt) + MANIFEST_NAME
    ):
        raise ValueError(f"{item['manifest']!r:.80} is not a manifest of this step and attempt")
    return Checkpoint(**{**item, **checked})


def checkpoint_item(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint as JSON data for `read_checkpoint`, with metrics as texts, since a metric may be NaN."""
    return {**asdict(checkpoint), "metrics": {name: repr(value) for name, value in checkpoint.metrics.items()}}


def read_lease(item: Mapping[str, Any]) -> Lease:
    """Read a lease from JSON data."""
    texts = {name: text(item[name]) for name in ("id", "manifest_digest", "holder")}
    return Lease(**{**item, **texts, "expires_at": finite(item["expires_at"])})


def read_evaluation(item: Mapping[str, Any]) -> Evaluation:
    """Read an evaluation from JSON data."""
    texts = {name: text(item[name]) for name in ("manifest_digest", "suite", "table", "table_digest", "evaluated_at")}
    step = whole(item["step"], MAX_STEP)
    if not is_evaluation(texts["table"], step, texts["suite"]):
        raise ValueError(f"{texts['table']!r:.80} is not a table of step {step} and the suite {texts['suite']!r:.80}")
    return Evaluation(**{**item, **texts, "step": step, "metrics": _metrics(item["metrics"])})


def read_check(item: Mapping[str, Any]) -> RunCheck:
    """Read the result of a check from JSON data."""
    counts, seconds = CHECKS[item["kind"]]
    figures = item["figures"]
    return RunCheck(
        kind=item["kind"],
        at=text(item["at"]),
        host=text(item["host"]),
        fault=optional(item["fault"]),
        figures={
            **{name: whole(figures[name]) for name in counts},
            **{name: finite(figures[name], most=_MAX_S) for name in seconds if name in figures},
        },
    )


def read_origin(item: Mapping[str, Any] | None) -> Origin | None:
    """Read the origin of a fork; None if the run was not forked."""
    if item is None:
        return None
    return Origin(
        url=text(item["url"]),
        run_key=text(item["run_key"]),
        step=whole(item["step"], MAX_STEP),
        manifest_digest=text(item["manifest_digest"]),
        identity=text(item["identity"]),
        set=read_params(item["set"]) or {},
        params=read_params(item["params"]),
    )


def read_rollback(item: Mapping[str, Any] | None) -> Rollback | None:
    """Read the last rollback; None if there was none."""
    if item is None:
        return None
    skip = item["skip"]
    if skip is not None:
        first, last = (whole(step, MAX_STEP) for step in skip)
        skip = first, last
    return Rollback(
        identity=text(item["identity"]),
        step=whole(item["step"], MAX_STEP),
        skip=skip,
        pending=flag(item["pending"]),
        by=optional(item["by"]),
    )


def read_params(item: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Read the parameters of a program from JSON data; None if the run has none."""
    if item is not None and not isinstance(item, dict):
        raise ValueError(f"{item!r:.80} are no parameters")
    return item


def attempt_objects(names: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of objects to delete; raise ValueError if a name is not that of an attempt's object."""
    return _folded(names, is_attempt_object, "an object", MAX_RETIRED)


def _reuses(names: Iterable[Any]) -> tuple[str, ...]:
    return _folded(names, is_shard, "a shard", MAX_FOLDED)


def _folded(names: Iterable[Any], is_one: Callable[[str], bool], what: str, most: int) -> tuple[str, ...]:
    checked = tuple(names)
    for name in checked:
        if type(name) is not str or not (is_one(name) or is_folded(name)):
            raise ValueError(f"{name!r:.80} is not {what} of an attempt")
    if folded_count(checked) > most:
        raise ValueError(f"more than {most} objects")
    return checked


def _epochs(value: Any) -> Any:
    if value is not None:
        finite(value)  # A loop may report a fraction of an epoch.
    return value


def _metrics(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}


SEAL_NAME = "seal.json"
Compared = Mapping[str, Mapping[str, str]]  # Digests by name that must be equal in all ranks.
MAX_SEAL_BYTES = 8 << 20


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
            return cls(
                run_key=text(body.pop("run_key")),
                checkpoint=read_checkpoint(body.pop("checkpoint"), uncommitted=True),
                newest=optional(body.pop("newest")),
                in_flight=optional(body.pop("in_flight")),
                **body,  # An unknown field is an error.
            )
