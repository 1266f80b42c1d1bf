"""Prune as the owner: decide, verify one checkpoint that stays, retire, delete, sweep.

The entry that commits a checkpoint also retires the checkpoints that the policy does not keep (`with_commit`). A thread
deletes their objects after the commit: a save is done when it is committed, and errors of the prune are only logged.

Invariants

1. A checkpoint whose objects a save under way may reuse is not retired.
2. A restore, a release and the interpreter's end never retire or delete anything: they cancel a running prune.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from ckpt_tasks.checkpoint.restore.reading import Run, check_live, put_pin
from ckpt_tasks.errors import CkptError, FencedError, StateError, StoreError
from ckpt_tasks.format.keys import parse_attempt, unfold
from ckpt_tasks.format.ledger import State, lineage
from ckpt_tasks.format.policy.retention import RetentionPolicy, Verdict
from ckpt_tasks.format.records import Checkpoint, Owner
from ckpt_tasks.process import start_thread
from ckpt_tasks.run.ledger.fencing import check_owner
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.upkeep.retiring import Retirement, delete_retired, retire
from ckpt_tasks.run.upkeep.verifying import (
    missing_metric,
    newest_good,
    orphans,
    plan_prune,
    plan_removal,
    verify_checkpoint,
)
from ckpt_tasks.system import system

_MOST_ORPHANS = 20_000  # An entry lists at most this many orphans, of 100 bytes each; the next prune lists the rest.
_MOST_NOTES = 16  # Keep this many notes about consecutive failed saves; the log has all of them.
_MANY = 20  # Commits, after which a metric that none has is thought to be mistyped.
_log = logging.getLogger("ckpt_tasks")
_T = TypeVar("_T")


class Pruner:
    """Prunes for one owner; remembers which checkpoints are known to be good and which retired objects are deleted.

    `verified` holds the identities of checkpoints that this process read from storage; `deleted` names objects that the
    next entry can remove from the ledger's list of retired ones. `unnoted` holds the newest events to write into the
    ledger when the store accepts a checkpoint again. `named` has the objects of checkpoints that this process
    committed, manifest first, so that they need not be listed. `base`: the checkpoint whose objects saves under way may
    reuse; a save holds `retiring` while it sets `base`.
    """

    def __init__(self, history: History, policy: RetentionPolicy):
        self.verified: set[str] = set()
        self.deleted: frozenset[str] = frozenset()
        self.named: dict[str, tuple[str, ...]] = {}
        self.unnoted: deque[Mapping[str, object]] = deque(maxlen=_MOST_NOTES)
        self.base: str | None = None  # Saves under way may reuse the objects of this checkpoint.
        self.retiring = system().lock()
        self._history = history
        self.policy = policy
        self._swept = False
        self._lacking = 0  # So many commits of this process were without a best checkpoint.
        self._failed = False
        self._warned_of_refusal = False
        self._one = system().lock()  # A direct prune and the background thread take turns.
        self._behind = Background(self._follow, "ckpt-prune")

    def plan(self, going_on_from: str | None) -> list[Verdict]:
        """Return a verdict on each checkpoint; training continues from the checkpoint `going_on_from`."""
        return self._plan(self._history.head().state, going_on_from)

    def _plan(self, state: State, going_on_from: str | None, base: str | None = None) -> list[Verdict]:
        known, in_use = frozenset(self.verified), {base, self.base}
        verdicts = plan_prune(state, self.policy, verified=known, restored_from=going_on_from)
        return [_kept(v) if not v.keep and v.manifest_digest in in_use else v for v in verdicts]

    def _agreed(self, state: State, going_on_from: str | None, base: str | None = None) -> list[Verdict]:
        """Plan a prune; keep everything if no checkpoint that stays is known to be good."""
        verdicts = self._plan(state, going_on_from, base)
        return verdicts if self._knows_good(verdicts) else []

    def with_commit(self, state: State, checkpoint: Checkpoint) -> Retirement:
        """Prepare the retirement for the entry that adds a checkpoint to `state`.

        The previous newest checkpoint stays: until the entry is put, other saves may choose to reuse its objects.
        """
        store, after = self._history.store, state.with_checkpoint(checkpoint, frozenset())
        plan = partial(self._agreed, going_on_from=checkpoint.manifest_digest, base=checkpoint.parent)
        try:
            return Retirement(store, after, plan, self.deleted, named=self.named)
        except CkptError:  # For example a listing failed: the prune after the commit logs this error.
            return Retirement(store, after, lambda state: (), self.deleted)

    def committed(self, state: State, retirement: Retirement, digest: str, names: tuple[str, ...]) -> None:
        """Remember the objects of the checkpoint that an entry has committed, and what the entry has retired."""
        self.deleted -= retirement.deleted
        live = {one.manifest_digest for one in state.live}
        self.named = {known: of for known, of in self.named.items() if known in live} | {digest: names}
        self.base = None
        self._warn_of_best(state)

    def new_owner(self) -> None:
        """Sweep the leftovers of dead owners again, because the directory had another owner meanwhile."""
        self._swept = False

    # ── in the background, after a commit ────────────────────────────────────────────────────────────────────

    def follow(self, owner: Owner, state: State) -> None:
        """Prune soon, in the background, after the commit of `state`; log errors, and retry after the next commit."""
        self._behind.request((owner, state))

    def finish(self, limit_s: float) -> None:
        """Wait at most `limit_s` for the prune after the last commit; leave the rest to the next owner."""
        self._behind.finish(limit_s)

    def cancel(self, limit_s: float) -> None:
        """Cancel the prune after the last commit, and wait at most `limit_s` for its end."""
        self._behind.cancel(limit_s)

    def _follow(self, request: tuple[Owner, State]) -> None:
        owner, state = request
        try:
            while self.unnoted:
                self._history.append(self.unnoted[0], lambda state, n: state, owner=owner)
                self.unnoted.popleft()
            with self._one:
                newest = state.live[-1].manifest_digest
                if self._swept and all(v.keep for v in plan_prune(state, self.policy, restored_from=newest)):
                    # The commit has retired everything that may go: no more requests are needed.
                    self._delete(state.retired, self._behind.check)
                else:
                    self._prune(owner, self._newest(owner, math.inf), newest, self._behind.check)
        except (CancelledWorkError, FencedError):
            return  # A process that was fenced raises in its next save.
        except Exception as error:  # noqa: BLE001 (the checkpoint is committed, whatever is met here)
            if not self._failed:
                _log.warning("Older checkpoints were not removed (%s); this is tried again after each save", error)
            self._failed = True
        else:
            self._failed = False

    # ── a prune ──────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, owner: Owner, going_on_from: str | None) -> list[Verdict]:
        """Remove checkpoints that the policy does not keep, and leftovers of dead attempts; return a verdict on each.

        Raises FencedError if the directory has another owner; nothing is deleted then.
        """
        with self._one:
            state = self._newest(owner)
            self._prune(owner, state, going_on_from, lambda: None)
        return self._plan(state, going_on_from)

    def _newest(self, owner: Owner, within_s: float = 0.0) -> State:
        """Return the newest state; on a server, a state that this process read or wrote at most `within_s` ago."""
        head = self._history.head_within(within_s)
        check_owner(head.state.owner, owner)
        return head.state.sparing(head.spared_epochs)

    def _prune(self, owner: Owner, state: State, going_on_from: str | None, check: Callable[[], None]) -> None:
        """Prune the newest state; an exception of `check` stops it. The caller holds `_one`."""
        # Retire nothing until a checkpoint that the policy keeps is known to be good. Plan without `verified`: a
        # checkpoint that stays only as the newest verified one would do, and no newer one would be verified.
        wanted = plan_prune(state, self.policy, restored_from=going_on_from)
        standing: Checkpoint | None = None
        if not all(v.keep for v in wanted) and not self._knows_good(wanted):
            standing = self._verify(lineage(state.live)[0], owner, check)
        left = () if self._swept else orphans(self._history.store, state)  # Leftovers of dead owners.
        unnamed = [name for name in left if not state.has_retired(name)][:_MOST_ORPHANS]
        given_up: tuple[str, ...] = ()
        waiting = state.without_deleted(self.deleted).retired
        with self.retiring:
            check()
            plan = partial(self._agreed, going_on_from=going_on_from)
            retirement = Retirement(self._history.store, state, plan, self.deleted, unnamed, named=self.named)
            if unnamed or retirement.checkpoints:
                # Do this before the first delete: if this process stalls here, others may commit objects that it would
                # delete.
                given_up = retire(self._history, owner, retirement, standing)
                self.deleted -= retirement.deleted
        self._delete((*waiting, *given_up), check)
        if not self._swept:
            self._drop_unfinished(owner)
            self._swept = len(unnamed) < _MOST_ORPHANS

    def _delete(self, retired: Iterable[str], check: Callable[[], None]) -> None:
        """Delete objects that an entry has given up."""
        left = [name for name in unfold(retired) if name not in self.deleted]
        refusals: list[CkptError] = []
        self.deleted |= delete_retired(self._history.store, left, check, refusals.append)
        if refusals and not self._warned_of_refusal:
            self._warned_of_refusal = True
            what = f"{len(refusals)} of {len(left)} objects of removed checkpoints are not deleted, and take up room"
            _log.warning("%s: %s: %s. This is tried again after each save.", self._history.store.url, what, refusals[0])
        if left:
            check()  # After a cancellation, this process may no longer own the directory.
            self._history.store.keep_room()  # The entry may have used the reserve.

    def pin(self, owner: Owner, step: int, reason: str | None) -> None:
        """Pin the checkpoint of a step; without a `reason`, unpin it.

        Raises CheckpointNotFoundError if no live checkpoint has this step, or if it is pruned meanwhile.
        """
        put_pin(self._history, Run(self._history, None).find(step), reason, owner)

    def remove(self, owner: Owner, checkpoint: Checkpoint, going_on_from: str | None) -> Verdict:
        """Remove a checkpoint and delete its objects, unless `plan_removal` keeps it.

        Raises CheckpointNotFoundError, NoGoodCheckpointError if no checkpoint verifies, and StateError if too many
        objects wait for their deletion; nothing is removed then.
        """
        with self._one, self.retiring:
            state, digest = self._newest(owner), checkpoint.manifest_digest
            check_live(state, checkpoint)
            self.verified.add(newest_good(self._history.store, state).manifest_digest)
            verified = frozenset(self.verified)
            plan = partial(plan_removal, digest=digest, verified=verified, restored_from=going_on_from)
            retirement = Retirement(self._history.store, state, plan, self.deleted)
            now = state
            if retirement.checkpoints:
                retire(self._history, owner, retirement)
                self.deleted -= retirement.deleted
                self._delete(retirement.given_up, lambda: None)
                now = self._newest(owner)
            # If the checkpoint stays, it was pinned or leased meanwhile.
            gone = digest not in now.by_identity
            verdict = next(v for v in plan(state if gone else now) if v.manifest_digest == digest)
            if not (verdict.keep or gone):
                hint = "`ckpt prune` deletes them; then try again."
                raise StateError("more objects wait for their deletion than a ledger entry lists", hint=hint)
            return verdict

    def _warn_of_best(self, state: State) -> None:
        missing = missing_metric(state, self.policy) if self._lacking < _MANY else None
        self._lacking += missing is not None
        if missing is not None and self._lacking == _MANY:  # Earlier, the first evaluation may be still to come.
            _log.warning("None is kept as the best so far: %s", missing)

    def _knows_good(self, verdicts: list[Verdict]) -> bool:
        return any(v.keep and v.manifest_digest in self.verified for v in verdicts)

    def _drop_unfinished(self, owner: Owner) -> None:
        try:
            self._history.store.drop_unfinished(lambda name: is_older(name, owner.epoch))
        except StoreError as error:
            if error.transient:
                raise
            # Some stores cannot list unfinished uploads, or list only those of the same writer: prune the rest anyway.
            _log.warning("Unfinished uploads of earlier owners, if there are any, stay in the store: %s", error)

    def _verify(self, newest: Checkpoint, owner: Owner, check: Callable[[], None]) -> Checkpoint | None:
        """Verify a checkpoint by reading it; return it if it is good, else note the damage."""
        faults = verify_checkpoint(self._history.store, newest, check)
        if not faults:
            self.verified.add(newest.manifest_digest)
            return newest
        event = {"kind": "note", "note": "damaged", "step": newest.step, "faults": faults[:5]}
        self._history.append(event, lambda state, n: state, owner=owner)
        return None


def _kept(verdict: Verdict) -> Verdict:
    return replace(verdict, keep=True, reasons=("a save under way reuses it",))


def is_older(name: str, epoch: int) -> bool:
    """Return True if an object's name belongs to an attempt of an owner before `epoch`."""
    attempt = parse_attempt(name)
    return attempt is not None and attempt.epoch < epoch


