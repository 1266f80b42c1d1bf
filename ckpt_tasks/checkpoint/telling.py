"""Tell the person who starts a training from which step it resumes, and where its first checkpoint is."""

from __future__ import annotations

import atexit
import logging
import sys

from ckpt_tasks.checkpoint.restore.restore import HostSnapshot
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.logs import tell
from ckpt_tasks.run.report.words import age, printable, when

_log = logging.getLogger("ckpt_tasks")
_NOTHING_LEFT = (
    "Nothing was left to train: the run in %s has ended at step %d. To train on, give more epochs or steps; a run that "
    "early stopping ended stays ended. Another training (another fold or seed) needs a directory of its own"
)
_trained: set[str] = set()  # The runs that this process has trained.
_idle: dict[str, int] = {}  # The runs that were ended at their start, with their steps; not told so far.


def note_idle(run: str, step: int) -> None:
    """Warn that a start had nothing left to train; if it may be an earlier phase of the program, do so at the exit.

    A run that this process has opened before is another fold's. A notebook may have no exit.
    """
    if run in _trained or run in _idle or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        _log.warning(_NOTHING_LEFT, printable(run), step)
    else:
        _idle[run] = step


def note_trained(run: str) -> None:
    """Note that this process has trained a run: those that had nothing left to train were its earlier phases."""
    _trained.add(run)
    _idle.clear()


@atexit.register
def _tell_idle() -> None:
    for run, step in _idle.items():
        _log.warning(_NOTHING_LEFT, printable(run), step)


class Start:
    """The lines of one start: where training begins, the first commit of a new run, and a save at a signal.

    It holds no Checkpointer: a saver keeps it as a listener, and a dropped Checkpointer must be collected.
    """

    def __init__(self, url: str, *, in_flow: bool):
        self._url = printable(url)
        self._ends = not in_flow  # A flow says itself how it ended.
        self.is_told = False
        self._is_new = True
        self._warning = ""

    def mute(self) -> None:
        """Tell nothing."""
        self.is_told, self._is_new, self._ends = True, False, False

    def begun(self, reached: int | None, *, after_death: bool, first_save_s: float | None) -> None:
        """Tell that the run has no checkpoint; an earlier attempt had completed `reached` steps (None: unknown).

        `after_death`: it was another process's. `first_save_s`: when the first save comes (None: as the program says).
        """
        line = f"Training begins at step 0: {self._url} has no checkpoint"
        if after_death:
            lost = "one step is" if reached == 1 else f"{reached} steps are"
            steps = f", and its {lost} trained again" if reached else ""
            soon = "" if first_save_s is None else f". The first save comes after {first_save_s:.0f} s"
            line += f". An earlier process committed nothing{steps}{soon}"
        else:
            line += _again(0, reached)
        self._tell(line)

    def restored(self, chosen: Checkpoint, snapshot: HostSnapshot | None, reached: int | None) -> None:
        """Tell which checkpoint was restored, and from where (`snapshot` None: from storage)."""
        self._is_new = chosen.n < 0  # The storage has no checkpoint yet.
        place = snapshot.place.removeprefix("in ") if snapshot is not None else "storage"
        saved = f"saved {when(chosen.saved_at)} ({age(chosen.saved_at)})"
        line = f"Resumed from step {chosen.step} of {self._url}, {saved}, from {place}"
        self._tell(line + _again(chosen.step, reached))

    def replaced(self, warning: str, *, is_tried: bool) -> None:
        """Warn of settings that a restore has replaced; if the start is only tried, do so at its first commit."""
        if is_tried:
            self._warning = warning
        else:
            _log.warning("%s", warning)

    def committed(self, checkpoint: Checkpoint) -> None:
        """Tell where the first checkpoint of a new run is, and what waited for a commit."""
        warning, self._warning = self._warning, ""
        if warning:
            _log.warning("%s", warning)
        if self._is_new:
            self._is_new = False
            tell(f"Step {checkpoint.step} is saved in {self._url}")
        elif checkpoint.why == "signal" and self._ends:
            tell(f"Step {checkpoint.step} is saved: the same command resumes it")

    def _tell(self, line: str) -> None:
        """Tell the line, but only log it after the first: a later restore of this process is no start."""
        if self.is_told:
            _log.info("%s", line)
        else:
            tell(line)
        self.is_told = True


def _again(step: int, reached: int | None) -> str:
    """Return words for the steps between a checkpoint and the last completed step of the earlier process."""
    lost = 0 if reached is None else reached - step
    if lost > 0:
        return f"; the {lost} steps after it are trained again" if lost > 1 else "; one step after it is trained again"
    return "; no step is lost" if lost == 0 and reached is not None else ""
