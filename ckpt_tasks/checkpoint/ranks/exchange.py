"""Agreements of the ranks of one training: each rank sends a message (bytes), rank 0 decides, all get the answer.

Invariants

1. A meeting returns the same answer in every rank, or raises in every living rank, within the deadline.
2. This module never calls a collective of torch: a rank may be in a collective of the program.
3. Every thread has its own connection to the c10d store: a thread that waits for an answer does not block the others.
4. Every request to the c10d store has a time limit: the process that holds the store may hang.
5. If a rank ends, and another rank of its host is alive, all waits for the ended rank end within seconds. (Before the
   first meeting, this holds only if the rank ended after the waiting rank had started.)
6. No rank reads messages of an earlier start: torchrun gives restarted ranks the old store with its data (torch 2.13).

A single process is rank 0 of 1, and sends nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from queue import Empty
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from ckpt_tasks.checkpoint.ranks.connection import Connection, cloned
from ckpt_tasks.checkpoint.ranks.meeting import Meeting, StoreMeeting
from ckpt_tasks.errors import StoreError
from ckpt_tasks.system import has_ended, host_name, process_start, system

_PIECE_BYTES = 4 << 20  # The c10d store refuses a value of more than 8 MiB.
_POLL_S = 0.002
_TIMEOUT_S = 600.0
_LOOK_S = 1.0  # A waiting rank looks for ended ranks this often.
_MARGIN = 1.5  # The other ranks wait this many times as long as rank 0, which can name the late rank.
SILENT = "It hangs, is slow or has ended, or has made another number of Checkpointers: look at its log."

Decide = Callable[[list[bytes]], bytes]
_T = TypeVar("_T")


class Exchange(Protocol):
    """Exchanges messages between the ranks of one training; this process is rank `rank` of `size`, `first` if rank 0.

    A meeting may take `patience` deadlines. Rank 0 gives up after one deadline, and names the rank that is late.
    """

    rank: int
    size: int
    first: bool
    patience: int

    def meeting(self, topic: str, deadline_s: float) -> AbstractContextManager[Meeting]:
        """Return a meeting of all ranks: in its block each rank calls `gather`, then `publish`. Use a topic only once.

        An exception in any rank's block is raised in all ranks. Raises StoreError if a rank sends nothing for
        `deadline_s` seconds.
        """

    def agree(self, topic: str, word: bytes | BaseException, decide: Decide, deadline_s: float) -> bytes:
        """Hold a meeting; return rank 0's answer `decide(words)`, where `words` has each rank's `word`, by rank.

        If a rank's `word` is an exception, all ranks raise it.
        """
        with self.meeting(topic, deadline_s) as meeting:
            if isinstance(word, BaseException):
                raise word
            words = meeting.gather(word, bytes, bytes)
            return meeting.publish(decide(words) if self.first else b"", bytes, bytes)

    def drain(self, timeout_s: float) -> None:
        """Wait until all ranks have read rank 0's answers: this process may hold the c10d store, and ends next."""

    def post(self, topic: str, data: bytes) -> None:
        """Publish data on a topic for `look`; replace the topic's previous data."""

    def look(self, topic: str) -> bytes | None:
        """Return the newest data that a rank has posted on a topic; None if no rank has. Do not wait."""


class Alone(Exchange):
    """The exchange of a training in one process, which has only this rank."""

    rank = 0
    size = 1
    first = True
    patience = 1

    def meeting(self, topic: str, deadline_s: float) -> Self:
        """Return this object as the meeting."""
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do not suppress an exception of the block."""

    def gather(self, word: _T, write: Callable[[_T], bytes], read: Callable[[bytes], _T]) -> list[_T]:
        """Return a list with this rank's message."""
        return [word]

    def publish(self, answer: _T, write: Callable[[_T], bytes], read: Callable[[bytes], _T]) -> _T:
        """Return the answer."""
        return answer

    def drain(self, timeout_s: float) -> None:
        """Return at once: there are no other ranks."""

    def post(self, topic: str, data: bytes) -> None:
        """Ignore the data: there are no other ranks."""

    def look(self, topic: str) -> bytes | None:
        """Return None: there are no other ranks."""
        return None


