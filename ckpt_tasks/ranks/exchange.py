"""How the ranks of one training agree: each sends a word, rank 0 decides, and every rank gets the same answer.

Invariants

1. `agree` returns the same answer in every rank, or raises in every rank that is alive, within the deadline.
2. Nothing here calls a collective of torch: a rank may be in one of the program's own collectives.
3. Every thread has its own connection to the c10d store: a call that waits does not stop the other threads.
4. Every request to that store has a time limit: the process that holds the store may hang.
5. The end of a rank ends all waits for its word within seconds, if another rank is left on its host.

One process is the case of one rank: it sends nothing.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from ckpt_tasks import errors
from ckpt_tasks.errors import CkptError, StateError, StoreError
from ckpt_tasks.system import has_ended, host_name, process_start

__all__ = [
    "ALONE",
    "SILENT",
    "Alone",
    "Exchange",
    "StoreExchange",
    "Together",
    "all_or_none",
    "find_exchange",
    "from_first",
]

_PIECE_BYTES = 4 << 20  # the c10d store refuses a value of more than 8 MiB
_POLL_S = 0.002
_TIMEOUT_S = 600.0
_PROBE_S = 2.0
_LOOK_S = 1.0  # a waiting rank looks this often whether ranks have ended
_MARGIN = 1.5  # rank 0 gives up first, and says which rank it waited for
SILENT = "It hangs, is slow or has ended, or has made another number of Checkpointers: look at its log."

Decide = Callable[[list[bytes]], bytes]


class Exchange(Protocol):
    """The exchange of words between the ranks of one training."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def agree(self, topic: str, word: bytes | BaseException, decide: Decide, deadline_s: float) -> bytes:
        """Send this rank's word on a topic, which is used once; return rank 0's answer: `decide(the words by rank)`.

        If a rank's word is an exception, or `decide` raises, that is raised in all ranks. Raises StoreError if a rank
        sends nothing for `deadline_s`.
        """

    def drain(self, timeout_s: float) -> None:
        """Wait until every rank has read rank 0's answers: this process may hold them, and end next."""

    def post(self, topic: str, data: bytes) -> None:
        """Set the word of a topic, for `look`; replaces the last one."""

    def look(self, topic: str) -> bytes | None:
        """Return the last posted word of a topic, from any rank; does not wait."""


class Alone:
    """The only rank of a training in one process."""

    rank = 0
    size = 1

    def agree(self, topic: str, word: bytes | BaseException, decide: Decide, deadline_s: float) -> bytes:
        """Decide at once."""
        if isinstance(word, BaseException):
            raise word
        return decide([word])

    def drain(self, timeout_s: float) -> None:
        """Do nothing."""

    def post(self, topic: str, data: bytes) -> None:
        """Do nothing."""

    def look(self, topic: str) -> bytes | None:
        """Return None."""
        return None


ALONE = Alone()


