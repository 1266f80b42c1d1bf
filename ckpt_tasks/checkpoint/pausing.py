"""Signals during a pause within the `with` block of a Checkpointer."""

from __future__ import annotations

from ckpt_tasks.checkpoint.checkpointer import Checkpointer

__all__ = ["hold_signals"]


def hold_signals(ckpt: Checkpointer, hold: bool) -> None:
    """Hold SIGTERM and Ctrl-C back until the next step, or let them through at once, a pending one included.

    For a pause within the `with` block (the delay before a retry); outside of the block this does nothing.
    """
    if not ckpt._entered or not ckpt._process.is_here:
        return
    if hold:
        ckpt._deliver_signal()  # nothing has been trained since the last commit
        ckpt._interrupt.install()
    else:
        ckpt._interrupt.uninstall()
        ckpt._interrupt.deliver()
