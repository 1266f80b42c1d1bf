"""A lease for as long as it takes: its holder renews it, or a thread does while a reader reads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ckpt_tasks.errors import CheckpointNotFoundError, CommitUncertainError, StoreError
from ckpt_tasks.format.ledger import Checkpoint
from ckpt_tasks.reading.reading import Run

__all__ = ["LEASE_S", "leased", "renewable", "renewed_lease"]

LEASE_S = 3600.0  # for so long a checkpoint outstays the policy after its reader was killed
_COPY_LEASE_S = 1800.0  # renewed at half of it; what a copy that was killed leaves holds a checkpoint for so long

_log = logging.getLogger("ckpt_tasks")


@contextmanager
def renewable(run: Run, checkpoint: Checkpoint, holder: str, lease_s: float) -> Iterator[Callable[[], None]]:
    """Lease a checkpoint while the block runs; gives what leases it anew, for who takes longer than `lease_s` seconds.

    Raises CheckpointNotFoundError if the checkpoint is pruned by now, and StoreError; so does what it gives.
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
    over. Raises CheckpointNotFoundError if the checkpoint is pruned by now, and StoreError.
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


@contextmanager
def renewed_lease(source: Run, checkpoint: Checkpoint, holder: str) -> Iterator[Callable[[], None]]:
    """Keep a checkpoint from being pruned while the block runs, however long; gives what renews the lease when due.

    A source that cannot be written is read without a lease, and `source.read_only` says so: what its owner prunes
    meanwhile is an error of the read.
    """
    with ExitStack() as held:
        again: Callable[[], None] = lambda: None  # noqa: E731
        try:
            again = held.enter_context(renewable(source, checkpoint, holder, _COPY_LEASE_S))
        except StoreError as error:
            if not error.denied:
                raise
            source.read_only = True
        due_s = time.monotonic() + _COPY_LEASE_S / 2

        def renew() -> None:
            nonlocal due_s
            if time.monotonic() >= due_s:
                again()
                due_s = time.monotonic() + _COPY_LEASE_S / 2

        yield renew
