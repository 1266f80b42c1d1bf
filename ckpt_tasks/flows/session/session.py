"""A session: live training state that the flow restores, trains, saves and discards.

A flow reaches the processes that compute only through its session. `local.py` has the session of this process, with
direct calls; `ckpt_tasks/flows/gang/` has the session of many ranks in separate processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from ckpt_tasks.checkpoint.save.listening import Listener
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.history import Head


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a completed step: metrics, seconds, the `amount` of data used (in `unit`), the newest commit."""

    step: int
    metrics: Mapping[str, float]
    step_s: float
    amount: float
    unit: str
    commit: Checkpoint | None


Watcher = Callable[[Progress], None]

# The function to call after every step of the flows that this thread starts; a flow's parameter cannot be a function.
watcher: ContextVar[Watcher | None] = ContextVar("ckpt_tasks_watcher", default=None)

# The function to call with the session when a flow has trained to its end, before the session ends.
at_end: ContextVar[Callable[[ProgramSession], object]] = ContextVar("ckpt_tasks_at_end", default=lambda session: None)


class TrainedRun(Protocol):
    """The run that a flow trains, for pages, events and the early stop; a Checkpointer implements it."""

    @property
    def config(self) -> CheckpointConfig:
        """The options of the run."""

    @property
    def position(self) -> int:
        """The number of completed steps: as restored, or as last reported."""

    def checkpoints(self) -> list[Checkpoint]:
        """List the live checkpoints, newest commit first."""

    def note(self, what: str, **fields: Any) -> None:
        """Write an event into the run's history."""

    def listen(self, listener: Listener) -> None:
        """Call a listener after every commit, failed save and restore from now on."""


class Session(Protocol):
    """Holds the live state of one run between attempts.

    `clean`: the live state is the state at `position`, so no restore is needed.
    """

    clean: bool

    @property
    def position(self) -> int:
        """The number of completed steps: as restored, or as last reported."""

    def head(self) -> Head:
        """Return the head of the ledger of the run that this session trains."""

    def restore(self) -> int:
        """Restore the newest good checkpoint and return its step; without one, save the live state as the first."""

    def save(self, step: int) -> None:
        """Commit the live state as `step`, if that step is not committed yet."""

    def discard(self) -> None:
        """Discard the live state of a failed attempt, and free its memory."""

    def record_failure(self, **fields: Any) -> None:
        """Record a failed attempt in the run's history."""

    def hold_signals(self, hold: bool) -> None:
        """Hold SIGTERM and Ctrl-C back until the next step, or deliver them, including a pending one."""


class ProgramSession(Session, TrainedRun, Protocol):
    """Holds a program's live state on one rank or on many."""

    @property
    def ranks(self) -> int:
        """The number of ranks that train."""

    @property
    def gangs(self) -> Sequence[Mapping[str, str]]:
        """The gangs of ranks that this process has started, newest first, as rows of texts; empty for one rank."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the last step."""

    @property
    def step_s(self) -> float | None:
        """The median seconds of the last steps, without saves; None before the first step."""

    @property
    def last_commit(self) -> Checkpoint | None:
        """The checkpoint that was committed last."""

    def run(self, until: int) -> None:
        """Train from the position to step `until`."""

    def evaluate(self, checkpoint: Checkpoint, suite: str) -> Mapping[str, float]:
        """Discard the live state; measure a checkpoint with a fresh program, on every rank together."""
