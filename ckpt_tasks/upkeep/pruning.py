"""Prune as an owner does it: decide, read back what must be known to be good, retire, delete, sweep.

The entry that commits a checkpoint retires what may go by then (`with_commit`). What is left goes on after the commit,
in a thread of its own: a save is done when it is committed, and what prune meets is logged.

Invariants

1. A checkpoint whose objects a save under way may reuse is not retired.
2. Nothing is retired or deleted on behalf of a restore, a release or an end: they cancel what runs.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from ckpt_tasks.errors import CheckpointNotFoundError, CkptError, FencedError, StoreError
from ckpt_tasks.format.folding import unfold
from ckpt_tasks.format.keys import parse_attempt
from ckpt_tasks.format.ledger import Checkpoint, Owner, State, lineage
from ckpt_tasks.ledger.history import History, check_owner
from ckpt_tasks.policy.retention import RetentionPolicy, Verdict
from ckpt_tasks.reading.reading import Run, put_pin
from ckpt_tasks.state.processes import lower_priority
from ckpt_tasks.upkeep.upkeep import (
    Retirement,
    delete_retired,
    missing_metric,
    newest_good,
    orphans,
    plan_prune,
    plan_removal,
    retire,
    verify_checkpoint,
)

__all__ = ["Background", "CancelledWorkError", "Pruner"]

_MOST_ORPHANS = 20_000  # in one entry, of 100 bytes each; the next prune takes more
_MOST_NOTES = 16  # of saves that failed one after the other; the log has all
_log = logging.getLogger("ckpt_tasks")
_T = TypeVar("_T")


class Pruner:
    """Remember, for one owner, which checkpoints are known to be good and which retired objects are gone.

    `verified` holds the identities of checkpoints that this process read from storage; `deleted` names what the next
    entry can strike off the ledger's list of retired objects. `unnoted` holds the newest events for the run's history
    that wait for a store which has failed to take a checkpoint. `in_use` returns the checkpoints whose objects saves
    under way may reuse; a save holds `retiring` while it chooses one.
    """

    def __init__(self, history: History, policy: RetentionPolicy):
        self.verified: set[str] = set()
        self.deleted: frozenset[str] = frozenset()
        self.unnoted: deque[Mapping[str, object]] = deque(maxlen=_MOST_NOTES)
        self.in_use: Callable[[], frozenset[str]] = frozenset
        self.retiring = threading.Lock()
        self._history = history
        self._policy = policy
        self._swept = False
        self._warned = False
        self._failed = False
        self._one = threading.Lock()  # prune() and the thread take turns
        self._behind = Background(self._follow, "ckpt-prune")

    def plan(self, going_on_from: str | None) -> list[Verdict]:
        """Decide what stays and why; `going_on_from` is the checkpoint that training was restored from or committed."""
        return self._plan(self._history.head().state, going_on_from)

    def _plan(self, state: State, going_on_from: str | None, base: str | None = None) -> list[Verdict]:
        known, in_use = frozenset(self.verified), {base, *self.in_use()}
        verdicts = plan_prune(state, self._policy, verified=known, restored_from=going_on_from)
        return [_kept(v) if not v.keep and v.manifest_digest in in_use else v for v in verdicts]

    def _agreed(self, state: State, going_on_from: str | None, base: str | None = None) -> list[Verdict]:
        """Plan, and remove nothing unless one that stays is known to be good."""
        verdicts = self._plan(state, going_on_from, base)
        return verdicts if self._knows_good(verdicts) else []

    def with_commit(self, state: State, checkpoint: Checkpoint) -> Retirement:
        """Prepare what the entry retires that commits a checkpoint upon `state`.

        The checkpoint that was the newest stays: until the entry stands, other saves choose it to reuse its objects.
        """
        store, after = self._history.store, state.with_checkpoint(checkpoint, frozenset())
        plan = partial(self._agreed, going_on_from=checkpoint.manifest_digest, base=checkpoint.parent)
        try:
            return Retirement(store, after, plan, self.deleted)
        except CkptError:  # no list of names, say: the prune behind the commit meets that too, and logs it
            return Retirement(store, after, lambda state: (), self.deleted)

    def new_owner(self) -> None:
        """Look for what dead owners left once more: the directory was another's in between."""
        self._swept = False

    # ── behind a commit ──────────────────────────────────────────────────────────────────────────────────────

    def follow(self, owner: Owner, state: State) -> None:
        """Prune soon, after a commit that led to `state`; what fails is logged, and tried again after the next one."""
        self._behind.request((owner, state))

    def finish(self, limit_s: float) -> None:
        """Wait at most `limit_s` for the prune that follows the last commit; what is left is the next owner's."""
        self._behind.finish(limit_s)

    def cancel(self, limit_s: float) -> None:
        """Stop the prune that follows the last commit, and wait at most `limit_s` until it has."""
        self._behind.cancel(limit_s)

    def _follow(self, request: tuple[Owner, State]) -> None:
        owner, state = request
        try:
            while self.unnoted:
                self._history.append(self.unnoted[0], lambda state, n: state, owner=owner)
                self.unnoted.popleft()
            with self._one:
                newest = state.live[-1].manifest_digest
                if self._swept and all(v.keep for v in plan_prune(state, self._policy, restored_from=newest)):
                    self._delete(state.retired, self._behind.check)  # by the commit; nothing else is to be asked
                else:
                    self._prune(owner, self._newest(owner), newest, self._behind.check)
        except (CancelledWorkError, FencedError):
            return  # not wanted any more; the next save meets the new owner
        except Exception as error:  # noqa: BLE001 (the checkpoint is committed, whatever is met here)
            if not self._failed:
                _log.warning("Older checkpoints were not removed (%s); this is tried again after each save", error)
            self._failed = True
        else:
            self._failed = False

    # ── a prune ──────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, owner: Owner, going_on_from: str | None) -> list[Verdict]:
        """Remove what the policy no longer keeps, and what dead attempts left; return every checkpoint's verdict.

        Raises FencedError if the directory is another's by now; nothing is deleted then.
        """
        with self._one:
            state = self._newest(owner)
            self._prune(owner, state, going_on_from, lambda: None)
        return self._plan(state, going_on_from)

    def _newest(self, owner: Owner) -> State:
        head = self._history.head()
        check_owner(head.state.owner, owner)
        return head.state.sparing(head.spared_epochs)

    def _prune(self, owner: Owner, state: State, going_on_from: str | None, check: Callable[[], None]) -> None:
        """Prune the newest state; `check` stops it by what it raises. The caller holds `_one`."""
        # Of those that the policy keeps one must be known to be good; one that stays only as the newest verified
        # does not count, or nothing newer would ever be read.
        wanted = plan_prune(state, self._policy, restored_from=going_on_from)
        if not all(v.keep for v in wanted):
            self._warn_of_best(state)
            if not self._knows_good(wanted):
                self._verify(lineage(state.live)[0], owner, check)
        unnamed = [] if self._swept else self._orphans(state)
        given_up: tuple[str, ...] = ()
        with self.retiring:
            check()
            plan = partial(self._agreed, going_on_from=going_on_from)
            retirement = Retirement(self._history.store, state, plan, self.deleted, unnamed)
            if unnamed or retirement.checkpoints:
                # Before the first delete: this process may stall, and others commit what it is about to delete.
                given_up = retire(self._history, owner, retirement)
                self.deleted -= retirement.deleted
        self._delete((*state.retired, *given_up), check)
        if not self._swept:
            self._drop_unfinished(owner)
            self._swept = len(unnamed) < _MOST_ORPHANS

    def _delete(self, retired: Iterable[str], check: Callable[[], None]) -> None:
        """Delete what an entry has given up; it may go at any time."""
        left = [name for name in unfold(retired) if name not in self.deleted]
        self.deleted |= delete_retired(self._history.store, left, check)
        if left:
            check()  # a cancelled prune may not hold the directory any more
            self._history.store.keep_room()  # the entry above may have used it

    def pin(self, owner: Owner, step: int, reason: str | None) -> None:
        """Keep the checkpoint of a step whatever the policy says; leave it to the policy again without a reason.

        Raises CheckpointNotFoundError if it is not live, or is pruned while this is written.
        """
        put_pin(self._history, Run(self._history, None).find(step), reason, owner)

    def remove(self, owner: Owner, checkpoint: Checkpoint, going_on_from: str | None) -> Verdict:
        """Take a checkpoint out of the run and delete its objects, unless `plan_removal` keeps it.

        Raises CheckpointNotFoundError, and NoGoodCheckpointError if no checkpoint verifies; nothing is removed then.
        """
        with self._one, self.retiring:
            state, digest = self._newest(owner), checkpoint.manifest_digest
            if all(one.manifest_digest != digest for one in state.live):
                raise CheckpointNotFoundError("the checkpoint has just been pruned", step=checkpoint.step)
            self.verified.add(newest_good(self._history.store, state).manifest_digest)
            verified = frozenset(self.verified)
            plan = partial(plan_removal, digest=digest, verified=verified, restored_from=going_on_from)
            retirement = Retirement(self._history.store, state, plan, self.deleted)
            if retirement.checkpoints:
                retire(self._history, owner, retirement)
                self.deleted -= retirement.deleted
                self._delete(retirement.given_up, lambda: None)
                state = state if retirement.given_up else self._newest(owner)  # pinned or leased meanwhile
            return next(v for v in plan(state) if v.manifest_digest == digest)

    def _orphans(self, state: State) -> list[str]:
        """List what dead owners left, so many at once as fit into an entry; one look is enough while it shrinks."""
        return [name for name in orphans(self._history.store, state) if not state.has_retired(name)][:_MOST_ORPHANS]

    def _warn_of_best(self, state: State) -> None:
        missing = None if self._warned else missing_metric(state, self._policy)
        if missing is not None:
            _log.warning("None is kept as the best: %s", missing)
            self._warned = True

    def _knows_good(self, verdicts: list[Verdict]) -> bool:
        return any(v.keep and v.manifest_digest in self.verified for v in verdicts)

    def _drop_unfinished(self, owner: Owner) -> None:
        try:
            self._history.store.drop_unfinished(lambda name: is_older(name, owner.epoch))
        except StoreError as error:
            if error.transient:
                raise
            # Not every store lists unfinished uploads, nor to everybody who may write: the rest is pruned all the same.
            _log.warning("Unfinished uploads of earlier owners, if there are any, stay in the store: %s", error)

    def _verify(self, newest: Checkpoint, owner: Owner, check: Callable[[], None]) -> None:
        faults = verify_checkpoint(self._history.store, newest, check)
        if not faults:
            self.verified.add(newest.manifest_digest)
            return
        event = {"kind": "note", "note": "damaged", "step": newest.step, "faults": faults[:5]}
        self._history.append(event, lambda state, n: state, owner=owner)


