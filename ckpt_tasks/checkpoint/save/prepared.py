"""Make index and manifest of a checkpoint from the parts of the ranks, and check their tiling; write nothing.

This module also compares the values and digests that must be equal in all ranks, by path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ckpt_tasks.checkpoint.memory.samples import Samples
from ckpt_tasks.checkpoint.save.parts import RankPart, Saving
from ckpt_tasks.checkpoint.save.provenance import provenance
from ckpt_tasks.errors import IntegrityError, StateError, UnsupportedStateError
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.keys import INDEX_NAME, MANIFEST_NAME, attempt_prefix, fold
from ckpt_tasks.format.layout.arrow import FAULTS
from ckpt_tasks.format.layout.index import MAX_INDEX_BYTES, Index, parse_index, write_index
from ckpt_tasks.format.manifest import MAX_MANIFEST_BYTES, Manifest, ObjectRecord
from ckpt_tasks.format.parsing import well_formed
from ckpt_tasks.format.records import Checkpoint, Compared
from ckpt_tasks.gc_pause import gc_paused
from ckpt_tasks.system import now_iso

_MOST_ITEMS = 32  # A container with more items gets one digest.
# A group with more leaves gets one digest; if it has more tensors, several tensors share a digest.
_MOST_LEAVES = _MOST_TENSORS = 256
_SHOWN = 80  # A longer value is replaced by a digest.


@dataclass(frozen=True)
class PreparedCheckpoint:
    """A checkpoint before its ledger entry: its manifest, and the bytes of manifest and index.

    `reuses` names the objects of older attempts that are part of the checkpoint.
    """

    saving: Saving
    manifest: Manifest
    index_bytes: bytes
    manifest_bytes: bytes
    digest: str

    @property
    def index(self) -> Index:
        """The index as a view of its bytes."""
        return parse_index(self.index_bytes, self.manifest.index.name)

    @property
    def reuses(self) -> tuple[str, ...]:
        """Names of the objects that other attempts wrote."""
        own = attempt_prefix(self.saving.attempt)
        return tuple(record.name for record in self.manifest.objects if not record.name.startswith(own))

    @property
    def own_names(self) -> tuple[str, ...]:
        """Names of the objects that this attempt wrote, manifest first."""
        own = attempt_prefix(self.saving.attempt)
        objects = (record.name for record in self.manifest.objects if record.name.startswith(own))
        return (own + MANIFEST_NAME, self.manifest.index.name, *objects)

    def checkpoint(self, *, parent: str | None, n: int, cost_s: float) -> Checkpoint:
        """Return the checkpoint as the ledger holds it, committed by entry `n`."""
        manifest = self.manifest
        data_bytes = sum(record.size_bytes for record in manifest.objects)
        return Checkpoint(
            step=manifest.step,
            attempt=manifest.attempt,
            manifest=attempt_prefix(self.saving.attempt) + MANIFEST_NAME,
            manifest_digest=self.digest,
            parent=parent,
            n=n,
            metrics=manifest.metrics,
            size_bytes=data_bytes + len(self.index_bytes) + len(self.manifest_bytes),
            objects=len(manifest.objects) + 2,
            saved_at=manifest.created_at,
            cost_s=round(cost_s, 6),
            epochs=self.saving.epochs,
            reuses=fold(self.reuses),
            interim=self.saving.interim,
            why=self.saving.why,
        )


def prepare_part(saving: Saving, part: RankPart, sealed: PreparedCheckpoint | None = None) -> PreparedCheckpoint:
    """Make index and manifest of one rank's part, for its own host; check them if there is only one rank.

    `sealed`: an earlier result for this snapshot; it is returned if the part still names the same objects.
    """
    if sealed is not None and sealed.manifest.objects == part.objects:
        return sealed
    if saving.world_size == 1:
        return prepare_checkpoint(saving, [part])
    with gc_paused():
        return _prepared(saving, write_index(part.index), part.objects, saving.groups)


@gc_paused()
def prepare_checkpoint(
    saving: Saving, parts: Sequence[RankPart], sealed: PreparedCheckpoint | None = None
) -> PreparedCheckpoint:
    """Make index and manifest from the parts of all ranks, and check that they tile the checkpoint; write nothing.

    `sealed`: the result of `prepare_part` for the first part; with one rank and the same objects it is returned. Raises
    IntegrityError if a rank or a region is missing, UnsupportedStateError if the checkpoint would be too large, and
    StateError if the states of ranks differ.
    """
    if sealed is not None and saving.world_size == len(parts) == 1 and sealed.manifest.objects == parts[0].objects:
        return sealed
    index, objects = _combine(parts, saving.world_size)
    groups = saving.groups if saving.world_size == 1 else _combine_groups(saving.groups, parts)
    _check_tiling(index, objects, saving)
    index_bytes = write_index(index)
    del index  # The index takes 130 MiB for 10⁶ regions.
    prepared = _prepared(saving, index_bytes, objects, groups)
    _check_sizes(prepared)
    if saving.number <= 1:  # Once for each owner of the run, parse the manifest as a restore does.
        Manifest.from_bytes(
            prepared.manifest_bytes, digest=prepared.digest, name=attempt_prefix(saving.attempt) + MANIFEST_NAME
        )
    return prepared


def _check_tiling(index: Index, objects: Sequence[ObjectRecord], saving: Saving) -> None:
    """Raise IntegrityError for holes, overlaps and bounds: a save must not write what a restore would refuse."""
    place = attempt_prefix(saving.attempt) + INDEX_NAME
    sizes = {record.name: (record.digested_bytes, record.size_bytes) for record in objects}
    ranks_hint = "The ranks disagree on where their parts lie: cut a tensor over one mesh, or parts of it."
    try:
        with well_formed("the index", place, FAULTS):
            index.check(place)
            faults = index.coverage_faults(whole=saving.world_size == 1) or index.object_faults(sizes)
        if faults:
            why = f"the index has holes: {'; '.join(faults[:5])}"
            raise IntegrityError(why, key=place, step=saving.attempt.step)
    except IntegrityError as error:
        error.hint = ranks_hint if saving.world_size > 1 else error.hint
        raise


def _check_sizes(prepared: PreparedCheckpoint) -> None:
    sizes = {
        INDEX_NAME: (len(prepared.index_bytes), MAX_INDEX_BYTES),
        MANIFEST_NAME: (len(prepared.manifest_bytes), MAX_MANIFEST_BYTES),
    }
    for name, (size_bytes, most_bytes) in sizes.items():
        if size_bytes > most_bytes:
            raise UnsupportedStateError(
                f"{name} would have {size_bytes} bytes, more than the {most_bytes} that are read",
                hint="Keep large values in tensors.",
            )


def _prepared(
    saving: Saving,
    index_bytes: bytes,
    objects: Sequence[ObjectRecord],
    groups: Mapping[str, Mapping[str, object]],
) -> PreparedCheckpoint:
    place = attempt_prefix(saving.attempt) + INDEX_NAME
    manifest = Manifest(
        run_key=saving.run_key,
        step=saving.attempt.step,
        attempt=saving.attempt.name,
        world_size=saving.world_size,
        index=ObjectRecord(place, len(index_bytes), digest_hex(index_bytes), len(index_bytes)),
        objects=tuple(objects),
        groups=groups,
        metrics=dict(saving.metrics),
        created_at=now_iso(),
        environment={**provenance(), **saving.environment},
    )
    manifest_bytes = manifest.to_bytes()
    return PreparedCheckpoint(saving, manifest, index_bytes, manifest_bytes, digest_hex(manifest_bytes))


def _combine(parts: Sequence[RankPart], world_size: int) -> tuple[Index, list[ObjectRecord]]:
    ranks = sorted(part.rank for part in parts)
    if ranks != list(range(world_size)):
        raise IntegrityError(f"ranks {ranks} handed in their parts, 0 to {world_size - 1} were expected")
    index = Index.joined(part.index for part in sorted(parts, key=lambda part: part.rank))
    return index, [record for part in parts for record in part.objects]


def _combine_groups(
    groups: Mapping[str, Mapping[str, object]], parts: Sequence[RankPart]
) -> dict[str, Mapping[str, object]]:
    """Return the checkpoint's groups: a group by rank has the trees of all ranks, any other group has rank 0's tree.

    Raises StateError if values that must be equal in all ranks differ.
    """
    ordered = sorted(parts, key=lambda part: part.rank)
    refuse_differences([part.compared for part in ordered])
    return {
        name: {"kind": group["kind"], "trees": [part.trees[name] for part in ordered]} if "by_rank" in group else group
        for name, group in groups.items()
    }


def compared_values(groups: Mapping[str, Mapping[str, Any]], values: Samples, replicated: Samples) -> Compared:
    """Return the short values and digests that must be equal in all ranks, by path.

    `all`: values that every rank has. `held`: parts of replicated tensors; only some ranks hold each part.
    """
    same: dict[str, str] = {}
    for name, group in groups.items():
        if "by_rank" not in group:
            same[f"{name}:"] = _short([group["kind"], group.get("buffers")])
            leaves = [*islice(_leaves(group["tree"], name), _MOST_LEAVES + 1)]
            same.update(leaves if len(leaves) <= _MOST_LEAVES else {name: _short(group["tree"])})
    digests = [*values.digests().items()]
    several = -(-len(digests) // _MOST_TENSORS) or 1
    for part in (digests[at : at + several] for at in range(0, len(digests), several)):
        same[part[0][0]] = part[0][1] if several == 1 else _short(part)
    return {"all": same, "held": replicated.digests()}


def refuse_differences(ranks: Sequence[Compared]) -> None:
    """Raise StateError, with a key, if values that must be equal differ; `ranks` has each rank's `compared`."""
    seen: dict[str, tuple[int, str]] = {}
    for rank, one in enumerate(ranks):
        held = one.get("held", {})
        different = [name for name, digest in held.items() if seen.setdefault(name, (rank, digest))[1] != digest]
        if different:
            other, _ = seen[different[0]]
            raise StateError(
                f"rank {rank} and rank {other} have different values in {len(different)} of {len(held)} "
                f"tensors that were compared: the ranks have drifted apart",
                key=different[0].rpartition(" [")[0],
                hint="Restore the last checkpoint, and look for what one rank does alone: another seed, module or step."
                " Where ranks may differ (unlike GPUs, local SGD), broadcast the parameters and the optimizer's tensors"
                " from rank 0 before every save.",
            )
    first = ranks[0].get("all", {})
    for rank, own in enumerate(one.get("all", {}) for one in ranks):
        for place in (place for place in {**first, **own} if first.get(place) != own.get(place)):
            raise StateError(
                f"rank {rank} and rank 0 have different values: {own.get(place)} and {first.get(place)}",
                key=re.sub("/~[a-z]+", "", place).rstrip(":"),
                hint="Make it the same on every rank, save it by rank (ByRank(value) in the state), or leave it out.",
            )


def _leaves(node: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield (path, short value) for every leaf of an encoded tree, and for every large container."""
    if node and isinstance(node, dict | list) and len(node) <= _MOST_ITEMS:
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(item, f"{place}/{key}")
    else:
        yield place, _short(node)


def _short(node: Any) -> str:
    text = canonical_json(node)
    return text.decode() if len(text) <= _SHOWN else digest_hex(text)
