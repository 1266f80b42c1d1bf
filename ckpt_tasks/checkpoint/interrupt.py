"""Hold back signals and a flow's timeout until the step is done and its checkpoint committed.

The signals are SIGTERM, SIGHUP, Ctrl-C, and those that a scheduler sends before it ends a job, which count as SIGTERM.

In a flow run Prefect's engine has its own SIGTERM handler. `prefect flow-run execute` and a worker announce a
reschedule or a cancellation to the engine before they send SIGTERM, and the engine acknowledges it only while the
installed handler is the function that its module names. Without the acknowledgement they kill the process at once. So
the module's name refers to our handler while it is installed, and Prefect's function gets the signal at the step
boundary.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, FrameType
from typing import Any

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.system import system

_log = logging.getLogger("ckpt_tasks")

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# Look this module up in sys.modules and never import it: without Prefect, its handlers do not matter.
_PREFECT = "prefect.utilities.engine"
_TIMEOUTS = "prefect._internal.concurrency.cancellation"
_TIMEOUT_GRACE_S = 30.0
_ONCE_S = 2.0  # A terminal and a launcher may both send Ctrl-C at about the same time.


class Interrupt:
    """Remembers a signal until the step boundary, then raises it again for the previous handler.

    Only the main thread can set signal handlers, and the previous handler runs there; the training may be in another
    thread. Where the main thread holds nothing back for it, that thread asks Prefect whether its task is cancelled. A
    second Ctrl-C within 2 s counts as the same signal; a later one acts at once. A second SIGTERM or SIGHUP does not
    act at once, since schedulers, shells and terminals send several. The alarm of a flow's timeout is held back for at
    most 30 s, since it may have to end a step that hangs. A forked child gets the previous handlers. This object
    calls `on_hold(True)` when it begins to hold signals back, and `on_hold(False)` when it ends.
    """

    def __init__(self, on_hold: Callable[[bool], object] = lambda holds: None) -> None:
        self.pending: int | None = None
        self.is_failing = False  # True while an exception ends the `with` block.
        self.within: CodeType | None = None  # If set, signals are held back only while a frame of this code runs.
        self._previous: dict[int, Any] = {}
        self._handler = self._note  # Keep one object, since Prefect compares by identity.
        self._seen: set[int] = set()  # Signals that came since the last delivery.
        self._noted_s: dict[int, float] = {}
        self._on_hold = on_hold
        self._notices: list[signal.Signals] = []
        self._at_once = False  # True while another thread has a signal delivered, or waits for a retry.
        self._is_left = False  # True from let_go() until the main thread restores the handlers.
        self._delivered = threading.Event()
        self._returned = False

    def install(self) -> None:
        """Install our signal handlers, in the main thread; another thread only lets the installed ones hold back."""
        if not _in_main_thread():
            self._at_once = False
            return
        if self._previous:
            return
        # A shell's background job ignores Ctrl-C, and under nohup a process ignores SIGHUP; keep that.
        ignored = [number for number in _SIGNALS[1:] if signal.getsignal(number) is signal.SIG_IGN]
        signals = [number for number in _SIGNALS if number not in ignored]
        if _is_timeout(signal.getsignal(signal.SIGALRM)):
            signals.append(signal.SIGALRM)
        self._notices = _free_stop_signals()
        signals += [number for number in self._notices if number not in signals]
        with _prefects_lock():
            for one in [one for one in _installed if one._is_left]:
                one._give_back()
            _installed.append(self)
            self._previous = {number: signal.signal(number, self._handler) for number in signals}
            _rename(self._previous[signal.SIGTERM], self._handler)
        self._on_hold(True)

    def uninstall(self) -> None:
        """Restore the previous handlers, unless another library has set its own meanwhile.

        In another thread than the main one, let signals pass to them at once.
        """
        if not _in_main_thread():
            self._at_once = True
            return
        if not self._previous:
            return
        self._on_hold(False)
        with _prefects_lock():
            self._give_back()

    def let_go(self) -> None:
        """Let signals pass to the previous handlers at once; the installed handlers then keep no Checkpointer alive."""
        self._at_once = self._is_left = True
        self._on_hold = lambda holds: None

    def must_end(self) -> bool:
        """Return True if a signal asks a failing program to end, so that it must not wait for other ranks."""
        return self.is_failing and self.pending is not None

    def asked(self) -> int | None:
        """Return the pending signal: in another thread than the main one, SIGTERM if Prefect cancels its task."""
        if self.pending is None and not _in_main_thread() and _is_task_cancelled():
            self.pending = signal.SIGTERM
        return self.pending

    def leave_to_parent(self) -> None:
        """Restore the previous handlers in a forked child; a pending signal, and a scheduler's, are the parent's."""
        self.pending = None
        self._seen.clear()
        self._give_back()  # A thread that the fork did not copy may hold Prefect's lock.
        for number in self._notices:
            signal.signal(number, _leave_to_parent)  # Slurm may signal loading workers too, which would die of it.

    def deliver(self) -> None:
        """Raise the pending signal for its previous handler; if that handler returns, training continues.

        In another thread than the main one, raises SystemExit if the handler raises in the main thread.
        """
        number, self.pending = self.pending, None
        if number is None:
            return
        if not _in_main_thread():
            self._deliver_elsewhere(number)
            return
        if number not in self._seen:  # Another rank got the signal: it may still reach this process.
            self._noted_s[number] = system().monotonic()
        self._seen.clear()
        held = bool(self._previous)
        self.uninstall()
        try:
            signal.raise_signal(number)
        finally:
            if held:
                self.install()  # Even after a KeyboardInterrupt: the signal may come again before the block ends.

    def _deliver_elsewhere(self, number: int) -> None:
        """Let the main thread raise the signal for its previous handler; raise SystemExit here if that one raises."""
        self._returned = False
        if self._previous:
            self._delivered.clear()
            before, self._at_once = self._at_once, True
            signal.pthread_kill(threading.main_thread().ident or 0, number)  # It may wait for a lock, for this thread.
            self._delivered.wait()
            self._at_once = before
        if not self._returned:
            raise SystemExit(128 + number)

    def _pass_on(self, number: int) -> None:
        self.pending = number
        try:
            self.deliver()
            self._returned = True
        finally:
            self._delivered.set()

    def _give_back(self) -> None:
        for number, previous in self._previous.items():
            for other in _installed:  # It was installed later: it must not deliver to a handler that has left.
                if other._previous.get(number) is self._handler:
                    other._previous[number] = previous
            if signal.getsignal(number) is self._handler:
                # The previous handler is None if it was not set from Python, which cannot restore it.
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        _rename(self._handler, self._previous[signal.SIGTERM])
        self._previous = {}
        _installed.remove(self)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._notices:
            number = signal.SIGTERM
        if self._at_once or (self.within is not None and not _runs(self.within, frame)):
            self._pass_on(number)
            return
        now_s = system().monotonic()
        if number == signal.SIGINT and now_s - self._noted_s.get(number, -math.inf) < _ONCE_S:
            return  # It is the same Ctrl-C.
        self._noted_s[number] = now_s
        again = number in self._seen and number not in (signal.SIGTERM, signal.SIGHUP)
        self._seen.add(number)
        if again or self.pending in (None, signal.SIGALRM):
            self.pending = number
        if again:
            self.deliver()
        elif number == signal.SIGALRM:
            signal.setitimer(signal.ITIMER_REAL, _TIMEOUT_GRACE_S)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_task_cancelled() -> bool:
    """Return True if this thread runs a task that was submitted, and its flow run ends without waiting for it.

    Prefect's task runner sets an event for each task when the flow's own code has ended, be it by SIGTERM.
    """
    context: Any = sys.modules.get("prefect.context")
    task, flow = (context.TaskRunContext.get(), context.FlowRunContext.get()) if context else (None, None)
    if task is None or flow is None or flow.flow_run is None:
        return False
    event = getattr(flow.task_runner, "_cancel_events", {}).get(task.task_run.id)
    ended = flow.flow_run.state is not None and flow.flow_run.state.is_completed()
    return event is not None and event.is_set() and not ended


def _runs(code: CodeType, frame: FrameType | None) -> bool:
    """Return True if a frame, or one of its callers, runs this code."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _prefects_lock() -> AbstractContextManager[object]:
    """Return the lock that Prefect holds while it checks the handler and acknowledges."""
    lock: AbstractContextManager[object] = getattr(
        sys.modules.get(_PREFECT), "_prefect_sigterm_bridge_lock", nullcontext()
    )
    return lock


