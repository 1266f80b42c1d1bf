"""A session: live training state that the flow restores, trains, saves and discards.

The flow knows nothing else of who computes. `local.py` has the session of one process; many ranks in processes of their
own can offer the same methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.format.records import Checkpoint

__all__ = ["Progress", "Session", "Watcher", "watcher"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One completed step: metrics, seconds, how much of `unit` it used, and what is committed."""

    step: int
    metrics: Mapping[str, float]
    step_s: float
    amount: float
    unit: str
    commit: Checkpoint | None


Watcher = Callable[[Progress], None]

# Called after every step of a flow that this thread starts; a function cannot be a flow's parameter.
watcher: ContextVar[Watcher | None] = ContextVar("ckpt_tasks_watcher", default=None)


class Session(Protocol):
    """Hold the live state of one run between attempts.

    `clean` says that the live state is the one of `ckpt.position`: no restore is needed.
    """

    ckpt: Checkpointer
    clean: bool

    def restore(self) -> int:
        """Restore the newest good checkpoint and return its step; without one, save the live state as the first."""

    def save(self, step: int) -> None:
        """Commit the live state as `step`, if that is not committed yet."""

    def discard(self) -> None:
        """Discard the live state of a failed attempt, and free its memory."""
