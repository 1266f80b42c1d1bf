"""Verify a run, and plan a prune: find damage and orphans, and checkpoints that the policy does not keep."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise
from typing import TypeVar

from ckpt_tasks.errors import CkptError, IntegrityError, NoGoodCheckpointError, ObjectNotFoundError, StoreError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import (
    FORMAT_NAME,
    LEDGER_PREFIX,
    is_group_file,
    ledger_name,
    parse_attempt,
    parse_ledger_name,
)
from ckpt_tasks.format.layout.image import parse_header
from ckpt_tasks.format.layout.index import IndexRow
from ckpt_tasks.format.layout.steps import MAX_STEPS_BYTES
from ckpt_tasks.format.ledger import State, lineage
from ckpt_tasks.format.manifest import ObjectRecord
from ckpt_tasks.format.policy.retention import RetentionPolicy, Verdict, plan_retention
from ckpt_tasks.format.records import Checkpoint, RunCheck
from ckpt_tasks.process import in_threads
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.timeline import moment
from ckpt_tasks.run.opening import (
    READ_BYTES,
    by_object,
    changes_in,
    check_header,
    merge_runs,
    open_checkpoint,
    read_whole,
)
from ckpt_tasks.storage.port import Store
from ckpt_tasks.system import now_iso, system

_FAR_REQUESTS = 8
UNREADABLE = "it cannot be read now"  # The fault of a checkpoint whose store does not answer begins so.
_LONGEST_FAULT = 2000

_T = TypeVar("_T")


@dataclass(frozen=True)
class RunFaults:
    """The faults in a run directory: by checkpoint, other damaged objects, orphans; `unread` counts ledger entries."""

    checkpoints: Mapping[str, tuple[Checkpoint, tuple[str, ...]]]
    damaged: tuple[str, ...]
    orphans: tuple[str, ...]
    unread: int = 0

    @property
    def good(self) -> bool:
        """Whether every checkpoint and the ledger verify; orphans do not count."""
        return not self.damaged and not any(faults for _, faults in self.checkpoints.values())


def verify_checkpoint(store: Store, checkpoint: Checkpoint, check: Callable[[], None] | None = None) -> list[str]:
    """Read every byte of a checkpoint and list all faults: digests, sizes, coverage, headers against the index.

    `check` is called before every read; its exception stops the verification. Raises StoreError if the store does not
    answer, which does not mean damage.
    """
    check = check or (lambda: None)
    try:
        opened = open_checkpoint(store, checkpoint)
        opened.check_trees()
    except (IntegrityError, ObjectNotFoundError) as error:
        return [str(error)]
    rows = by_object(opened.rows)

    def faults_of(record: ObjectRecord) -> list[str]:
        """Check an object's size and header; read a small object on a server whole, since that is one request."""
        check()
        here = rows.get(record.name, [])
        whole = not store.near and record.size_bytes <= READ_BYTES
        try:
            data = read_whole(store, record) if whole else check_header(store, record)
            wrong = _header_faults(data[: record.digested_bytes], record, here)
        except (IntegrityError, ObjectNotFoundError) as error:
            rows.pop(record.name, None)
            return [str(error)]
        if whole:
            rows.pop(record.name, None)
            for run in merge_runs(here):
                wrong += changes_in(run, memoryview(data)[run[0].begin : run[-1].end])
        return wrong

    faults = _each(store, faults_of, opened.manifest.objects)
    runs = [run for here in rows.values() for run in merge_runs(here)]
    return [*faults, *_run_faults(store, runs, check)]


def _each(store: Store, faults_of: Callable[[_T], list[str]], items: Iterable[_T]) -> list[str]:
    """Return the faults of all items in order, checking several items at a time on a server."""
    threads = 1 if store.near else _FAR_REQUESTS
    return [*chain.from_iterable(in_threads(faults_of, items, threads, "ckpt-verify"))]


