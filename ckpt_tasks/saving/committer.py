"""The committer's half of a save, for one owner of the run: owner → checks → index and manifest → entry → prune.

It commits RankParts and never sees a tensor. `commit.py` has the steps and their invariants.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ckpt_tasks.errors import CkptError, ConfigError, StoreError
from ckpt_tasks.format.keys import Attempt
from ckpt_tasks.format.ledger import Entry, State
from ckpt_tasks.format.records import Checkpoint, Owner
from ckpt_tasks.format.steps import StepMetrics
from ckpt_tasks.ledger.fencing import check_owner
from ckpt_tasks.ledger.history import Head, History
from ckpt_tasks.ledger.metrics import checked_metrics
from ckpt_tasks.ledger.ownership import release
from ckpt_tasks.ledger.steps import put_steps
from ckpt_tasks.policy.retention import RetentionPolicy
from ckpt_tasks.policy.space import CheckpointSize, forecast
from ckpt_tasks.reading.opening import open_checkpoint
from ckpt_tasks.saving.commit import PreparedCheckpoint, commit, discard, write_index_and_manifest
from ckpt_tasks.saving.parts import Saving, Stored, new_attempt
from ckpt_tasks.storage.port import Store
from ckpt_tasks.storage.space import free_bytes
from ckpt_tasks.upkeep.pruning import Pruner

__all__ = ["Committer", "Follower", "Line"]

_log = logging.getLogger("ckpt_tasks")


@dataclass
class Line:
    """The line of checkpoints that this process continues; it outlives an ownership.

    `parent` is the checkpoint that the next one follows: restored from, or committed last. `known_n` is the newest
    ledger entry that is known here to have committed a checkpoint. `unsure`: a save of many ranks failed here, but may
    have been committed, so that other ranks may have another parent.
    """

    parent: Checkpoint | None = None
    last_commit: Checkpoint | None = None
    known_n: int = -1
    unsure: bool = False
    stored: tuple[str, Stored] | None = None  # (manifest digest, its objects): at least those of this rank

    @property
    def digest(self) -> str | None:
        """The identity of `parent`."""
        return self.parent.manifest_digest if self.parent is not None else None

    @property
    def step(self) -> int:
        """The step of `parent`, -1 without one."""
        return self.parent.step if self.parent is not None else -1

    def stored_of(self, store: Store, base: Checkpoint | None) -> Stored | None:
        """Return a checkpoint's objects for reuse; None if there is no checkpoint or it cannot be read."""
        if base is None:
            return None
        if self.stored is None or self.stored[0] != base.manifest_digest:
            try:
                opened = open_checkpoint(store, base)
            except CkptError:
                return None  # everything is written then
            self.stored = base.manifest_digest, Stored.of(opened.manifest.objects, opened.index)
        return self.stored[1]

    def follow(self, parent: Checkpoint | None) -> None:
        """Continue from a checkpoint."""
        self.parent, self.unsure = parent, False

    def committed(self, checkpoint: Checkpoint, stored: Stored) -> None:
        """Continue from a checkpoint that this process has committed; `stored` is what this rank has of it."""
        self.stored = checkpoint.manifest_digest, stored
        self.follow(checkpoint)
        self.last_commit = checkpoint
        self.known_n = checkpoint.n


class Follower:
    """The committer as a rank other than 0 sees it: enough to name the objects that it writes.

    `fenced` is set once a commit finds that another process owns the directory.
    """

    def __init__(self, owner: Owner, run_key: str, line: Line, world_size: int = 1):
        self.owner = owner
        self.line = line
        self.fenced = False
        self._run_key = run_key
        self._world_size = world_size
        self._saves = 0

    def check_line(self) -> None:
        """Do nothing: rank 0 does."""

    @contextmanager
    def choosing_base(self) -> Iterator[Checkpoint | None]:
        """Yield the checkpoint whose objects a save may reuse; rank 0 prevents its retirement during the block."""
        yield None if self.line.unsure else self.line.parent

    def release(self) -> bool:
        """Return False if another process owns the directory; rank 0 releases it."""
        return not self.fenced

    def new_saving(
        self,
        step: int,
        groups: Mapping[str, Mapping[str, object]],
        *,
        metrics: Mapping[str, float] | None,
        epochs: int | None,
        interim: bool,
        steps: tuple[StepMetrics, ...] = (),
    ) -> Saving:
        """Name a new attempt to save a step."""
        number = self.next_number()
        return Saving(
            attempt=new_attempt(step, self.owner, number),
            run_key=self._run_key,
            owner=self.owner,
            groups=groups,
            metrics=checked_metrics(metrics or {}),
            epochs=epochs,
            interim=interim,
            world_size=self._world_size,
            number=number,
            steps=steps,
        )

    def next_number(self) -> int:
        """Return the number of the next save; all ranks count alike."""
        self._saves += 1
        return self._saves

    def topic(self, number: int) -> str:
        """Return the name under which the ranks agree on a save."""
        return f"save/{self.owner.epoch}/{number}"


