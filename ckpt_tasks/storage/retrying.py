"""Retries of requests; no other module retries.

Every request except one is safe to repeat: reads change nothing, and writing the same object twice under its own name
gives the same object. `put_if_absent` is repeated only if the store answered that it did nothing. A lost answer looks
like a lost request, so a commit first reads the entry before it tries again (`History.append`).

Waits grow and are random (Brooker, Exponential Backoff And Jitter, AWS Architecture Blog, 2015), so that writers that
were refused together retry at different times.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import tenacity

from ckpt_tasks.errors import CkptError, IntegrityError, ObjectExistsError, ObjectNotFoundError, StoreError
from ckpt_tasks.storage.port import ReadableStore, Store, WrappedStore
from ckpt_tasks.system import system

_T = TypeVar("_T")

_DEADLINE_S = 120.0  # It counts from a request's first failure; after it, the request raises.
_FIRST_S = 0.2
_MOST_S = 10.0
_QUIET_TRIES = 2  # One or two refusals are normal, and not logged.
_TRIES = 5
_QUIET_S = 60.0  # Outages that follow each other within this time are logged once.
_LOOK_BYTES = 16 << 20
_READS = 3
_PAUSE_S = 0.1

_log = logging.getLogger("ckpt_tasks")


class RetryingStore(WrappedStore):
    """A store that retries requests to `inner` after transient failures, for `deadline_s` seconds."""

    def __init__(self, inner: Store, *, deadline_s: float = _DEADLINE_S):
        super().__init__(inner)
        self._deadline_s = deadline_s
        self._told_s = -math.inf  # The time of the newest log line about an outage; infinite during an outage.

    def put(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        failed = False

        def ours() -> bool:
            # Only one attempt uses the name, so an existing object may be from our own earlier try, whose answer was
            # lost. After a failed try, comparing the size suffices.
            try:
                return self._holds(name, body, size_only=failed)
            except ObjectNotFoundError:
                return False

        def write() -> None:
            nonlocal failed
            try:
                if not (failed and ours()):
                    self.inner.put(name, body)
            except ObjectExistsError:
                if not ours():
                    raise
            except StoreError:
                failed = True
                raise

        self._forward(write)

    def put_if_absent(self, name: str, body: bytes) -> None:
        self._forward(lambda: self.inner.put_if_absent(name, body), _was_refused)

    def sizes(self, names: Sequence[str]) -> list[int]:
        return self._forward(lambda: self.inner.sizes(names))

    def delete_all(self, names: Sequence[str]) -> dict[str, CkptError]:
        left, refused = names, dict[str, CkptError]()

        def delete() -> None:
            nonlocal left
            failed = self.inner.delete_all(left)
            left = [name for name, error in failed.items() if is_transient(error)]
            refused.update((name, error) for name, error in failed.items() if name not in left)
            if left:
                raise failed[left[0]]

        try:
            self._forward(delete)
        except CkptError as error:
            return refused | dict.fromkeys(left, error)
        return refused

    def _holds(self, name: str, body: Sequence[bytes | memoryview], *, size_only: bool) -> bool:
        """Return True if an object consists of these buffers in order."""
        pieces = [memoryview(piece).cast("B") for piece in body]
        if self.inner.size(name) != sum(piece.nbytes for piece in pieces):
            return False
        begin = 0
        for piece in [] if size_only else pieces:
            for at in range(0, piece.nbytes, _LOOK_BYTES):
                wanted = piece[at : at + _LOOK_BYTES]
                stored = bytearray(wanted.nbytes)
                self.inner.read(name, begin + at, memoryview(stored))
                if stored != wanted:
                    return False
            begin += piece.nbytes
        return True

    def _forward(self, request: Callable[[], _T], worth: Callable[[BaseException], bool] | None = None) -> _T:
        failed_s: float | None = None
        tells = False  # Only one request logs the begin and the end of an outage.

        def left_s() -> float:
            # Count from the first failure: before it, an upload may run longer than the deadline.
            return self._deadline_s if failed_s is None else self._deadline_s - (system().monotonic() - failed_s)

        def over(state: tenacity.RetryCallState) -> bool:
            nonlocal failed_s
            if failed_s is None:
                failed_s = system().monotonic()
            return state.upcoming_sleep > left_s()

        def say(state: tenacity.RetryCallState) -> None:
            nonlocal tells
            is_new = system().monotonic() - self._told_s > _QUIET_S
            if state.attempt_number > _QUIET_TRIES and state.outcome is not None and is_new:
                tells, self._told_s = True, math.inf
                _log.warning("%s: %s; trying again for %.0f s more", self.url, state.outcome.exception(), left_s())

        retry = tenacity.retry_if_exception(worth or is_transient)
        again = tenacity.Retrying(
            retry=retry, wait=wait_s, stop=over, before_sleep=say, sleep=system().sleep, reraise=True
        )
        try:
            result = again(request)
        finally:
            if tells:
                self._told_s = system().monotonic()
        if tells and failed_s is not None:
            _log.warning("%s: it answers again, after %.0f s", self.url, system().monotonic() - failed_s)
        return result


async def tried_again(request: Callable[[], Awaitable[_T]], worth: Callable[[BaseException], bool]) -> _T:
    """Make a request on the event loop; after an error, retry while `worth(error)` is True, five tries at most."""
    retry, stop = tenacity.retry_if_exception(worth), tenacity.stop_after_attempt(_TRIES)
    return await tenacity.AsyncRetrying(retry=retry, wait=wait_s, stop=stop, reraise=True)(request)


def wait_s(state: tenacity.RetryCallState) -> float:
    """Return how many seconds to wait before the next try."""
    return system().uniform(0, min(_MOST_S, _FIRST_S * 2 ** (state.attempt_number - 1)))


def is_transient(error: BaseException) -> bool:
    """Return True if the same request may succeed later."""
    return isinstance(error, StoreError) and error.transient


def _was_refused(error: BaseException) -> bool:
    return isinstance(error, StoreError) and error.refused and error.transient


def read_good(store: ReadableStore, read: Callable[[], _T], *, listed: bool = False) -> _T:
    """Call `read`, which reads and verifies, until the bytes are good, three times at most; return its result.

    `listed`: the object must exist, so retry if it is missing. Raises the error of the last try.
    """
    again = (IntegrityError, ObjectNotFoundError) if listed else (IntegrityError,)
    for _ in range(_READS - 1):
        try:
            return read()
        except again:
            if not store.near:
                system().sleep(_PAUSE_S)
    return read()