def _run_faults(store: Store, runs: Iterable[list[IndexRow]], check: Callable[[], None]) -> list[str]:
    """Read and digest regions, several reads at a time from a server; stop reading an object at its first error."""
    buffers, given_up = system().local(), set[str]()

    def faults_of(run: list[IndexRow]) -> list[str]:
        check()
        name, begin, end = run[0].object, run[0].begin, run[-1].end
        if name in given_up:
            return []
        if not hasattr(buffers, "one"):  # Reuse the buffers: new memory would cost more than the reads.
            buffers.one = memoryview(mmap.mmap(-1, READ_BYTES))
        try:
            store.read(name, begin, buffers.one[: end - begin])
        except (IntegrityError, ObjectNotFoundError) as error:
            given_up.add(name)
            return [str(error)]
        return changes_in(run, buffers.one[: end - begin])

    return _each(store, faults_of, runs)


def verify_run_directory(history: History, *, whole: bool | None = None) -> RunFaults:
    """Verify every live checkpoint, unless it is pruned meanwhile; look for damaged ledger entries and orphans.

    `whole`: read every ledger entry and its table of steps. Otherwise read only the entries on which live checkpoints
    depend, so that the number of requests grows only with the live checkpoints. None: read all, except on a server.
    """
    head = history.head()
    results = {c.manifest_digest: (c, _faults(history.store, c)) for c in lineage(head.state.live)}
    if any(faults for _, faults in results.values()):
        live = history.head().state.by_identity
        results = {digest: result for digest, result in results.items() if digest in live or not result[1]}
    damaged, unread = record_faults(history, history.store.near if whole is None else whole)
    return RunFaults(results, tuple(damaged), tuple(orphans(history.store, head.state)), unread)


def record_verification(history: History, faults: RunFaults) -> str:
    """Record the result of verifying the whole run; return why it could not be recorded, or "".

    Any process may do this: it does not disturb the owner. If the newest ledger entry is damaged, nothing is written: a
    new entry would hide the damage.
    """
    wrong = [listed[0] for _, listed in faults.checkpoints.values() if listed]
    try:
        head = history.head()
        if head.entry is None or head.damaged:
            return "its newest ledger entry is damaged or missing"
        counts = (len(faults.checkpoints), len(wrong), len(faults.damaged))
        check = RunCheck(
            kind="verify",
            at=now_iso(),
            host=system().host(),
            fault=next((fault[:_LONGEST_FAULT] for fault in (*wrong, *faults.damaged)), None),
            figures=dict(zip(("checkpoints", "damaged_checkpoints", "damaged_records"), counts, strict=True)),
        )
        record_check(history, check)
    except CkptError as error:  # Return the result even if it cannot be recorded.
        return error.message
    return ""


def record_check(history: History, check: RunCheck) -> None:
    """Record the result of a check in the ledger; any process may do this. Raises what `History.append` raises."""
    event = {**asdict(check), "kind": "note", "note": check.kind}
    history.append(event, lambda state, n: state.with_check(check), owner=None)


def _faults(store: Store, checkpoint: Checkpoint) -> tuple[str, ...]:
    try:
        return tuple(verify_checkpoint(store, checkpoint))
    except StoreError as error:  # Verify the other checkpoints anyway.
        return (f"{UNREADABLE}: {error}",)


def record_faults(history: History, whole: bool) -> tuple[list[str], int]:
    """List faults in ledger entries, format.json and tables; count the entries that were not read."""
    head, store = history.head(), history.store
    faults = [] if history.check(None) is not None else [f"{FORMAT_NAME}: its bytes are not what was written"]
    numbers = sorted({n for name in store.names(LEDGER_PREFIX) if (n := parse_ledger_name(name)) is not None})
    newest = head.entry.n if head.entry else -1  # All entries above it are damaged.
    rests_on = {checkpoint.n for checkpoint in head.state.live}
    wanted = [n for n in numbers if whole or n >= newest or n in rests_on]

    def read(n: int) -> tuple[list[str], list[tuple[str, str]]]:
        try:
            known = moment(history.read_entry(n)[0])
        except (IntegrityError, StoreError) as error:
            return [f"{ledger_name(n)}: {error.message}"], []
        return [], [known.steps] if known is not None and known.steps is not None else []

    def changed(table: tuple[str, str]) -> list[str]:
        name, digest = table
        try:
            good = digest_hex(store.get(name, MAX_STEPS_BYTES)) == digest
        except (IntegrityError, StoreError) as error:
            return [f"{name}: {error.message}"]
        return [] if good else [f"{name}: its bytes have changed"]

    entries = in_threads(read, wanted, 1 if store.near else _FAR_REQUESTS, "ckpt-verify")
    faults += chain.from_iterable(wrong for wrong, _ in entries)
    for before, after in pairwise([-1, *numbers]):
        if after > before + 1:  # Numbers are dense, unless a foreign program added a high one.
            more = f" to {ledger_name(after - 1)}" if after > before + 2 else ""
            faults.append(f"{ledger_name(before + 1)}{more}: no such object")
    tables = [table for _, named in entries for table in named]
    tables += [(evaluation.table, evaluation.table_digest) for evaluation in head.state.evaluations]
    faults += _each(store, changed, tables)
    return faults, len(numbers) - len(wanted)


