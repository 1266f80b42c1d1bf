"""Whoever wants to know what a Checkpointer does: told in the thread that did it, and never in its way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_tasks.format.ledger import Checkpoint

if TYPE_CHECKING:
    from ckpt_tasks.reading.restore import RestoreReport

__all__ = ["Listener", "Listeners"]

_log = logging.getLogger("ckpt_tasks")


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Plain functions, each called after the fact: they must return at once, and what they raise is only logged.

    `committed` is told of every durable commit, by the thread that made it; `failed` of a snapshot that will not be
    committed (step, why); `restored` of what was restored.
    """

    committed: Callable[[Checkpoint], object] | None = None
    failed: Callable[[int, BaseException], object] | None = None
    restored: Callable[[RestoreReport], object] | None = None


class Listeners:
    """Tell all listeners; one that raises is heard of once in the log, and called again the next time."""

    def __init__(self) -> None:
        self._all: list[Listener] = []
        self._complained: set[int] = set()

    def add(self, listener: Listener) -> None:
        """Tell this one as well from now on."""
        self._all.append(listener)

    def committed(self, checkpoint: Checkpoint, after_s: float) -> None:
        """Tell of a durable commit, so long after training went on."""
        size_mib, waited_s = checkpoint.size_bytes / 2**20, checkpoint.cost_s
        said = "Saved step %d: %.1f MiB, training waited %.3f s, committed %.2f s later"
        _log.info(said, checkpoint.step, size_mib, waited_s, after_s)
        self._tell("committed", checkpoint)

    def failed(self, step: int, why: BaseException) -> None:
        """Tell of a snapshot that will not be committed."""
        self._tell("failed", step, why)

    def restored(self, report: RestoreReport) -> None:
        """Tell of what was restored."""
        self._tell("restored", report)

    def _tell(self, name: str, *what: Any) -> None:
        for listener in self._all:
            function = getattr(listener, name)
            try:
                if function is not None:
                    function(*what)
            except Exception:  # noqa: BLE001 (logged; a listener is in nobody's way)
                if id(listener) not in self._complained:
                    self._complained.add(id(listener))
                    _log.exception("%r was told what was %s, and failed; the run goes on", function, name)
