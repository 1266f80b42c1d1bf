"""One ownership of a run directory by this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ckpt_tasks.errors import ObjectNotFoundError, StoreError
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.records import Owner, read_owner
from ckpt_tasks.ledger.config import CheckpointConfig
from ckpt_tasks.ledger.history import History
from ckpt_tasks.ledger.ownership import Heartbeat, acquire, damage, identify
from ckpt_tasks.ranks.exchange import Exchange, all_or_none, from_first
from ckpt_tasks.saving.committer import Committer, Follower, Line
from ckpt_tasks.snapshot.cache import SnapshotCache
from ckpt_tasks.upkeep.pruning import Pruner

__all__ = ["Following", "Tenure", "take"]


class Following:
    """Rank 0's ownership, as another rank sees it: it has the methods of `Tenure`, which do nothing here."""

    damaged: tuple[str, ...] = ()
    heartbeat = None

    def __init__(self, answer: bytes, line: Line, world_size: int):
        facts = json.loads(answer)
        self.run_key: str = facts["run_key"]
        self.owner = read_owner(facts["owner"])
        self.committer: Follower = Follower(self.owner, self.run_key, line, world_size)

    def check(self) -> None:
        """Do nothing: rank 0 has the heartbeat, and a lost run fails its commit."""

    def note(
        self, name: str, fields: Mapping[str, Any], change: Callable[[State], State] = lambda state: state
    ) -> None:
        """Do nothing: rank 0 writes the event once."""

    def beat(self) -> None:
        """Do nothing."""

    def quiet(self) -> None:
        """Do nothing."""


def take(
    ranks: Exchange,
    topic: str,
    make: Callable[[], Tenure],
    line: Line,
    *,
    deadline_s: float,
    open_memory: Callable[[str], None],
) -> Tenure | Following:
    """Take a run directory in rank 0, tell the other ranks, and open each rank's memory for the run's key.

    What one rank raises is raised in all; the directory is not held then.
    """
    made: list[Tenure] = []

    def own() -> bytes:
        made.append(make())
        return json.dumps({"run_key": made[0].run_key, "owner": asdict(made[0].owner)}).encode()

    try:
        answer = from_first(ranks, topic, own, deadline_s)
        if ranks.size == 1:
            return made[0]
        with all_or_none(ranks, f"{topic}/memory", deadline_s) as confirm:
            tenure = made[0] if made else Following(answer, line, ranks.size)
            if isinstance(tenure, Following):
                try:
                    open_memory(tenure.run_key)
                except ObjectNotFoundError as error:
                    why = "this rank does not find the run that rank 0 has taken"
                    raise StoreError(why, hint="Give all ranks one directory that they share.") from error
            confirm()
    except BaseException:
        for taken in made:
            taken.quiet()
            taken.committer.release()
        raise
    return tenure


class Tenure:
    """Take a run directory, and hold what its owner needs: a heartbeat, the run's key, and the committer.

    `damaged` names unreadable ledger entries; the owner's own entry now stands above them. `single_writer`: the store
    cannot refuse a second writer. Raises OwnedError, RunMismatchError, NoGoodCheckpointError or StoreError; the
    directory is not held then.
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
        world_size: int = 1,
    ):
        cache.check()
        key = config.run_key or history.store.url.rstrip("/").rpartition("/")[2]
        history.create(key, single_writer=single_writer)
        self.run_key = history.check(config.run_key) or key
        self.damaged = damage(history)
        me, best = identify(flow_run_id), (config.best_metric, config.best_mode)
        owner = acquire(history, me, take_over=take_over, timeout_s=config.owner_timeout_s, best=best)
        self.committer = Committer(history, owner, self.run_key, pruner, line, world_size=world_size)
        self._history = history
        self._timeout_s = config.owner_timeout_s
        self.heartbeat: Heartbeat | None = None
        try:
            history.store.keep_room()
            pruner.new_owner()
            cache.open(self.run_key)
            self.beat()
        except BaseException:
            self.committer.release()  # so the next owner need not wait for the timeout
            raise

    @property
    def owner(self) -> Owner:
        """This process, as the ledger names it."""
        return self.committer.owner

    def check(self) -> None:
        """Raise FencedError if the heartbeat has seen another owner."""
        if self.heartbeat is not None and self.heartbeat.fenced is not None:
            raise self.heartbeat.fenced

    def note(
        self, name: str, fields: Mapping[str, Any], change: Callable[[State], State] = lambda state: state
    ) -> None:
        """Put an event into the ledger, with a change of its state. Raises FencedError or StoreError."""
        event = {**fields, "kind": "note", "note": name}
        self._history.append(event, lambda state, n: change(state), owner=self.owner)

    def beat(self) -> None:
        """Start the heartbeat again if `quiet` has stopped it."""
        if self.heartbeat is None:
            self.heartbeat = Heartbeat(self._history, self.owner, self._timeout_s)

    def quiet(self) -> None:
        """Stop the heartbeat: other processes may take the directory after the timeout."""
        if self.heartbeat is not None:
            self.heartbeat.stop()
            self.heartbeat = None
