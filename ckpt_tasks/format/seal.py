"""The seal of a snapshot on this host: what it is a snapshot of, and where in the run's line it belongs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.ledger import Checkpoint
from ckpt_tasks.format.manifest import check_version

__all__ = ["MAX_SEAL_BYTES", "SEAL_NAME", "SEAL_VERSION", "Seal"]

SEAL_NAME = "seal.json"
SEAL_VERSION = 1
MAX_SEAL_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Seal:
    """A complete snapshot: the checkpoint that it is, or would become.

    `newest` is the identity of the newest committed checkpoint when it was taken, and `in_flight` that of the snapshot
    which was on its way to storage then: it may be used while one of the two is the newest in the ledger, or while it
    is committed itself. `checkpoint.n` is -1: whether it was committed, only the ledger knows.
    """

    run_key: str
    checkpoint: Checkpoint
    newest: str | None
    in_flight: str | None

    def to_bytes(self) -> bytes:
        """Write the seal as JSON with its own digest."""
        checkpoint = {**asdict(self.checkpoint), "metrics": {k: repr(v) for k, v in self.checkpoint.metrics.items()}}
        body = {**asdict(self), "checkpoint": checkpoint, "version": SEAL_VERSION}
        return canonical_json({**body, "digest": digest_hex(canonical_json(body))})

    @classmethod
    def from_bytes(cls, data: bytes) -> Seal:
        """Read a seal; raise IntegrityError where it is damaged and FormatVersionError where it is a newer one's."""
        try:
            body: dict[str, Any] = json.loads(data)
            digest = body.pop("digest")
            if digest_hex(canonical_json(body)) != digest:
                raise IntegrityError("the seal of a snapshot has changed")
            check_version(body.pop("version"), SEAL_NAME)
            saved = body.pop("checkpoint")
            if saved.keys() != {field.name for field in fields(Checkpoint)}:
                raise ValueError("a checkpoint has other fields")
            metrics = {str(name): float(value) for name, value in saved.pop("metrics").items()}
            saved["reuses"] = tuple(saved["reuses"])
            return cls(checkpoint=Checkpoint(metrics=metrics, **saved), **body)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise IntegrityError(f"the seal of a snapshot is malformed: {error}") from error
