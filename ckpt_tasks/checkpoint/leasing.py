"""A lease for as long as it takes: renewed by a thread while a reader reads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ckpt_tasks.checkpoint.reading import Run
from ckpt_tasks.errors import CheckpointNotFoundError, CommitUncertainError, StoreError
from ckpt_tasks.format.ledger import Checkpoint

__all__ = ["LEASE_S", "leased"]

LEASE_S = 3600.0  # for so long a checkpoint outstays the policy after its reader was killed

_log = logging.getLogger("ckpt_tasks")


@contextmanager
def leased(run: Run, checkpoint: Checkpoint, holder: str, lease_s: float = LEASE_S) -> Iterator[None]:
    """Keep a checkpoint from being pruned while the block runs, however long.

    The lease is renewed at half its time; where the store does not take that, it is asked again until the lease is
    over. Raises CheckpointNotFoundError where the checkpoint is pruned by now, and StoreError.
    """
    leases, over = ExitStack(), threading.Event()
    leases.enter_context(run.lease(checkpoint, holder, lease_s))

    def renew() -> None:
        nonlocal leases
        pause_s = lease_s / 2
        while not over.wait(pause_s):
            newer = ExitStack()
            try:
                newer.enter_context(run.lease(checkpoint, holder, lease_s))
                before, leases = leases, newer
                before.close()
                pause_s = lease_s / 2
            except CheckpointNotFoundError:
                return  # too late: whoever records something of it is told
            except (StoreError, CommitUncertainError) as error:
                _log.warning("The lease of step %d could not be renewed yet: %s", checkpoint.step, error)
                pause_s = lease_s / 16

    thread = threading.Thread(target=renew, name="ckpt-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        leases.close()
