"""The owner of a run directory, and when another process may take the directory.

Safety does not depend on this module: the ledger's dense numbers fence a writer that has lost the directory. This
module only decides when a process may take the directory without `take_over`: if the owner has released it, is
certainly dead, or has a heartbeat older than the timeout.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Protocol
from weakref import WeakValueDictionary, ref

from ckpt_tasks.errors import (
    CkptError,
    CommitUncertainError,
    FencedError,
    IntegrityError,
    NoGoodCheckpointError,
    ObjectNotFoundError,
    OwnedError,
    StoreError,
)
from ckpt_tasks.format.digests import canonical_json
from ckpt_tasks.format.keys import heartbeat_name, parse_attempt
from ckpt_tasks.format.ledger import BestMode, State
from ckpt_tasks.format.parsing import seconds_of
from ckpt_tasks.format.records import Owner
from ckpt_tasks.gc_pause import collect_all
from ckpt_tasks.process import start_thread
from ckpt_tasks.run.ledger.fencing import check_owner
from ckpt_tasks.run.ledger.history import Head, History
from ckpt_tasks.system import boot_id, has_ended, now_iso, process_start, system

_log = logging.getLogger("ckpt_tasks")
NEVER_OWNED = "it has had no owner"

RELEASE_GRACE_S = 35.0  # A preempted process has 30 s to commit and release; its successor waits longer.
_POLL_S = 0.25
_BEAT = 1 / 4  # An owner renews its heartbeat after this part of the timeout.
_MISSED = 1.5  # An owner that has missed this many heartbeats is late, or gone.
_LOOKS, _LOOK_S = 5, 0.02  # A heartbeat's thread may hold the Checkpointer during one collection, but not during each.


class Leftover(Protocol):
    """A commit in the background for an owner whose Checkpointer no longer exists."""

    def finish(self) -> None:
        """Wait until no commit is under way."""


left_here: WeakValueDictionary[str, Leftover] = WeakValueDictionary()  # The key is the owner's id.


def identify(flow_run_id: str | None, epoch: int = 0) -> Owner:
    """Describe this process so that other processes, on this host or others, can tell whether it still lives."""
    return Owner(
        epoch=epoch,
        id=system().token_hex(16),
        flow_run_id=flow_run_id,
        host=system().host(),
        machine_id=_read("/etc/machine-id"),
        boot_id=boot_id(),
        pid_namespace=_link("/proc/self/ns/pid"),
        pid=os.getpid(),
        process_start=process_start(os.getpid()) or "",
        taken_at=now_iso(),
    )


def why_free(owner: Owner | None, me: Owner, silent_s: float | None, timeout_s: float) -> str | None:
    """Return why the directory may be taken without `take_over`; None if its owner may be alive.

    `silent_s`: seconds without a heartbeat of the owner; None if that is unknown.
    """
    if owner is None:
        return NEVER_OWNED
    if owner.released:
        return "its owner released it"
    if _same_system(owner, me):
        if (owner.pid, owner.process_start) == (me.pid, me.process_start):
            return "this process holds it already"
        if has_ended(owner.pid, owner.process_start):
            return f"its owner, process {owner.pid} on this host, is gone"
    if silent_s is not None and silent_s > timeout_s:
        return f"its owner has shown no life for {silent_s:.0f} s"
    return None


def lives_here(owner: Owner, me: Owner) -> bool:
    """Return True if the owner is another process of this system that certainly runs and holds the directory."""
    if owner.released or owner.pid == me.pid or not owner.process_start or not _same_system(owner, me):
        return False
    return process_start(owner.pid) == owner.process_start


def _same_system(owner: Owner, me: Owner) -> bool:
    """Return True if both have the same host, boot and process namespace, so that process ids mean the same.

    Host names and machine ids alone do not suffice: copies of a system image share them.
    """
    systems = {(one.host, one.machine_id, one.boot_id, one.pid_namespace) for one in (owner, me)}
    return len(systems) == 1 and bool(me.boot_id and me.pid_namespace)


def damage(history: History) -> tuple[str, ...]:
    """Return the names of unreadable ledger entries; raise NoGoodCheckpointError if no checkpoint can be read.

    A run whose history is lost must not start from nothing over the checkpoints that it still has.
    """
    head, store = history.head(), history.store
    if head.entry is None and not head.damaged and any(parse_attempt(name) for name in store.names("")):
        head = history.head()  # Look again: an owner may meanwhile have written the first entry, then objects.
        if head.entry is None and not head.damaged:
            raise NoGoodCheckpointError(
                f"{store.url} holds checkpoints and no ledger",
                hint="The target is untouched. Bring the ledger back, or use another directory.",
            )
    if head.damaged and not head.state.live:
        raise NoGoodCheckpointError(
            f"no ledger entry of {store.url} that names a checkpoint can be read",
            reasons=tuple((0, f"{name} is damaged") for name in head.damaged),
            hint="The target is untouched. `ckpt verify` lists the damage.",
        )
    return head.damaged


def acquire(
    history: History,
    me: Owner,
    *,
    take_over: bool,
    timeout_s: float,
    best: tuple[str | None, BestMode] = (None, "min"),
) -> Owner:
    """Take the run directory and return the owner record of this process.

    If the owner is another attempt of the same flow run, waits for its release for 35 s, or for one and a half
    heartbeats if that is longer: a preempted process commits and releases within its grace period. If the owner still
    renews its heartbeat then, the flow run was started twice: raises OwnedError with `same_flow_run`. If the owner has
    no flow run (upkeep, a person who prunes), a flow run waits `timeout_s` to see whether the owner is alive. If the
    owner's clock is unusable, every process waits `timeout_s`. Raises OwnedError if the owner may be alive and
    `take_over` is False.
    """
    began_s, signs, waits = system().monotonic(), Signs(history, timeout_s), False
    while True:
        head = history.head()
        owner = head.state.owner
        if owner is not None and not owner.released and owner.pid == os.getpid():
            _finish_own(owner, take_over=take_over)
        free = why_free(owner, me, signs.silent_s(owner), timeout_s) if owner else NEVER_OWNED
        if free or take_over:
            break
        assert owner is not None
        same_run = owner.flow_run_id is not None and owner.flow_run_id == me.flow_run_id
        patience_s = _patience_s(owner, me, timeout_s)
        if (signs.watching and not same_run) or system().monotonic() - began_s < patience_s:
            waits = waits or _say_wait(history, owner, max(patience_s, timeout_s if signs.watching else 0.0))
            system().sleep(_POLL_S)
            continue
        if not same_run:
            raise OwnedError(
                f"the run directory is held by process {owner.pid} on {owner.host} since {owner.taken_at}",
                hint=f"Stop that process, wait until it has shown no life for {timeout_s:g} s, "
                "or pass take_over=True to fence it.",
            )
        if signs.beating or lives_here(owner, me):
            error = OwnedError(
                f"process {owner.pid} on {owner.host} already executes this flow run since {owner.taken_at}",
                hint="This second process has changed nothing, and ends.",
            )
            error.same_flow_run = True
            raise error
        free = "the same flow run has not released it within its grace"
        break
    return _take(history, me, why=free or "take_over was asked for", head=head, best=best)


def _patience_s(owner: Owner, me: Owner, timeout_s: float) -> float:
    """Return how long this process waits for an owner that shows signs of life."""
    if me.flow_run_id is None:
        return 0.0
    if owner.flow_run_id == me.flow_run_id:
        return max(RELEASE_GRACE_S, _MISSED * timeout_s * _BEAT)
    return timeout_s if owner.flow_run_id is None else 0.0


def _finish_own(owner: Owner, *, take_over: bool) -> None:
    """Finish the saves of a Checkpointer of this process that was left; raise OwnedError if one still holds the run."""
    _finish_here(owner)
    if not take_over and owner.id in Heartbeat.held_here:
        raise OwnedError(
            "another Checkpointer of this process holds the run directory",
            hint="close() that one first, or pass take_over=True to fence it: a notebook keeps the one that it "
            "has shown, or that the last traceback is of.",
        )


def _say_wait(history: History, owner: Owner, most_s: float) -> bool:
    said = "%s is held by process %d on %s: waiting at most %.0f s for its release, or for a sign of life"
    _log.warning(said, history.store.url, owner.pid, owner.host, most_s)
    return True


def _take(
    history: History,
    me: Owner,
    *,
    why: str,
    head: Head,
    best: tuple[str | None, BestMode],
) -> Owner:
    seen = head.state.owner
    taken: list[Owner] = []

    def change(state: State, n: int) -> State:
        now = state.owner
        if (now and now.id) != (seen and seen.id):
            raise OwnedError(
                f"process {now.pid} on {now.host} took the run directory first" if now else "the owner has changed",
                hint="Start again when it has ended.",
            )
        taken[:] = [replace(me, epoch=(now.epoch if now else 0) + 1, taken_at=now_iso())]
        return state.with_owner(taken[0], *best)

    event = {"kind": "owner", "because": why, "pid": me.pid, "host": me.host}
    history.append(event, change, owner=None)
    if seen is not None:
        with suppress(StoreError):  # A heartbeat that cannot be deleted does no harm: it is of an earlier epoch.
            history.store.delete(heartbeat_name(seen.epoch))
    return taken[0]


def release(history: History, owner: Owner, deleted: frozenset[str] = frozenset()) -> bool:
    """Release the run directory; `owner` has `deleted` these retired objects; return False if it has lost the run.

    If the store fails, the next owner sees that this process is gone, or that its heartbeat is old.
    """
    with suppress(StoreError, CommitUncertainError):
        try:
            history.append({"kind": "release"}, lambda state, n: state.released(deleted), owner=owner)
        except FencedError:
            return False
    return True


class Heartbeat:
    """Renews a heartbeat while this process owns the directory, and notices the loss of the directory.

    A daemon thread writes a small object every quarter of the timeout. `fenced` holds the FencedError once the ledger
    names another owner, so that training stops before its next commit fails. The thread ends when this object is
    garbage-collected.
    """

    held_here: ClassVar[WeakValueDictionary[str, Heartbeat]] = WeakValueDictionary()  # The key is the owner's id.

    def __init__(self, history: History, owner: Owner, timeout_s: float):
        self.fenced: FencedError | None = None
        self._history = history
        self._owner = owner
        self._every_s = self.every_s(timeout_s)
        self._stop = system().event()
        with suppress(StoreError):  # Without this heartbeat, the time of the take-over counts.
            self._beat()
        self.held_here[owner.id] = self
        arguments = (ref(self), self._stop, self._every_s)
        self._thread = start_thread(_look_again_and_again, *arguments, name="ckpt-heartbeat")

    @staticmethod
    def every_s(timeout_s: float) -> float:
        """Return after how many seconds an owner renews its heartbeat, and checks that it is still the owner."""
        return timeout_s * _BEAT

    def stop(self) -> None:
        """End the thread; the last heartbeat then becomes old."""
        self.held_here.pop(self._owner.id, None)
        self._stop.set()
        self._thread.join(timeout=self._every_s)

    def look(self) -> None:
        """Check that this process still owns the directory, and renew the heartbeat; the thread calls it."""
        try:
            check_owner(self._history.head().state.owner, self._owner)
            self._beat()
        except FencedError as error:
            self.fenced = error
        except (CkptError, MemoryError):
            pass  # If the store does not answer, commits will report that; an old heartbeat only permits a take-over.

    def _beat(self) -> None:
        body = canonical_json({"id": self._owner.id, "at_s": system().time()})
        self._history.store.replace(heartbeat_name(self._owner.epoch), body)


def _look_again_and_again(heart: ref[Heartbeat], stop: threading.Event, every_s: float) -> None:
    while not stop.wait(every_s):
        beating = heart()
        if beating is None or beating.fenced is not None:
            return
        beating.look()
        del beating


def _finish_here(owner: Owner) -> None:
    """Finish the save of a garbage-collected Checkpointer of this process, and release the directory."""
    for _ in range(_LOOKS):
        if owner.id not in Heartbeat.held_here:
            break
        collect_all()  # A Checkpointer that is freed without it leaves its heartbeat in a cycle.
        if owner.id in left_here:
            break
        system().sleep(_LOOK_S)
    if owner.id in left_here:
        left_here[owner.id].finish()


class Signs:
    """An owner's heartbeats: the age of the newest one by the owner's clock, or the time without a change by ours.

    `watching`: the owner's clock is useless (ahead by more than the timeout, or the heartbeat is damaged), and the
    heartbeat has not changed since the first look. `beating`: the same owner has renewed the heartbeat since the first
    look.
    """

    def __init__(self, history: History, timeout_s: float):
        self.watching = self.beating = False
        self._history = history
        self._timeout_s = timeout_s
        self._sign: tuple[str, bytes] | None = None
        self._seen_s = 0.0

    def silent_s(self, owner: Owner) -> float | None:
        """Return for how many seconds the owner has not renewed its heartbeat; None if it has just done so.

        Call it repeatedly: it remembers the last heartbeat. Raises StoreError if the store does not answer.
        """
        sign, changed = (owner.id, self._read(owner)), False
        if sign != self._sign:
            changed = self._sign is not None
            self.beating = self._sign is not None and self._sign[0] == owner.id
            self._sign, self._seen_s = sign, system().monotonic()
        age_s = system().time() - _time_of(sign[1])
        self.watching = not changed and not age_s >= -self._timeout_s
        if changed:
            return None
        return system().monotonic() - self._seen_s if self.watching else age_s

    def _read(self, owner: Owner) -> bytes:
        try:
            return self._history.store.get(heartbeat_name(owner.epoch), 4096)
        except ObjectNotFoundError:  # Without a heartbeat, the time of the take-over counts.
            return canonical_json({"taken_at": owner.taken_at})
        except IntegrityError:
            return b""


def _time_of(sign: bytes) -> float:
    """Return the time of a heartbeat, in seconds since 1970 by its writer's clock; NaN if it has none."""
    try:
        body = json.loads(sign)
        if "taken_at" in body:
            taken_s = seconds_of(body["taken_at"])
            return math.nan if taken_s is None else taken_s
        return float(body["at_s"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return math.nan


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
