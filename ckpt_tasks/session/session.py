"""A session: live training state that the flow restores, trains on, saves and throws away.

The flow knows no more than this of who computes. A session in this process (`local.py`) is the smallest one; a gang of
ranks in processes of their own answers to the same verbs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.format.ledger import Checkpoint

__all__ = ["Progress", "Session", "Watcher", "watcher"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One completed step: its metrics, its seconds, how much of `unit` it went through, and what is committed."""

    step: int
    metrics: Mapping[str, float]
    step_s: float
    amount: float
    unit: str
    commit: Checkpoint | None


Watcher = Callable[[Progress], None]

# Called after every step of a flow that this thread starts; a flow's parameters are JSON and cannot carry it.
watcher: ContextVar[Watcher | None] = ContextVar("ckpt_tasks_watcher", default=None)


class Session(Protocol):
    """Hold the live state of one run between attempts.

    `clean` says that the live state is the one of `ckpt.position`, so that nothing has to be restored.
    """

    ckpt: Checkpointer
    clean: bool

    def restore(self) -> int:
        """Make the live state that of the newest good checkpoint and return its step; save where nothing is stored."""

    def save(self, step: int) -> None:
        """Commit the live state as `step`, unless that is committed already."""

    def discard(self) -> None:
        """Give up the live state of a failed attempt, and free what it held."""
