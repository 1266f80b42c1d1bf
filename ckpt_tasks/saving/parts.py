"""What one rank hands in for a checkpoint: its images, digested, as index rows and objects.

Nothing here knows a ledger. The committer's half is `commit.py`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_tasks.errors import StateError
from ckpt_tasks.format.digests import canonical_json, digest_bytes, digest_hex
from ckpt_tasks.format.index import Index, parse_index, write_index
from ckpt_tasks.format.keys import Attempt, attempt_prefix
from ckpt_tasks.format.ledger import Owner
from ckpt_tasks.format.manifest import ObjectRecord
from ckpt_tasks.format.steps import StepMetrics
from ckpt_tasks.format.tree import encode
from ckpt_tasks.snapshot.snapshot import Image
from ckpt_tasks.state.capture import Captured

__all__ = [
    "OF_RANK",
    "RankPart",
    "Saving",
    "Stored",
    "SupersededError",
    "digest_image",
    "encode_groups",
    "joined",
    "new_attempt",
    "reuse",
    "same_step",
]

OF_RANK = ("rng", "generator")  # kinds of groups that each rank has of its own
_ALIGNMENT = 64  # of Arrow's columns
_LENGTH = struct.Struct("<Q")
_REUSED_BYTES = 1 << 20  # a smaller object costs less than to depend on an older checkpoint's


class SupersededError(Exception):
    """A newer snapshot took the place of one that waited; the pipeline catches this."""


@dataclass(frozen=True)
class RankPart:
    """What one rank hands in for one attempt: its part of the index, its objects, and its state without the tensors.

    `trees` are the groups that each rank has of its own (random streams and generators), and `digests` (hex) say what
    the others are: they must be the same on all ranks.
    """

    rank: int
    index: Index
    objects: tuple[ObjectRecord, ...]
    trees: Mapping[str, object] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    step: int = -1

    def with_groups(self, step: int, groups: Mapping[str, Mapping[str, object]]) -> RankPart:
        """Return the part with the step, and what `encode_groups` made of this rank's groups."""
        trees = {name: group["tree"] for name, group in groups.items() if group["kind"] in OF_RANK}
        digests = {name: digest_hex(canonical_json(group)) for name, group in groups.items() if name not in trees}
        return replace(self, trees=trees, digests=digests, step=step)

    def to_bytes(self) -> bytes:
        """Write the part for rank 0: the length of its JSON, the JSON, and the index, which is aligned."""
        body = {name: value for name, value in vars(self).items() if name != "index"}
        head = json.dumps(body, allow_nan=False).encode("ascii")
        head += b" " * (-(_LENGTH.size + len(head)) % _ALIGNMENT)
        return b"".join((_LENGTH.pack(len(head)), head, write_index(self.index)))

    @classmethod
    def from_bytes(cls, data: bytes) -> RankPart:
        """Read what a rank of this training wrote; the index is a view of the bytes."""
        begin = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        body = json.loads(data[_LENGTH.size : begin])
        objects = tuple(ObjectRecord(*record) for record in body.pop("objects"))
        index = parse_index(memoryview(data)[begin:], f"the part of rank {body['rank']}")
        return cls(index=index, objects=objects, **body)


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Everything about one save that is known before it: what is saved, as what, by whom."""

    attempt: Attempt
    run_key: str
    owner: Owner
    groups: Mapping[str, Mapping[str, object]]
    metrics: Mapping[str, float]
    epochs: int | None = None
    interim: bool = False
    world_size: int = 1
    number: int = 0  # of the saves of this owner
    steps: tuple[StepMetrics, ...] = ()  # that were not known to be committed
    environment: Mapping[str, str] = field(default_factory=dict)  # beside the versions


@dataclass(frozen=True)
class Stored:
    """The objects of a committed checkpoint by the last part of their names, to be reused where nothing has changed."""

    records: Mapping[str, ObjectRecord]
    index: Index

    @classmethod
    def of(cls, records: Iterable[ObjectRecord], index: Index) -> Stored:
        """Sort the objects of a checkpoint, or of one rank's part of it, by their names."""
        return cls({_last(record.name): record for record in records}, index)


def new_attempt(step: int, owner: Owner, number: int) -> Attempt:
    """Name an owner's next try to save a step; every rank finds the same name.

    The owner's id is a random nonce, so the name is unique for ever.
    """
    return Attempt(step, owner.epoch, digest_hex(f"{owner.id}/{owner.epoch}/{number}".encode())[:16])


def encode_groups(captured: Captured) -> dict[str, dict[str, object]]:
    """Turn the captured groups into JSON; raises UnsupportedStateError by path, before anything is written."""
    return {name: {"kind": group.kind, "tree": encode(group.tree, name)} for name, group in captured.groups.items()}


def digest_image(attempt: Attempt, image: Image, given_up: Callable[[], bool], rank: int = 0) -> RankPart:
    """Digest one image of a snapshot; raises SupersededError as soon as it is given up."""
    name, header = attempt_prefix(attempt) + image.name, image.layout.header
    digests: list[bytes] = []
    for _, _, begin, end in image.layout.regions:
        if given_up():
            raise SupersededError
        digests.append(digest_bytes(image.bytes[begin:end]))
    index = image.regions.placed(name, digests)
    return RankPart(rank, index, (ObjectRecord(name, image.layout.size_bytes, digest_hex(header), len(header)),))


def same_step(parts: Sequence[RankPart]) -> Sequence[RankPart]:
    """Return the parts of the ranks, in their order; raise StateError if they are of different steps."""
    for rank, part in enumerate(parts):
        if part.step != parts[0].step:
            raise StateError(
                f"rank {rank} saves step {part.step}, and rank 0 step {parts[0].step}",
                hint="Call step() and save() at the same steps on every rank.",
            )
    return parts


def joined(parts: Sequence[RankPart], rank: int = 0) -> RankPart:
    """Make one rank's part of those of its images."""
    index = Index.joined(part.index for part in parts)
    return RankPart(rank, index, tuple(record for part in parts for record in part.objects))


def reuse(part: RankPart, stored: Stored | None) -> RankPart:
    """Name the stored object instead of a new one that has the same header and the same regions and digests."""
    (record,) = part.objects
    name = _last(record.name)
    old = stored.records.get(name) if stored else None
    if stored is None or old is None or old != record._replace(name=old.name) or old.size_bytes < _REUSED_BYTES:
        return part
    regions = stored.index.of_object(old.name)
    return RankPart(part.rank, regions, (old,)) if regions.same_regions(part.index) else part


def _last(name: str) -> str:
    return name.rpartition("/")[2]