class StoreExchange:
    """Ranks that share a c10d store; `name` is that of one Checkpointer, the same in all ranks."""

    def __init__(self, store: Any, rank: int, size: int, name: str, timeout_s: float = _TIMEOUT_S):
        self.rank = rank
        self.size = size
        self._store = store
        self._name = name
        self._timeout_s = timeout_s
        self.must_end: Callable[[], bool] = bool  # returns True once this process may wait for no other rank
        self._clients = threading.local()
        self._answers: dict[int, set[str]] = {}  # keys of the last agreement in each thread of rank 0
        self._processes = f"{name}/processes/{host_name()}"
        if start := process_start(os.getpid()):
            with _reaching(name):
                self._request("append", self._processes, f"{rank} {os.getpid()} {start}\n")

    def agree(self, topic: str, word: bytes | BaseException, decide: Decide, deadline_s: float) -> bytes:
        """Decide in rank 0; wait for its answer in the others."""
        topic = f"{self._name}/{topic}"
        if self.rank == 0:
            return self._decide(topic, word, decide, deadline_s)
        with _reaching(topic):
            self._put(f"{topic}/{self.rank}", _sealed(word))
            answer = self._get(f"{topic}/answer/{self.rank}", _MARGIN * deadline_s, 0)
        return _opened(answer)

    def drain(self, timeout_s: float) -> None:
        """Wait until the others have read their answers."""
        end_s = time.monotonic() + timeout_s
        with suppress(StoreError), _reaching("drain"):
            waiting = {key for keys in self._answers.values() for key in keys}
            while waiting and time.monotonic() < end_s:
                waiting = {key for key in waiting if self._request("check", [key]) and not self._has_ended(key)}
                time.sleep(_POLL_S if waiting else 0)

    def post(self, topic: str, data: bytes) -> None:
        """Set a key."""
        with _reaching(topic):
            self._request("set", f"{self._name}/{topic}", data)

    def look(self, topic: str) -> bytes | None:
        """Get a key, None if it is not set."""
        with _reaching(topic):
            key = f"{self._name}/{topic}"
            return bytes(self._request("get", key)) if self._request("check", [key]) else None

    def _decide(self, topic: str, word: bytes | BaseException, decide: Decide, deadline_s: float) -> bytes:
        answer: bytes | BaseException
        end_s = time.monotonic() + deadline_s
        try:
            with _reaching(topic):
                left_s = (max(0.0, end_s - time.monotonic()) for _ in range(1, self.size))
                said = [self._get(f"{topic}/{rank}", for_s, rank) for rank, for_s in enumerate(left_s, start=1)]
            if isinstance(word, BaseException):
                raise word
            answer = decide([word, *(_opened(data, rank) for rank, data in enumerate(said, start=1))])
        except BaseException as error:
            answer = error
            raise
        finally:
            with _reaching(topic):
                for rank in range(1, self.size):
                    self._put(f"{topic}/answer/{rank}", _sealed(answer))
                self._answers[threading.get_ident()] = {f"{topic}/answer/{rank}" for rank in range(1, self.size)}
        return answer

    def _request(self, name: str, *arguments: Any) -> Any:
        """Call a method of this thread's connection to the store; raise StoreError if it does not answer."""
        connection = getattr(self._clients, "connection", None)
        if connection is None:
            connection = self._clients.connection = _Connection(self._store)
        try:
            return connection.request(name, arguments, self._timeout_s)
        except Empty:
            self._clients.connection = None  # its late answer must not be taken for that of the next request
            raise StoreError(
                f"the ranks cannot reach each other: their store says nothing for {self._timeout_s:.0f} s",
                hint="The process that holds it hangs or is stopped: look at its log.",
            ) from None

    def _put(self, key: str, data: bytes) -> None:
        pieces = range(0, len(data), _PIECE_BYTES)
        for begin in pieces[1:]:
            self._request("set", f"{key}+{begin // _PIECE_BYTES}", data[begin : begin + _PIECE_BYTES])
        # Set last: it says that all pieces are there.
        self._request("set", key, b"%06d" % len(pieces) + data[:_PIECE_BYTES])

    def _get(self, key: str, deadline_s: float, rank: int) -> bytes:
        end_s, look_s = time.monotonic() + deadline_s, time.monotonic() + _LOOK_S
        poll_s = max(_POLL_S, self.size * 1e-4)
        # Not wait(): torch prints a warning when that times out.
        while not self._request("check", [key]):
            if time.monotonic() > end_s:
                error = StoreError(f"rank {rank} said nothing for {deadline_s:.0f} s", key=key.rpartition("/")[0])
                error.hint = SILENT
                raise error
            if time.monotonic() > look_s:
                self._check_ended(rank)
                look_s = time.monotonic() + _LOOK_S
            time.sleep(poll_s)
        head = bytes(self._request("get", key))
        others = [f"{key}+{n}" for n in range(1, int(head[:6]))]
        pieces = [head[6:], *(bytes(self._request("get", other)) for other in others)]
        for other in (*others, key):
            self._request("delete_key", other)
        return b"".join(pieces)

    def _check_ended(self, rank: int) -> None:
        """Raise StoreError if a rank has ended, or this one must; tell all ranks which ones of this host have."""
        listed = self._request("get", self._processes) if self._request("check", [self._processes]) else b""
        with suppress(ValueError):  # not what a rank has written
            for other, pid, start in (line.split() for line in bytes(listed).decode().splitlines()):
                if has_ended(int(pid), start):
                    self._request("set", f"{self._name}/ended/{other}", b"")
        if self.must_end():
            self._request("set", f"{self._name}/ended/{self.rank}", b"")
            raise StoreError(f"rank {self.rank} was told to end while it waited for rank {rank}")
        if self._has_ended(f"/{rank}"):
            raise StoreError(f"rank {rank} has ended", hint="Look at its log: it was killed, or it has failed.")

    def _has_ended(self, key: str) -> bool:
        """Return True if the rank that a key ends with has ended."""
        return bool(self._request("check", [f"{self._name}/ended/{key.rpartition('/')[2]}"]))


