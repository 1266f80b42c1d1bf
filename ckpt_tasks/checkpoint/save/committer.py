"""The committer's half of a save, for one owner of the run: owner → checks → index and manifest → entry → prune.

The committer uses RankParts and no tensors. `commit.py` has the last steps of a commit and their invariants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from ckpt_tasks.checkpoint.save.commit import commit, discard, write_index_and_manifest
from ckpt_tasks.checkpoint.save.prepared import PreparedCheckpoint
from ckpt_tasks.checkpoint.save.pruning import Pruner
from ckpt_tasks.checkpoint.save.tenure import Line
from ckpt_tasks.errors import ConfigError, ObjectNotFoundError, StoreError
from ckpt_tasks.format.keys import Attempt
from ckpt_tasks.format.layout.steps import StepMetrics
from ckpt_tasks.format.ledger import Entry, State
from ckpt_tasks.format.records import Owner
from ckpt_tasks.run.ledger.fencing import check_owner
from ckpt_tasks.run.ledger.history import Head, History
from ckpt_tasks.run.ledger.ownership import Heartbeat, release
from ckpt_tasks.run.ledger.step_tables import put_steps


class Committer:
    """Commits the parts that ranks have written, for one owner of the run directory."""

    def __init__(
        self,
        history: History,
        owner: Owner,
        pruner: Pruner,
        line: Line,
        *,
        owner_timeout_s: float,
    ):
        self.owner = owner
        self._line = line
        self._owner_timeout_s = owner_timeout_s
        self._beat_s = Heartbeat.every_s(owner_timeout_s)
        self._history = history
        self._pruner = pruner
        # The attempt whose entry this process began to put: the entry may exist, even after an error.
        self._entered: Attempt | None = None

    def check_line(self) -> None:
        """Raise ConfigError if other processes have committed checkpoints that this one has not restored.

        Otherwise the saves of this process would begin another line. One check per ownership suffices, because only the
        owner commits.
        """
        state = self._history.head().state
        check_owner(state.owner, self.owner)
        if any(checkpoint.n > self._line.known_n for checkpoint in state.live):
            raise ConfigError(
                f"{self._history.store.url} holds checkpoints up to step {max(c.step for c in state.live)}",
                hint="Call restore() first, or use another directory.",
            )

    def hold_base(self) -> None:
        """Protect all checkpoints whose objects the next save may reuse from retirement, until the save ends."""
        with self._pruner.retiring:
            self._pruner.base = self._line.digest

    def admit(self) -> tuple[Head, State]:
        """Return the ledger's head and state for the next commit; raise FencedError if another process is the owner.

        On a server, the head may be as old as one heartbeat interval, because the heartbeat checks the owner, too.
        """
        head = self._history.head_within(self._beat_s)
        state = head.state.sparing(head.spared_epochs)
        check_owner(state.owner, self.owner)
        return head, state

    @contextmanager
    def owning(self) -> Iterator[None]:
        """Raise FencedError instead of ObjectNotFoundError if another process owns the directory.

        The new owner deletes objects of this process that are not committed, so a missing object can mean a lost run.
        """
        try:
            yield
        except ObjectNotFoundError:
            with suppress(StoreError):
                check_owner(self._history.head().state.owner, self.owner)
            raise

    def abandon(self, attempt: Attempt) -> None:
        """Delete the objects of a failed attempt, unless its ledger entry may exist.

        Raises FencedError if another process owns the directory, which explains why the attempt failed.
        """
        self._pruner.base = None
        if self._entered == attempt:
            return
        with suppress(StoreError):  # A later owner deletes what remains.
            check_owner(self._history.head().state.owner, self.owner)
        discard(self._history.store, attempt)

    def commit(
        self,
        admitted: tuple[Head, State],
        prepared: PreparedCheckpoint,
        *,
        cost_s: float,
        observed: Mapping[str, object],
    ) -> tuple[Entry, tuple[StepMetrics, ...]]:
        """Put the ledger entry of a checkpoint; the entry also retires checkpoints that the policy no longer keeps.

        `admitted`: the result of `admit`. `cost_s` and `observed`: see `commit.commit`. Returns the entry, and the
        metrics of the steps that it adds.
        """
        self._entered = prepared.saving.attempt
        head, state = admitted
        parent = self._line.digest
        steps, table = put_steps(self._history.store, prepared.saving.attempt, prepared.saving.steps, self._line.step)
        observed = {**observed, "steps": table} if table else observed
        new = prepared.checkpoint(parent=parent, n=head.next_n, cost_s=cost_s)
        retirement = self._pruner.with_commit(state, new)
        entry = commit(self._history, prepared, parent=parent, cost_s=cost_s, retirement=retirement, observed=observed)
        self._pruner.deleted -= retirement.deleted
        named = {c.manifest_digest: self._pruner.named.get(c.manifest_digest) for c in entry.state.live}
        self._pruner.named = {digest: names for digest, names in named.items() if names is not None}
        self._pruner.named[prepared.digest] = prepared.own_names
        self._pruner.base = None
        return entry, steps

    def put_manifest(self, prepared: PreparedCheckpoint) -> None:
        """Check every object's size, then write the checkpoint's index and manifest."""
        write_index_and_manifest(self._history.store, prepared)

    def prune_behind(self, entry: Entry) -> None:
        """Prune the other checkpoints in the background after a commit."""
        self._pruner.follow(self.owner, entry.state)

    def note(
        self, name: str, fields: Mapping[str, Any], change: Callable[[State], State] = lambda state: state
    ) -> None:
        """Put an event into the ledger, with a change of the run's state. Raises FencedError or StoreError."""
        event = {**fields, "kind": "note", "note": name}
        self._history.append(event, lambda state, n: change(state), owner=self.owner)

    def heartbeat(self) -> Heartbeat:
        """Start a heartbeat and return it."""
        return Heartbeat(self._history, self.owner, self._owner_timeout_s)

    def release(self) -> bool:
        """Release the run directory; return False if another process owns it."""
        return release(self._history, self.owner, self._pruner.deleted)
