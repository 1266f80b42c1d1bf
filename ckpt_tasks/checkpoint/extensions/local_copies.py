"""A local directory beside a remote store: checkpoints are first written to it, and read from it if possible.

The directory holds copies under the objects' names in the store, and a seal for every complete checkpoint. It has no
ledger: as with snapshots in memory (`cache`), only the store's ledger says which checkpoints are committed, and in
which order. Unlike snapshots in memory, copies survive a reboot of the host.

Invariants

1. A seal is written after every object of its checkpoint is durable; a copy without a seal is never read.
2. A copy is deleted when its checkpoint is neither live nor the newest in this directory.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

from ckpt_tasks.checkpoint.extension import Extension
from ckpt_tasks.checkpoint.memory.rank_snapshot import Part
from ckpt_tasks.checkpoint.save.parts import RankPart, joined
from ckpt_tasks.checkpoint.save.pipeline import Snapshot
from ckpt_tasks.checkpoint.save.prepared import PreparedCheckpoint, prepare_part
from ckpt_tasks.errors import CkptError, ConfigError, IntegrityError, ObjectExistsError, ObjectNotFoundError, StoreError
from ckpt_tasks.format.keys import FORMAT_NAME, MANIFEST_NAME, Attempt, Names, attempt_prefix, parse_attempt
from ckpt_tasks.format.records import MAX_SEAL_BYTES, SEAL_NAME, Checkpoint, Seal
from ckpt_tasks.state.tensors.placements import ALONE
from ckpt_tasks.storage.local import LocalStore

_PLACE = "the local directory"
_log = logging.getLogger("ckpt_tasks")


class LocalCopies(Extension):
    """The copies of one run's checkpoints in a local directory; each of many ranks has a directory of its own in it."""

    def __post_init__(self) -> None:
        self._world = self.world or ALONE
        self.store = LocalStore(self._directory(self._world.rank))
        self._newest: str | None = None

    def _directory(self, rank: int) -> Path:
        """Return the directory for a rank's copies."""
        place, size = Path(str(self.config.local_dir)), self._world.size
        return place if size == 1 else place / f"rank-{rank:05d}-of-{size:05d}"

    def keeps_in(self) -> str:
        """Say where snapshots are kept that outlive this process."""
        return _PLACE

    def has_answered(self) -> bool | None:
        """Return True if an earlier process has taken the run with this directory."""
        return self._has(FORMAT_NAME) or None

    def opened(self, format_bytes: bytes) -> None:
        """Take the directory for the run with this format.json; raise ConfigError if it has another run's copies."""
        try:
            self.store.put_if_absent(FORMAT_NAME, format_bytes)
        except ObjectExistsError:
            if _identity(self.store.get(FORMAT_NAME, 1 << 20)) != _identity(format_bytes):
                raise ConfigError(
                    f"local_dir {self.store.url} holds copies of another run", hint="Give every run one of its own."
                ) from None

    def digested(self, snapshot: Snapshot, files: Sequence[tuple[RankPart, memoryview | None]]) -> None:
        """Copy this rank's part of a snapshot; log a failure."""
        assert self.history is not None
        part = joined([part for part, _ in files], self._world.rank)
        prepared = prepare_part(snapshot.saving, part, snapshot.sealed)
        try:
            objects = dict[str, memoryview | bytes]()
            for (record,), data in ((part.objects, data) for part, data in files):
                if data is not None:
                    objects[record.name] = data
                elif not self._has(record.name):
                    objects[record.name] = self.history.store.get(record.name, record.size_bytes)
            self.write(objects, prepared, snapshot.seal_of(prepared, None))
        except StoreError as error:
            _log.warning("Step %d has no copy in the local directory: %s", snapshot.saving.attempt.step, error)

    def write(self, objects: dict[str, memoryview | bytes], prepared: PreparedCheckpoint, seal: Seal) -> None:
        """Write a snapshot durably: objects, index and manifest, then the seal; raise StoreError."""
        prefix = seal.checkpoint.manifest.removesuffix(MANIFEST_NAME)
        for name, body in objects.items():
            with suppress(ObjectExistsError):  # An older copy already has this reused object.
                self.store.put(name, [body])
        self.store.put(prepared.manifest.index.name, [prepared.index_bytes])
        self.store.put(prefix + MANIFEST_NAME, [prepared.manifest_bytes])
        self.store.put(prefix + SEAL_NAME, [seal.to_bytes()])
        self._newest = prefix

    def _has(self, name: str) -> bool:
        """Return True if an older copy has this object."""
        try:
            return self.store.size(name) >= 0
        except ObjectNotFoundError:
            return False

    def refused(self, attempt: Attempt) -> None:
        """Delete the seal of a copy, so that no process reads the copy."""
        with suppress(CkptError):
            self.store.delete(attempt_prefix(attempt) + SEAL_NAME)

    def snapshots(self, rank: int) -> Iterator[Part]:
        """Yield a rank's complete copies, newest first."""
        if (directory := self._directory(rank)).is_dir():
            store = LocalStore(directory)
            yield from (Part(seal, store, f"in {_PLACE}") for seal in _seals(store))

    def committed(self, checkpoint: Checkpoint) -> None:
        """Delete copies that no restart needs.

        One rank keeps the copies of all live checkpoints. Many ranks keep only those of the newest checkpoint: a copy
        is of use only if every rank has its part.
        """
        assert self.history is not None
        alone = self._world.size == 1
        self._retain(self.history.head_within(inf).state.live if alone else [checkpoint])

    def _retain(self, live: Iterable[Checkpoint]) -> None:
        """Delete all copies except the newest copy, and copies of live checkpoints."""
        kept: set[str | None] = {self._newest}
        reused: list[str] = []
        for checkpoint in live:
            kept.add(checkpoint.manifest.removesuffix(MANIFEST_NAME))
            reused += checkpoint.reuses
        objects = Names(reused)
        with suppress(CkptError):  # The next save tries again.
            found = [(name, parse_attempt(name)) for name in self.store.names("") if name not in objects]
            doomed = [name for name, attempt in found if attempt and attempt_prefix(attempt) not in kept]
            for name in sorted(doomed, key=lambda name: not name.endswith(SEAL_NAME)):
                self.store.delete(name)


def _identity(format_bytes: bytes) -> tuple[object, object] | None:
    try:
        body = json.loads(format_bytes)
        return body["run_key"], body["created_at"]  # The other fields may change with the endpoint.
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _seals(store: LocalStore) -> list[Seal]:
    """List the seals of complete checkpoints, newest first."""
    seals = []
    for name in store.names(""):
        attempt = parse_attempt(name)
        if attempt is not None and name == attempt_prefix(attempt) + SEAL_NAME:
            try:
                seals.append(Seal.from_bytes(store.get(name, MAX_SEAL_BYTES)))
            except (IntegrityError, StoreError) as error:
                _log.warning("A local copy is not used: %s", error)
    return sorted(seals, key=lambda seal: (seal.checkpoint.step, seal.checkpoint.saved_at), reverse=True)
