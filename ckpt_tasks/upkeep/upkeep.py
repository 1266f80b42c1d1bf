"""Verify and prune: find what is damaged or orphaned, and what the policy no longer keeps.

A save writes bottom-up, a prune removes top-down: first a ledger entry says which checkpoints are gone and which
objects are given up, orphans included, so that no later commit names one; then the objects are deleted, the manifest
first. A process that stalls here and is fenced may still delete what it gave up at any later time. After a crash in
between the names are in `retired`, and the next owner deletes the objects.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from ckpt_tasks.errors import CkptError, IntegrityError, NoGoodCheckpointError, ObjectNotFoundError, StoreError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.folding import MAX_RETIRED, fold, folded_count, unfold
from ckpt_tasks.format.image import parse_header
from ckpt_tasks.format.index import IndexRow
from ckpt_tasks.format.keys import (
    FORMAT_NAME,
    LEDGER_PREFIX,
    MANIFEST_NAME,
    attempt_prefix,
    ledger_name,
    parse_attempt,
    parse_ledger_name,
)
from ckpt_tasks.format.ledger import State, lineage
from ckpt_tasks.format.manifest import MAX_MANIFEST_BYTES, Manifest, ObjectRecord
from ckpt_tasks.format.records import Checkpoint, Owner
from ckpt_tasks.format.steps import MAX_STEPS_BYTES
from ckpt_tasks.ledger.history import History
from ckpt_tasks.ledger.timeline import moment
from ckpt_tasks.policy.retention import RetentionPolicy, Verdict, plan_retention
from ckpt_tasks.reading.opening import READ_BYTES, by_object, check_header, merge_runs, open_checkpoint, verify_run
from ckpt_tasks.state.processes import in_threads
from ckpt_tasks.storage.port import Store
from ckpt_tasks.system import system

__all__ = [
    "Retirement",
    "RunFaults",
    "delete_retired",
    "missing_metric",
    "newest_good",
    "orphans",
    "plan_prune",
    "plan_removal",
    "retire",
    "verify_checkpoint",
    "verify_run_directory",
]

_FAR_REQUESTS = 8


@dataclass(frozen=True)
class RunFaults:
    """Faults in a run directory: by checkpoint, other damaged objects, and orphans."""

    checkpoints: Mapping[str, tuple[Checkpoint, tuple[str, ...]]]
    damaged: tuple[str, ...]
    orphans: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether every checkpoint and the ledger verify; orphans are not a fault."""
        return not self.damaged and not any(faults for _, faults in self.checkpoints.values())


def verify_checkpoint(store: Store, checkpoint: Checkpoint, check: Callable[[], None] | None = None) -> list[str]:
    """Read every byte of a checkpoint and list what is wrong: digests, sizes, coverage, headers against the index.

    `check` is called before every read; what it raises stops the verification. Raises StoreError if the store does not
    answer, which does not mean damage.
    """
    check = check or (lambda: None)
    try:
        opened = open_checkpoint(store, checkpoint)
        opened.check_trees()
    except (IntegrityError, ObjectNotFoundError) as error:
        return [str(error)]
    faults: list[str] = []
    rows = by_object(opened.rows)
    for record in opened.manifest.objects:
        check()
        try:
            check_header(store, record)
            faults += _header_faults(store, record, rows.get(record.name, []))
        except (IntegrityError, ObjectNotFoundError) as error:
            faults.append(str(error))
            rows.pop(record.name, None)
    runs = [run for here in rows.values() for run in merge_runs(here)]
    return [*faults, *_run_faults(store, runs, check)]


def _run_faults(store: Store, runs: Iterable[list[IndexRow]], check: Callable[[], None]) -> list[str]:
    """Read and digest runs, several at a time from a remote store; stop reading an object at its first error."""
    buffers, given_up = system().local(), set[str]()

    def faults_of(run: list[IndexRow]) -> list[str]:
        check()
        name, begin, end = run[0].object, run[0].begin, run[-1].end
        if name in given_up:
            return []
        if not hasattr(buffers, "one"):  # reused: new memory costs more than the reads
            buffers.one = memoryview(mmap.mmap(-1, READ_BYTES))
        try:
            store.read(name, begin, buffers.one[: end - begin])
        except (IntegrityError, ObjectNotFoundError) as error:
            given_up.add(name)
            return [str(error)]
        return verify_run(run, buffers.one[: end - begin])

    if store.near:
        return [fault for run in runs for fault in faults_of(run)]
    return [fault for faults in in_threads(faults_of, runs, _FAR_REQUESTS, "ckpt-verify") for fault in faults]


