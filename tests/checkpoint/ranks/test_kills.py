"""SIGKILL of one rank, some, or all at every moment of a save: nothing committed is lost, and the end is the same.

Every seed is a run that is killed. As many as you like, from the first one on, or one of them again::

    KILLS=1000 python -m pytest tests/checkpoint/ranks/test_kills.py
    KILLS=1000 python -m pytest tests/checkpoint/ranks/test_kills.py -k "[731]"
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckpt_tasks.checkpoint.restore.reading import open_run
from tests.checkpoint.ranks.training import digests, state_of, steps_of, train
from tests.checkpoint.ranks.victims import ANY_MOMENT, PHASES, STEPS, TWO_GANGS, Death, Life, Plan, plan, train_and_die
from tests.support.gang import Gang, run
from tests.support.sweeps import sparse

KILLS = int(os.environ.get("KILLS", "200"))
QUICK = (2, 3, 4)  # in a write, a hand-over and a commit: two ranks each
_END_S = 240.0  # survivors have ended by then: the deadlines of a save and of a close on two busy cores


class Whole(NamedTuple):
    """A training without a break: what each rank says at its end, and the digests of every step's checkpoint."""

    ranks: list[Any]
    by_step: dict[int, dict[str, str]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Whole]:
    """Return a training without a break, in some form, with some number of ranks."""

    @cache
    def train_whole(kind: str, size: int) -> Whole:
        root = tmp_path_factory.mktemp(f"{kind}-{size}")
        ranks = run(size, train_and_die, kind, str(root), Life(Death((), ANY_MOMENT), waits=True))
        return Whole(ranks, restored_steps(root))

    return train_whole


def restored_steps(root: Path) -> dict[int, dict[str, str]]:
    """Restore every live checkpoint of a run in this process alone; return digests of all that it holds, by step."""
    found, opened = {}, open_run(root)
    for checkpoint in opened.checkpoints():
        state = state_of("plain", 1)
        opened.restore(checkpoint, state, partial=True)
        found[checkpoint.step] = digests(state["model"], state["optimizer"])
    return found


class Seen:
    """What gangs have said of themselves: the steps that they have committed, where they died, what they raised."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self.phases: list[str] = []
        self.errors: list[str] = []

    def follow(self, gang: Gang, *, launcher: bool) -> None:
        """Follow a gang to its end."""
        ended_well = set()
        for rank, said in gang.follow(_END_S):
            match said:
                case None if launcher and rank not in ended_well:
                    gang.kill()
                case ("result", _):
                    ended_well.add(rank)
                case ("error", error):
                    self.errors.append(error)
                case ("report", ("commit", step)):
                    self.committed.append(step)
                case ("report", ("hit", (phase, _))):
                    self.phases.append(phase)
        assert None not in gang.end(_END_S)

    def first_commit(self, gang: Gang) -> None:
        """Wait until a gang has committed for the first time, or rank 0 has ended."""
        try:
            while not self.committed:
                match gang.said(0, _END_S):
                    case ("report", ("commit", step)):
                        self.committed.append(step)
                    case ("report", ("hit", (phase, _))):
                        self.phases.append(phase)
        except EOFError:
            pass  # it has been killed


def live(root: Path, drawn: Plan, seen: Seen) -> None:
    """Let the gangs of a run live, and die."""
    (first, *others) = drawn.lives
    with Gang(drawn.size, train_and_die, drawn.kind, str(root), first) as gang:
        if drawn.phase == ANY_MOMENT:
            kill_from_outside(gang, first)
        if drawn.phase == TWO_GANGS:
            seen.first_commit(gang)
            with Gang(drawn.size, train_and_die, drawn.kind, str(root), others.pop()) as other:
                seen.follow(gang, launcher=drawn.launcher)
                seen.follow(other, launcher=drawn.launcher)
        else:
            seen.follow(gang, launcher=drawn.launcher)
    for life in others:
        with Gang(drawn.size, train_and_die, drawn.kind, str(root), life) as gang:
            seen.follow(gang, launcher=drawn.launcher)


def kill_from_outside(gang: Gang, life: Life) -> None:
    time.sleep(life.after_s)
    for rank in life.death.ranks:
        gang.processes[rank].kill()


def left_of(root: Path) -> list[str]:
    """Name the shared memory of a run, and the processes that have something of it open or mapped."""
    here = Path("/dev/shm") / f"ckpt-tasks-{os.getuid()}"
    left = [str(lock.parent) for lock in here.glob("*/lock") if lock.read_bytes().startswith(os.fsencode(root))]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            used = (process / "maps").read_text() + "".join(map(os.readlink, (process / "fd").glob("*")))
        except OSError:
            continue  # it has just ended, or closed a file, or is another user's
        left += [process.name for name in (str(root), *left) if name in used]
    return left


def survives(root: Path, whole: Callable[[str, int], Whole], seed: int) -> None:
    """Kill the gangs of a run, look at what is there, and go on."""
    drawn, seen, before = plan(seed), Seen(), left_of(root)
    live(root, drawn, seen)
    note = f"{drawn}, committed {seen.committed}, died in {seen.phases} {''.join(seen.errors)}"
    assert drawn.phase not in PHASES or drawn.phase in seen.phases, note
    there = steps_of(root) if (root / "format.json").exists() else []
    assert max(there, default=0) >= max(seen.committed, default=0), note
    keeps = drawn.lives[0].keeps
    options = {"step_interval": 1, "max_num_checkpoints": keeps}
    resumed = run(drawn.size, train, drawn.kind, str(root), (STEPS, options))
    first = whole(drawn.kind, drawn.size)
    assert len({rank["start"] for rank in resumed}) == 1, note
    assert resumed[0]["start"] >= max(there, default=0), note  # later, if memory has a step that was not committed
    assert [rank["digests"] for rank in resumed] == [rank["digests"] for rank in first.ranks], note
    assert [rank["draws"] for rank in resumed] == [rank["draws"][resumed[0]["start"] :] for rank in first.ranks], note
    assert max(steps_of(root)) == STEPS, note
    restored = restored_steps(root)
    assert keeps or {*seen.committed, *there} <= {*restored}, note
    assert all(restored[step] == first.by_step[step] for step in restored), note
    assert left_of(root) == before, note  # an aborted sweep may have left some under the same name


@pytest.mark.parametrize("seed", sparse(range(KILLS), 10, QUICK))
def test_a_killed_gang_goes_on_bit_for_bit(tmp_path: Path, whole: Callable[[str, int], Whole], seed: int) -> None:
    """P55: ranks die while they step, copy, write, hand in or commit: every commit that was seen restores, bit-equal.

    The next gang ends as if they had not died, and leaves neither shared memory nor a process. The long form has two
    and four ranks.
    """
    survives(tmp_path, whole, seed)
