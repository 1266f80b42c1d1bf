"""The names of objects in a run directory, and how to read them back.

Every name is built and parsed here. Names are relative, their parts match a strict pattern, and parsing is by full
match: a foreign name in the directory is ignored, never misread. A name that is read from an object must be of the kind
of its field: a table with the name of a ledger entry would otherwise be copied as one.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ckpt_tasks.errors import ConfigError

__all__ = [
    "FORMAT_NAME",
    "INDEX_NAME",
    "LEDGER_PREFIX",
    "MANIFEST_NAME",
    "MAX_EPOCH",
    "MAX_LEDGER_NUMBER",
    "MAX_STEP",
    "STEPS_NAME",
    "Attempt",
    "attempt_prefix",
    "evaluation_name",
    "heartbeat_name",
    "is_attempt_object",
    "is_evaluation",
    "is_group",
    "is_live_list",
    "is_object_name",
    "is_run_key",
    "is_shard",
    "is_steps",
    "key_of_rank",
    "ledger_name",
    "live_list_name",
    "parse_attempt",
    "parse_ledger_name",
    "shard_name",
    "steps_name",
]

FORMAT_NAME = "format.json"
MANIFEST_NAME = "manifest.json"
INDEX_NAME = "index.arrow"
STEPS_NAME = "steps.arrow"  # in a snapshot in memory
LEDGER_PREFIX = "ledger/"
MAX_STEP = 10**12 - 1
MAX_EPOCH = 10**9 - 1  # of owners; an attempt's name has room for nine digits
MAX_LEDGER_NUMBER = 10**20 - 1

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}", re.ASCII)
_GROUP = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}", re.ASCII)
_SHARD = re.compile(rf"{_GROUP.pattern}-[0-9]{{5,9}}-of-[0-9]{{5,9}}-[0-9]{{1,9}}\.safetensors", re.ASCII)
_EVALUATION = re.compile(rf"evals/([0-9]{{12}})-({_GROUP.pattern})-[0-9a-f]{{16}}\.arrow", re.ASCII)
_STEPS = re.compile(r"steps/([0-9]{12})-e(?:[0-9]{6}|[1-9][0-9]{6,8})-[0-9a-f]{16}\.arrow", re.ASCII)
_LIVE_LIST = re.compile(r"live/[0-9a-f]{32}\.json", re.ASCII)
_LEDGER = re.compile(r"ledger/([0-9]{20})-([0-9]{20})\.json", re.ASCII)
_ATTEMPT = re.compile(r"checkpoint_([0-9]{12})/e([0-9]{6}|[1-9][0-9]{6,8})-([0-9a-f]{16})(?:/.*)?", re.ASCII)


class Attempt(NamedTuple):
    """One try to save one step: `epoch` is the owner epoch of its writer, `nonce` 16 hex digits of its own."""

    step: int
    epoch: int
    nonce: str

    @property
    def name(self) -> str:
        """The attempt's directory name, unique for ever: two attempts never write the same object."""
        return f"e{self.epoch:06d}-{self.nonce}"


def attempt_prefix(attempt: Attempt) -> str:
    """Return the prefix of all objects of an attempt, with a slash at the end."""
    return f"checkpoint_{attempt.step:012d}/{attempt.name}/"


def key_of_rank(key: str, rank: int) -> str:
    """Return the full key of a rank's own tensor: "group/name" with the rank's number after the group."""
    group, _, name = key.partition("/")
    return f"{group}/{rank:05d}/{name}"


def parse_attempt(name: str) -> Attempt | None:
    """Read the attempt out of an object's name or prefix; None for any other name."""
    match = _ATTEMPT.fullmatch(name)
    return Attempt(int(match[1]), int(match[2]), match[3]) if match else None


def shard_name(group: str, rank: int, world_size: int, part: int) -> str:
    """Name one safetensors file of a group: rank r of n, part p."""
    return f"{group}-{rank:05d}-of-{world_size:05d}-{part}.safetensors"


def ledger_name(n: int) -> str:
    """Name ledger entry n so that the newest lists first; raise ConfigError if the numbers are used up."""
    if n > MAX_LEDGER_NUMBER:
        raise ConfigError("the ledger has no number left for another entry", hint="Use another directory.")
    return f"{LEDGER_PREFIX}{MAX_LEDGER_NUMBER - n:020d}-{n:020d}.json"


def parse_ledger_name(name: str) -> int | None:
    """Read the number of a ledger entry; None if the name is foreign or its two numbers disagree."""
    match = _LEDGER.fullmatch(name)
    if match is None or int(match[1]) + int(match[2]) != MAX_LEDGER_NUMBER:
        return None
    return int(match[2])


def live_list_name(digest: str) -> str:
    """Name the object that holds a list of live checkpoints too long for a ledger entry."""
    return f"live/{digest}.json"


def evaluation_name(step: int, suite: str, nonce: str) -> str:
    """Name the table of one evaluation."""
    return f"evals/{step:012d}-{suite}-{nonce}.arrow"


def steps_name(attempt: Attempt) -> str:
    """Name the table of metrics of the steps that a checkpoint adds; it stays when the checkpoint is pruned."""
    return f"steps/{attempt.step:012d}-{attempt.name}.arrow"


def heartbeat_name(epoch: int) -> str:
    """Name the object that an owner renews while it lives."""
    return f"heartbeat/{epoch:06d}.json"


def is_group(name: str) -> bool:
    """Say whether a name can be a group's: a letter, then letters, digits and underscores, 64 at most."""
    return _GROUP.fullmatch(name) is not None


def is_run_key(name: str) -> bool:
    """Say whether a name can be a run's key: one flat part, which can also be a directory's name."""
    return _PART.fullmatch(name) is not None


def is_object_name(name: str) -> bool:
    """Say whether a name can be an object's: one to four parts, none with a leading dot; no URL, no absolute path."""
    parts = name.split("/")
    return 1 <= len(parts) <= 4 and all(_PART.fullmatch(part) for part in parts)


def is_attempt_object(name: str) -> bool:
    """Say whether a name is that of an object of an attempt."""
    attempt = parse_attempt(name)
    return attempt is not None and name.startswith(attempt_prefix(attempt)) and is_object_name(name)


def is_shard(name: str) -> bool:
    """Say whether a name is that of a shard directly below an attempt's prefix."""
    attempt = parse_attempt(name)
    return attempt is not None and _SHARD.fullmatch(name.removeprefix(attempt_prefix(attempt))) is not None


def is_evaluation(name: str, step: int, suite: str) -> bool:
    """Say whether a name is that of a table of this suite on a checkpoint of this step."""
    match = _EVALUATION.fullmatch(name)
    return match is not None and (int(match[1]), match[2]) == (step, suite)


def is_steps(name: str, step: int) -> bool:
    """Say whether a name is that of the metrics that came with a commit of this step."""
    match = _STEPS.fullmatch(name)
    return match is not None and int(match[1]) == step


def is_live_list(name: str) -> bool:
    """Say whether a name is that of a list of live checkpoints."""
    return _LIVE_LIST.fullmatch(name) is not None