class _Connection:
    """A connection to a c10d store in a thread of its own, because torch waits for an answer without a time limit."""

    def __init__(self, store: Any):
        self._store = store
        self._requests: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        queues = (store, self._requests, self._answers)
        threading.Thread(target=_serve, args=queues, name="ckpt-ranks", daemon=True).start()

    def __del__(self) -> None:
        self._requests.put(None)

    def request(self, name: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        """Return what a method of the store returns.

        Raises Empty after `timeout_s`, and RuntimeError if the store's process has ended.
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


def _check_listening(store: Any) -> None:
    """Raise RuntimeError if the store's process has ended; torch tries for minutes to make a new connection to it."""
    tcp = store
    while (inner := getattr(tcp, "underlying_store", None)) is not None:
        tcp = inner
    place = (getattr(tcp, "host", None), getattr(tcp, "port", None))
    if None in place:
        return  # a store in a file or in this process
    try:
        socket.create_connection(place, timeout=_PROBE_S).close()
    except ConnectionRefusedError as error:
        raise RuntimeError(f"nothing listens at {place[0]}:{place[1]}") from error
    except OSError:
        return  # it may be stopped, or slow


def _serve(store: Any, requests: SimpleQueue[Any], answers: SimpleQueue[Any]) -> None:
    client = None
    while (request := requests.get()) is not None:
        name, arguments = request
        try:
            client = client or store.clone()
            answers.put(getattr(client, name)(*arguments))
        except Exception as error:  # noqa: BLE001 (raised by who asked)
            answers.put(error)


_made = 0


def find_exchange(group: Any = None, timeout_s: float = _TIMEOUT_S) -> Exchange:
    """Return the exchange of a process group (default: torch's default group), or `ALONE` if there is none.

    Every rank must call it equally often. A request to the c10d store may take `timeout_s`.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return ALONE
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    if size == 1:
        return ALONE
    global _made
    _made += 1
    c10d = distributed.distributed_c10d
    store = c10d._get_default_store() if group is None else c10d._get_process_group_store(group)
    return StoreExchange(store.clone(), rank, size, f"ckpt-tasks/{_made}", timeout_s)


def from_first(exchange: Exchange, topic: str, make: Callable[[], bytes], deadline_s: float) -> bytes:
    """Return in every rank what `make` returns in rank 0, or raise what it raises there."""
    word: bytes | BaseException = b""
    if exchange.rank == 0:
        try:
            word = make()
        except BaseException as error:
            if exchange.size == 1:
                raise
            word = error
    return exchange.agree(topic, word, lambda words: words[0], deadline_s)


@contextmanager
def all_or_none(exchange: Exchange, topic: str, deadline_s: float) -> Iterator[Together]:
    """Run a block that all ranks complete, or none; the block must call the yielded object before each change.

    An exception in any rank is raised in all ranks: at that call, or at the end of the block.
    """
    together = Together(exchange, topic, deadline_s)
    try:
        yield together
    except BaseException as error:
        if not together.asking:
            together(error)
        raise


class Together:
    """The agreements of the ranks within `all_or_none`; all ranks must make them in the same order."""

    def __init__(self, exchange: Exchange, topic: str = "", deadline_s: float = 0.0):
        self.rank = exchange.rank
        self.size = exchange.size
        self.asking = False
        self._exchange = exchange
        self._topic = topic
        self._deadline_s = deadline_s
        self._count = 0

    def __call__(self, word: bytes | BaseException = b"", decide: Decide = lambda words: b"") -> bytes:
        """Wait until every rank has called this; return the same answer in all. See `Exchange.agree`."""
        self._count, self.asking = self._count + 1, True
        answer = self._exchange.agree(f"{self._topic}/{self._count}", word, decide, self._deadline_s)
        self.asking = False
        return answer


@contextmanager
def _reaching(topic: str) -> Iterator[None]:
    """Raise StoreError if torch cannot reach the c10d store."""
    try:
        yield
    except RuntimeError as error:  # torch's DistError: the process that holds the store is gone
        raise StoreError(f"the ranks cannot reach each other: {error!s:.200}", key=topic) from error


def _sealed(word: bytes | BaseException) -> bytes:
    if not isinstance(word, BaseException):
        return b"=" + word
    kind = type(word).__name__ if isinstance(word, CkptError) else "StateError"
    said = {name: value for name, value in vars(word).items() if _is_plain(value)}
    return b"!" + json.dumps({"message": str(word), **said, "kind": kind}).encode()


def _opened(data: bytes, rank: int | None = None) -> bytes:
    """Return a word; if it is an exception, raise it with the number of its rank."""
    if data[:1] == b"=":
        return data[1:]
    said = json.loads(data[1:])
    kind, message = str(said.pop("kind")), str(said.pop("message"))
    error: CkptError = getattr(errors, kind)(message) if kind in errors.__all__ else StateError(message)
    for name, value in said.items():
        if not name.startswith("_") and not callable(
            getattr(error, name, callable)
        ):  # the store asks nobody who they are
            setattr(error, name, tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value)
    if rank is not None and not error.message.startswith("rank "):
        error.message = f"rank {rank}: {error.message}"
    raise error


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | tuple | list)
