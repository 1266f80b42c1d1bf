"""Names of shards that differ in the rank alone, as one name: `…/base-[0-999]-of-01000-0.safetensors`.

A checkpoint of a thousand ranks that reuses a frozen base names a thousand objects, and so does every ledger entry in
which it is live. Folded they are one text, however many ranks there are. Folding loses nothing: what is deleted, kept
or reused is decided by whole names. Nobody unfolds what he has only read: whether a name is among folded ones is found
without that, since a text of twenty bytes can stand for a million names.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter

from ckpt_tasks.format.keys import is_shard

__all__ = ["MAX_FOLDED", "Names", "fold", "folded_count", "is_folded", "unfold"]

MAX_FOLDED = 1 << 20  # names in one; an object has a region at least, and a checkpoint has no more of them

_SHARD = re.compile(r"(.*-)([0-9]{5,9})(-of-[0-9]{5,9}-[0-9]{1,9}\.safetensors)", re.ASCII)
_RUN = r"(?:0|[1-9][0-9]{0,8})(?:-[1-9][0-9]{0,8})?"
_FOLDED = re.compile(rf"(.*-)\[({_RUN}(?:,{_RUN})*)\](-of-[0-9]{{5,9}}-[0-9]{{1,9}}\.safetensors)", re.ASCII)

_Key = tuple[str, str]  # what stands before the rank, and behind it
_Run = tuple[int, int]  # ranks, the last one included


def fold(names: Iterable[str]) -> tuple[str, ...]:
    """Return names with those that differ in the rank alone as one, each once, in the order in which they come.

    What is folded already may be among them.
    """
    runs: dict[_Key | str, list[_Run]] = {}
    for name in names:
        key, ranks = _parsed(name)
        runs.setdefault(key, []).extend(ranks)
    return tuple(key if isinstance(key, str) else _name(key, _merged(ranks)) for key, ranks in runs.items())


def unfold(names: Iterable[str]) -> Iterator[str]:
    """Yield every single name."""
    for name in names:
        key, runs = _parsed(name)
        if isinstance(key, str):
            yield key
        else:
            yield from (f"{key[0]}{rank:05d}{key[1]}" for first, last in runs for rank in range(first, last + 1))


def is_folded(name: str) -> bool:
    """Say whether a name stands for those of several ranks, and is written as `fold` writes it."""
    if "[" not in name:
        return False
    key, runs = _parsed(name)
    if isinstance(key, str) or any(first > last for first, last in runs) or _count(runs) > MAX_FOLDED:
        return False
    return _name(key, _merged(runs)) == name and is_shard(f"{key[0]}{runs[0][0]:05d}{key[1]}")


def folded_count(names: Iterable[str]) -> int:
    """Count the names that folded ones stand for; others count as nothing."""
    return sum(_count(_parsed(name)[1]) for name in names if "[" in name)


class Names:
    """A set of names, given folded or not; whether a name is in it is found without unfolding."""

    def __init__(self, names: Iterable[str]):
        runs: dict[_Key | str, list[_Run]] = {}
        for name in dict.fromkeys(names):
            key, ranks = _parsed(name)
            runs.setdefault(key, []).extend(ranks)
        self._runs = {key: _merged(ranks) for key, ranks in runs.items()}

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
    """Return what a name shares with those of other ranks, and its ranks; the name itself where it has none."""
    match = _FOLDED.fullmatch(name) if "[" in name else _SHARD.fullmatch(name)
    if match is None:
        return name, []
    before, ranks, behind = match.groups()
    if "[" not in name:
        # Another way to write a number is another name.
        return ((before, behind), [(int(ranks), int(ranks))]) if f"{int(ranks):05d}" == ranks else (name, [])
    ends = [run.partition("-") for run in ranks.split(",")]
    return (before, behind), [(int(first), int(last or first)) for first, _, last in ends]


def _merged(runs: list[_Run]) -> list[_Run]:
    """Return runs of ranks in order, without overlap, and none right behind another."""
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