def _rename(own: Any, new: Any) -> None:
    """Make Prefect regard `new` as its own SIGTERM handler, if it regards `own` as that now."""
    engine: Any = sys.modules.get(_PREFECT)
    if own is not None and getattr(engine, "_prefect_sigterm_handler", None) is own:
        engine._prefect_sigterm_handler = new


def _is_timeout(handler: Any) -> bool:
    """Return True if a handler is Prefect's timeout, which ends a flow run that takes too long."""
    return type(getattr(handler, "__self__", None)).__module__ == _TIMEOUTS


def held_back() -> int | None:
    """Return the signal that this process holds back until the step boundary, or None."""
    return _installed[-1].pending if _installed else None


def _leave_to_parent(number: int, frame: FrameType | None) -> None:
    pass


def stop_signals() -> list[signal.Signals]:
    """Return the signals that a scheduler sends before it ends a job: CKPT_STOP_SIGNALS, else SIGUSR1 and SIGUSR2.

    Raises ConfigError for a name that is not a signal's.
    """
    names = os.environ.get("CKPT_STOP_SIGNALS", "USR1,USR2").replace(",", " ").upper().split()
    try:
        return [signal.Signals[f"SIG{name.removeprefix('SIG')}"] for name in names]
    except KeyError as error:
        raise ConfigError(
            f"CKPT_STOP_SIGNALS names {error}, which is no signal", hint="For example CKPT_STOP_SIGNALS=USR1,XCPU."
        ) from error