class Committer(Follower):
    """Commit what ranks have written, as one owner of the run directory."""

    def __init__(
        self, history: History, owner: Owner, run_key: str, pruner: Pruner, line: Line, *, world_size: int = 1
    ):
        super().__init__(owner, run_key, line, world_size)
        self._history = history
        self._pruner = pruner
        self._space = _SpaceWatch(history.store, pruner.policy)

    def check_line(self) -> None:
        """Raise ConfigError if other processes have committed checkpoints that this one has not restored.

        It must not continue with a line of its own. One check per ownership is enough: only the owner commits.
        """
        state = self._history.head().state
        check_owner(state.owner, self.owner)
        if any(checkpoint.n > self.line.known_n for checkpoint in state.live):
            raise ConfigError(
                f"{self._history.store.url} holds checkpoints up to step {max(c.step for c in state.live)}",
                hint="Call restore() first, or use another directory.",
            )

    @contextmanager
    def choosing_base(self) -> Iterator[Checkpoint | None]:
        """Yield the checkpoint whose objects a save may reuse; it is not retired before the block ends."""
        with self._pruner.retiring, super().choosing_base() as base:
            yield base

    def admit(self, size: CheckpointSize | None = None) -> tuple[Head, State]:
        """Return the newest head and state, to commit upon; raise FencedError if another process owns the directory.

        Warns once if the disk lacks the room that the policy will need for checkpoints whose parts have this `size`.
        """
        head = self._history.head()
        state = head.state.sparing(head.spared_epochs)
        check_owner(state.owner, self.owner)
        if size is not None:
            ranks = self._world_size
            self._space.look(state, CheckpointSize(ranks * size.own_bytes, ranks * size.shared_bytes))
        return head, state

    def abandon(self, attempt: Attempt) -> None:
        """Delete what a failed attempt wrote; raise FencedError if another process owns the directory: that is why."""
        with suppress(StoreError):  # a later owner sweeps what is left
            check_owner(self._history.head().state.owner, self.owner)
        discard(self._history.store, attempt)

    def commit(
        self,
        admitted: tuple[Head, State],
        prepared: PreparedCheckpoint,
        *,
        stored: Stored,
        cost_s: float,
        observed: Mapping[str, object],
    ) -> tuple[Entry, tuple[StepMetrics, ...]]:
        """Put the ledger entry, which also retires what the policy no longer keeps, and continue from the checkpoint.

        `admitted` is the result of `admit`, `stored` the checkpoint's objects that this rank knows; `cost_s` and
        `observed` are those of `commit.commit`. Returns the entry, and the metrics of the steps that it adds.
        """
        head, state = admitted
        parent = self.line.digest
        steps, table = put_steps(self._history.store, prepared.saving.attempt, prepared.saving.steps, self.line.step)
        observed = {**observed, "steps": table} if table else observed
        new = prepared.checkpoint(parent=parent, n=head.next_n, cost_s=cost_s)
        retirement = self._pruner.with_commit(state, new)
        entry = commit(self._history, prepared, parent=parent, cost_s=cost_s, retirement=retirement, observed=observed)
        self._pruner.deleted -= retirement.deleted
        named = {c.manifest_digest: self._pruner.named.get(c.manifest_digest) for c in entry.state.live}
        self._pruner.named = {digest: names for digest, names in named.items() if names is not None}
        self._pruner.named[prepared.digest] = prepared.own_names
        self.line.committed(entry.state.live[-1], stored)
        return entry, steps

    def put_manifest(self, prepared: PreparedCheckpoint) -> None:
        """Check every object's size, then write index and manifest."""
        write_index_and_manifest(self._history.store, prepared)

    def prune_behind(self, entry: Entry) -> None:
        """Prune the rest after a commit, soon and in the background."""
        self._pruner.follow(self.owner, entry.state)

    def release(self) -> bool:
        """Release the run directory; return False if another process owns it."""
        return release(self._history, self.owner, self._pruner.deleted)


class _SpaceWatch:
    """Warn before the disk is full: what the policy will need at its peak against what is free, before each save.

    It warns once and refuses nothing: others may free the room in time, and a quota is not seen (docs/decisions/0071).
    """

    def __init__(self, store: Store, policy: RetentionPolicy):
        self._store = store
        self._policy = policy
        self._warned = False

    def look(self, state: State, size: CheckpointSize) -> None:
        """Log a warning if the room will not do; once, and never where the store has no limit that it tells."""
        free = None if self._warned or not size.own_bytes else free_bytes(self._store)
        if free is None:
            return
        peak = forecast(self._policy, state.live, pinned=state.pins, size=size, free_bytes=free)
        if peak.fits:
            return
        self._warned = True
        fewer = "Prune it, or set max_num_checkpoints" if peak.grows else "Set a smaller max_num_checkpoints"
        _log.warning("%s will run out of room: %s. %s, or use another disk.", self._store.url, peak.words, fewer)
