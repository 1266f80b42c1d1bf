"""One agreement of all ranks over a c10d store, and the encoding of values and exceptions between ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from ckpt_tasks import errors
from ckpt_tasks.errors import CkptError, StateError, StoreError
from ckpt_tasks.format.parsing import MALFORMED

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.ranks.exchange import StoreExchange

_T = TypeVar("_T")


class Meeting(Protocol):
    """One agreement of all ranks: `gather`, then rank 0 decides, then `publish`."""

    def gather(self, word: _T, write: Callable[[_T], bytes], read: Callable[[bytes], _T]) -> list[_T]:
        """Return the messages of all ranks by rank, in rank 0; return an empty list in the other ranks.

        `write` and `read` turn a message into bytes and back, if another process needs the message.
        """

    def publish(self, answer: _T, write: Callable[[_T], bytes], read: Callable[[bytes], _T]) -> _T:
        """Return rank 0's answer in every rank."""


class StoreMeeting:
    """An agreement over a c10d store. If a rank's block raises before `gather`, the rank sends the error to rank 0."""

    def __init__(self, exchange: StoreExchange, topic: str, deadline_s: float):
        self._exchange = exchange
        self._topic = topic
        self._deadline_s = deadline_s
        self._said = self._over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._over:
            return
        raised = error
        if not self._said:
            try:
                self._gather(error)
            except BaseException as other:  # noqa: BLE001 (raised below)
                raised = other
        if not self._over and self._exchange.first:
            self._tell(raised)
        elif not self._over:
            try:
                self._hear()  # This raises the error that rank 0 has sent, which may come from another rank.
            except BaseException as heard:
                raise heard from None
        if raised is not error:
            raise raised

    def gather(self, word: _T, write: Callable[[_T], bytes], read: Callable[[bytes], _T]) -> list[_T]:
        """Collect the messages of all ranks, in rank 0; send this rank's message, in the other ranks."""
        said = self._gather(write(word) if not self._exchange.first else b"")
        with naming_foreign(self._topic):
            return [word, *(read(data) for data in said)] if self._exchange.first else []

    def publish(self, answer: _T, write: Callable[[_T], bytes], read: Callable[[bytes], _T]) -> _T:
        """Send the answer, in rank 0; wait for the answer, in the other ranks."""
        if not self._exchange.first:
            heard = self._hear()
            with naming_foreign(self._topic):
                return read(heard)
        self._tell(write(answer))
        return answer

    def _gather(self, word: bytes | BaseException) -> list[bytes]:
        self._said = True
        if not self._exchange.first:
            self._over = True  # If this send fails, no answer will come.
            self._exchange.send(self._topic, sealed(word))
            self._over = False
            return []
        with naming_foreign(self._topic):
            said = self._exchange.collect(self._topic, self._deadline_s)
            if not isinstance(word, BaseException):
                return [opened(data, rank) for rank, data in enumerate(said, start=1)]
        raise word

    def _tell(self, answer: bytes | BaseException) -> None:
        self._over = True
        self._exchange.tell(self._topic, sealed(answer))

    def _hear(self) -> bytes:
        self._over = True
        with naming_foreign(self._topic):
            return opened(self._exchange.hear(self._topic, self._deadline_s))


@contextmanager
def naming_foreign(topic: str) -> Iterator[None]:
    """Raise StoreError if the block cannot read a value of the store: a foreign program has written this value."""
    try:
        yield
    except CkptError:
        raise
    except MALFORMED as error:
        raise StoreError(
            f"the store of the ranks has a value that none of them has written: {error!s:.100}",
            key=topic,
            hint="Another program on these hosts, or in their network, writes to its port.",
        ) from error


def sealed(word: bytes | BaseException) -> bytes:
    """Encode a message, or an exception, as bytes."""
    if not isinstance(word, BaseException):
        return b"=" + word
    kind = type(word).__name__ if isinstance(word, CkptError) else "StateError"
    said = {name: value for name, value in vars(word).items() if _is_plain(value)}
    return b"!" + json.dumps({"message": str(word), **said, "kind": kind}).encode()


def opened(data: bytes, rank: int | None = None) -> bytes:
    """Decode a message; if it is an exception, raise the exception, with the rank's number in its text."""
    if data[:1] == b"=":
        return data[1:]
    said = json.loads(data[1:])
    kind, message = str(said.pop("kind")), str(said.pop("message"))
    error: CkptError = getattr(errors, kind)(message) if kind in errors.__all__ else StateError(message)
    for name, value in said.items():
        # A foreign program may have written to the store: set only data attributes that our errors have.
        ours = getattr(error, name, callable)
        if not name.startswith("_") and not callable(ours):
            setattr(error, name, tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value)
    if rank is not None and not error.message.startswith("rank "):
        error.message = f"rank {rank}: {error.message}"
    raise error


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | tuple | list)
