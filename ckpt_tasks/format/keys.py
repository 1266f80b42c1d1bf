"""The names of objects in a run directory: building and parsing them.

Names are relative, their parts match a strict pattern, and a parser matches the whole name: a foreign name in the
directory is ignored, never misread. A name that an object contains must have the kind of its field: otherwise a table
with the name of a ledger entry would be copied as a ledger entry.

`fold` writes the names of shards that differ only in the rank as one name: `…/base-[0-999]-of-01000-0.safetensors`. A
checkpoint of a thousand ranks that reuses a frozen base names a thousand objects, and so does every ledger entry in
which the checkpoint is live; a folded name is one text for any number of ranks. Decisions to delete, keep or reuse are
still made for single names. `Names` finds a name without unfolding, since a folded name of twenty bytes can stand for a
million names.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import NamedTuple

from ckpt_tasks.errors import ConfigError

FORMAT_NAME = "format.json"
MANIFEST_NAME = "manifest.json"
INDEX_NAME = "index.arrow"
STEPS_NAME = "steps.arrow"  # The file with the metrics of the steps of a snapshot in memory.
LEDGER_PREFIX = "ledger/"
COMPILED_PREFIX = "compiled/"
MAX_STEP = 10**12 - 1
MAX_EPOCH = 10**9 - 1  # The highest owner epoch: the name of an attempt has room for nine digits.
MAX_LEDGER_NUMBER = 2**63 - 1
_COUNTED_DOWN = 10**20 - 1  # A name begins with this number less the entry's, so that the newest comes first.

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}", re.ASCII)
_GROUP = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}", re.ASCII)
_OF_RANKS = r"-of-[0-9]{5,9}-[0-9]{1,9}\.(?:safetensors|arrow)"
_SHARD = re.compile(rf"{_GROUP.pattern}-[0-9]{{5,9}}{_OF_RANKS}", re.ASCII)
_EVALUATION = re.compile(rf"evals/([0-9]{{12}})-({_GROUP.pattern})-[0-9a-f]{{16}}\.arrow", re.ASCII)
_STEPS = re.compile(r"steps/([0-9]{12})-e(?:[0-9]{6}|[1-9][0-9]{6,8})-[0-9a-f]{16}\.arrow", re.ASCII)
_LIVE_LIST = re.compile(r"live/[0-9a-f]{32}\.json", re.ASCII)
_COMPILED = re.compile(r"compiled/e([0-9]{6}|[1-9][0-9]{6,8})-([0-9a-f]{16})-([0-9a-f]{32})\.pack", re.ASCII)
_LEDGER = re.compile(r"ledger/([0-9]{20})-([0-9]{20})\.json", re.ASCII)
_ATTEMPT = re.compile(r"checkpoint_([0-9]{12})/e([0-9]{6}|[1-9][0-9]{6,8})-([0-9a-f]{16})(?:/.*)?", re.ASCII)


class Attempt(NamedTuple):
    """One try to save one step: `epoch` is the writer's owner epoch, `nonce` a random number of 16 hex digits."""

    step: int
    epoch: int
    nonce: str

    @property
    def name(self) -> str:
        """The name of the attempt's directory; no other attempt has it, so two attempts never write the same object."""
        return f"e{self.epoch:06d}-{self.nonce}"


class Compiled(NamedTuple):
    """A pack of compiled code: its writer's owner epoch, the kind of host that can use it, and its digest."""

    epoch: int
    kind: str
    digest: str


def attempt_prefix(attempt: Attempt) -> str:
    """Return the prefix of all objects of an attempt, with a slash at the end."""
    return f"checkpoint_{attempt.step:012d}/{attempt.name}/"


def key_of_rank(key: str, rank: int) -> str:
    """Return the key of a rank's own tensor: insert the rank after the group of `key` ("group/name")."""
    group, _, name = key.partition("/")
    return f"{group}/{rank:05d}/{name}"


def parse_attempt(name: str) -> Attempt | None:
    """Read the attempt from an object's name or prefix; return None for any other name."""
    match = _ATTEMPT.fullmatch(name)
    return Attempt(int(match[1]), int(match[2]), match[3]) if match else None


