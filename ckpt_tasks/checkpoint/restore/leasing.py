"""Leases that last as long as their reader: the reader or a thread renews them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.errors import CheckpointNotFoundError, CommitUncertainError, StoreError
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.process import start_thread
from ckpt_tasks.system import system

LEASE_S = 3600.0  # A killed reader protects a checkpoint at most this long.
_COPY_LEASE_S = 1800.0  # A copy renews its lease after half of this time; a killed copy's lease ends after it.

_log = logging.getLogger("ckpt_tasks")


@contextmanager
def renewable(run: Run, checkpoint: Checkpoint, holder: str, lease_s: float) -> Iterator[Callable[[], None]]:
    """Lease a checkpoint while the block runs; yield a function that renews the lease for `lease_s` more seconds.

    This and the yielded function raise CheckpointNotFoundError if the checkpoint has been pruned, and StoreError.
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

    A thread renews the lease after half its time; if the store fails, it retries until the lease is over. Raises
    CheckpointNotFoundError if the checkpoint has been pruned, and StoreError.
    """
    over = system().event()

    def keep(renew: Callable[[], None]) -> None:
        pause_s = lease_s / 2
        while not over.wait(pause_s):
            try:
                renew()
                pause_s = lease_s / 2
            except CheckpointNotFoundError:
                return  # The lease is over: recording a result will raise.
            except (StoreError, CommitUncertainError) as error:
                _log.warning("The lease of step %d could not be renewed yet: %s", checkpoint.step, error)
                pause_s = lease_s / 16

    with renewable(run, checkpoint, holder, lease_s) as renew:
        thread = start_thread(keep, renew, name="ckpt-lease")
        try:
            yield
        finally:
            over.set()
            thread.join()


@contextmanager
def renewed_lease(source: Run, checkpoint: Checkpoint, holder: str) -> Iterator[Callable[[], None]]:
    """Keep a checkpoint from being pruned while the block runs; yield a function that renews the lease when due.

    Call that function often. If the source cannot be written, it is read without a lease and `source.read_only` is set:
    then a read fails if the owner prunes the checkpoint. Raises CheckpointNotFoundError if the checkpoint has been
    pruned.
    """
    with ExitStack() as held:
        again: Callable[[], None] = lambda: None  # noqa: E731
        try:
            again = held.enter_context(renewable(source, checkpoint, holder, _COPY_LEASE_S))
        except StoreError as error:
            if not error.denied:
                raise
            source.read_only = True
        due_s = system().monotonic() + _COPY_LEASE_S / 2

        def renew() -> None:
            nonlocal due_s
            if system().monotonic() >= due_s:
                again()
                due_s = system().monotonic() + _COPY_LEASE_S / 2

        yield renew
