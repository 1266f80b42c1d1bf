"""One save, from a snapshot in memory to its ledger entry: the same for one rank and for many.

Each rank writes its part, rank 0 commits all parts, and then every rank continues from the new checkpoint. A single
rank gathers only its own part, and receives its own answer.
"""

from __future__ import annotations

import json

from ckpt_tasks.checkpoint.extension import Extension, Extensions
from ckpt_tasks.checkpoint.memory.cache import SnapshotCache
from ckpt_tasks.checkpoint.ranks.exchange import Exchange
from ckpt_tasks.checkpoint.save.listening import Listeners
from ckpt_tasks.checkpoint.save.parts import RankPart, Stored, SupersededError, same_step
from ckpt_tasks.checkpoint.save.pipeline import Snapshot
from ckpt_tasks.checkpoint.save.prepared import prepare_checkpoint
from ckpt_tasks.checkpoint.save.rank_saver import RankSaver
from ckpt_tasks.checkpoint.save.schedule import SaveSchedule
from ckpt_tasks.errors import CkptError, FencedError, StateError
from ckpt_tasks.format.ledger import Entry, State
from ckpt_tasks.format.records import Checkpoint, checkpoint_item, read_checkpoint
from ckpt_tasks.run.ledger.history import Head, History
from ckpt_tasks.storage.port import moved
from ckpt_tasks.system import system


class OneSave:
    """Saves one snapshot after another; one thread at a time calls `run`."""

    def __init__(
        self,
        *,
        ranks: Exchange,
        rank: RankSaver,
        history: History,
        cache: SnapshotCache,
        schedule: SaveSchedule,
        listeners: Listeners,
        extensions: Extensions,
        deadline_s: float,
    ):
        self._ranks = ranks
        self._rank = rank
        self._history = history
        self._cache = cache
        self._schedule = schedule
        self._listeners = listeners
        self._extensions = extensions
        self._deadline_s = deadline_s

    def run(self, snapshot: Snapshot) -> Checkpoint:
        """Write this rank's part of a snapshot, and commit it with the parts of all ranks; return the checkpoint.

        Raises SupersededError if a rank already has a newer snapshot; raises an error of any rank in all ranks. After
        an error nothing is committed.
        """
        topic, part, parts, entry = snapshot.tenure.topic(snapshot.saving.number), None, [], None
        try:
            # An error in one rank is raised in all; if another process has taken the run, FencedError replaces it.
            with self._ranks.meeting(topic, self._deadline_s) as ranks, snapshot.tenure.owning():
                part, admitted = self._written(snapshot)
                parts = ranks.gather(part, _part_to_bytes, _part_from_bytes)
                if admitted is not None and all(parts):  # Rank 0 has all parts, and none was replaced.
                    entry = self._commit(snapshot, admitted, parts)
                done = ranks.publish(_checkpoint_of(entry), _to_bytes, _from_bytes)
        except CkptError as error:
            if (done := _checkpoint_of(entry)) is None:
                self._failed(snapshot, error)
                raise
            # The entry exists: the save is committed, although not all ranks know this.
        if done is None or part is None:
            if snapshot.tenure.committer is not None and any(parts):  # All ranks have answered: no rank writes now.
                snapshot.tenure.committer.abandon(snapshot.saving.attempt)
            raise SupersededError
        self._follow(snapshot, done, part, entry)
        return done

    def _written(self, snapshot: Snapshot) -> tuple[RankPart | None, tuple[Head, State] | None]:
        """Write this rank's new objects; return its part, and in rank 0 also the ledger's head and state.

        The part names unchanged objects of the last checkpoint again. The part is None if a newer snapshot has replaced
        this one.
        """
        committer, line, store = snapshot.tenure.committer, snapshot.tenure.line, self._history.store
        admitted = None
        try:
            if snapshot.given_up:
                return None, None  # The snapshot's slot is being refilled.
            if committer is not None:
                admitted = committer.admit()  # A fenced process must not write.
                state, size = admitted[1], self._rank.size.of_ranks(self._ranks.size)
                self._extensions.tell(Extension.admitted, state, size)
                committer.hold_base()
            stored = line.reusable(store)
            if stored is not None and admitted is not None:
                stored = stored.kept(admitted[1].keeps)
            return self._rank.write(store, snapshot, stored), admitted
        finally:
            snapshot.patience = self._ranks.patience
            moved()

    def _commit(self, snapshot: Snapshot, admitted: tuple[Head, State], parts: list[RankPart | None]) -> Entry:
        """Check the parts, write index and manifest, and put the ledger entry, which creates the checkpoint."""
        committer = snapshot.tenure.committer
        assert committer is not None  # This is rank 0.
        present = same_step([part for part in parts if part is not None])
        prepared = prepare_checkpoint(snapshot.saving, present, snapshot.sealed)
        committer.put_manifest(prepared)
        observed = {**snapshot.observed, "flush_s": round(system().monotonic() - snapshot.taken_s, 6)}
        if snapshot.superseded:
            observed["superseded"] = [*snapshot.superseded]
        if snapshot.tenure.failed_saves:
            observed["failed_saves"] = snapshot.tenure.failed_saves
        if resumed := snapshot.tenure.resume.parts:
            observed["resumed"] = resumed
        entry, steps = committer.commit(admitted, prepared, cost_s=snapshot.stall_s, observed=observed)
        snapshot.tenure.resume.parts, snapshot.tenure.failed_saves = {}, 0
        if steps:
            self._listeners.measured(steps)
        return entry

    def _failed(self, snapshot: Snapshot, error: CkptError) -> None:
        """Remove everything of a save that failed in this or another rank, except the snapshot in memory."""
        tenure, attempt = snapshot.tenure, snapshot.saving.attempt
        tenure.failed_saves += 1
        tenure.fenced = tenure.fenced or isinstance(error, FencedError)
        if type(error) is StateError:  # The ranks' states do not fit together: no rank may restore the snapshot.
            snapshot.unsealed = True
            self._rank.refuse(snapshot.slot, attempt)
        if tenure.committer is None:
            tenure.line.unsure = True
        else:
            tenure.committer.abandon(attempt)

    def _follow(self, snapshot: Snapshot, checkpoint: Checkpoint, part: RankPart, entry: Entry | None) -> None:
        """Continue from the new checkpoint: call listeners, learn its cost, and prune older checkpoints."""
        tenure = snapshot.tenure
        for file in snapshot.files:
            file.file.committed(checkpoint.manifest_digest)
        tenure.line.committed(checkpoint, Stored.of(part.objects, part.index))
        self._cache.forget_left()
        self._listeners.committed(checkpoint, system().monotonic() - snapshot.taken_s)
        self._cache.committed(checkpoint, entry.state.live if entry is not None else ())
        if tenure.committer is not None and entry is not None:
            self._schedule.learn(entry)
            tenure.committer.prune_behind(entry)


def _checkpoint_of(entry: Entry | None) -> Checkpoint | None:
    return entry.state.live[-1] if entry is not None else None


def _part_to_bytes(part: RankPart | None) -> bytes:
    return part.to_bytes() if part is not None else b""


def _part_from_bytes(data: bytes) -> RankPart | None:
    return RankPart.from_bytes(data) if data else None


def _to_bytes(checkpoint: Checkpoint | None) -> bytes:
    return json.dumps(checkpoint_item(checkpoint)).encode() if checkpoint is not None else b""


def _from_bytes(data: bytes) -> Checkpoint | None:
    return read_checkpoint(json.loads(data)) if data else None