def shard_name(group: str, rank: int, world_size: int, part: int) -> str:
    """Name the safetensors file of a group that has one part of one rank's tensors."""
    return f"{group}-{rank:05d}-of-{world_size:05d}-{part}.safetensors"


def group_file_name(group: str, rank: int, world_size: int, number: int) -> str:
    """Name one Arrow file that a group writes by itself; each of its files has another `number`."""
    return f"{group}-{rank:05d}-of-{world_size:05d}-{number}.arrow"


def is_group_file(name: str) -> bool:
    """Return True if a shard's name, plain or folded, names a file that a group writes by itself."""
    return name.endswith(".arrow") and "-of-" in name


def ledger_name(n: int) -> str:
    """Name ledger entry n so that a listing begins with the newest; raise ConfigError if n is too high."""
    if n > MAX_LEDGER_NUMBER:
        raise ConfigError("the ledger has no number left for another entry", hint="Use another directory.")
    return f"{LEDGER_PREFIX}{_COUNTED_DOWN - n:020d}-{n:020d}.json"


def parse_ledger_name(name: str) -> int | None:
    """Read the number of a ledger entry; return None if the name is foreign or its two numbers disagree."""
    match = _LEDGER.fullmatch(name)
    if match is None or int(match[1]) + int(match[2]) != _COUNTED_DOWN:
        return None
    return int(match[2])


def live_list_name(digest: str) -> str:
    """Name the object that holds a list of live checkpoints too long for a ledger entry."""
    return f"live/{digest}.json"


def evaluation_name(step: int, suite: str, nonce: str) -> str:
    """Name the file of one evaluation's rows."""
    return f"evals/{step:012d}-{suite}-{nonce}.arrow"


def steps_name(attempt: Attempt) -> str:
    """Name the file with the metrics of the steps that a checkpoint adds; the file outlives the checkpoint."""
    return f"steps/{attempt.step:012d}-{attempt.name}.arrow"


def compiled_name(compiled: Compiled) -> str:
    """Name a pack of compiled code."""
    return f"{COMPILED_PREFIX}e{compiled.epoch:06d}-{compiled.kind}-{compiled.digest}.pack"


def parse_compiled(name: str) -> Compiled | None:
    """Read the name of a pack of compiled code; return None for any other name."""
    match = _COMPILED.fullmatch(name)
    return Compiled(int(match[1]), match[2], match[3]) if match else None


def heartbeat_name(epoch: int) -> str:
    """Name the object that an owner renews while it lives."""
    return f"heartbeat/{epoch:06d}.json"


def is_group(name: str) -> bool:
    """Return True if a group can have this name: a letter, then letters, digits and underscores, 64 at most."""
    return _GROUP.fullmatch(name) is not None


def is_run_key(name: str) -> bool:
    """Return True if a run's key can be this text: one part without slashes, which can also name a directory."""
    return _PART.fullmatch(name) is not None


def is_object_name(name: str) -> bool:
    """Return True if an object can have this name: one to four parts without a leading dot; no URL or absolute path."""
    parts = name.split("/")
    return 1 <= len(parts) <= 4 and all(_PART.fullmatch(part) for part in parts)


def is_attempt_object(name: str) -> bool:
    """Return True if an object with this name belongs to an attempt."""
    attempt = parse_attempt(name)
    return attempt is not None and name.startswith(attempt_prefix(attempt)) and is_object_name(name)


def is_shard(name: str) -> bool:
    """Return True if this is the name of a shard, directly below an attempt's prefix."""
    attempt = parse_attempt(name)
    return attempt is not None and _SHARD.fullmatch(name.removeprefix(attempt_prefix(attempt))) is not None


def is_evaluation(name: str, step: int, suite: str) -> bool:
    """Return True if this name is for an evaluation by this suite of a checkpoint of this step."""
    match = _EVALUATION.fullmatch(name)
    return match is not None and (int(match[1]), match[2]) == (step, suite)


def is_steps(name: str, step: int) -> bool:
    """Return True if this name is for the metrics of the steps that a checkpoint of this step added."""
    match = _STEPS.fullmatch(name)
    return match is not None and int(match[1]) == step


