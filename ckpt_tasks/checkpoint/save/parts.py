"""A rank's part of a checkpoint: index rows and objects, made from the rank's digested images.

This module does not use the ledger. `commit.py` has the committer's half of a save.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tasks.checkpoint.memory.snapshot import Image
from ckpt_tasks.errors import StateError, StoreError
from ckpt_tasks.format.digests import digest_bytes, digest_hex
from ckpt_tasks.format.keys import Attempt, attempt_prefix, is_group_file
from ckpt_tasks.format.layout.image import ImageLayout, plan_bytes
from ckpt_tasks.format.layout.index import WHOLE, Index, Places, parse_index, write_index
from ckpt_tasks.format.manifest import ObjectRecord
from ckpt_tasks.format.records import Checkpoint, Compared, Owner, checkpoint_item, read_checkpoint
from ckpt_tasks.format.tree import encode
from ckpt_tasks.state.kinds.group_parts import Captured, GroupFile, GroupState
from ckpt_tasks.storage.port import Store

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.extension import Attached

_ALIGNMENT = 64  # Arrow aligns columns to this many bytes.
_LENGTH = struct.Struct("<Q")
_REUSED_BYTES = 1 << 20  # Below this size, writing an object costs less than depending on an older checkpoint.


class SupersededError(Exception):
    """A newer snapshot has replaced this one; `RankSaver` catches this error."""


@dataclass(frozen=True)
class RankPart:
    """A rank's part of one attempt: its index rows, its objects, and the trees of its state.

    `trees`: the trees of the groups that are saved by rank. `compared`: values that must be equal in all ranks.
    """

    rank: int
    index: Index
    objects: tuple[ObjectRecord, ...]
    trees: Mapping[str, object] = field(default_factory=dict)
    compared: Compared = field(default_factory=dict)
    step: int = -1

    def with_groups(self, step: int, groups: Mapping[str, Mapping[str, object]], compared: Compared) -> RankPart:
        """Return the part with the step, this rank's encoded groups, and the values that ranks compare."""
        trees = {name: group["tree"] for name, group in groups.items() if "by_rank" in group}
        return replace(self, trees=trees, compared=compared, step=step)

    def to_bytes(self) -> bytes:
        """Return the part as bytes for rank 0: the JSON's length, the JSON, and the index, aligned for Arrow."""
        body = {name: value for name, value in vars(self).items() if name != "index"}
        head = json.dumps(body, allow_nan=False).encode("ascii")
        head += b" " * (-(_LENGTH.size + len(head)) % _ALIGNMENT)
        return b"".join((_LENGTH.pack(len(head)), head, write_index(self.index)))

    @classmethod
    def from_bytes(cls, data: bytes) -> RankPart:
        """Read a part from bytes; the index is a view of them. Raises IntegrityError for a bad index."""
        begin = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        body = json.loads(data[_LENGTH.size : begin])
        objects = tuple(ObjectRecord(*record) for record in body.pop("objects"))
        index = parse_index(memoryview(data)[begin:], f"the part of rank {body['rank']}")
        return cls(index=index, objects=objects, **body)


class Digested(NamedTuple):
    """The part of one file, and its bytes; the bytes are None for a file of a group that only storage has."""

    part: RankPart
    bytes: memoryview | None


@dataclass(frozen=True, kw_only=True)
class Saving:
    """The facts of a save that are known before it begins: step, groups, metrics, attempt, owner."""

    attempt: Attempt
    run_key: str
    owner: Owner
    groups: Mapping[str, Mapping[str, object]]
    metrics: Mapping[str, float]
    epochs: int | None = None
    interim: bool = False
    why: str = ""
    world_size: int = 1
    number: int = 0  # Counts the saves of this owner.
    attached: Sequence[Attached] = ()  # What features store with it.
    environment: Mapping[str, str] = field(default_factory=dict)  # Facts for people, in addition to the versions.

    @property
    def turn(self) -> int:
        """A number that grows by one with each save, equal in all ranks; its first value depends on the owner's id."""
        return zlib.crc32(self.owner.id.encode()) + self.number


@dataclass(frozen=True)
class Stored:
    """The objects of a committed checkpoint, by the last part of their names; a save reuses unchanged objects."""

    records: Mapping[str, ObjectRecord]
    index: Index

    @classmethod
    def of(cls, records: Iterable[ObjectRecord], index: Index) -> Stored:
        """Index the objects of a checkpoint, or of one rank's part of it, by name."""
        return cls({_last(record.name): record for record in records}, index)

    def kept(self, keeps: Callable[[str], bool]) -> Stored:
        """Return the objects that the run still keeps: `keeps` returns True for their names."""
        return Stored({last: record for last, record in self.records.items() if keeps(record.name)}, self.index)


def new_attempt(step: int, owner: Owner, number: int) -> Attempt:
    """Name the owner's next attempt to save a step; every rank computes the same name.

    The owner's id is a random nonce, so no other attempt ever has this name.
    """
    return Attempt(step, owner.epoch, digest_hex(f"{owner.id}/{owner.epoch}/{number}".encode())[:16])


def encode_groups(captured: Captured) -> dict[str, dict[str, object]]:
    """Turn captured groups into JSON; raise UnsupportedStateError with the path of a value that cannot be stored."""
    encoded: dict[str, dict[str, object]] = {}
    for name, group in captured.groups.items():
        encoded[name] = {"kind": group.kind, "tree": _encoded(group, name)}
        if group.by_rank:
            # In memory this tree belongs to one rank; a checkpoint has the trees of all ranks.
            encoded[name]["by_rank"] = True
        elif group.buffers:
            encoded[name]["buffers"] = [*group.buffers]
    return encoded


