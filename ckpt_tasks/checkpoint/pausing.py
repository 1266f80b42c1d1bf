"""Functions for sessions that drive a Checkpointer: signals in a pause, and rollbacks of an earlier process."""

from __future__ import annotations

import signal
from types import CodeType

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.ledger.metrics import GoingBack


def go_back(ckpt: Checkpointer, back: GoingBack) -> None:
    """Let the next restore go back before steps whose metrics were not finite in a previous process."""
    ckpt._finite.back = back


def hold_signals(ckpt: Checkpointer, hold: bool) -> None:
    """Hold SIGTERM and Ctrl-C back until the next step; if not `hold`, deliver them, and a pending one, at once.

    Meant for a pause within the `with` block (the delay before a retry); outside the block this does nothing.
    """
    if not ckpt._entered or not ckpt._process.is_here:
        return
    if hold:
        ckpt._deliver_signal()  # Nothing has been trained since the last commit.
        ckpt._interrupt.install()
    else:
        ckpt._interrupt.uninstall()
        ckpt._interrupt.deliver()


def hold_within(ckpt: Checkpointer, loop: CodeType) -> None:
    """Hold signals back only while a frame of this code runs: an iterator does not learn that an exception ended it."""
    ckpt._interrupt.within = loop


def is_told_to_end(ckpt: Checkpointer) -> bool:
    """Return True if SIGTERM or Ctrl-C is held back."""
    return ckpt._interrupt.pending is not None


def end_waits(ckpt: Checkpointer) -> None:
    """End all waits for other ranks, in any thread, because a rank has failed."""
    ckpt._ranks.end_with(lambda: True)


def give_up(ckpt: Checkpointer) -> None:
    """End waits for other ranks, and ignore SIGTERM while this process, which has failed, ends.

    A launcher sends SIGTERM because of the failure, and that signal would hide the cause. Call this in the main thread.
    """
    end_waits(ckpt)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ckpt._interrupt.pending = None