def is_live_list(name: str) -> bool:
    """Return True if this is the name of a list of live checkpoints."""
    return _LIVE_LIST.fullmatch(name) is not None


# One folded name stands for at most this many names: a checkpoint has no more regions, and an object has at least one.
MAX_FOLDED = 1 << 20
MAX_RETIRED = 4 * MAX_FOLDED  # One ledger entry lists at most this many retired names.

_NUMBERED = re.compile(rf"(.*-)([0-9]{{5,9}})({_OF_RANKS})", re.ASCII)
_RUN = r"(?:0|[1-9][0-9]{0,8})(?:-[1-9][0-9]{0,8})?"
_FOLDED = re.compile(rf"(.*-)\[({_RUN}(?:,{_RUN})*)\]({_OF_RANKS})", re.ASCII)

_Key = tuple[str, str]  # The texts before and after the rank.
_Run = tuple[int, int]  # The first and the last rank.


def fold(names: Iterable[str]) -> tuple[str, ...]:
    """Fold names that differ only in the rank; return each name once, in order of first appearance.

    Names may be folded already.
    """
    runs = _by_key(names)
    return tuple(key if isinstance(key, str) else _name(key, _merged(ranks)) for key, ranks in runs.items())


def repeated(sets: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Return the names that more than one set has, folded; names in the sets may be folded or plain."""
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
    """Return True if a name is folded exactly as `fold` writes it."""
    if "[" not in name:
        return False
    key, runs = _parsed(name)
    if isinstance(key, str) or any(first > last for first, last in runs) or _count(runs) > MAX_FOLDED:
        return False
    return _name(key, _merged(runs)) == name and is_shard(f"{key[0]}{runs[0][0]:05d}{key[1]}")


def folded_count(names: Iterable[str]) -> int:
    """Count the single names that the folded names stand for; ignore plain names."""
    return sum(_count(_parsed(name)[1]) for name in names if "[" in name)


class Names:
    """A set of folded and plain names; `in` finds a single name without unfolding."""

    def __init__(self, names: Iterable[str]):
        self._runs = {key: _merged(ranks) for key, ranks in _by_key(dict.fromkeys(names)).items()}

    def __contains__(self, name: str) -> bool:
        """Return True if a single name is in the set."""
        key, ranks = _parsed(name)
        runs = self._runs.get(key)
        if runs is None or not ranks:
            return runs is not None
        ((rank, _),) = ranks
        at = bisect_right(runs, rank, key=itemgetter(0)) - 1
        return at >= 0 and rank <= runs[at][1]


def _parsed(name: str) -> tuple[_Key | str, list[_Run]]:
    """Split a name into (texts around the rank, runs of ranks); return (the name, []) if it has no rank."""
    match = _FOLDED.fullmatch(name) if "[" in name else _NUMBERED.fullmatch(name)
    if match is None:
        return name, []
    before, ranks, behind = match.groups()
    if "[" not in name:
        # A rank with needless leading zeros is not a rank: the name is plain.
        return ((before, behind), [(int(ranks), int(ranks))]) if f"{int(ranks):05d}" == ranks else (name, [])
    ends = [run.partition("-") for run in ranks.split(",")]
    return (before, behind), [(int(first), int(last or first)) for first, _, last in ends]


def _by_key(names: Iterable[str]) -> dict[_Key | str, list[_Run]]:
    """Group runs of ranks by the texts around the rank; a name without a rank gets an empty list."""
    runs: dict[_Key | str, list[_Run]] = {}
    for name in names:
        key, ranks = _parsed(name)
        runs.setdefault(key, []).extend(ranks)
    return runs


def _overlaps(runs: list[_Run]) -> list[_Run]:
    """Return the ranks that more than one of these sorted runs has."""
    twice, end = [], -1
    for first, last in runs:
        if first <= end:
            twice.append((first, min(last, end)))
        end = max(end, last)
    return twice


def _merged(runs: list[_Run]) -> list[_Run]:
    """Sort runs of ranks, and merge overlapping and adjacent runs."""
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
