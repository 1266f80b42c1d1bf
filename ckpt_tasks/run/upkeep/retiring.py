"""Retire checkpoints: take them out of the ledger, then delete their objects.

A save writes bottom-up, a prune removes top-down. First a ledger entry says which checkpoints are gone and which
objects are given up, including orphans, so that no later commit names these objects. Then the objects are deleted, the
manifest first. A process that stalls here and is fenced may delete these objects at any later time. After a crash, the
ledger's `retired` still has the names, and the next owner deletes the objects.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain

from ckpt_tasks.errors import CkptError, IntegrityError, ObjectNotFoundError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import MANIFEST_NAME, MAX_RETIRED, attempt_prefix, fold, folded_count, parse_attempt, unfold
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.manifest import MAX_MANIFEST_BYTES, Manifest
from ckpt_tasks.format.policy.retention import Verdict
from ckpt_tasks.format.records import Checkpoint, Owner
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.storage.port import Store

_DELETED_AT_ONCE = 1000  # One request to S3 can name as many.


class Retirement:
    """The part of a ledger entry that retires checkpoints by `plan(state)`, and gives up their objects.

    The constructor lists these objects, unless `named` has them. `unnamed` objects, which no checkpoint names, are
    given up with them. `deleted` names objects given up earlier and deleted by now. An entry lists at most
    `MAX_RETIRED` objects that are given up and not deleted: the oldest checkpoints that fit go now, others later.
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
        self._objects = {digest: names for digest, names in objects.items() if digest in fitting}  # Oldest first.
        self._spared = _reused_by_spared(store, state) if going or unnamed else frozenset()

    @property
    def checkpoints(self) -> list[str]:
        """The identities of the checkpoints that the plan removes."""
        return sorted(self._objects)

    def apply(self, state: State) -> State:
        """Return the state after the entry; set `given_up` to the objects that may be deleted then, manifests first.

        A checkpoint that was meanwhile leased, pinned or evaluated stays if a new plan would keep it.
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
        """Fold the names of the first checkpoints' objects; an object that several of them reuse counts once."""
        return fold(chain(named, chain.from_iterable(objects[digest] for digest in digests[:count])))

    count, folded = len(digests), names(len(digests))  # Fold once instead of for each of thousands of checkpoints.
    if folded_count(folded) > room:
        count = max(0, bisect_right(range(count), room, key=lambda count: folded_count(names(count))) - 1)
        folded = names(count)
    return frozenset(digests[:count]), folded


def retire(
    history: History, owner: Owner, retirement: Retirement, standing: Checkpoint | None = None
) -> tuple[str, ...]:
    """Put an entry that removes checkpoints; return the objects to delete, manifests first.

    No object may be deleted before this function returns. `standing` is passed to `append`. Raises FencedError and
    StoreError.
    """
    event = {"kind": "retire", "checkpoints": retirement.checkpoints}
    history.append(event, lambda state, n: retirement.apply(state), owner=owner, standing=standing)
    return retirement.given_up


def delete_retired(
    store: Store,
    names: Iterable[str],
    check: Callable[[], None] = lambda: None,
    on_refusal: Callable[[CkptError], None] = lambda error: None,
) -> frozenset[str]:
    """Delete retired objects, manifests first; return the deleted ones; `on_refusal` gets the errors of the rest."""
    ordered = sorted(names, key=lambda name: not name.endswith(f"/{MANIFEST_NAME}"))
    at_once = 1 if store.near else _DELETED_AT_ONCE
    gone: set[str] = set()
    for begin in range(0, len(ordered), at_once):
        check()
        batch = ordered[begin : begin + at_once]
        try:
            refused = store.delete_all(batch)
        except CkptError as error:
            refused = dict.fromkeys(batch, error)
        for refusal in refused.values():
            on_refusal(refusal)
        gone |= {*batch} - refused.keys()
    return frozenset(gone)


def _going(verdicts: Iterable[Verdict]) -> frozenset[str]:
    return frozenset(v.manifest_digest for v in verdicts if not v.keep)


def _objects_of(store: Store, checkpoint: Checkpoint, named: Mapping[str, Sequence[str]]) -> list[str]:
    """List a checkpoint's objects, manifest first; objects of other attempts as folded names."""
    if checkpoint.manifest_digest in named:
        return [*named[checkpoint.manifest_digest], *checkpoint.reuses]
    attempt = parse_attempt(checkpoint.manifest)
    assert attempt is not None
    prefix = attempt_prefix(attempt)
    return [*sorted(store.names(prefix), key=lambda name: name != prefix + MANIFEST_NAME), *checkpoint.reuses]


def _reused_by_spared(store: Store, state: State) -> frozenset[str]:
    """Return the objects reused by checkpoints that only a damaged ledger entry may have listed."""
    reused: set[str] = set()
    for name in store.names("") if state.spared_epochs else ():
        attempt = parse_attempt(name)
        if attempt is None or not name.endswith(f"/{MANIFEST_NAME}") or state.keeps(name):
            continue
        if attempt.epoch <= state.spared_epochs:
            with suppress(IntegrityError, ObjectNotFoundError):  # A checkpoint without its manifest is lost anyway.
                data = store.get(name, MAX_MANIFEST_BYTES)
                reused |= {
                    record.name for record in Manifest.from_bytes(data, digest=digest_hex(data), name=name).objects
                }
    return frozenset(reused)
