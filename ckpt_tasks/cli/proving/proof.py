"""Train a program twice, once without a break and once with two kills, and compare every step bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_tasks.errors import ConfigError, ProgramError

# What one training after the other does, for a person who waits.
DOING = (
    "1 of 4: without a kill",
    "2 of 4: until the first kill",
    "3 of 4: resumed, until the second kill",
    "4 of 4: resumed, to the end",
)
_LEAST_STEPS = 6
CAUSES = {
    "streams": "more or fewer numbers were drawn from a global random stream: by a loader that is not in the state, by "
    "a thread, or where training begins",
    "position": "the loop takes other batches after a resume: iter(loader) begins a new epoch, so call it once for "
    "each epoch, and not in every step",
    "hidden": "something outside of the state has another value after a resume: a counter, a generator, a buffer, the "
    "order of a set of texts",
    "later": "all steps are equal, but this is not in the state and has another value after a resume: a later step, an "
    "evaluation or the end may read it",
    "kernel": "the program gives another result each time, without any kill: a generator that is not seeded, the "
    "clock, the order of a set, or a kernel that is not deterministic (torch.use_deterministic_algorithms(True))",
}


@dataclass(frozen=True)
class FirstDifference:
    """The first step that differs, the names of its differing values, and the likely cause in words.

    `after_kills`: how often the training had been killed by then; 0 means that the resume is not the cause.
    """

    step: int
    what: tuple[str, ...]
    after_kills: int
    cause: str


@dataclass(frozen=True)
class Proof:
    """The comparison: steps, steps in which a process was killed, values per step, and the first difference.

    `outside`: plain values outside the program's state that differ after a resume, although all else is equal.
    """

    steps: int
    killed_within: tuple[int, ...]
    values: int
    difference: FirstDifference | None
    outside: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """True if all values are equal."""
        return self.difference is None


def prove_resume(
    program: str,
    params: Mapping[str, Any] | None = None,
    *,
    steps: int = 12,
    ranks: int = 1,
    say: Callable[[str], object] = lambda doing: None,
) -> Proof:
    """Train "module:Program" twice in new processes, once with two kills, and compare the two.

    Every value of the state, every metric and the random streams are compared after every step; at the end also the
    evaluation "quick", if the program has it, and what the program holds outside its state. Each process has its own
    hash seed, unless PYTHONHASHSEED is set. With `ranks`, each is compared with the same rank of the other training,
    and all are killed at once. Calls `say` with each of DOING as it begins. Raises ConfigError for fewer than 6
    steps or 1 rank, and ProgramError if the program cannot be built or fails.
    """
    if type(ranks) is not int or ranks < 1:
        raise ConfigError(f"ranks must be a whole number from 1 on, not {ranks!r}", key="ranks")
    if type(steps) is not int or steps < _LEAST_STEPS:
        raise ConfigError(f"steps must be a whole number from {_LEAST_STEPS} on, not {steps!r}", key="steps")
    saves = [steps // 3, 2 * steps // 3]
    kills = [saves[0] + 2, saves[1] + 2]
    with tempfile.TemporaryDirectory(prefix="verify-resume-") as folder:
        legs = [("twin", None, 0), *zip(["killed"] * 3, [*kills, None], [0, *saves], strict=True)]
        orders = [
            {
                "program": program,
                "params": dict(params or {}),
                "steps": steps,
                "saves": saves,
                "run": f"{folder}/{run}",
                "log": f"{folder}/{n}.log",
                "die_within": within,
                "begin": begin,
                "ranks": ranks,
            }
            for n, (run, within, begin) in enumerate(legs)
        ]
        of_ranks = _train(program, orders, say)
    values = sum(max(len(line["values"]) + len(line["metrics"]) for line in twin[1:-1]) for twin, *_ in of_ranks)
    by_rank = [(rank, _difference(twin, killed)) for rank, (twin, *killed) in enumerate(of_ranks)]
    differences = [_in_rank(one, rank, ranks) for rank, one in by_rank if one is not None]
    difference = min(differences, key=_place, default=None)
    outside = (
        [] if difference else sorted({name for twin, *killed in of_ranks for name in _changed_outside(twin, killed)})
    )
    if objects := [name for name in outside if name.endswith(")")]:
        difference = FirstDifference(steps, tuple(objects), len(kills), CAUSES["later"])
    return Proof(steps, tuple(kills), values, difference, tuple(outside))


def _place(one: FirstDifference) -> tuple[int, bool]:
    """Return the sort key of a difference: by step; in a step, ranks whose streams or metrics differ come first."""
    return one.step, not one.what[0].startswith(("rng/", "metric "))


def _in_rank(one: FirstDifference, rank: int, ranks: int) -> FirstDifference:
    return replace(one, what=tuple(f"{name} of rank {rank}" for name in one.what)) if ranks > 1 else one


def _train(
    program: str, orders: list[dict[str, Any]], say: Callable[[str], object]
) -> list[list[list[dict[str, Any]]]]:
    """Carry out the orders in processes, one after the other; return for each rank the records of each process."""
    # The child can import whatever this process can import.
    places = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])
    for seed, (order, doing) in enumerate(zip(orders, DOING, strict=True)):
        say(doing)
        done = subprocess.run(
            [sys.executable, "-m", "ckpt_tasks.cli.proving.child", json.dumps(order)],
            env={"PYTHONHASHSEED": str(seed), **os.environ, "PYTHONPATH": places},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != (0 if order["die_within"] is None else -signal.SIGKILL):
            said = done.stderr.strip().splitlines()
            where = _where([Path(order["log"]) for order in orders])
            raise ProgramError(f"{program} failed{where}: {said[-1] if said else f'exit status {done.returncode}'}")
    suffixes = ["", *(f".{rank}" for rank in range(1, orders[0]["ranks"]))]
    return [[_records(Path(order["log"] + suffix)) for order in orders] for suffix in suffixes]


def _records(log: Path) -> list[dict[str, Any]]:
    """Read what one process has recorded, without a line that its death has cut off."""
    *lines, _ = log.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]


def _where(logs: list[Path]) -> str:
    """Return the step at which a program failed, and the resume before it, from its processes' records."""
    legs = [log.read_text(encoding="utf-8").splitlines() for log in logs if log.exists()]
    if not legs or not legs[-1]:
        return ""
    last = json.loads(legs[-1][-1])
    step = f" in step {1 + last.get('step', last.get('begin', 0))}"
    resume = {3: "first", 4: "second"}.get(len(legs))
    return step if resume is None else f"{step}, after the {resume} resume; without a break it did not"


