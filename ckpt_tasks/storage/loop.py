"""The event loop that talks to object stores: one daemon thread, and daemon threads for calls that block.

asyncio runs blocking calls (host names, certificates, credentials) in an executor. Python shuts executors down before
it calls atexit functions, and from 3.12 on it cannot start threads after that. But the last checkpoint is committed at
that time, so this loop starts its own threads when it is made.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, TypeVar, TypeVarTuple

__all__ = ["io_loop"]

_BLOCKING_THREADS = 6

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class _StoreLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        for _ in range(_BLOCKING_THREADS):
            threading.Thread(target=_answer, args=(self._calls,), name="ckpt-io-blocking", daemon=True).start()

    def run_in_executor(self, executor: Executor | None, func: Callable[[*_Ts], _T], *args: *_Ts) -> asyncio.Future[_T]:
        """Run a blocking call in one of this loop's threads, unless the caller gives an executor."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        future: Future[_T] = Future()
        self._calls.put((future, func, args))
        return asyncio.wrap_future(future, loop=self)


def io_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process; the first call starts it."""
    global _loop
    with _starting:
        if _loop is None:
            loop = _StoreLoop()
            threading.Thread(target=loop.run_forever, name="ckpt-io", daemon=True).start()
            _loop = loop
        return _loop


def _answer(calls: SimpleQueue[_Call]) -> None:
    while True:
        future, func, args = calls.get()
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(func(*args))
        except BaseException as error:  # noqa: BLE001 (the caller's future raises it)
            future.set_exception(error)
        del future, func, args  # otherwise the arguments would stay alive until the next call


def _after_fork() -> None:
    """Forget the loop in a forked child, which has none of its threads; closing it would disturb the parent's."""
    global _loop, _starting
    _inherited.append(_loop)
    _loop, _starting = None, threading.Lock()


_loop: asyncio.AbstractEventLoop | None = None
_starting = threading.Lock()
_inherited: list[object] = []
os.register_at_fork(after_in_child=_after_fork)
