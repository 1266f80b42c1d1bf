"""Find which checkpoints the target of a copy lacks, and in which order it must commit them; write nothing.

A checkpoint has the same identity in every ledger, but each ledger gives it another entry number. The last commit is
the newest checkpoint, so the target must commit in the source's order. If a checkpoint was copied alone, and older
checkpoints are copied later, the target must commit the newer one again.
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
from ckpt_tasks.run.ledger.history import SYNCED, Head, History, newest_first


@dataclass(frozen=True, kw_only=True)
class SyncDiff:
    """The requested checkpoints that a target lacks.

    `missing` has the identities of these checkpoints. `ranked` has the missing checkpoints (with the source's entry
    numbers) and the target's (with the target's numbers), in the order of the source's commits. `pruned` has identities
    of checkpoints that the source has and the target has removed. `given_up` has folded names of objects that a former
    owner of the target may still delete.
    """

    missing: frozenset[str]
    ranked: tuple[Checkpoint, ...]
    pruned: frozenset[str]
    given_up: frozenset[str]
    evaluations: tuple[Evaluation, ...]
    pins: Mapping[str, str]

    @property
    def nothing(self) -> bool:
        """Whether the target has all checkpoints, in order, and all evaluations and pins."""
        return not (self.missing or self.evaluations or self.pins) and in_order(self.ranked)


class _Mark(NamedTuple):
    """The state of source and target when the last copy ended, and what the target has removed by now.

    `entry` was the source's newest entry. `live` were the target's checkpoints, all of them from the source. `pruned`
    are the checkpoints that the target has had and no longer has. `given_up` are the objects that more than one owner
    of the target has listed for deletion: an earlier owner may have stalled, and may still delete them. An object that
    only one owner has listed is not in `given_up`.
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

    Omits a checkpoint that is not in `order`: it is older than every checkpoint to copy, and keeps its entry.
    """
    known = [c for c in have if c.manifest_digest in order]
    return tuple(sorted([*known, *missing], key=lambda c: order[c.manifest_digest]))


def in_order(have: Sequence[Checkpoint]) -> bool:
    """Return True if these checkpoints were committed in this order."""
    return all(before.n < after.n for before, after in pairwise(have))


def _order(
    source: History, head: Head, have: Mapping[str, Checkpoint], missing: Sequence[Checkpoint], mark: _Mark
) -> dict[str, int]:
    """Return, by identity, the number of the source's entry that committed each checkpoint to be sorted.

    Raises RunMismatchError if the target has a checkpoint that the source never had.
    """
    order = {c.manifest_digest: c.n for c in head.state.live}
    unknown = have.keys() - order.keys()
    strangers = unknown - mark.live
    # The source's commits since the last copy are newer than all checkpoints of the target.
    late = any(c.n <= mark.entry for c in missing) or not in_order(rank([*have.values()], (), order))
    if strangers or (late and unknown):
        order |= _numbers(source, unknown if late else strangers)
    own = sorted(have[digest].step for digest in strangers - order.keys())
    if own:
        steps = ", ".join(str(step) for step in own[:6]) + (" …" if len(own) > 6 else "")
        raise RunMismatchError(
            f"the target has checkpoints that {source.store.url} never had (steps {steps}): training resumed from it",
            hint="Copy to another directory.",
        )
    return order


def _last_copy(source: History, target: History, there: Head) -> _Mark:
    """Find the event of the last finished copy from this source, and what the target has removed so far."""
    have = there.state.by_identity.keys()
    had: set[str] = set()
    retired: dict[int, set[str]] = {}  # Folded names of objects, by owner epoch.
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
    """Return, by identity, the numbers of the entries that committed these checkpoints; search newest entries first."""
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