def _encoded(group: GroupState, name: str) -> object:
    """Encode a tree, but what was encoded for an earlier save and has stayed as it was."""
    if group.kept is None:
        return encode(group.tree, name)
    json = group.kept.json
    if not json:
        json.update(encode({part: group.tree[part] for part in group.kept.names}, name))
    return {part: json[part] if part in json else encode({part: tree}, name)[part] for part, tree in group.tree.items()}


def digest_file(
    attempt: Attempt, file: GroupFile, given_up: Callable[[], bool], stored: Stored | None, rank: int
) -> Digested:
    """Digest a group's own file, or find the file in the previous checkpoint; raise as `digest_image` does.

    Raises StoreError if neither the process nor that checkpoint has the file.
    """
    if given_up():
        raise SupersededError
    if file.contents is not None:
        data = file.contents.bytes
        image = Image(file.group, file.name, plan_bytes(file.key, len(data)), data, {})
        return Digested(digest_image(attempt, image, given_up, rank), data)
    record = stored.records.get(file.name) if stored is not None else None
    if stored is None or record is None:
        raise _lost(file.name)
    return Digested(RankPart(rank, stored.index.of_object(record.name), (record,)), None)


def _lost(name: str) -> StoreError:
    hint = "The next save writes it whole."
    return StoreError(f"the last checkpoint, which has {name}, cannot be read or has been removed", hint=hint)


def digest_image(attempt: Attempt, image: Image, given_up: Callable[[], bool], rank: int = 0) -> RankPart:
    """Digest one image of a snapshot; raise SupersededError as soon as `given_up()` is true."""
    digests: list[bytes] = []
    for _, _, begin, end in image.layout.regions:
        if given_up():
            raise SupersededError
        digests.append(digest_bytes(image.bytes[begin:end]))
    return _of_file(attempt_prefix(attempt) + image.name, image.layout, image.regions, digests, rank)


def put_tensors(
    store: Store | None,
    name: str,
    group: str,
    layout: ImageLayout,
    data_of: Callable[[str], memoryview],
    *,
    places: Places = WHOLE,
) -> RankPart:
    """Digest the tensors of a file, and put the file; `data_of` returns the bytes of a tensor by its name in the group.

    If `store` is None, nothing is read or put: every region gets the digest of empty bytes.
    """
    digests = [digest_bytes(b"")] * len(layout.regions)
    if store is not None:
        data = {slot.spec.name: data_of(slot.spec.name) for slot in layout.slots}
        begins = {slot.spec.name: slot.begin for slot in layout.slots}
        digests = [
            digest_bytes(data[spec.name][begin - begins[spec.name] : end - begins[spec.name]])
            for spec, _, begin, end in layout.regions
        ]
        store.put(name, [layout.header, *(piece for piece in data.values() if piece.nbytes)])
    return _of_file(name, layout, Index.of_layout(group, layout, places), digests)


def _of_file(name: str, layout: ImageLayout, regions: Index, digests: Sequence[bytes], rank: int = 0) -> RankPart:
    record = ObjectRecord(name, layout.size_bytes, digest_hex(layout.header), len(layout.header))
    return RankPart(rank, regions.placed(name, digests), (record,))


def same_step(parts: Sequence[RankPart]) -> Sequence[RankPart]:
    """Return the parts unchanged; raise StateError if they are of different steps."""
    for rank, part in enumerate(parts):
        if part.step != parts[0].step:
            raise StateError(
                f"rank {rank} saves step {part.step}, and rank 0 step {parts[0].step}",
                hint="Call step() and save() at the same steps on every rank.",
            )
    return parts


def joined(parts: Sequence[RankPart], rank: int = 0) -> RankPart:
    """Join the parts of a rank's images into one part."""
    index = Index.joined(part.index for part in parts)
    return RankPart(rank, index, tuple(record for part in parts for record in part.objects))


def reuse(digested: Digested, stored: Stored | None) -> RankPart:
    """Return a RankPart that names a stored object again, if it equals the file; else the file's own RankPart.

    They are equal if header, regions and digests are the same. Names no small image again. Raises
    StoreError if it names no stored object, and this process does not have the file's bytes.
    """
    part, data = digested
    (record,) = part.objects
    name = _last(record.name)
    old = stored.records.get(name) if stored else None
    if stored is not None and old is not None and old == record._replace(name=old.name):
        regions = stored.index.of_object(old.name)
        is_worth = old.size_bytes >= _REUSED_BYTES or is_group_file(name)
        if is_worth and regions.same_regions(part.index):
            return RankPart(part.rank, regions, (old,))
    if data is None:
        raise _lost(name)
    return part


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _part_to_bytes(part: RankPart | None) -> bytes:
    return part.to_bytes() if part is not None else b""


def _part_from_bytes(data: bytes) -> RankPart | None:
    return RankPart.from_bytes(data) if data else None


def _checkpoint_to_bytes(checkpoint: Checkpoint | None) -> bytes:
    return json.dumps(checkpoint_item(checkpoint)).encode() if checkpoint is not None else b""


def _checkpoint_from_bytes(data: bytes) -> Checkpoint | None:
    return read_checkpoint(json.loads(data)) if data else None


# What ranks tell each other, as (to bytes, from bytes); b"" is None.
PART = _part_to_bytes, _part_from_bytes
CHECKPOINT = _checkpoint_to_bytes, _checkpoint_from_bytes
