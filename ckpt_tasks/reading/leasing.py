"""A lease for as long as it takes: its holder renews it, or a thread does while a reader reads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ckpt_tasks.errors import CheckpointNotFoundError, CommitUncertainError, StoreError
from ckpt_tasks.format.ledger import Checkpoint
from ckpt_tasks.reading.reading import Run

__all__ = ["LEASE_S", "leased", "renewable"]

LEASE_S = 3600.0  # for so long a checkpoint outstays the policy after its reader was killed

_log = logging.getLogger("ckpt_tasks")


@contextmanager
def renewable(run: Run, checkpoint: Checkpoint, holder: str, lease_s: float) -> Iterator[Callable[[], None]]:
    """Lease a checkpoint while the block runs; gives what leases it anew, for who takes longer than `lease_s` seconds.

    Raises CheckpointNotFoundError where the checkpoint is pruned by now, and StoreError; so does what it gives.
    """
    held = ExitStack()

    def renew() -> None:
        nonlocal held
        newer = ExitStack()
        newer.enter_context(run.lease(checkpoint, holder, lease_s))
        before, held = held, newer
        before.close()

    renew()
    try:
        yield renew
    finally:
        held.close()


@contextmanager
def leased(run: Run, checkpoint: Checkpoint, holder: str, lease_s: float = LEASE_S) -> Iterator[None]:
    """Keep a checkpoint from being pruned while the block runs, however long.

    The lease is renewed at half its time; where the store does not take that, it is asked again until the lease is
    over. Raises CheckpointNotFoundError where the checkpoint is pruned by now, and StoreError.
    """
    over = threading.Event()

    def keep(renew: Callable[[], None]) -> None:
        pause_s = lease_s / 2
        while not over.wait(pause_s):
            try:
                renew()
                pause_s = lease_s / 2
            except CheckpointNotFoundError:
                return  # too late: recording a result for it raises
            except (StoreError, CommitUncertainError) as error:
                _log.warning("The lease of step %d could not be renewed yet: %s", checkpoint.step, error)
                pause_s = lease_s / 16

    with renewable(run, checkpoint, holder, lease_s) as renew:
        thread = threading.Thread(target=keep, args=(renew,), name="ckpt-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