def _kept(verdict: Verdict) -> Verdict:
    return replace(verdict, keep=True, reasons=("a save under way reuses it",))


def is_older(name: str, epoch: int) -> bool:
    """Say whether an object's name is an attempt's of an owner before `epoch`."""
    attempt = parse_attempt(name)
    return attempt is not None and attempt.epoch < epoch


class CancelledWorkError(Exception):
    """The work is not wanted any more; only the thread that did it sees this."""


class Background(Generic[_T]):
    """Run `work` for the newest request, in a daemon thread that ends when there is none.

    `work` calls `check` wherever it can stop.
    """

    def __init__(self, work: Callable[[_T], None], name: str):
        self._work = work
        self._name = name
        self._changed = threading.Condition()
        self._requested: list[_T] = []
        self._running = False
        self._cancelled = False

    def request(self, argument: _T) -> None:
        """Have the work done soon; a request that still waits is dropped for this one."""
        with self._changed:
            self._requested = [argument]
            if not self._running:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._running = True

    def check(self) -> None:
        """Raise CancelledWorkError if the work that runs was cancelled."""
        if self._cancelled:
            raise CancelledWorkError

    def finish(self, limit_s: float) -> None:
        """Wait until nothing is left to do, at most `limit_s`; then cancel what is left."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._running, limit_s):
                return
        self.cancel(0)

    def cancel(self, limit_s: float) -> None:
        """Drop what waits, cancel what runs, and wait at most `limit_s` for its end."""
        with self._changed:
            self._requested = []
            self._cancelled = self._running
            self._changed.wait_for(lambda: not self._running, limit_s)

    def _run(self) -> None:
        lower_priority()
        while True:
            with self._changed:
                if not self._requested:
                    self._running = self._cancelled = False
                    self._changed.notify_all()
                    return
                argument = self._requested.pop()
                self._cancelled = False
            try:
                self._work(argument)
            except CancelledWorkError:
                continue
