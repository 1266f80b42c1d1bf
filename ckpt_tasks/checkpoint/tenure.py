"""The time in which this process owns a run directory: begun in one place, and ended in one."""

from __future__ import annotations

from ckpt_tasks.format.ledger import Owner
from ckpt_tasks.ledger.config import CheckpointConfig
from ckpt_tasks.ledger.history import History
from ckpt_tasks.ledger.ownership import Heartbeat, acquire, damage, identify
from ckpt_tasks.saving.committer import Committer, Line
from ckpt_tasks.snapshot.cache import SnapshotCache
from ckpt_tasks.upkeep.pruning import Pruner

__all__ = ["Tenure"]


class Tenure:
    """Take a run directory; hold what its owner needs: a heartbeat, the run's key, and the committer.

    `damaged` names ledger entries that could not be read and that the owner's own entry now stands above.
    `single_writer`: the store cannot refuse a second writer. Raises OwnedError, RunMismatchError, NoGoodCheckpointError
    or StoreError; the directory is not held then.
    """

    def __init__(
        self,
        history: History,
        config: CheckpointConfig,
        cache: SnapshotCache,
        pruner: Pruner,
        line: Line,
        *,
        single_writer: bool,
        take_over: bool,
        flow_run_id: str | None,
    ):
        cache.check()
        key = config.run_key or history.store.url.rstrip("/").rpartition("/")[2]
        history.create(key, single_writer=single_writer)
        self.run_key = history.check(config.run_key) or key
        self.damaged = damage(history)
        me, best = identify(flow_run_id), (config.best_metric, config.best_mode)
        owner = acquire(history, me, take_over=take_over, timeout_s=config.owner_timeout_s, best=best)
        self.committer = Committer(history, owner, self.run_key, pruner, line)
        try:
            history.store.keep_room()
            pruner.new_owner()
            cache.open(self.run_key)
        except BaseException:
            self.committer.release()  # others need not wait for the timeout
            raise
        self._history = history
        self._timeout_s = config.owner_timeout_s
        self.heartbeat: Heartbeat | None = None
        self.beat()

    @property
    def owner(self) -> Owner:
        """This process, as the ledger names it."""
        return self.committer.owner

    def check(self) -> None:
        """Raise FencedError if the heartbeat has seen another owner."""
        if self.heartbeat is not None and self.heartbeat.fenced is not None:
            raise self.heartbeat.fenced

    def beat(self) -> None:
        """Show life from now on, if `quiet` has ended that."""
        if self.heartbeat is None:
            self.heartbeat = Heartbeat(self._history, self.owner, self._timeout_s)

    def quiet(self) -> None:
        """Show no more life: others may take the directory after the timeout."""
        if self.heartbeat is not None:
            self.heartbeat.stop()
            self.heartbeat = None
