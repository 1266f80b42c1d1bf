"""What sessions do with a Checkpointer in a pause; and tests, in which it stands for a process that dies or waits."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any, NamedTuple

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.extension import Extension
from ckpt_tasks.checkpoint.memory.snapshot import Image
from ckpt_tasks.errors import ConfigError


class UnderWay(NamedTuple):
    """The unfinished saves of a moment, and the memory for them.

    `steps`: the step that is being written, and the step that waits. `stuck`: the store has taken nothing for too long.
    `next_slot`: the slot of the next snapshot. `owner`: the id of this process's ownership, as far as it knows; None if
    it holds no run. `parent`: the identity of the checkpoint that the next one follows; None without an owner.
    """

    steps: Sequence[int]
    stuck: bool
    next_slot: str
    owner: str | None
    parent: str | None


def remember(ckpt: Checkpointer, facts: Mapping[str, Any]) -> None:
    """Tell the extensions what another process of this training remembers for them; a restore follows."""
    ckpt._extensions.tell(Extension.remembers, facts)


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


def say_nothing(ckpt: Checkpointer) -> None:
    """Do not tell of starts and commits: this Checkpointer is no training's own."""
    ckpt._start.mute()


def note_step(ckpt: Checkpointer, step: int) -> None:
    """Note that a step is complete whose report comes later: if the process dies before, it is trained again."""
    ckpt._cache.note_step(step)


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


# ── for tests ──


def under_way(ckpt: Checkpointer) -> UnderWay:
    """Return the unfinished saves of a Checkpointer; do not wait."""
    writer, held = ckpt._writer, ckpt._writer.tenure
    return UnderWay(
        steps=[snapshot.saving.attempt.step for snapshot in writer.under_way],
        stuck=writer.stuck,
        next_slot=writer.next_slot(),
        owner=held.owner.id if held is not None else None,
        parent=held.line.digest if held is not None else None,
    )


def images_of(ckpt: Checkpointer) -> Mapping[str, Sequence[Image]]:
    """Return the memory of a Checkpointer for saves, by slot; takes no lock, so a forked child may call it."""
    return ckpt._writer.images


def elapse(ckpt: Checkpointer, seconds: float) -> None:
    """Make a save by time due earlier, as if `seconds` more had passed since the last save."""
    ckpt._at.last = replace(ckpt._at.last, clock_s=ckpt._at.last.clock_s - seconds)


def die(ckpt: Checkpointer) -> None:
    """Leave a Checkpointer like a dying process: release nothing, keep its memory for the next process.

    Waits until its last snapshot is sealed and no thread writes. The next Checkpointer of this process may be its
    restart.
    """
    ckpt._writer.wait_sealed()
    ckpt._pruner.cancel(60.0)
    if ckpt._tenure is not None:
        ckpt._tenure.quiet()
        ckpt._tenure.fenced = True  # Its features end their threads, and delete nothing.
    ckpt._extensions.tell(Extension.released, 60.0)
    ckpt._cache.close(keep=True)  # This frees the memory's lock, as the kernel does for a dead process.
    ckpt._writer.tenure = None


def settle(ckpt: Checkpointer) -> None:
    """Wait until saves under way and all work after a commit have ended; keep a failure for the next call."""
    ckpt._writer.wait_idle()
    ckpt._pruner.finish(60.0)
    ckpt._extensions.tell(Extension.released, 600.0)


def seal(ckpt: Checkpointer) -> None:
    """Wait until the newest snapshot is sealed (complete in memory, where a restart finds it), or cannot be sealed."""
    ckpt._writer.wait_sealed()


def look(ckpt: Checkpointer) -> None:
    """Let the heartbeat check the ledger now, as it does by itself every few seconds.

    Raises ConfigError if the Checkpointer holds no run.
    """
    if ckpt._tenure is None or ckpt._tenure.heartbeat is None:
        raise ConfigError("this Checkpointer holds no run, so nothing of it looks at the ledger")
    ckpt._tenure.heartbeat.look()
