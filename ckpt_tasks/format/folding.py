"""Names of shards that differ only in the rank, as one name: `…/base-[0-999]-of-01000-0.safetensors`.

A checkpoint of a thousand ranks that reuses a frozen base names a thousand objects, as does every ledger entry in which
it is live. Folded they are one text, for any number of ranks. Folding loses nothing: single names decide what is
deleted, kept or reused. `Names` finds a name without unfolding, since a read text of twenty bytes can stand for a
million names.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter

from ckpt_tasks.format.keys import is_shard

__all__ = ["MAX_FOLDED", "MAX_RETIRED", "Names", "fold", "folded_count", "is_folded", "repeated", "unfold"]

MAX_FOLDED = 1 << 20  # names in one: a checkpoint has no more regions, and an object has at least one
MAX_RETIRED = 4 * MAX_FOLDED  # names that one ledger entry gives up

_SHARD = re.compile(r"(.*-)([0-9]{5,9})(-of-[0-9]{5,9}-[0-9]{1,9}\.safetensors)", re.ASCII)
_RUN = r"(?:0|[1-9][0-9]{0,8})(?:-[1-9][0-9]{0,8})?"
_FOLDED = re.compile(rf"(.*-)\[({_RUN}(?:,{_RUN})*)\](-of-[0-9]{{5,9}}-[0-9]{{1,9}}\.safetensors)", re.ASCII)

_Key = tuple[str, str]  # the texts before and after the rank
_Run = tuple[int, int]  # first and last rank


def fold(names: Iterable[str]) -> tuple[str, ...]:
    """Fold names that differ only in the rank; return each name once, in order of first appearance.

    Names may be folded already.
    """
    runs = _by_key(names)
    return tuple(key if isinstance(key, str) else _name(key, _merged(ranks)) for key, ranks in runs.items())


def repeated(sets: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Return the names, folded, that are in more than one of these sets of folded and plain names; unfold none."""
    runs: dict[_Key | str, list[list[_Run]]] = {}
    for names in sets:
        for key, ranks in _by_key(names).items():
            runs.setdefault(key, []).append(_merged(ranks))
    common: list[str] = []
    for key, several in runs.items():
        if isinstance(key, str):
            common += [key] if len(several) > 1 else []
        elif twice := _overlaps(sorted(run for ranks in several for run in ranks)):
            common.append(_name(key, _merged(twice)))
    return tuple(common)


def unfold(names: Iterable[str]) -> Iterator[str]:
    """Yield every single name of folded and plain names."""
    for name in names:
        key, runs = _parsed(name)
        if isinstance(key, str):
            yield key
        else:
            yield from (f"{key[0]}{rank:05d}{key[1]}" for first, last in runs for rank in range(first, last + 1))


def is_folded(name: str) -> bool:
    """Say whether a name is folded, in exactly the form that `fold` writes."""
    if "[" not in name:
        return False
    key, runs = _parsed(name)
    if isinstance(key, str) or any(first > last for first, last in runs) or _count(runs) > MAX_FOLDED:
        return False
    return _name(key, _merged(runs)) == name and is_shard(f"{key[0]}{runs[0][0]:05d}{key[1]}")


def folded_count(names: Iterable[str]) -> int:
    """Count the single names behind folded ones; plain names do not count."""
    return sum(_count(_parsed(name)[1]) for name in names if "[" in name)


class Names:
    """A set of folded and plain names, with `in` for single names that does not unfold."""

    def __init__(self, names: Iterable[str]):
        self._runs = {key: _merged(ranks) for key, ranks in _by_key(dict.fromkeys(names)).items()}

    def __contains__(self, name: str) -> bool:
        """Say whether a single name is in the set."""
        key, ranks = _parsed(name)
        runs = self._runs.get(key)
        if runs is None or not ranks:
            return runs is not None
        ((rank, _),) = ranks
        at = bisect_right(runs, rank, key=itemgetter(0)) - 1
        return at >= 0 and rank <= runs[at][1]


def _parsed(name: str) -> tuple[_Key | str, list[_Run]]:
    """Split a name into (texts around the rank, runs of ranks); (the name, []) if it has no rank."""
    match = _FOLDED.fullmatch(name) if "[" in name else _SHARD.fullmatch(name)
    if match is None:
        return name, []
    before, ranks, behind = match.groups()
    if "[" not in name:
        # A number written in another way makes another name.
        return ((before, behind), [(int(ranks), int(ranks))]) if f"{int(ranks):05d}" == ranks else (name, [])
    ends = [run.partition("-") for run in ranks.split(",")]
    return (before, behind), [(int(first), int(last or first)) for first, _, last in ends]


def _by_key(names: Iterable[str]) -> dict[_Key | str, list[_Run]]:
    """Return the runs of ranks by the texts around them; of a name without a rank none."""
    runs: dict[_Key | str, list[_Run]] = {}
    for name in names:
        key, ranks = _parsed(name)
        runs.setdefault(key, []).extend(ranks)
    return runs


def _overlaps(runs: list[_Run]) -> list[_Run]:
    """Return what more than one of these sorted runs has."""
    twice, end = [], -1
    for first, last in runs:
        if first <= end:
            twice.append((first, min(last, end)))
        end = max(end, last)
    return twice


def _merged(runs: list[_Run]) -> list[_Run]:
    """Return runs of ranks sorted, with overlapping and adjacent runs merged."""
    merged: list[_Run] = []
    for first, last in sorted(runs):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _name(key: _Key, runs: list[_Run]) -> str:
    if _count(runs) == 1:
        return f"{key[0]}{runs[0][0]:05d}{key[1]}"
    ranks = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{key[0]}[{ranks}]{key[1]}"


def _count(runs: list[_Run]) -> int:
    return sum(last - first + 1 for first, last in runs)
