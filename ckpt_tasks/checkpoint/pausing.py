"""What sessions do with a Checkpointer: signals during a pause in its block, and what a process before it has seen."""

from __future__ import annotations

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.ledger.metrics import GoingBack

__all__ = ["go_back", "hold_signals"]


def go_back(ckpt: Checkpointer, back: GoingBack) -> None:
    """Let the next restore go back from steps whose metrics were not finite in a previous process."""
    ckpt._finite.back = back


def hold_signals(ckpt: Checkpointer, hold: bool) -> None:
    """Hold SIGTERM and Ctrl-C back until the next step, or let them through at once, including a pending one.

    For a pause within the `with` block (the delay before a retry); outside of the block this does nothing.
    """
    if not ckpt._entered or not ckpt._process.is_here:
        return
    if hold:
        ckpt._deliver_signal()  # Nothing has been trained since the last commit.
        ckpt._interrupt.install()
    else:
        ckpt._interrupt.uninstall()
        ckpt._interrupt.deliver()
