"""A run directory is anybody's: whatever lies in it ends in a clear error, and nothing outside of it is touched.

Every directory has fitting digests up to its ledger entry, as an attacker would make it, and is met in a process of its
own with an end to its memory and its time. Nothing else of this page runs in the process of the tests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import hostile, hostile_child, hostile_memory
from tests.faults.hostile_cases import Case
from tests.house.sources import ROOT

CASES = hostile_child.cases()
_SHARES = 8  # of the long form; on a slow machine all of it takes an hour and a half
SWEEPS = ("manifests", "entries", "indexes")
Line = dict[str, Any]


def run_child(place: Path, wanted: list[str], timeout_s: float) -> Iterator[Line]:
    """Meet the wanted cases, and those after one that took its process along in another process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "PYTHONPATH": str(ROOT)}
    while wanted:
        command = [sys.executable, "-m", "tests.faults.hostile_child", str(place)]
        done = subprocess.run(  # noqa: PLW1510 (how it ended is what is looked at)
            command,
            input="\n".join(wanted),
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout_s,
            cwd=ROOT,
        )
        lines: list[Line] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        yield from lines
        if lines and "done" in lines[-1]:
            assert done.returncode == 0, done.stderr
            return
        assert lines, done.stderr
        assert "case" in lines[-1], done.stderr
        last = lines[-1]["case"]
        yield {
            "case": last,
            "verb": lines[-1]["verb"],
            "end": "died",
            "type": str(done.returncode),
            "trace": done.stderr,
        }
        at = next((number for number, line in enumerate(wanted) if line.endswith(f" {last}")), len(wanted))
        wanted = wanted[at + 1 :]


def faults(lines: Iterable[Line]) -> list[str]:
    """Say what must not be: a crash, a hang, an error that is not ours, something touched outside."""
    return [
        f"{line['case']}, {line['verb']}: {line['end']} {(line.get('trace') or line.get('says') or '')[-600:]}"
        for line in lines
        if line.get("end") not in (None, "well", "refused")
    ]


def wrong(case: Case, lines: dict[str, Line]) -> Iterator[str]:
    """Say what did not come of a case that must."""
    checked, went_on = lines.get("verify", {}), lines.get("go on", {})
    if went_on.get("end") == "well" and not went_on["right"] and case.harm != "values":
        yield f"step {went_on['step']} came back with other values"
    yield from ill_remembered(case, lines.get("remember", {}))
    if case.harm in ("any", "values", "memory"):
        return
    if checked and checked.get("end") != "well":
        yield f"verify ended with {checked.get('says')}"
        return
    told = json.loads(checked["out"]) if checked else {}
    if told and (checked["status"] != 1 or not re.search(case.named, checked["out"])):
        yield f"verify says {checked['status']}, {told}"
    if case.harm == "entry" and told and not any("ledger/" in name for name in told["damaged"]):
        yield f"verify does not name the entry: {told}"
    if case.harm == "checkpoint":
        if told and [one["step"] for one in told["checkpoints"] if not one["good"]] != [hostile.NEWEST]:
            yield f"verify finds {told['checkpoints']}"
        skipped = [step for step, _ in went_on.get("skipped", ())]
        if went_on and (went_on.get("step"), skipped) != (2, [hostile.NEWEST]):
            yield f"restored {went_on}"
        for verb in ("show", "export", "part", "diff", "evaluate"):
            told = lines.get(verb, {})
            if told.get("end") == "refused" and not told["key"]:
                yield f"{verb} names nothing: {told['says']}"
    elif case.harm == "entry" and went_on and not went_on.get("damaged"):
        yield f"restored without a word: {went_on}"


def ill_remembered(case: Case, told: Line) -> Iterator[str]:
    """Say what a process took, or did not take, from the memory that it found, and should have done otherwise."""
    if told.get("end") != "well":
        return
    if (told["step"], told["right"]) != (hostile_memory.NEXT, True):
        yield f"with that memory came back {told}"
    if ("/memory/" in told["source"]) != (case.harm == "any"):
        yield f"restored from {told['source']}"


def check(place: Path, wanted: list[str], timeout_s: float) -> list[Line]:
    lines = [*run_child(place, wanted, timeout_s)]
    assert faults(lines) == []
    by_case: dict[str, dict[str, Line]] = {}
    for line in lines:
        if "case" in line and "end" in line:
            by_case.setdefault(line["case"], {})[line["verb"]] = line
    known = {name: told for name, told in by_case.items() if name in CASES}
    assert [f"{name}: {word}" for name, told in known.items() for word in wrong(CASES[name], told)] == []
    assert {*known} == {name for line in wanted if (name := line.partition(" ")[2]) in CASES}
    return lines


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])  # every fifth case, or all
def test_a_hostile_directory_ends_in_a_clear_error(fast_dir: Path, stride: int) -> None:
    """P21, P42, P49, P56: names, links, files that are none, headers, Arrow, JSON, trees, numbers, memory, races.

    Every verb of `ckpt`, a restore, saves that go on from it and an evaluation end well or with an error of ours that
    names what is wrong; never with a crash, a hang, all memory, or something changed outside of the directory. So do
    places of a manifest, an entry and an index that are changed one by one, with digests that fit.
    """
    wanted = [f"quick {name}" for name, case in CASES.items() if not case.slow][::stride]
    assert len(wanted) > 100 / stride
    sweeps = ["sweep manifests 13 120", "sweep entries 7 120", "sweep indexes 100 800"]
    ends = Counter(line["end"] for line in check(fast_dir, wanted + sweeps, 580) if "end" in line)
    assert ends["well"] > 100
    assert ends["refused"] > 30


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("share", range(_SHARES))
def test_every_hostile_directory_and_every_verb(fast_dir: Path, share: int) -> None:
    """P21, P42, P49, P56: every name in every place, what takes its time to make, and every verb for all of them."""
    check(fast_dir, [f"full {name}" for name in [*CASES][share::_SHARES]], 2900)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("what", SWEEPS)
def test_every_change_with_fitting_digests(fast_dir: Path, what: str) -> None:
    """P21, P49: every place of a manifest, an entry and an index, changed in every way of the list."""
    check(fast_dir, [f"sweep {what} 0 1"], 2900)
