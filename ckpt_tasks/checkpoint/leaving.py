"""Functions for tests, in which a Checkpointer stands for a whole process: let it die, wait for it, inspect it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.saving.saver import UnderWay
from ckpt_tasks.snapshot.snapshot import Image


def under_way(ckpt: Checkpointer) -> UnderWay:
    """Return the unfinished saves of a Checkpointer; do not wait."""
    return ckpt._saver.under_way()


def images_of(ckpt: Checkpointer) -> Mapping[str, Sequence[Image]]:
    """Return the memory of a Checkpointer for saves, by slot; takes no lock, so a forked child may call it."""
    return ckpt._saver.images


def elapse(ckpt: Checkpointer, seconds: float) -> None:
    """Make a save by time due earlier, as if `seconds` more had passed since the last save."""
    ckpt._at.last = replace(ckpt._at.last, clock_s=ckpt._at.last.clock_s - seconds)


def die(ckpt: Checkpointer) -> None:
    """Leave a Checkpointer like a dying process: release nothing, and keep its memory for the next process.

    Waits until its last snapshot is sealed in memory. The next Checkpointer of this process may act as its restart.
    """
    ckpt._saver.wait_sealed()
    if ckpt._tenure is not None:
        ckpt._tenure.quiet()
    ckpt._cache.close(keep=True)  # This frees the memory's lock, as the kernel does for a dead process.
    ckpt._saver.tenure = None


def settle(ckpt: Checkpointer) -> None:
    """Wait until saves under way and all work after a commit have ended; keep a failure for the next call."""
    ckpt._saver.wait_idle()
    ckpt._pruner.finish(60.0)
    if ckpt._compiled is not None:
        ckpt._compiled.finish(600.0)


def seal(ckpt: Checkpointer) -> None:
    """Wait until the newest snapshot is sealed (complete in memory, where a restart finds it), or cannot be sealed."""
    ckpt._saver.wait_sealed()


def look(ckpt: Checkpointer) -> None:
    """Let the heartbeat check the ledger now, as it does by itself every few seconds.

    Raises ConfigError if the Checkpointer holds no run.
    """
    if ckpt._tenure is None or ckpt._tenure.heartbeat is None:
        raise ConfigError("this Checkpointer holds no run, so nothing of it looks at the ledger")
    ckpt._tenure.heartbeat.look()