ALONE = Alone()


class StoreExchange(Exchange):
    """The exchange of ranks that share a c10d store; `name` stands for one Checkpointer, and is equal in all ranks.

    `shared`: the store may have data of an earlier start, so all keys begin with a name of this start. Rank 0 draws the
    name, each rank answers with a random number, and rank 0 repeats these numbers. The first use waits for all of this.
    """

    patience = 2

    def __init__(
        self, store: Any, rank: int, size: int, name: str, timeout_s: float = _TIMEOUT_S, *, shared: bool = False
    ):
        self.rank = rank
        self.size = size
        self.first = rank == 0
        self._store = store
        self._drawn = system().token_hex(8)
        self._shared = name
        self._name = f"{name}/{self._drawn}" if shared and self.first else name
        self._met = not shared
        self._meeting = threading.Lock()
        self._timeout_s = timeout_s
        # Returns True if this process must end, without waiting for other ranks.
        self.must_end: Callable[[], bool] = bool
        self._clients = threading.local()
        self._answers: dict[int, set[str]] = {}  # In rank 0, by thread: the answers' keys of the last meeting.
        self._processes = f"{name}/processes/{host_name()}"
        self._earlier: set[str] = set()
        with _reaching(name):
            if shared and self.first:
                self._request("set", f"{name}/name", self._name)
            if start := process_start(os.getpid()):
                self._request("append", self._processes, f"{rank} {os.getpid()} {start}\n")
                # Processes that have already ended may belong to an earlier start.
                self._earlier = {line for line, _ in self._ended_here()} if shared else set()

    def meeting(self, topic: str, deadline_s: float) -> StoreMeeting:
        """Return a meeting of all ranks over the store."""
        return StoreMeeting(self, f"{self.name(deadline_s)}/{topic}", deadline_s)

    def name(self, deadline_s: float) -> str:
        """Return the prefix of this start's keys, equal in all ranks; the first time, wait for all ranks."""
        if not self._met:
            with self._meeting, _reaching(self._shared):
                if self.first:
                    answered = [f"{self._name}/here/{rank}" for rank in range(1, self.size)]
                    self._await_all(answered, deadline_s)
                    self._request("set", f"{self._name}/all", b" ".join(self._request("get", key) for key in answered))
                else:
                    self._await(self._is_answered, 0, _MARGIN * deadline_s, self._shared)
                self._met = True
        return self._name

    def _is_answered(self) -> bool:
        """Answer the newest name that rank 0 has drawn; return True if rank 0 has repeated this process's number."""
        if not self._has(f"{self._shared}/name"):
            return False
        newest = bytes(self._request("get", f"{self._shared}/name")).decode(errors="replace")
        if newest != self._name:
            self._request("set", f"{newest}/here/{self.rank}", self._drawn)
            self._name = newest
        answers = f"{newest}/all"
        return self._has(answers) and self._drawn.encode() in bytes(self._request("get", answers)).split()

    def _has(self, key: str) -> bool:
        return bool(self._request("check", [key]))

    def drain(self, timeout_s: float) -> None:
        """Wait until the other ranks have read their answers, at most `timeout_s` seconds."""
        end_s = time.monotonic() + timeout_s
        with suppress(StoreError), _reaching("drain"):
            waiting = {key for keys in self._answers.values() for key in keys}
            while waiting and time.monotonic() < end_s:
                waiting = {key for key in waiting if self._has(key) and not self._has_ended(key)}
                time.sleep(_POLL_S if waiting else 0)

    def post(self, topic: str, data: bytes) -> None:
        """Set the data of a topic in the store."""
        with _reaching(topic):
            self._request("set", f"{self.name(self._timeout_s)}/{topic}", data)

    def look(self, topic: str) -> bytes | None:
        """Read the data of a topic from the store; return None if no rank has set them."""
        with _reaching(topic):
            key = f"{self.name(self._timeout_s)}/{topic}"
            return bytes(self._request("get", key)) if self._has(key) else None

    def send(self, topic: str, word: bytes) -> None:
        """Send this rank's message on a topic to rank 0."""
        with _reaching(topic):
            self._put(f"{topic}/{self.rank}", word)

    def collect(self, topic: str, deadline_s: float) -> list[bytes]:
        """Wait in rank 0 for the messages of the other ranks, and return them by rank."""
        keys = [f"{topic}/{rank}" for rank in range(1, self.size)]
        with _reaching(topic):
            self._await_all(keys, deadline_s)
            return [self._get(key) for key in keys]

    def tell(self, topic: str, answer: bytes) -> None:
        """Send rank 0's answer to the other ranks."""
        with _reaching(topic):
            for rank in range(1, self.size):
                self._put(f"{topic}/answer/{rank}", answer)
            self._answers[threading.get_ident()] = {f"{topic}/answer/{rank}" for rank in range(1, self.size)}

    def hear(self, topic: str, deadline_s: float) -> bytes:
        """Wait in a rank other than 0 for rank 0's answer, and return the answer."""
        key = f"{topic}/answer/{self.rank}"
        with _reaching(topic):
            self._await(partial(self._has, key), 0, _MARGIN * deadline_s, topic)
            return self._get(key)

    def _request(self, name: str, *arguments: Any) -> Any:
        """Call a method of the store over this thread's connection; raise StoreError if the store does not answer."""
        connection = getattr(self._clients, "connection", None)
        if connection is None:
            connection = self._clients.connection = Connection(self._store)
        try:
            return connection.request(name, arguments, self._timeout_s)
        except Empty:
            self._clients.connection = None  # Drop it: the next request must not get this request's late answer.
            raise StoreError(
                f"the ranks cannot reach each other: their store says nothing for {self._timeout_s:.0f} s",
                hint="The process that holds it hangs or is stopped: look at its log.",
            ) from None

    def _put(self, key: str, data: bytes) -> None:
        pieces = range(0, len(data), _PIECE_BYTES)
        for begin in pieces[1:]:
            self._request("set", f"{key}+{begin // _PIECE_BYTES}", data[begin : begin + _PIECE_BYTES])
        # Set the first piece, which has the number of pieces, last: readers wait for it.
        self._request("set", key, b"%06d" % len(pieces) + data[:_PIECE_BYTES])

    def _await_all(self, keys: Sequence[str], deadline_s: float) -> None:
        """Wait in rank 0 until the keys of the other ranks are set."""
        end_s = time.monotonic() + deadline_s
        for rank, key in enumerate(keys, start=1):
            left_s = max(0.0, end_s - time.monotonic())
            self._await(partial(self._has, key), rank, left_s, key.rpartition("/")[0])

    def _await(self, has_come: Callable[[], bool], rank: int, deadline_s: float, topic: str) -> None:
        """Wait until `has_come` returns True; raise StoreError after `deadline_s` seconds, or if `rank` has ended."""
        end_s, look_s = time.monotonic() + deadline_s, time.monotonic() + _LOOK_S
        poll_s = max(_POLL_S, self.size * 1e-4)
        # Poll, because torch's wait() prints a warning when it times out.
        while not has_come():
            if time.monotonic() > end_s:
                raise StoreError(f"rank {rank} said nothing for {deadline_s:.0f} s", key=topic, hint=SILENT)
            if time.monotonic() > look_s:
                self.check_ended(rank)
                look_s = time.monotonic() + _LOOK_S
            time.sleep(poll_s)

    def _get(self, key: str) -> bytes:
        head = bytes(self._request("get", key))
        others = [f"{key}+{n}" for n in range(1, int(head[:6]))]
        pieces = [head[6:], *(bytes(self._request("get", other)) for other in others)]
        for other in (*others, key):
            self._request("delete_key", other)
        return b"".join(pieces)

    def check_ended(self, rank: int) -> None:
        """Tell all ranks which ranks of this host have ended; raise StoreError if `rank` has or this one must end."""
        ended = self._tell_ended()
        if self.must_end():
            self._request("set", f"{self._name}/ended/{self.rank}", b"")
            raise StoreError(f"rank {self.rank} was told to end while it waited for rank {rank}")
        if str(rank) in ended or self._has_ended(f"/{rank}"):
            raise StoreError(f"rank {rank} has ended", hint="Look at its log: it was killed, or it has failed.")

    def ended(self) -> list[int]:
        """Return the ranks that have ended, as far as this rank knows."""
        with _reaching("ended"):
            self._tell_ended()
            return [rank for rank in range(self.size) if self._has_ended(f"/{rank}")]

    def _tell_ended(self) -> set[str]:
        """Tell all ranks which of this host's ranks have ended, and return them."""
        ended = {rank for line, rank in self._ended_here() if line not in self._earlier}
        for rank in ended:
            self._request("set", f"{self._name}/ended/{rank}", b"")
        return ended

    def _ended_here(self) -> Iterator[tuple[str, str]]:
        """Yield the entry and the rank of each ended process of this host, of any start."""
        listed = self._request("get", self._processes) if self._has(self._processes) else b""
        with suppress(ValueError):  # A foreign program may have written the entry.
            for line in bytes(listed).decode().splitlines():
                rank, pid, start = line.split()
                if has_ended(int(pid), start):
                    yield line, rank

    def _has_ended(self, key: str) -> bool:
        """Return True if a rank of this start has ended; the rank is the last part of the key."""
        return (self._met or self.first) and self._has(f"{self._name}/ended/{key.rpartition('/')[2]}")


