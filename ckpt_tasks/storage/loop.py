"""The event loop that talks to object stores: one daemon thread, and daemon threads for calls that block.

asyncio runs blocking calls (host names, certificates, credentials) in an executor. Python shuts executors down before
it calls atexit functions, and from 3.12 on it cannot start threads after that. But the last checkpoint is committed in
an atexit function, so this loop starts its own threads when it is made.
"""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, TypeVar, TypeVarTuple

from ckpt_tasks.process import start_thread

_BLOCKING_THREADS = 6
# Send at most 8 requests at a time, so that an upload in parts copies at most 8 parts of the image in memory.
_IN_FLIGHT = 8

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class _StoreLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        for _ in range(_BLOCKING_THREADS):
            start_thread(_answer, self._calls, name="ckpt-io-blocking")

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
            start_thread(loop.run_forever, name="ckpt-io")
            _loop = loop
        return _loop


async def each(ask: Callable[[str], Awaitable[_T]], keys: Iterable[str]) -> dict[str, _T | BaseException]:
    """Call `ask` for each key, several at a time, and return the answers and errors by key."""
    keys, free = [*keys], asyncio.Semaphore(_IN_FLIGHT)

    async def one(key: str) -> _T:
        async with free:
            return await ask(key)

    return dict(zip(keys, await asyncio.gather(*map(one, keys), return_exceptions=True), strict=True))


def failed(answers: Mapping[str, object]) -> dict[str, BaseException]:
    """Return the errors among the answers."""
    return {key: answer for key, answer in answers.items() if isinstance(answer, BaseException)}


async def in_flight(jobs: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run jobs, several at a time; return their results in order. After an error cancel the others, and raise it.

    A job is taken from `jobs` only when it can start: this bounds the memory.
    """
    free, waiting, begun = asyncio.Semaphore(_IN_FLIGHT), iter(jobs), list[asyncio.Task[_T]]()

    async def one(job: Coroutine[Any, Any, _T]) -> _T:
        try:
            return await job
        finally:
            free.release()

    try:
        while True:
            await free.acquire()
            for task in begun:
                if task.done() and task.exception():
                    await task
            job = next(waiting, None)
            if job is None:
                return [await task for task in begun]
            begun.append(asyncio.ensure_future(one(job)))
    except BaseException:
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        raise


def slices(body: Sequence[memoryview], part_bytes: int) -> Iterator[io.BytesIO]:
    """Cut consecutive buffers into copies of `part_bytes` each; the last copy may be shorter.

    The client needs streams with their own memory: it would copy plain bytes again.
    """
    part = io.BytesIO()
    for piece in body:
        at = 0
        while at < piece.nbytes:
            step = min(part_bytes - part.tell(), piece.nbytes - at)
            part.write(piece[at : at + step])
            at += step
            if part.tell() == part_bytes:
                part.seek(0)
                yield part
                part = io.BytesIO()
    if part.tell():
        part.seek(0)
        yield part


def _answer(calls: SimpleQueue[_Call]) -> None:
    while True:
        future, func, args = calls.get()
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(func(*args))
        except BaseException as error:  # noqa: BLE001 (the caller's future raises it)
            future.set_exception(error)
        del future, func, args  # Otherwise the thread would keep the arguments until its next call.


def _after_fork() -> None:
    """Forget the loop in a forked child, where its threads are missing; closing it would disturb the parent's loop."""
    global _loop, _starting
    _inherited.append(_loop)
    _loop, _starting = None, threading.Lock()


_loop: asyncio.AbstractEventLoop | None = None
_starting = threading.Lock()
_inherited: list[object] = []
os.register_at_fork(after_in_child=_after_fork)
