"""A save of many ranks: each rank seals and writes its own part, and rank 0 commits once it has the parts of all.

`seal` and `commit` run in the pipeline's threads, as those of one rank alone do (`saver.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable

from ckpt_tasks.errors import CkptError, FencedError, StateError
from ckpt_tasks.format.keys import MANIFEST_NAME, attempt_prefix
from ckpt_tasks.format.ledger import Entry, State
from ckpt_tasks.format.records import Checkpoint, checkpoint_item, read_checkpoint
from ckpt_tasks.ledger.history import Head, History
from ckpt_tasks.ranks.exchange import Exchange
from ckpt_tasks.saving.commit import PreparedCheckpoint, prepare_checkpoint, prepare_part
from ckpt_tasks.saving.committer import Committer
from ckpt_tasks.saving.parts import RankPart, Stored, SupersededError, joined, reuse, same_step
from ckpt_tasks.saving.pipeline import Snapshot
from ckpt_tasks.saving.rank_saver import RankSaver
from ckpt_tasks.snapshot.cache import SnapshotCache
from ckpt_tasks.storage.port import moved

__all__ = ["JointSave"]

Commit = Callable[[Committer, Snapshot, tuple[Head, State], PreparedCheckpoint, Stored], Entry]


class JointSave:
    """The joint half of a save; `commit_entry` puts the ledger entry in rank 0."""

    def __init__(
        self,
        ranks: Exchange,
        rank: RankSaver,
        history: History,
        cache: SnapshotCache,
        *,
        deadline_s: float,
        commit_entry: Commit,
    ):
        self._ranks = ranks
        self._rank = rank
        self._history = history
        self._cache = cache
        self._deadline_s = deadline_s
        self._commit = commit_entry

    def seal(self, snapshot: Snapshot, before: Snapshot | None) -> None:
        """Digest and seal this rank's part of a snapshot; does not wait for other ranks."""
        saving, parts = snapshot.saving, []
        for digested in self._rank.digest(saving.attempt, snapshot.images, None, lambda: snapshot.given_up):
            parts.append(digested[0])
            snapshot.digested.put(digested)
        if self._cache.outlives:
            prepared = prepare_part(saving, joined(parts, self._ranks.rank))
            in_flight = attempt_prefix(before.saving.attempt) + MANIFEST_NAME if before is not None else None
            snapshot.prepared = prepared
            seal = snapshot.seal_of(prepared, in_flight)
            snapshot.unsealed = not self._rank.seal(snapshot.slot, prepared, seal)
        else:
            snapshot.unsealed = self._cache.left is not None

    def commit(self, snapshot: Snapshot) -> tuple[Checkpoint, Entry | None]:
        """Write this rank's part and hand it in; rank 0 commits once it has the parts of all ranks.

        Raises SupersededError if a rank has a newer snapshot already, and the error of any rank in all of them.
        """
        committer, saving = snapshot.committer, snapshot.saving
        entries: list[Entry] = []
        committing = False
        word: bytes | BaseException
        part: RankPart | None = None
        try:
            admitted = committer.admit(self._rank.size) if isinstance(committer, Committer) else None
            part = self._written(snapshot, admitted)
            word = part.with_groups(saving.attempt.step, saving.groups, snapshot.compared()).to_bytes()
        except SupersededError:
            word = b""
        except Exception as error:  # noqa: BLE001 (handed in: it is raised in every rank)
            word = error

        def decide(words: list[bytes]) -> bytes:
            nonlocal committing
            if not all(words):
                return b""  # some rank has a newer snapshot
            assert isinstance(committer, Committer)
            assert admitted is not None
            assert part is not None
            prepared = prepare_checkpoint(saving, same_step([*map(RankPart.from_bytes, words)]))
            committer.put_manifest(prepared)
            committing = True  # from here on the entry may exist, whatever is raised
            entries.append(self._commit(committer, snapshot, admitted, prepared, Stored.of(part.objects, part.index)))
            return json.dumps(checkpoint_item(entries[0].state.live[-1])).encode()

        snapshot.handed_in = True
        moved()
        try:
            answer = self._ranks.agree(committer.topic(saving.number), word, decide, self._deadline_s)
        except CkptError as error:
            if entries:
                return entries[0].state.live[-1], entries[0]  # committed, though not all ranks know it
            committer.line.unsure = True
            committer.fenced = committer.fenced or isinstance(error, FencedError)
            if isinstance(committer, Committer) and not committing:
                committer.abandon(saving.attempt)
            if type(error) is StateError:  # the ranks do not fit together: in no rank may the snapshot be restored
                snapshot.unsealed = True
                self._rank.refuse(snapshot.slot, saving.attempt)
            raise
        if not answer or part is None:
            if isinstance(committer, Committer):
                committer.abandon(saving.attempt)  # no rank is still writing: all have answered
            raise SupersededError
        checkpoint = read_checkpoint(json.loads(answer))
        if not entries:
            committer.line.committed(checkpoint, Stored.of(part.objects, part.index))
        return checkpoint, entries[0] if entries else None

    def _written(self, snapshot: Snapshot, admitted: tuple[Head, State] | None) -> RankPart:
        """Put this rank's objects, except those that the last checkpoint has.

        All ranks have the same last checkpoint: they agree on every commit before they start the next snapshot.
        """
        if snapshot.given_up:
            raise SupersededError  # its slot is being filled again
        with snapshot.committer.choosing_base() as base:
            snapshot.base = base.manifest_digest if base is not None else None
        attempt, store = snapshot.saving.attempt, self._history.store
        stored = snapshot.committer.line.stored_of(store, base)
        if (copies := self._cache.copies) is not None:
            prepared = snapshot.wait_prepared()
            self._rank.copy(copies, snapshot.images, prepared, snapshot.seal_of(prepared, None))
        own = attempt_prefix(attempt)
        keeps = admitted[1].keeps if admitted is not None else lambda name: not name.startswith(own)
        digested = ((written, reuse(written, stored)) for written, _ in iter(snapshot.digested.get, None))
        part, _ = self._rank.put(store, attempt, snapshot.images, digested=digested, keeps=keeps)
        snapshot.wait_digested()
        return part