def _difference(twin: list[dict[str, Any]], legs: list[list[dict[str, Any]]]) -> FirstDifference | None:
    expected = {line["step"]: line for line in twin[1:-1]}
    for kills, (begin, *lines) in enumerate(legs):
        for line in lines:
            if "step" in line and (what := unequal_values(expected[line["step"]], line)):
                cause = _cause(expected[line["step"]], line, what, begin, kills)
                return FirstDifference(line["step"], tuple(what), kills, cause)
    one, other = twin[-1]["evaluated"], legs[-1][-1]["evaluated"]
    if what := [f"evaluation {name}" for name in one or () if other is None or one[name] != other.get(name)]:
        *_, expected_last, _ = twin
        cause = _cause(expected_last, legs[-1][-2], what, legs[-1][0], len(legs) - 1)
        return FirstDifference(expected_last["step"], tuple(what), len(legs) - 1, cause)
    return None


def _changed_outside(twin: list[dict[str, Any]], legs: list[list[dict[str, Any]]]) -> list[str]:
    """Name values outside the state that differ after a resume, but not in an uninterrupted second process."""
    expected = {line["step"]: line for line in twin[1:-1]}
    begun, *resumed = [
        {name for line in leg if "step" in line for name in _differing(expected[line["step"]], line)} for leg in legs
    ]
    return sorted(set().union(*resumed) - begun)


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    names = one["outside"].keys() | other["outside"].keys()
    return sorted(name for name in names if one["outside"].get(name) != other["outside"].get(name))


def unequal_values(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of differing values: random streams, then metrics, then all others."""
    values = sorted(
        key
        for key in one["values"].keys() | other["values"].keys()
        if one["values"].get(key) != other["values"].get(key)
    )
    names = one["metrics"].keys() | other["metrics"].keys()
    metrics = sorted(name for name in names if one["metrics"].get(name) != other["metrics"].get(name))
    streams = [key for key in values if key.startswith("rng/")]
    return [*streams, *(f"metric {name}" for name in metrics), *(key for key in values if key not in streams)]


def _cause(
    one: Mapping[str, Any], other: Mapping[str, Any], what: list[str], begin: Mapping[str, Any], kills: int
) -> str:
    names = ", ".join(_differing(one, other))
    if kills == 0:
        hint = f". Not in the state, and perhaps not seeded: {names}" if names else ""
        return CAUSES["streams" if what[0].startswith("rng/") else "kernel"] + hint
    hint = f". Held by the program, and not in its state: {names}" if names else ""
    if any(key.startswith(f"{loader}/") for loader in begin["loaders"] for key in what):
        return CAUSES["position"] + hint
    return CAUSES["streams" if what[0].startswith("rng/") else "hidden"] + hint
