"""The seal of a snapshot on this host: what it is a snapshot of, and where in the run's line it belongs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.ledger import Checkpoint
from ckpt_tasks.format.manifest import check_version
from ckpt_tasks.format.parsing import MALFORMED, optional, parse_json, text
from ckpt_tasks.format.records import read_checkpoint

__all__ = ["MAX_SEAL_BYTES", "SEAL_NAME", "SEAL_VERSION", "Seal"]

SEAL_NAME = "seal.json"
SEAL_VERSION = 1
MAX_SEAL_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Seal:
    """A complete snapshot: the checkpoint that it is, or would become.

    `newest` is the identity of the newest committed checkpoint when it was taken, and `in_flight` that of the older
    snapshot which storage did not have then (on its way, or its write had failed): it may be used while one of the two
    is the newest in the ledger, or while it is committed itself. `checkpoint.n` is -1: whether it was committed, only
    the ledger knows.
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
            body = parse_json(data)
            digest = body.pop("digest")
            if digest_hex(canonical_json(body)) != digest:
                raise IntegrityError("the seal of a snapshot has changed")
            check_version(body.pop("version"), SEAL_NAME)
            return cls(
                run_key=text(body.pop("run_key")),
                checkpoint=read_checkpoint(body.pop("checkpoint"), uncommitted=True),
                newest=optional(body.pop("newest")),
                in_flight=optional(body.pop("in_flight")),
                **body,  # nothing, or it is not ours
            )
        except MALFORMED as error:
            raise IntegrityError(f"the seal of a snapshot is malformed: {error!r:.200}") from error