_made = 0


def find_exchange(group: Any = None, timeout_s: float = _TIMEOUT_S) -> Exchange:
    """Return the exchange of a process group (None: torch's default group); `ALONE` if there is no group or one rank.

    All ranks must call this function equally often. A request to the c10d store may take `timeout_s` seconds.
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
    name = f"ckpt-tasks/{(group or distributed.group.WORLD).group_name}/{_made}"
    return StoreExchange(cloned(store), rank, size, name, timeout_s, shared=True)


def from_first(exchange: Exchange, topic: str, make: Callable[[], bytes], deadline_s: float) -> bytes:
    """Call `make` in rank 0; return its result, or raise its error, in every rank."""
    with exchange.meeting(topic, deadline_s) as meeting:
        answer = make() if exchange.first else b""
        meeting.gather(b"", bytes, bytes)
        return meeting.publish(answer, bytes, bytes)


@contextmanager
def all_or_none(exchange: Exchange, topic: str, deadline_s: float) -> Iterator[Together]:
    """Run a block in which all ranks make a change, or none; the block must call the yielded object before each change.

    An exception in any rank is raised in all ranks, at the next such call or at the end of the block.
    """
    together = Together(exchange, topic, deadline_s)
    try:
        yield together
    except BaseException as error:
        if not together.asking:
            together(error)
        raise


class Together:
    """The agreements of the ranks within `all_or_none`; all ranks must call this object in the same order."""

    def __init__(self, exchange: Exchange, topic: str = "", deadline_s: float = 0.0):
        self.rank = exchange.rank
        self.size = exchange.size
        self.asking = False
        self._exchange = exchange
        self._topic = topic
        self._deadline_s = deadline_s
        self._count = 0

    def __call__(self, word: bytes | BaseException = b"", decide: Decide = lambda words: b"") -> bytes:
        """Wait until every rank has called this object; return the same answer in all ranks. See `Exchange.agree`."""
        self._count, self.asking = self._count + 1, True
        answer = self._exchange.agree(f"{self._topic}/{self._count}", word, decide, self._deadline_s)
        self.asking = False
        return answer


@contextmanager
def _reaching(topic: str) -> Iterator[None]:
    """Raise StoreError if torch cannot reach the c10d store."""
    try:
        yield
    except RuntimeError as error:  # torch's DistError: the store's process has ended.
        raise StoreError(f"the ranks cannot reach each other: {error!s:.200}", key=topic) from error
