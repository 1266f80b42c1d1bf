"""The values that must be equal in all ranks of a save. Commits and restarts from memory compare them the same way."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ckpt_tasks.errors import StateError
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.records import Compared
from ckpt_tasks.snapshot.samples import Samples

_MOST_ITEMS = 32  # A container with more items has one digest.
# A group with more leaves has one digest; if it has more tensors, several tensors share a digest.
_MOST_LEAVES = _MOST_TENSORS = 256
_SHOWN = 80  # A longer value has a digest.


def compared(groups: Mapping[str, Mapping[str, Any]], values: Samples, replicated: Samples) -> Compared:
    """Return what must be equal in other ranks: short values and digests, by path.

    `all`: what every rank has; `held`: parts of replicated tensors, which only some ranks hold.
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
    """Raise StateError, with a key, if ranks differ in what must be equal; `ranks` has each one's `compared`."""
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
    """Yield (path, short value) for every leaf of an encoded tree, and for every container of many items."""
    if node and isinstance(node, dict | list) and len(node) <= _MOST_ITEMS:
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(item, f"{place}/{key}")
    else:
        yield place, _short(node)


def _short(node: Any) -> str:
    text = canonical_json(node)
    return text.decode() if len(text) <= _SHOWN else digest_hex(text)
