"""The committer's half of a save, for one owner of the run: owner → checks → index and manifest → entry → prune.

What it commits are RankParts; it sees no tensor. `commit.py` has the steps and their invariants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ckpt_tasks.errors import CkptError, CommitUncertainError, ConfigError, FencedError, StoreError
from ckpt_tasks.format.keys import Attempt
from ckpt_tasks.format.ledger import Checkpoint, Entry, Owner, State
from ckpt_tasks.format.steps import StepMetrics
from ckpt_tasks.ledger.history import Head, History, check_owner
from ckpt_tasks.ledger.metrics import checked_metrics
from ckpt_tasks.ledger.steps import put_steps
from ckpt_tasks.reading.opening import open_checkpoint
from ckpt_tasks.saving.commit import PreparedCheckpoint, commit, discard, write_index_and_manifest
from ckpt_tasks.saving.parts import Saving, Stored, new_attempt
from ckpt_tasks.storage.port import Store
from ckpt_tasks.upkeep.pruning import Pruner

__all__ = ["Committer", "Follower", "Line"]


@dataclass
class Line:
    """The checkpoints that this process continues; it outlives an ownership.

    `parent` is what the next checkpoint follows: restored from, or committed last. `known_n` is the newest ledger entry
    known here to have committed a checkpoint. `unsure`: a save of many ranks failed here, and may have been committed
    all the same, so that other ranks may have another parent.
    """

    parent: Checkpoint | None = None
    last_commit: Checkpoint | None = None
    known_n: int = -1
    unsure: bool = False
    stored: tuple[str, Stored] | None = None  # of which checkpoint, what; at least this rank's part

    @property
    def digest(self) -> str | None:
        """The identity of `parent`."""
        return self.parent.manifest_digest if self.parent is not None else None

    @property
    def step(self) -> int:
        """The step of `parent`, -1 without one."""
        return self.parent.step if self.parent is not None else -1

    def stored_of(self, store: Store, base: Checkpoint | None) -> Stored | None:
        """Return what a checkpoint is made of; None if there is none, or where it cannot be read."""
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
        """Go on from a checkpoint."""
        self.parent, self.unsure = parent, False

    def committed(self, checkpoint: Checkpoint, stored: Stored) -> None:
        """Continue from a checkpoint that this process has committed; `stored` is what this rank has of it."""
        self.stored = checkpoint.manifest_digest, stored
        self.follow(checkpoint)
        self.last_commit = checkpoint
        self.known_n = checkpoint.n


class Follower:
    """What a rank other than 0 knows of the owner: enough to name the objects that it writes.

    `fenced` is set where a commit found that the directory is another's by now.
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
        """Give the checkpoint whose objects a save may reuse; rank 0 sees that it is not retired meanwhile."""
        yield None if self.line.unsure else self.line.parent

    def release(self) -> bool:
        """Return False if the directory is another's already; rank 0 releases it."""
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
        """Count a save; all ranks count the same."""
        self._saves += 1
        return self._saves

    def topic(self, number: int) -> str:
        """Name what the ranks agree on under the number of a save."""
        return f"save/{self.owner.epoch}/{number}"


class Committer(Follower):
    """Commit what ranks have written, as one owner of the run directory."""

    def __init__(
        self, history: History, owner: Owner, run_key: str, pruner: Pruner, line: Line, *, world_size: int = 1
    ):
        super().__init__(owner, run_key, line, world_size)
        self._history = history
        self._pruner = pruner

    def check_line(self) -> None:
        """Raise ConfigError if others have committed what this process does not know.

        It must not put a line of its own over theirs. Once is enough: a commit is the owner's alone.
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
        """Give the checkpoint whose objects a save may reuse; it is not retired before the block ends."""
        with self._pruner.retiring, super().choosing_base() as base:
            yield base

    def admit(self) -> tuple[Head, State]:
        """Return the newest state, to write and commit upon; raise FencedError if the directory is another's."""
        head = self._history.head()
        state = head.state.sparing(head.spared_epochs)
        check_owner(state.owner, self.owner)
        return head, state

    def abandon(self, attempt: Attempt) -> None:
        """Delete what a failed attempt wrote; raise FencedError if the directory is another's, which explains it."""
        with suppress(StoreError):  # a new owner sweeps what it finds of ours
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

        `admitted` is what `admit` returned, `stored` what this rank has of the checkpoint; `cost_s` and `observed` are
        as of `commit.commit`. Returns the metrics of the steps that the checkpoint adds, too.
        """
        head, state = admitted
        parent = self.line.digest
        steps, table = put_steps(self._history.store, prepared.saving.attempt, prepared.saving.steps, self.line.step)
        observed = {**observed, "steps": table} if table else observed
        new = prepared.checkpoint(parent=parent, n=head.next_n, cost_s=cost_s)
        retirement = self._pruner.with_commit(state, new)
        entry = commit(self._history, prepared, parent=parent, cost_s=cost_s, retirement=retirement, observed=observed)
        self._pruner.deleted -= retirement.deleted
        self.line.committed(entry.state.live[-1], stored)
        return entry, steps

    def put_manifest(self, prepared: PreparedCheckpoint) -> None:
        """Write index and manifest, once every object has its size."""
        write_index_and_manifest(self._history.store, prepared)

    def prune_behind(self, entry: Entry) -> None:
        """Have what is left to prune after a commit done soon, behind training's back."""
        self._pruner.follow(self.owner, entry.state)

    def release(self) -> bool:
        """Release the run directory; False if it is another's already."""
        deleted = self._pruner.deleted
        with suppress(StoreError, CommitUncertainError):  # the next owner sees that this process is gone, or silent
            try:
                self._history.append({"kind": "release"}, lambda state, n: state.released(deleted), owner=self.owner)
            except FencedError:
                return False
        return True
