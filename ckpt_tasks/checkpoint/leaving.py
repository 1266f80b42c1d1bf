"""What tests do with a Checkpointer that stands for a process of its own: let it die, finish, seal, or look."""

from __future__ import annotations

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import ConfigError


def die(ckpt: Checkpointer) -> None:
    """Leave a Checkpointer like a dying process: nothing is released, and its memory stays for the next process.

    Waits until its last snapshot is sealed in memory. The next Checkpointer of this process may be its restart.
    """
    ckpt._saver.wait_sealed()
    if ckpt._tenure is not None:
        ckpt._tenure.quiet()
    ckpt._cache.close(keep=True)  # The kernel frees the lock of a process that is gone.
    ckpt._saver.tenure = None


def settle(ckpt: Checkpointer) -> None:
    """Wait until saves under way and the prune after them have ended; a failure is kept for the next call."""
    ckpt._saver.wait_idle()
    ckpt._pruner.finish(60.0)


def seal(ckpt: Checkpointer) -> None:
    """Wait until the newest snapshot is sealed in memory, or cannot be: what a restart would find then."""
    ckpt._saver.wait_sealed()


def look(ckpt: Checkpointer) -> None:
    """Let the heartbeat look at the ledger now, as it does by itself every few seconds.

    Raises ConfigError if the Checkpointer holds no run.
    """
    if ckpt._tenure is None or ckpt._tenure.heartbeat is None:
        raise ConfigError("this Checkpointer holds no run, so nothing of it looks at the ledger")
    ckpt._tenure.heartbeat.look()