def verify_run_directory(history: History) -> RunFaults:
    """Verify every live checkpoint (not one that is pruned meanwhile); look for damaged ledger entries and orphans."""
    head = history.head()
    results = {c.manifest_digest: (c, _faults(history.store, c)) for c in lineage(head.state.live)}
    if any(faults for _, faults in results.values()):
        live = {c.manifest_digest for c in history.head().state.live}
        results = {digest: result for digest, result in results.items() if digest in live or not result[1]}
    return RunFaults(results, tuple(record_faults(history)), tuple(orphans(history.store, head.state)))


def _faults(store: Store, checkpoint: Checkpoint) -> tuple[str, ...]:
    try:
        return tuple(verify_checkpoint(store, checkpoint))
    except StoreError as error:  # verify the others anyway
        return (f"it cannot be read now: {error}",)


def record_faults(history: History) -> list[str]:
    """List faults outside of the checkpoints: in ledger entries, also old ones, format.json and evaluations."""
    head = history.head()
    faults = [] if history.check(None) is not None else [f"{FORMAT_NAME}: its bytes are not what was written"]
    numbers = {n for name in history.store.names(LEDGER_PREFIX) if (n := parse_ledger_name(name)) is not None}
    tables: list[tuple[str, str]] = []
    for n in sorted(numbers):
        try:
            known = moment(history.read_entry(n)[0])
            tables += [known.steps] if known is not None and known.steps is not None else []
        except (IntegrityError, StoreError) as error:
            faults.append(f"{ledger_name(n)}: {error.message}")
    for before, after in pairwise([-1, *sorted(numbers)]):
        if after > before + 1:  # numbers are dense, unless somebody has added a name with a high one
            more = f" to {ledger_name(after - 1)}" if after > before + 2 else ""
            faults.append(f"{ledger_name(before + 1)}{more}: no such object")
    tables += [(evaluation.table, evaluation.table_digest) for evaluation in head.state.evaluations]
    for name, digest in tables:
        try:
            if digest_hex(history.store.get(name, MAX_STEPS_BYTES)) != digest:
                faults.append(f"{name}: its bytes have changed")
        except (IntegrityError, StoreError) as error:
            faults.append(f"{name}: {error.message}")
    return faults


def orphans(store: Store, state: State) -> list[str]:
    """List objects of attempts that are not live nor reused; without those of the present owner, and foreign names."""
    epoch = state.owner.epoch if state.owner else 0
    names = []
    for name in store.names(""):
        attempt = parse_attempt(name)
        if attempt is None or state.keeps(name) or attempt.epoch <= state.spared_epochs:
            continue
        if attempt.epoch < epoch or (attempt.epoch == epoch and state.owner is not None and state.owner.released):
            names.append(name)
    return names


def _reused_by_spared(store: Store, state: State) -> frozenset[str]:
    """Return the objects reused by checkpoints that only a damaged ledger entry may have listed."""
    reused: set[str] = set()
    for name in store.names("") if state.spared_epochs else ():
        attempt = parse_attempt(name)
        if attempt is None or not name.endswith(f"/{MANIFEST_NAME}") or state.keeps(name):
            continue
        if attempt.epoch <= state.spared_epochs:
            with suppress(IntegrityError, ObjectNotFoundError):  # without its manifest the checkpoint is lost anyway
                data = store.get(name, MAX_MANIFEST_BYTES)
                reused |= {
                    record.name for record in Manifest.from_bytes(data, digest=digest_hex(data), name=name).objects
                }
    return frozenset(reused)


def plan_prune(
    state: State,
    policy: RetentionPolicy,
    *,
    verified: frozenset[str] = frozenset(),
    restored_from: str | None = None,
) -> list[Verdict]:
    """Return a verdict on each live checkpoint by the policy; reads and changes nothing.

    `verified` are digests that are known to be good; `restored_from` is that of the checkpoint in use by training.
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
    """Return a verdict on each live checkpoint if a person removes one (`digest`); all others stay.

    The newest, the newest of the `verified` ones, pinned and leased checkpoints cannot be removed.
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
    """Return a message if the policy keeps the best by a metric that no checkpoint has; None otherwise."""
    if not policy.keep_best or not state.live or policy.best_metric in state.metric_names:
        return None
    known = ", ".join(sorted(state.metric_names)) or "none at all"
    return f"no checkpoint has the metric {policy.best_metric!r}: there is {known}"


