"""The orders of rank 0 to a launcher's ranks, and the first failure of a rank, exchanged through the c10d store.

Invariants

1. Foreign programs can write into the store. So a rank reads from the store only which order comes next, and its step:
   no name to import, no parameter, no path.
2. Soon after a rank has failed, the process of every other rank ends. Otherwise a rank that waits for the failed rank,
   in gloo or for an order, would wait for minutes.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import NamedTuple

from ckpt_tasks.checkpoint.ranks.exchange import StoreExchange
from ckpt_tasks.errors import CkptError, RankError, StateError, StoreError
from ckpt_tasks.flows.gang.messages import RankFailed
from ckpt_tasks.format.parsing import MALFORMED, parse_json, typed, whole
from ckpt_tasks.process import start_thread

_NAMES = ("restore", "run", "save", "evaluate", "close")
_POLL_S = 0.01
_WATCH_S = 0.2
_LOOK_S = 1.0
_GRACE_S = 20.0  # Rank 0 has this time to record a failure; a launcher waits 30 s before it kills rank 0.
_CAUSE_S = 0.3
_log = logging.getLogger("ckpt_tasks")


class Given(NamedTuple):
    """An order: its name, and the step to train to, to save or to evaluate."""

    name: str
    step: int


class Orders:
    """The channel by which rank 0 gives orders to the other ranks; `size` is the number of ranks."""

    def __init__(self, exchange: StoreExchange):
        self.size = exchange.size
        self._exchange = exchange
        self._count = 0
        self._over = threading.Event()

    def give(self, name: str, step: int = 0) -> None:
        """Post the next order, in rank 0."""
        self._count += 1
        self._end_watch(name)
        self._exchange.post(f"order/{self._count}", json.dumps([name, step]).encode())

    def take(self, is_over: Callable[[], bool]) -> Given | None:
        """Wait for the next order, in a rank other than 0; return None as soon as `is_over` returns True.

        Raises StoreError if rank 0 has ended, StateError for an invalid order.
        """
        self._count += 1
        look_s = time.monotonic() + _LOOK_S
        while (word := self._exchange.look(f"order/{self._count}")) is None:
            if is_over():
                return None
            if time.monotonic() > look_s:
                self._exchange.check_ended(0)
                look_s = time.monotonic() + _LOOK_S
            time.sleep(_POLL_S)
        try:
            name, step = parse_json(word)
            order = Given(_NAMES[_NAMES.index(name)], whole(step))
        except MALFORMED as error:
            raise StateError(f"the store of the ranks has an order that is none: {word!r:.80}") from error
        self._end_watch(order.name)
        return order

    def _end_watch(self, name: str) -> None:
        if name == "close":
            self._over.set()

    def close(self, timeout_s: float) -> None:
        """Wait for all ranks after the last order: the process that holds the store may end next."""
        with suppress(StoreError):  # If a rank has ended meanwhile, the launcher notices.
            self._exchange.agree("closed", b"", lambda words: b"", timeout_s)
            self._exchange.drain(timeout_s)

    def watch(self, end_waits: Callable[[], None]) -> None:
        """Start a thread that ends this process soon after another rank has failed, or the store's process has ended.

        The thread first calls `end_waits`, which ends the waits for other ranks; rank 0 then has 20 s to end by itself.
        """
        start_thread(self._watch, end_waits, name="ckpt-orders")

    def failed(self, error: BaseException, step: int) -> BaseException:
        """Return another rank's failure if it came first; else tell the other ranks about `error`, and return `error`.

        If a rank has ended without a message, return an error that names the ended rank: `error` does not name it.
        """
        first = self._first(error)
        if first is None:
            self._post(RankFailed.of(error, step))
        return first or error

    def unevaluated(self, error: Exception) -> None:
        """Log that the evaluation has failed in this rank; 20 s later ranks end that still wait for others in it."""
        _log.warning("rank %d: the evaluation has failed: %r", self._exchange.rank, error)
        with suppress(StoreError):
            self._exchange.post("unevaluated", b"")

    def end_process(self, error: BaseException) -> None:
        """Show an error and end this process at once: at a normal exit, threads would wait for the other ranks."""
        self._over.set()
        shown = f"error: {error}" if isinstance(error, CkptError) else "".join(traceback.format_exception(error))
        with suppress(OSError, ValueError):
            sys.stderr.write(f"rank {self._exchange.rank}: {shown.rstrip()}\n")
            sys.stderr.flush()
            sys.stdout.flush()
        os._exit(1)

    def _post(self, failed: RankFailed) -> None:
        with suppress(StoreError):  # If the store's process has ended, every rank notices this by itself.
            self._exchange.post("failed", json.dumps([self._exchange.rank, asdict(failed)]).encode())

    def _first(self, error: BaseException) -> CkptError | None:
        """Return another rank's failure or end, if that may be the cause of `error`; else None."""
        if isinstance(error, CkptError) and not isinstance(error, StoreError):
            return None
        end_s = time.monotonic() + _CAUSE_S
        try:
            while time.monotonic() < end_s:
                if (word := self._exchange.look("failed")) is not None:
                    return _read(word)
                if ended := self._exchange.ended():
                    names = ", ".join(map(str, ended))
                    return RankError(f"rank {names} has ended", hint="The launcher's log says how.")
                time.sleep(_POLL_S)
        except StoreError:
            return _store_has_ended()
        return None

    def _leave_evaluation(self) -> None:
        """End this process, with status 0: all is committed. Rank 0 stays, and its wait for ended ranks fails."""
        if not self._exchange.first:
            sys.stdout.flush()
            os._exit(0)

    def _watch(self, end_waits: Callable[[], None]) -> None:
        why: CkptError | None = None
        while why is None and not self._over.wait(_WATCH_S):
            try:
                if self._exchange.look("unevaluated") is not None and not self._over.wait(_GRACE_S):
                    self._leave_evaluation()
                word = self._exchange.look("failed")
                why = None if word is None else _read(word)
            except StoreError:
                why = _store_has_ended()
        if why is not None:
            end_waits()
            if not self._over.wait(_GRACE_S if self._exchange.first else 0):
                self.end_process(why)  # The main thread may hang in gloo, so it cannot report the error.


def _store_has_ended() -> RankError:
    return RankError("the process that holds the store of the ranks has ended", hint="It is rank 0, or torchrun.")


def _read(word: bytes) -> CkptError:
    """Read the exception of the first rank that has failed."""
    try:
        rank, said = parse_json(word)
        failed = typed(said, RankFailed)
        return failed.exception(whole(rank))
    except MALFORMED:
        return RankError("a rank has failed, and its word cannot be read")
