"""Check that this process still owns a run directory."""

from __future__ import annotations

from ckpt_tasks.errors import FencedError
from ckpt_tasks.format.records import Owner


def check_owner(current: Owner | None, mine: Owner) -> None:
    """Raise FencedError if the directory has another owner, or none any more."""
    if current is None:
        raise FencedError(
            "the run directory has no owner any more: it was moved, emptied or damaged",
            hint="This process must stop. Find the directory, or put it back, and start again.",
        )
    if current.id != mine.id or current.epoch != mine.epoch:
        same = (current.host, current.pid, current.process_start) == (mine.host, mine.pid, mine.process_start)
        who = "another Checkpointer of this process" if same else f"process {current.pid} on {current.host}"
        who += f", owner epoch {current.epoch}"
        raise FencedError(
            f"the run directory has been taken over by {who}",
            hint="This process must stop: what it trained since its last commit is not part of the run.",
        )