def _free_stop_signals() -> list[signal.Signals]:
    """Return those of `stop_signals` that would end this process, or that CKPT_STOP_SIGNALS names.

    A program may use SIGUSR1 for itself; faulthandler does so below Python, which then still calls it the default.
    """
    named = "CKPT_STOP_SIGNALS" in os.environ
    with open("/proc/self/status") as status:
        caught = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt:"))
    return [
        number
        for number in stop_signals()
        if named
        or (handler := signal.getsignal(number)) is _leave_to_parent
        or (handler is signal.SIG_DFL and not caught >> (number - 1) & 1)
    ]


@contextmanager
def taking_stop_signals() -> Iterator[None]:
    """Within the block, treat each of `stop_signals` as SIGTERM, and SIGHUP too unless it is ignored.

    Only the main thread may enter the block.
    """
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    before = {
        number: signal.signal(number, lambda *_: signal.raise_signal(signal.SIGTERM))
        for number in dict.fromkeys([*stop_signals(), *hangup])
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_installed: list[Interrupt] = []
_mask = threading.local()


def _before_fork() -> None:
    # Block signals until the child has its handlers back: Python would forget a signal otherwise.
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _after_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _after_in_child() -> None:
    for interrupt in reversed([*_installed]):  # Each restores the handlers that it replaced.
        interrupt.leave_to_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


def leave_flow_run(flow_run_id: str | None, why: Exception) -> None:
    """End this process's flow run by Prefect's Abort, which sets no state: another process continues the flow run.

    Prefect would show any other exception as a failure and retry, although the run trains. Does nothing outside that
    flow run.
    """
    context: Any = sys.modules.get("prefect.context")
    current = context.FlowRunContext.get() if context else None
    if current is not None and current.flow_run is not None and str(current.flow_run.id) == flow_run_id:
        _log.warning("Another process continues with this flow run, and this one ends: %s", why)
        raise sys.modules["prefect.exceptions"].Abort(str(why)) from why
