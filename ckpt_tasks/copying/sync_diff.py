"""Find which checkpoints a copy of a run lacks, and the order in which it must commit them; writes nothing.

A checkpoint has the same identity everywhere, but every ledger has its own numbers. The last commit is the newest
checkpoint, so the target must commit in the source's order; a checkpoint that was copied alone may have to be committed
again after older ones.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from ckpt_tasks.errors import RunMismatchError
from ckpt_tasks.format.keys import MAX_LEDGER_NUMBER, repeated
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.records import Checkpoint, Evaluation
from ckpt_tasks.ledger.history import SYNCED, Head, History, newest_first


@dataclass(frozen=True, kw_only=True)
class SyncDiff:
    """The requested checkpoints that a target lacks.

    `ranked` are the checkpoints in `missing` (with the source's entry numbers) and those of the target (with its own),
    in the order of the source's commits. `pruned` are identities that the source has and the target has removed.
    `given_up` are folded names of objects that a process which has lost the target may still delete.
    """

    missing: frozenset[str]
    ranked: tuple[Checkpoint, ...]
    pruned: frozenset[str]
    given_up: frozenset[str]
    evaluations: tuple[Evaluation, ...]
    pins: Mapping[str, str]

    @property
    def nothing(self) -> bool:
        """Whether the target has all checkpoints, in order."""
        return not (self.missing or self.evaluations or self.pins) and in_order(self.ranked)


class _Mark(NamedTuple):
    """The state of source and target at the end of the last copy.

    `entry` was the source's newest entry then; `live` are the target's checkpoints then, all of them from the source.
    `pruned` are the checkpoints that the target once had and no longer has. `given_up` are objects that more than one
    owner of the target was going to delete: every owner except the last may have stalled, and may delete them later. An
    object that a single owner recorded as deleted is not among them.
    """

    entry: int
    live: frozenset[str]
    pruned: frozenset[str]
    given_up: frozenset[str]


def find_sync_diff(
    source: History, head: Head, target: History, there: Head, only: Checkpoint | None = None
) -> SyncDiff:
    """Compare two ledgers; `only` requests one checkpoint instead of all live ones.

    Raises RunMismatchError if the target has a checkpoint that the source never had.
    """
    live, have = head.state.by_identity, there.state.by_identity
    mark = _last_copy(source, target, there)
    chosen = live if only is None else {only.manifest_digest: only}
    missing = [c for digest, c in chosen.items() if digest not in have and digest not in mark.pruned]
    return SyncDiff(
        missing=frozenset(c.manifest_digest for c in missing),
        ranked=rank([*have.values()], missing, _order(source, head, have, missing, mark)),
        pruned=mark.pruned & live.keys(),
        given_up=mark.given_up,
        evaluations=_evaluations(head.state, there.state, chosen.keys() - mark.pruned),
        pins={
            digest: why
            for digest, why in head.state.pins.items()
            if digest in chosen and digest not in there.state.pins and digest not in mark.pruned
        },
    )


def rank(have: Sequence[Checkpoint], missing: Sequence[Checkpoint], order: Mapping[str, int]) -> tuple[Checkpoint, ...]:
    """Sort the target's checkpoints and the missing ones by the source's `order` (identity → entry).

    A checkpoint that is not in `order` is left out: it is older than all that will be copied, and keeps its place.
    """
    known = [c for c in have if c.manifest_digest in order]
    return tuple(sorted([*known, *missing], key=lambda c: order[c.manifest_digest]))


def in_order(have: Sequence[Checkpoint]) -> bool:
    """Return True if these checkpoints were committed in this order."""
    return all(before.n < after.n for before, after in pairwise(have))


def _order(
    source: History, head: Head, have: Mapping[str, Checkpoint], missing: Sequence[Checkpoint], mark: _Mark
) -> dict[str, int]:
    """Return the source's ledger entry of each checkpoint to be ordered: identity → entry.

    Raises RunMismatchError if the target has a checkpoint that the source never had.
    """
    order = {c.manifest_digest: c.n for c in head.state.live}
    unknown = have.keys() - order.keys()
    strangers = unknown - mark.live
    # Commits of the source since the last copy follow everything that the target has.
    late = any(c.n <= mark.entry for c in missing) or not in_order(rank([*have.values()], (), order))
    if strangers or (late and unknown):
        order |= _numbers(source, unknown if late else strangers)
    own = sorted(have[digest].step for digest in strangers - order.keys())
    if own:
        steps = ", ".join(str(step) for step in own[:6]) + (" …" if len(own) > 6 else "")
        raise RunMismatchError(
            f"the target has checkpoints that {source.store.url} never had (steps {steps}): training went on from it",
            hint="Copy to another directory.",
        )
    return order


def _last_copy(source: History, target: History, there: Head) -> _Mark:
    """Find the event of the last finished copy from this source, and what the target has given up since."""
    have = there.state.by_identity.keys()
    had: set[str] = set()
    retired: dict[int, set[str]] = {}  # Folded names of objects, by the owner's epoch.
    given_up: set[str] = set()
    mark, at_mark = sys.maxsize, frozenset[str]()
    for entry, _ in newest_first(target):
        live = entry.state.by_identity.keys()
        had |= live
        epoch = entry.state.owner.epoch if entry.state.owner else 0
        retired.setdefault(epoch, set()).update(entry.state.retired)
        if _is_past(source, entry.event):
            had |= _texts(entry.event.get("pruned"))
            given_up = _texts(entry.event.get("given_up"))
            mark, at_mark = int(entry.event["entry"]), frozenset(live)
            break
    given_up.update(repeated(retired.values()))
    return _Mark(mark, at_mark, frozenset(had - have), frozenset(given_up))


def _texts(value: Any) -> set[str]:
    """Return the strings of a list in an event; anything else counts as an empty list."""
    return {str(item) for item in value} if isinstance(value, list) else set()


def _is_past(source: History, event: Mapping[str, Any]) -> bool:
    """Return True if an event records a copy from this source's ledger, up to an entry that the source still has."""
    n = event.get("entry")
    if event["kind"] != "note" or event.get("note") != SYNCED or type(n) is not int or not 0 <= n <= MAX_LEDGER_NUMBER:
        return False
    good = source.good_entry(n)
    return good is not None and good[1] == event.get("entry_digest")


def _numbers(history: History, wanted: Collection[str]) -> dict[str, int]:
    """Search a ledger, newest entry first, for the entries that committed these checkpoints."""
    numbers: dict[str, int] = {}
    for entry, _ in newest_first(history):
        for checkpoint in entry.state.live:
            if checkpoint.manifest_digest in wanted:
                numbers.setdefault(checkpoint.manifest_digest, checkpoint.n)
        if len(numbers) == len(wanted):
            break
    return numbers


def _evaluations(state: State, there: State, wanted: Collection[str]) -> tuple[Evaluation, ...]:
    recorded = {(e.manifest_digest, e.suite) for e in there.evaluations}
    return tuple(
        e for e in state.evaluations if e.manifest_digest in wanted and (e.manifest_digest, e.suite) not in recorded
    )
