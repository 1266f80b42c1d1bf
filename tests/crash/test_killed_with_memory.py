"""A training that saves every step, killed at random moments: memory and storage together never go back."""

from __future__ import annotations

import logging
import random
import signal
import time
from pathlib import Path

import pytest

from ckpt_tasks import open_run
from ckpt_tasks.upkeep.upkeep import verify_run_directory
from tests.crash import memory_training
from tests.crash.memory_training import lying, said_of, training
from tests.support.children import Child

_log = logging.getLogger(__name__)


class Past:
    """What training has said that it was, step by step: `had`; and how its lives ended.

    `newest` is the step below which it must not fall, `from_memory` counts the lives that began from a memory
    directory, and `cut` those that were killed in the middle of a copy.
    """

    def __init__(self, run_dir: Path, memory: Path):
        self.had = {0: said_of(training())}
        self.newest = self.from_memory = self.cut = 0
        self._run_dir, self._memory = run_dir, memory
        self._seen: set[str] = set()

    def check(self, said: list[str]) -> None:
        """Check that a life began as a moment that training had, went on as it did before, and left no other ones."""
        word, source, first = said[0].split(" ", 2)
        assert word == "restored", said[0]
        restored = int(first.split()[0])
        assert restored >= self.newest
        assert_same(first, self.had[restored])
        self.from_memory += source.startswith(str(self._memory))
        steps = [line.removeprefix("step ") for line in said if line.startswith("step ")]
        for number, line in enumerate(steps, start=restored + 1):
            assert_same(line, self.had.setdefault(number, line))
        self.newest = max(restored, *self._committed())
        self.cut += bool(steps) and any(self._is_cut(slot, steps[-1]) for slot in self._memory.glob("*/*/?"))

    def _committed(self) -> list[int]:
        run, state = open_run(str(self._run_dir)), training()
        checkpoints = run.checkpoints()[::-1]
        for checkpoint in checkpoints:
            if checkpoint.manifest not in self._seen:
                run.restore(checkpoint, state)
                assert_same(said_of(state), self.had[checkpoint.step])
                self._seen.add(checkpoint.manifest)
        steps = [checkpoint.step for checkpoint in checkpoints]
        assert steps == sorted(steps)
        return [0, *steps]

    @staticmethod
    def _is_cut(slot: Path, last: str) -> bool:
        """Whether a slot without a seal holds some of the large tensors that training had at last, and not all."""
        if (slot / "seal.json").exists():
            return False
        there = lying(slot).values()
        return 0 < sum(f"={digest}" in last for digest in there) < len(there)


def assert_same(found: str, had: str) -> None:
    """Compare what was said of two states; name the step and what differs."""
    differ = [one.partition("=")[0] for one, other in zip(found.split(), had.split(), strict=True) if one != other]
    assert not differ, f"of step {had.split(maxsplit=1)[0]}"


@pytest.mark.parametrize("kills", [2, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.timeout(3000)
def test_killed_at_random_moments(run_dir: Path, memory: Path, kills: int) -> None:
    """P1, P30: killed anywhere, what comes back is one moment of training, and never an older one than before.

    Copies are killed as well; whatever was committed on the way is one moment, too.
    """
    chance, past = random.Random(11), Past(run_dir, memory)
    for number in range(kills):
        delay = ["--delay-s", "0.02"] if number % 2 else []
        arguments = [str(run_dir), str(memory), *delay]
        lines, pause_s = chance.randint(1, 25), chance.uniform(0, 0.02)
        with Child(memory_training.main, arguments, run_dir.parent / "output") as child:
            assert child.until(lambda: child.said().count("\n") >= lines), child.said()  # noqa: B023 (called at once)
            time.sleep(pause_s)
            child.send(signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL
            past.check(child.said().rpartition("\n")[0].splitlines())
    _log.info("%d of %d kills within a copy, %d lives from memory", past.cut, kills, past.from_memory)
    assert past.from_memory > 0
    assert past.cut > 0 or kills < 100
    assert verify_run_directory(open_run(str(run_dir)).history).good
