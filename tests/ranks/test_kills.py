"""SIGKILL of one rank, some, or all in every phase of a save: nothing committed is lost, and the end is the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.test_failures import steps_of
from tests.ranks.training import train
from tests.ranks.victims import PHASES, STEPS, choose, train_and_die
from tests.support.gang import Gang, run

_END_S = (
    90.0  # survivors have ended by then; not a measurement: the deadlines of a save and of a close on two busy cores
)


Whole = Callable[[str, int], list[Any]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return what each rank says at the end of a training without a break."""

    @cache
    def train_whole(kind: str, size: int) -> list[Any]:
        root = tmp_path_factory.mktemp(f"{kind}-{size}")
        return run(size, train, kind, str(root), (STEPS, {"step_interval": 1}))

    return train_whole


def die(gang: Gang, *, launcher: bool) -> tuple[list[int], set[str], list[str]]:
    """Follow a gang to its end; return the committed steps, the phases in which it died, and what its ranks raised.

    A `launcher` kills the others when one has died, as torchrun does; without one they must end by themselves.
    """
    committed: list[int] = []
    phases: set[str] = set()
    errors: list[str] = []
    for _, said in gang.follow(_END_S):
        if said is None and launcher:
            gang.kill()
        elif said is not None and said[0] == "error":
            errors.append(said[1])
        elif said is not None and said[0] == "report":
            what, value = said[1]
            if what == "commit":
                committed.append(value)
            else:
                phases.add(value[0])
    assert None not in gang.end(_END_S)
    return committed, phases, errors


def kill(tmp_path: Path, whole: Whole, seed: int, size: int, phase: str) -> None:
    """Kill a gang, look at what is there, and go on."""
    death = choose(seed, size, phase)
    kind = (["fsdp", "ddp"] if size == 2 else ["2d", "hsdp", "fsdp"])[seed % (2 if size == 2 else 3)]
    root = tmp_path / f"{seed}-{phase}"
    note = f"{death}, {kind}"
    with Gang(size, train_and_die, kind, str(root), death) as gang:
        committed, phases, errors = die(gang, launcher=bool(seed % 2))
    note += "".join(errors)
    assert phases == {phase}, note
    there = steps_of(root) if (root / "format.json").exists() else []
    assert max(there, default=0) >= max(committed, default=0), note
    resumed = run(size, train, kind, str(root), (STEPS, {"step_interval": 1}))
    first = whole(kind, size)
    assert len({rank["start"] for rank in resumed}) == 1, note
    assert resumed[0]["start"] >= max(there, default=0), note  # later, if memory has a step that was not committed
    assert [rank["digests"] for rank in resumed] == [rank["digests"] for rank in first], note
    assert [rank["draws"] for rank in resumed] == [rank["draws"][resumed[0]["start"] :] for rank in first], note
    assert max(steps_of(root)) == STEPS, note


@pytest.mark.parametrize("phase", PHASES)
def test_a_gang_killed_in_a_phase_goes_on_bit_for_bit(tmp_path: Path, whole: Whole, phase: str) -> None:
    """P55: ranks are killed while they step, copy, write, hand in or commit; the next gang ends as if they were not."""
    kill(tmp_path, whole, 2 * PHASES.index(phase) + (phase != "step"), 2, phase)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("share", range(2))
def test_two_hundred_kills(tmp_path: Path, whole: Whole, size: int, phase: str, share: int) -> None:
    """P55: the same 200 times, with two and four ranks: one of them, some, or all."""
    for seed in range(100 + 10 * share, 110 + 10 * share):
        kill(tmp_path, whole, seed, size, phase)