class Retirement:
    """What one ledger entry removes from a run: the checkpoints that `plan` removes from `state`, and their objects.

    Making one lists these objects, unless `named` has them. `unnamed` objects, which no checkpoint names, are given up
    with them. `deleted` names objects that were given up before and are deleted by now. An entry lists at most
    `MAX_RETIRED` objects that are given up and not deleted: the oldest checkpoints that fit go, the others later.
    """

    def __init__(
        self,
        store: Store,
        state: State,
        plan: Callable[[State], Iterable[Verdict]],
        deleted: frozenset[str],
        unnamed: Sequence[str] = (),
        *,
        named: Mapping[str, Sequence[str]] | None = None,
    ):
        self.deleted = deleted
        self.given_up: tuple[str, ...] = ()
        going = _going(plan(state))
        self._plan = plan
        named = named or {}
        objects = {c.manifest_digest: _objects_of(store, c, named) for c in state.live if c.manifest_digest in going}
        self._unnamed = unnamed
        fitting, _ = _fitting(objects, unnamed, self._room(state))
        self._objects = {digest: names for digest, names in objects.items() if digest in fitting}  # oldest first
        self._spared = _reused_by_spared(store, state) if going or unnamed else frozenset()

    @property
    def checkpoints(self) -> list[str]:
        """The identities of the checkpoints that the plan removes."""
        return sorted(self._objects)

    def apply(self, state: State) -> State:
        """Return the state after the entry; set `given_up` to the objects that may be deleted then, manifests first.

        A checkpoint that has been leased, pinned or evaluated meanwhile, so that the plan now keeps it, stays.
        """
        gone = _going(self._plan(state)) if self._objects else frozenset()
        objects = {digest: names for digest, names in self._objects.items() if digest in gone}
        fitting, names = _fitting(objects, self._unnamed, self._room(state))
        keeps = state.retire(fitting, (), self.deleted).keeps
        self.given_up = tuple(name for name in unfold(names) if not keeps(name) and name not in self._spared)
        return state.retire(fitting, self.given_up, self.deleted)

    def _room(self, state: State) -> int:
        """Return how many more objects an entry can give up."""
        return MAX_RETIRED - folded_count(state.without_deleted(self.deleted).retired)


def _fitting(
    objects: Mapping[str, Sequence[str]], unnamed: Iterable[str], room: int
) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the first checkpoints whose objects fit into `room`, and the folded names of these and the `unnamed`."""
    digests, named = [*objects], [*unnamed]

    def names(count: int) -> tuple[str, ...]:
        """Fold the names of the first checkpoints: what many of them reuse counts once."""
        return fold(chain(named, chain.from_iterable(objects[digest] for digest in digests[:count])))

    count, folded = len(digests), names(len(digests))  # once, and not for each of thousands of checkpoints
    if folded_count(folded) > room:
        count = max(0, bisect_right(range(count), room, key=lambda count: folded_count(names(count))) - 1)
        folded = names(count)
    return frozenset(digests[:count]), folded


def retire(history: History, owner: Owner, retirement: Retirement) -> tuple[str, ...]:
    """Put an entry that removes checkpoints; return the objects to delete, manifests first.

    No object may be deleted before this returns. Raises FencedError and StoreError.
    """
    event = {"kind": "retire", "checkpoints": retirement.checkpoints}
    history.append(event, lambda state, n: retirement.apply(state), owner=owner)
    return retirement.given_up


def delete_retired(
    store: Store,
    names: Iterable[str],
    check: Callable[[], None] = lambda: None,
    on_refusal: Callable[[CkptError], None] = lambda error: None,
) -> frozenset[str]:
    """Delete retired objects, manifests first; return those that are deleted; `on_refusal` gets the others' errors."""

    def delete(name: str) -> str | None:
        check()
        try:
            store.delete(name)
        except CkptError as error:
            on_refusal(error)
            return None
        return name

    rest, manifests = _parted(names, lambda name: name.endswith(f"/{MANIFEST_NAME}"))
    if store.near:
        return frozenset(filter(None, map(delete, [*manifests, *rest])))
    gone = in_threads(delete, manifests, _FAR_REQUESTS, "ckpt-delete")
    return frozenset(filter(None, [*gone, *in_threads(delete, rest, _FAR_REQUESTS, "ckpt-delete")]))


def _parted(names: Iterable[str], of_second: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    first: list[str] = []
    second: list[str] = []
    for name in names:
        (second if of_second(name) else first).append(name)
    return first, second


def _going(verdicts: Iterable[Verdict]) -> frozenset[str]:
    return frozenset(v.manifest_digest for v in verdicts if not v.keep)


def _objects_of(store: Store, checkpoint: Checkpoint, named: Mapping[str, Sequence[str]]) -> list[str]:
    """List a checkpoint's objects, manifest first, those of other attempts as folded names."""
    if checkpoint.manifest_digest in named:
        return [*named[checkpoint.manifest_digest], *checkpoint.reuses]
    attempt = parse_attempt(checkpoint.manifest)
    assert attempt is not None
    prefix = attempt_prefix(attempt)
    return [*sorted(store.names(prefix), key=lambda name: name != prefix + MANIFEST_NAME), *checkpoint.reuses]


def _header_faults(store: Store, record: ObjectRecord, rows: list[IndexRow]) -> list[str]:
    prefix = bytearray(record.digested_bytes)
    store.read(record.name, 0, memoryview(prefix))
    try:
        entries = parse_header(bytes(prefix), record.size_bytes)
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
