"""The messages between a gang's agent and its ranks: typed values, one line of JSON each; nothing is pickled."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpt_tasks.checkpoint.ranks.meeting import opened, sealed
from ckpt_tasks.checkpoint.restore.restore import RestoreReport
from ckpt_tasks.checkpoint.save.listening import Listener
from ckpt_tasks.errors import CkptError, ConfigError, RankError
from ckpt_tasks.flows.session.session import Progress
from ckpt_tasks.format.parsing import declared
from ckpt_tasks.format.records import Checkpoint, checkpoint_item, read_checkpoint
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.storage.answers import answer_of
from ckpt_tasks.storage.locations import Location

HOST = "127.0.0.1"  # Rank 0 listens only at this address: torch's own store would listen on every interface.
_BLOCK_BYTES = 1 << 16
_MOST_TRACEBACK = 20_000


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all messages; every field is JSON data."""


@dataclass(frozen=True, kw_only=True)
class Begin(Message):
    """The first message to a rank: what it trains, and where all `size` ranks connect (port 0: not known yet).

    The rank's host has `local_size` of the ranks, from `first_rank` on. All keys in their store begin with `secret`,
    which differs for each gang: other programs of the host do not hit upon them. `command` is the agent's command line.
    """

    size: int
    first_rank: int
    local_size: int
    host: str
    port: int
    config: Mapping[str, Any]
    program: str
    params: Mapping[str, Any]
    flow_run_id: str | None
    secret: str = field(default="", repr=False)
    command: list[str] = field(default_factory=list, repr=False)


@dataclass(frozen=True, kw_only=True)
class Order(Message):
    """To a rank: carry out this order, and answer Done or Failed."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stop(Message):
    """To a rank that trains: commit the step and release the run, as after SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class Done(Message):
    """From a rank: it has carried out the order; `stopped` is the signal that has ended the order early.

    `busy` is the share of the order's time in which the rank's main thread has computed instead of waiting. `source` is
    the source of a restore, `measured` are the metrics of an evaluation.
    """

    position: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    step_s: float | None = None
    commit: Mapping[str, Any] | None = None
    stopped: int | None = None
    busy: float = 0.0
    source: str = ""
    measured: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stepped(Message):
    """From a rank: the steps completed since its last such message; ranks other than 0 send only the last step."""

    steps: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RankMoved(Message):
    """From a rank: within the last second the store has received bytes from the rank, or delivered bytes to it."""


@dataclass(frozen=True, kw_only=True)
class Told(Message):
    """From rank 0: an event for the listeners of the session."""

    event: str
    value: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Logged(Message):
    """From a rank: a record of its log."""

    logger: str
    level: int
    text: str


@declared
@dataclass(frozen=True, kw_only=True)
class RankFailed(Message):
    """From a rank: an exception has ended its work after `step`, at `at_s` seconds of the host's monotonic clock."""

    error: str
    ours: bool
    answer: tuple[int | None, str]  # The store's answer that caused the exception, if any.
    trace: str
    at_s: float
    step: int

    @classmethod
    def of(cls, error: BaseException, step: int = 0) -> RankFailed:
        """Make the message that describes an exception."""
        ours = isinstance(error, CkptError)
        said = sealed(error).decode() if ours else f"{type(error).__name__}: {error}"[:2000]
        trace = "".join(traceback.format_exception(error))[-_MOST_TRACEBACK:]
        return cls(error=said, ours=ours, answer=answer_of(error), trace=trace, at_s=time.monotonic(), step=step)

    def exception(self, rank: int) -> CkptError:
        """Return the exception to raise in the agent: our own errors unchanged, any other as a RankError."""
        error: CkptError = RankError(f"rank {rank} failed after step {self.step}: {self.error}")
        if self.ours:
            try:
                opened(self.error.encode(), rank or None)
            except CkptError as same:
                error = same
                error.__cause__ = _Answer(*self.answer) if self.answer[1] or self.answer[0] else None
        error.add_note(f"In rank {rank}:\n{self.trace}")
        return error


class _Answer(Exception):  # noqa: N818 (never raised: only the cause of an error)
    """A store's answer to a rank, in the form that `answer_of` reads."""

    def __init__(self, status: int | None, code: str):
        super().__init__(f"the store answered {status} {code}")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": code}}


_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Begin, Order, Stop, Done, Stepped, RankMoved, Told, Logged, RankFailed)
}


class Channel:
    """One end of a socket pair. `closed` is set once the other end is closed and all its messages are received."""

    def __init__(self, end: socket.socket):
        self.closed = False
        self._socket = end
        self._sending = threading.Lock()
        self._rest = b""

    def fileno(self) -> int:
        """Return the descriptor, for use in select()."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message; do nothing if the other end is closed, since `receive` will notice that."""
        line = json.dumps([type(message).__name__, asdict(message)]).encode() + b"\n"
        with self._sending, suppress(OSError):
            self._socket.sendall(line)

    def receive(self) -> list[Message]:
        """Wait for messages and return them; return an empty list if the other end is closed."""
        while not self.closed:
            try:
                data = self._socket.recv(_BLOCK_BYTES)
            except ConnectionError:
                data = b""
            *lines, self._rest = (self._rest + data).split(b"\n")
            self.closed = not data
            if lines:
                return [_read(line) for line in lines]
        return []

    def close(self) -> None:
        """Close this end of the channel."""
        self.closed = True
        self._socket.close()


def _read(line: bytes) -> Message:
    kind, fields = json.loads(line)
    return _KINDS[kind](**fields)


def write_config(config: CheckpointConfig) -> dict[str, Any]:
    """Return a configuration as JSON data. Raises ConfigError if options of its store are not JSON."""
    fields = {**vars(config), "checkpoint_dir": vars(config.location)}
    fields |= {name: os.fspath(fields[name]) for name in ("memory_dir", "local_dir") if fields[name] is not None}
    try:
        json.dumps(fields)
    except TypeError as error:
        raise ConfigError(
            f"storage_options cannot be given to other processes: {error}", hint="Use numbers, texts, lists and dicts."
        ) from error
    return fields


def read_config(fields: Mapping[str, Any]) -> CheckpointConfig:
    """Read the result of `write_config`."""
    return CheckpointConfig(**{**fields, "checkpoint_dir": Location(**fields["checkpoint_dir"])})


def write_progress(progress: Progress) -> dict[str, Any]:
    """Return the progress of a step as JSON data."""
    return {**vars(progress), "commit": checkpoint_item(progress.commit) if progress.commit else None}


def read_progress(fields: Mapping[str, Any]) -> Progress:
    """Read the result of `write_progress`."""
    commit: Checkpoint | None = read_checkpoint(fields["commit"]) if fields["commit"] else None
    return Progress(**{**fields, "commit": commit})


def tell_agent(listener: Listener, message: Told) -> None:
    """Call a listener with an event of rank 0."""
    value = message.value
    if message.event == "committed" and listener.committed:
        listener.committed(read_checkpoint(value))
    elif message.event == "restored" and listener.restored:
        listener.restored(read_report(value))
    elif message.event == "failed" and listener.failed:
        listener.failed(value["step"], RankFailed(**value).exception(0))


def read_report(fields: Mapping[str, Any]) -> RestoreReport:
    """Read the report of a restore, in which JSON has turned tuples into lists."""
    report: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return RestoreReport(**{**report, "skipped": tuple((step, why) for step, why in report["skipped"])})