class CancelledWorkError(Exception):
    """Raised in a background thread whose work was cancelled; the thread itself catches it."""


class Background(Generic[_T]):
    """Runs `work` for the newest request, in a daemon thread that ends when there is no request.

    `work` must call `check` wherever it can stop.
    """

    def __init__(self, work: Callable[[_T], None], name: str):
        self._work = work
        self._name = name
        self._changed = system().condition()
        self._requested: list[_T] = []
        self._running = False
        self._cancelled = False

    def request(self, argument: _T) -> None:
        """Request the work; a request that still waits is replaced."""
        with self._changed:
            self._requested = [argument]
            if not self._running:
                try:
                    start_thread(self._run, name=self._name)
                except StoreError:  # The next request or owner does the work.
                    self._requested = []
                    return
                self._running = True

    def check(self) -> None:
        """Raise CancelledWorkError if the current work was cancelled."""
        if self._cancelled:
            raise CancelledWorkError

    def finish(self, limit_s: float) -> None:
        """Wait at most `limit_s` until all work is done; then cancel the rest."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._running, limit_s):
                return
        self.cancel(0)

    def cancel(self, limit_s: float) -> None:
        """Drop a waiting request, cancel running work, and wait at most `limit_s` for its end."""
        with self._changed:
            self._requested = []
            self._cancelled = self._running
            self._changed.wait_for(lambda: not self._running, limit_s)

    def _ended(self) -> None:
        with self._changed:
            self._running = self._cancelled = False
            self._changed.notify_all()

    def _run(self) -> None:
        system().lower_priority()
        while True:
            with self._changed:
                if not self._requested:
                    self._ended()
                    return
                argument = self._requested.pop()
                self._cancelled = False
            try:
                self._work(argument)
            except CancelledWorkError:
                continue
            except BaseException:  # For example, no memory is left.
                self._ended()
                raise