def orphans(store: Store, state: State) -> list[str]:
    """List objects of attempts that are neither live nor reused, except the current owner's and foreign names."""
    epoch = state.owner.epoch if state.owner else 0
    names = []
    for name in store.names(""):
        attempt = parse_attempt(name)
        if attempt is None or state.keeps(name) or attempt.epoch <= state.spared_epochs:
            continue
        if attempt.epoch < epoch or (attempt.epoch == epoch and state.owner is not None and state.owner.released):
            names.append(name)
    return names


def plan_prune(
    state: State,
    policy: RetentionPolicy,
    *,
    verified: frozenset[str] = frozenset(),
    restored_from: str | None = None,
) -> list[Verdict]:
    """Return a verdict on each live checkpoint by the policy; reads and changes nothing.

    `verified`: the identities of checkpoints that are known to be good. `restored_from`: the identity of the checkpoint
    from which training continues.
    """
    now = system().time()
    return plan_retention(
        lineage(state.live),
        policy,
        pins=state.pins,
        leased={lease.manifest_digest: lease.holder for lease in state.leases if lease.expires_at > now},
        verified=verified,
        restored_from=restored_from,
        metrics=state.evaluated,
    )


def plan_removal(
    state: State, digest: str, verified: frozenset[str], restored_from: str | None = None
) -> list[Verdict]:
    """Return a verdict on each live checkpoint, for a person who removes the checkpoint with `digest`; all others stay.

    The newest, the newest of the `verified` ones, `restored_from`, pinned and leased checkpoints cannot be removed.
    """
    everything = RetentionPolicy(max_num_checkpoints=0)
    verdicts = plan_prune(state, everything, verified=verified, restored_from=restored_from)
    return [
        replace(v, keep=True, reasons=("another one is meant",))
        if v.manifest_digest != digest
        else v
        if v.keep
        else replace(v, reasons=("by hand",))
        for v in verdicts
    ]


def newest_good(store: Store, state: State) -> Checkpoint:
    """Read checkpoints, newest first, and return the first that verifies; raise NoGoodCheckpointError if none does."""
    reasons = []
    for checkpoint in lineage(state.live):
        faults = verify_checkpoint(store, checkpoint)
        if not faults:
            return checkpoint
        reasons.append((checkpoint.step, faults[0]))
    raise NoGoodCheckpointError(
        "no checkpoint verifies, so none may go", reasons=tuple(reasons), hint="`ckpt verify` lists the damage."
    )


def missing_metric(state: State, policy: RetentionPolicy) -> str | None:
    """Return a message if the policy keeps the best by a metric that no checkpoint has, otherwise None."""
    if not policy.keep_best or not state.live or policy.best_metric in state.metric_names:
        return None
    known = f"only {', '.join(sorted(state.metric_names))}" if state.metric_names else "there is none at all"
    return f"no checkpoint has the metric {policy.best_metric!r}: {known}"


def _header_faults(header: bytes, record: ObjectRecord, rows: list[IndexRow]) -> list[str]:
    if is_group_file(record.name):
        return []  # The file has no header: the index covers all of its bytes.
    try:
        entries = parse_header(header, record.size_bytes)
    except IntegrityError as error:
        which = f", tensor {error.key!r:.80}" if error.key else ""
        raise IntegrityError(f"{error.message}{which}", key=record.name) from error
    spans: dict[str, tuple[int, int]] = {}
    for row in rows:
        begin, end = spans.get(row.key, (row.begin, row.end))
        spans[row.key] = (min(begin, row.begin), max(end, row.end))
    return [
        f"{key}: the header of {record.name} places it at {entries[key][2:] if key in entries else 'nowhere'}"
        for key, span in spans.items()
        if key not in entries or entries[key][2:] != span
    ]
