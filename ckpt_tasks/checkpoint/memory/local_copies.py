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
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress

from ckpt_tasks.errors import CkptError, ConfigError, IntegrityError, ObjectExistsError, ObjectNotFoundError, StoreError
from ckpt_tasks.format.keys import FORMAT_NAME, MANIFEST_NAME, Attempt, Names, attempt_prefix, parse_attempt
from ckpt_tasks.format.records import MAX_SEAL_BYTES, SEAL_NAME, Checkpoint, Seal
from ckpt_tasks.storage.local import LocalStore

_log = logging.getLogger("ckpt_tasks")


class LocalCopies:
    """The copies of one run's checkpoints in a local directory."""

    def __init__(self, local_dir: str | os.PathLike[str]):
        self.store = LocalStore(local_dir)
        self._newest: str | None = None

    def open(self, format_bytes: bytes) -> None:
        """Take the directory for the run with this format.json; raise ConfigError if it has another run's copies."""
        try:
            self.store.put_if_absent(FORMAT_NAME, format_bytes)
        except ObjectExistsError:
            if _identity(self.store.get(FORMAT_NAME, 1 << 20)) != _identity(format_bytes):
                raise ConfigError(
                    f"local_dir {self.store.url} holds copies of another run", hint="Give every run one of its own."
                ) from None

    def write(
        self, objects: Mapping[str, memoryview | bytes], index: tuple[str, bytes], manifest: bytes, seal: Seal
    ) -> None:
        """Write a snapshot durably: objects, index and manifest (name, bytes), then the seal; raise StoreError."""
        prefix = seal.checkpoint.manifest.removesuffix(MANIFEST_NAME)
        for name, body in objects.items():
            with suppress(ObjectExistsError):  # An older copy already has this reused object.
                self.store.put(name, [body])
        name, data = index
        self.store.put(name, [data])
        self.store.put(prefix + MANIFEST_NAME, [manifest])
        self.store.put(prefix + SEAL_NAME, [seal.to_bytes()])
        self._newest = prefix

    def has(self, name: str) -> bool:
        """Return True if an older copy has this object."""
        try:
            return self.store.size(name) >= 0
        except ObjectNotFoundError:
            return False

    def unseal(self, attempt: Attempt) -> None:
        """Delete the seal of a copy, so that no process reads the copy; raise StoreError if that fails."""
        self.store.delete(attempt_prefix(attempt) + SEAL_NAME)

    def seals(self) -> list[Seal]:
        """List the seals of complete checkpoints, newest first."""
        seals = []
        for name in self.store.names(""):
            attempt = parse_attempt(name)
            if attempt is not None and name == attempt_prefix(attempt) + SEAL_NAME:
                try:
                    seals.append(Seal.from_bytes(self.store.get(name, MAX_SEAL_BYTES)))
                except (IntegrityError, StoreError) as error:
                    _log.warning("A local copy is not used: %s", error)
        return sorted(seals, key=lambda seal: (seal.checkpoint.step, seal.checkpoint.saved_at), reverse=True)

    def retain(self, live: Iterable[Checkpoint]) -> None:
        """Delete all copies except the newest copy, and copies of live checkpoints."""
        kept: set[str | None] = {self._newest}
        reused: list[str] = []
        for checkpoint in live:
            kept.add(checkpoint.manifest.removesuffix(MANIFEST_NAME))
            reused += checkpoint.reuses
        objects = Names(reused)
        with suppress(CkptError):  # The next save tries again.
            doomed = [name for name in self.store.names("") if self._belongs_to_none(name, kept, objects)]
            for name in sorted(doomed, key=lambda name: not name.endswith(SEAL_NAME)):
                self.store.delete(name)

    def _belongs_to_none(self, name: str, kept: set[str | None], objects: Names) -> bool:
        attempt = parse_attempt(name)
        return attempt is not None and attempt_prefix(attempt) not in kept and name not in objects


def _identity(format_bytes: bytes) -> tuple[object, object] | None:
    try:
        body = json.loads(format_bytes)
        return body["run_key"], body["created_at"]  # The other fields may change with the endpoint.
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
