"""The manifest of one checkpoint: the JSON object that names all its other objects, with size and digest.

A save writes the manifest last, before the commit; the ledger entry has the manifest's name and digest. So a checkpoint
is a tree of digests: ledger entry → manifest → index and headers → regions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt_tasks.errors import IntegrityError, UnsupportedStateError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import INDEX_NAME, attempt_prefix, is_group, is_shard, parse_attempt
from ckpt_tasks.format.parsing import (
    FORMAT_VERSION,
    Count,
    Time,
    check_version,
    declared,
    finite_json,
    parse_json,
    text,
    typed,
    well_formed,
)
from ckpt_tasks.format.records import Step

MAX_MANIFEST_BYTES = 256 << 20
MAX_GROUPS = 4096


class ObjectRecord(NamedTuple):
    """The record of one object of a checkpoint.

    `name` is relative to the run directory. `digest` (hex) covers the first `digested_bytes`: a whole index or table,
    but only the header of a safetensors file, since the index has a digest of each region of its data.
    """

    name: str
    size_bytes: Count
    digest: str
    digested_bytes: Count


@declared
@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of one checkpoint: its groups and objects."""

    run_key: str
    step: Step
    attempt: str
    """As in its name."""
    world_size: Count
    """The number of ranks that wrote it."""
    index: ObjectRecord
    objects: tuple[ObjectRecord, ...]
    """All shards."""
    groups: Mapping[str, Mapping[str, Any]]
    """By name: `kind`, and `tree` or `trees`; a module may have `buffers`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    created_at: Time = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What wrote it, for people, under any names; `imported_from` and `dcp_root` have a meaning."""

    @property
    def buffers(self) -> frozenset[str]:
        """The full keys of rank 0's tensors of which every other rank has its own."""
        return frozenset(f"{name}/{one}" for name, group in self.groups.items() for one in group.get("buffers", ()))

    def to_bytes(self) -> bytes:
        """Write the manifest as JSON; do not sort keys, since a dict in the state has an order.

        Raises UnsupportedStateError if readers would refuse it.
        """
        if len(self.groups) > MAX_GROUPS:
            raise UnsupportedStateError(f"the state has {len(self.groups)} groups, more than {MAX_GROUPS}")
        body = {
            "version": FORMAT_VERSION,
            "run_key": self.run_key,
            "step": self.step,
            "attempt": self.attempt,
            "world_size": self.world_size,
            "created_at": self.created_at,
            "environment": dict(self.environment),
            "metrics": finite_json(self.metrics),
            "index": list(self.index),
            "objects": [list(record) for record in self.objects],
            "groups": self.groups,
        }
        return json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")

    @classmethod
    def from_bytes(cls, data: bytes, *, digest: str, name: str) -> Manifest:
        """Read a manifest whose digest is known.

        Raises IntegrityError if the bytes do not have the digest or are malformed, and FormatVersionError if a newer
        version wrote them.
        """
        if digest_hex(data) != digest:
            raise IntegrityError("the manifest is not the one that was committed", key=name)
        with well_formed("the manifest", name):
            body = parse_json(data)
            check_version(body.pop("version"), name)
            if len(body["groups"]) > MAX_GROUPS:
                raise ValueError(f"{len(body['groups'])} groups, more than {MAX_GROUPS}")
            groups = {_group(group): _saved(saved, body["world_size"]) for group, saved in body["groups"].items()}
            metrics = {name: float(value) for name, value in body["metrics"].items()}
            manifest = typed({**body, "groups": groups, "metrics": metrics}, cls)
            _check_objects(manifest)
        return manifest


def _check_objects(manifest: Manifest) -> None:
    """Raise ValueError if the index belongs to another step or attempt, or a shard's name is wrong or appears twice."""
    attempt = parse_attempt(f"checkpoint_{manifest.step:012d}/{manifest.attempt}/")
    if attempt is None or manifest.index.name != attempt_prefix(attempt) + INDEX_NAME:
        raise ValueError(f"{manifest.index.name!r:.80} is not an index of this step and attempt")
    names = [record.name for record in manifest.objects]
    for name in names:
        if not is_shard(name):
            raise ValueError(f"{name!r:.80} is not a shard of an attempt")
    if len(names) != len({*names}):
        raise ValueError("an object is named twice")


def _group(name: str) -> str:
    if not is_group(name):
        raise ValueError(f"{name!r:.80} is not a group name")
    return name


def _saved(group: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    for name in group.get("buffers", ()):
        text(name)
    if world_size == 1 or "trees" not in group:
        return {**group, "kind": text(group["kind"]), "tree": group["tree"]}
    if type(group["trees"]) is not list or len(group["trees"]) != world_size:
        raise ValueError(f"{world_size} ranks do not have {len(group['trees'])} trees")
    return {**group, "kind": text(group["kind"])}
