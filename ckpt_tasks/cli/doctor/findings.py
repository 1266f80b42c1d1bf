"""The findings of `measuring.py` about a store, and the verdict whether it is fit for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EXCLUSIVE = "conditional write"
# Checkpoints need all of these abilities; the value is the message if one is missing.
_NEEDED = {
    "list": "it cannot be listed",
    "write": "it cannot be written to",
    "read": "what was written cannot be read at once",
    "delete": "nothing can be deleted, so that nothing would ever be pruned",
    "ordered listing": "it does not list in order, at once, what is there",
    "ranged reads": "parts of an object cannot be read",
    "large objects": "a large object does not come through",
}


@dataclass(frozen=True)
class Ability:
    """Whether something works (None: not tried), and the observation that shows it."""

    works: bool | None
    seen: str = ""


@dataclass(frozen=True)
class Disk:
    """The disk of a local directory: the file system's abilities, and free bytes."""

    o_direct: Ability
    link: Ability
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What one store can do; `left` names objects that could not be deleted."""

    url: str
    endpoint: str | None
    abilities: Mapping[str, Ability]
    disk: Disk | None = None
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoreVerdict:
    """The verdict: whether the store is fit for checkpoints, and why, in words."""

    fit: bool
    words: str


def judge(findings: Findings) -> StoreVerdict:
    """Judge whether a store is fit for checkpoints; a test that was not run is not a fault."""
    abilities = findings.abilities
    for name, matter in _NEEDED.items():
        ability = abilities.get(name, Ability(None))
        if ability.works is False:
            return StoreVerdict(False, f"not fit: {matter}" + (f" ({ability.seen})" if ability.seen else ""))
    exclusive = abilities.get(EXCLUSIVE, Ability(None, "a conditional write was not tried"))
    if exclusive.works:
        return StoreVerdict(True, "fit for checkpoints")
    if findings.endpoint is None:  # A local directory has no other way to commit.
        return StoreVerdict(False, f"not fit: of two writers of one name none loses ({exclusive.seen})")
    return StoreVerdict(False, f"only with single_writer=True: {exclusive.seen}")
