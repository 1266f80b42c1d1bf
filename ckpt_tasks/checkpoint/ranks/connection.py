"""c10d stores: opened, and asked by connections with a time limit for each request."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

from ckpt_tasks.process import start_thread

_PROBE_S = 2.0


class Connection:
    """A connection to a c10d store. A thread sends the requests, because torch waits for an answer without limit."""

    def __init__(self, store: Any):
        self._store = store
        self._requests: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        start_thread(_serve, store, self._requests, self._answers, name="ckpt-ranks")

    def __del__(self) -> None:
        self._requests.put(None)

    def request(self, name: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        """Call a method of the store and return its result.

        Raises Empty after `timeout_s` seconds without an answer, and RuntimeError if the store's process has ended.
        """
        self._requests.put((name, arguments))
        end_s = time.monotonic() + timeout_s
        while True:
            left_s = end_s - time.monotonic()
            try:
                answer = self._answers.get(timeout=max(0.0, min(_PROBE_S, left_s)))
            except Empty:
                if left_s <= _PROBE_S:
                    raise
                _check_listening(self._store)
                continue
            if isinstance(answer, BaseException):
                raise answer
            return answer


def open_store(
    host: str, port: int, size: int, *, holds: bool, join_s: float, listening_fd: int | None = None, **more: Any
) -> Any:
    """Connect to a c10d store, or hold it in this process (`holds`), on the socket `listening_fd` if it is given."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not export this name

    if listening_fd is not None:
        more |= {"master_listen_fd": listening_fd, "use_libuv": hasattr(TCPStore, "clone")}  # False before torch 2.8.
    return TCPStore(
        host, port, size, is_master=holds, timeout=timedelta(seconds=join_s), wait_for_workers=False, **more
    )


def cloned(store: Any) -> Any:
    """Return another connection to a store.

    Before torch 2.8 its keys have no prefix: a prefix store does not tell its own.
    """
    if hasattr(store, "clone"):
        return store.clone()
    root = _root(store)
    if hasattr(root, "host"):
        return open_store(root.host, root.port, -1, holds=False, join_s=root.timeout.total_seconds())
    return type(root)(root.path) if hasattr(root, "path") else root


def _root(store: Any) -> Any:
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


def _check_listening(store: Any) -> None:
    """Raise RuntimeError if the store's process has ended; torch would try for minutes to reconnect."""
    tcp = _root(store)
    place = (getattr(tcp, "host", None), getattr(tcp, "port", None))
    if None in place:
        return  # The store is a file, or it is in this process.
    try:
        socket.create_connection(place, timeout=_PROBE_S).close()
    except ConnectionRefusedError as error:
        raise RuntimeError(f"nothing listens at {place[0]}:{place[1]}") from error
    except OSError:
        return  # The store's process may be stopped, or slow.


def _serve(store: Any, requests: SimpleQueue[Any], answers: SimpleQueue[Any]) -> None:
    client = None
    while (request := requests.get()) is not None:
        name, arguments = request
        try:
            client = client or cloned(store)
            answers.put(getattr(client, name)(*arguments))
        except Exception as error:  # noqa: BLE001 (`request` raises it)
            answers.put(error)
