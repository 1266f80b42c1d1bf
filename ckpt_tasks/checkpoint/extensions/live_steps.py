"""Show the steps that are not committed yet: rank 0 writes their metrics beside its heartbeat, every few seconds.

A thread of its own writes the object, so that training never waits for it. A write that fails is left out.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from weakref import ref

from ckpt_tasks.checkpoint.extension import Extension, Metrics, Restored
from ckpt_tasks.checkpoint.save.tenure import Tenure
from ckpt_tasks.errors import CkptError
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.process import start_thread
from ckpt_tasks.run.ledger.live_steps import LiveStep, drop_live_steps, write_live_steps
from ckpt_tasks.run.ledger.metrics import is_here
from ckpt_tasks.system import system

_EVERY_S = 2.0
_EVERY_FAR_S = 30.0  # In an object store each write is a request that costs money.
_MOST = 4096


class LiveSteps(Extension):
    """Remembers the newest steps, and writes those that are not committed."""

    _tenure: Tenure | None = None
    _stop: threading.Event | None = None
    _thread: threading.Thread | None = None
    _there = False  # True if this owner has written the object.

    def owned(self, tenure: Tenure) -> None:
        """Write from now on, in rank 0."""
        self._steps: deque[LiveStep] = deque(maxlen=_MOST)
        self._committed, self._written = -1, True
        self._tenure = tenure if tenure.committer is not None else None

    def restored(self, now: Restored) -> None:
        """Forget the steps that training repeats."""
        if self._tenure is not None:
            self._steps.clear()
            self._committed, self._written = now.step, False

    def check(self, step: int, metrics: Metrics, *, saving: bool) -> None:
        """Remember the metrics of a step that are on this host; reading one on a device would wait for it."""
        if self._tenure is None:
            return
        here = {name: value for name, value in metrics.items() if is_here(value)}
        self._steps.append(LiveStep(step, system().time(), here))
        self._written = False
        if self._stop is None:
            self._stop = system().event()
            every_s = _EVERY_S if self.history is None or self.history.store.near else _EVERY_FAR_S
            with suppress(CkptError):  # Without a thread, the pages show commits.
                self._thread = start_thread(_write_again_and_again, ref(self), self._stop, every_s, name="ckpt-live")

    def committed(self, checkpoint: Checkpoint) -> None:
        """Leave the committed steps out of the next write."""
        self._committed, self._written = checkpoint.step, False

    def released(self, limit_s: float) -> None:
        """End the thread, whose last write has at most `limit_s`, and delete the object."""
        if self._stop is not None:
            self._stop.set()
            if self._thread is not None:
                self._thread.join(limit_s)  # A write that came after the deletion would stay.
            self._stop = self._thread = None
            if self.history is not None and self._there and self._owns():
                drop_live_steps(self.history.store)
        self._tenure, self._there = None, False

    def write(self) -> None:
        """Write the steps that are not committed, if there is anything new."""
        tenure, history = self._tenure, self.history
        if tenure is None or history is None or self._written or not self._owns():
            return
        self._written = True
        steps = [one for one in self._steps.copy() if one.step > self._committed]
        with suppress(CkptError):  # Commits report a store that fails.
            self._there = True
            write_live_steps(history.store, tenure.owner, steps)

    def _owns(self) -> bool:
        tenure = self._tenure
        return (
            tenure is not None and not tenure.fenced and (tenure.heartbeat is None or tenure.heartbeat.fenced is None)
        )


def _write_again_and_again(of: ref[LiveSteps], stop: threading.Event, every_s: float) -> None:
    while not stop.wait(every_s):
        steps = of()
        if steps is None:
            return
        steps.write()
        del steps
