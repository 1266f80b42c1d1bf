"""Processes that take snapshots into a memory directory and die; what becomes of each snapshot is decided before.

A life is a Checkpointer of this process, left by `die` as a killed process leaves it; the kills of test_memory_kills.py
are real.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ckpt_tasks.checkpoint.save.parts import Digested, digest_image
from ckpt_tasks.checkpoint.save.pipeline import Snapshot
from ckpt_tasks.checkpoint.save.rank_saver import RankSaver
from ckpt_tasks.errors import CkptError, StoreError
from ckpt_tasks.format.records import Seal
from ckpt_tasks.testing import die, under_way
from tests.support.calls import WatchedCalls
from tests.support.pipelines import committed, opened
from tests.support.waiting import until

SIZE = 1 << 8


def state_of(step: int, size: int = SIZE) -> dict[str, Any]:
    """Return a state of which every number follows from the step; several groups, so that a mixture would show."""
    return {
        "one": torch.full((size,), float(step)),
        "two": [torch.full((size // 2,), float(step + i)) for i in range(3)],
        "step": step,
    }


def step_of(state: dict[str, Any]) -> int:
    """Return the step that a state is of; raise AssertionError where it is of several."""
    step: int = state["step"]
    assert bool((state["one"] == float(step)).all()), "mixed"
    assert all(bool((value == float(step + i)).all()) for i, value in enumerate(state["two"])), "mixed"
    return step


class Fate(NamedTuple):
    """What becomes of a snapshot in memory (sealed; no room for its seal; no digest), and of its flush.

    A flush is stored, refused, stuck until the end of the test, or late: until the test lets it go on.
    """

    seal: str = "sealed"
    store: str = "stored"


class Fated(WatchedCalls):
    """Let the store do with the objects of each step as its fate says."""

    def __init__(self, fates: Mapping[int, Fate]):
        super().__init__()
        self.fates = fates
        self.stuck, self.over, self.late = threading.Event(), threading.Event(), threading.Event()

    def do(self, name: str, path: str, call: Callable[[], Any]) -> Any:
        store = next((fate.store for step, fate in self.fates.items() if f"/checkpoint_{step:012d}/" in path), "stored")
        if name == "pwrite" and store == "late":
            self.late.wait(60)
        elif name == "pwrite" and store != "stored":
            if store == "stuck":
                self.stuck.set()
                self.over.wait(60)
            raise OSError(errno.EIO, "on purpose")
        return super().do(name, path, call)


def seals(memory: Path) -> dict[int, Seal]:
    return {seal.checkpoint.step: seal for seal, _ in _sealed(memory)}


def slots(memory: Path) -> dict[int, Path]:
    """Return the slot of each step that is sealed."""
    return {seal.checkpoint.step: slot for seal, slot in _sealed(memory)}


def _sealed(memory: Path) -> list[tuple[Seal, Path]]:
    return [(Seal.from_bytes(path.read_bytes()), path.parent) for path in memory.rglob("seal.json")]


_SEAL = RankSaver.seal
_LIVES: dict[str | None, Life] = {}


@pytest.fixture
def fated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every snapshot be sealed as its owner's life says, if it has one."""

    def seal(rank: RankSaver, snapshot: Snapshot, before: Snapshot | None) -> None:
        life = _LIVES.get(snapshot.tenure.owner.id)
        life.seal(rank, snapshot, before) if life else _SEAL(rank, snapshot, before)

    monkeypatch.setattr(RankSaver, "seal", seal)


class Life:
    """A process that saves one step after another; `safe` is the newest step that a restart could restore."""

    def __init__(
        self, run_dir: Path, memory: Path, fates: Mapping[int, Fate] | None = None, safe: int = 0, **options: Any
    ):
        self.safe = safe
        self.strict = True  # only the newest of several that wait behind one that is stuck is safe
        self.calls = Fated(fates or {})
        self._run_dir, self._memory = run_dir, memory
        timeout_s = 0.1 if any(fate.store == "stuck" for fate in self.calls.fates.values()) else 60.0
        options = {"memory_dir": str(memory), "on_flush_failure": "warn", "flush_timeout_s": timeout_s, **options}
        self.ckpt = opened(run_dir, self.calls, **options)
        self.ckpt.acquire()
        _LIVES[under_way(self.ckpt).owner] = self
        self.restored = self.ckpt.restore(state := state_of(0))
        assert step_of(state) == self.restored >= safe
        report = self.ckpt.last_restore
        self.from_memory = report is not None and report.source.startswith(str(memory))
        self.skipped = [f"{step} {why}" for step, why in report.skipped] if report else []

    def look(self) -> None:
        """Raise AssertionError if neither memory nor storage has the newest step that was safe, or a newer one."""
        safe = max([0, *committed(self._run_dir), *seals(self._memory)])
        assert safe >= self.safe or not self.strict
        self.safe = safe

    def seal(self, rank: RankSaver, snapshot: Snapshot, before: Snapshot | None) -> None:
        """Look while the slot has no seal, then seal it as its fate says."""
        self.look()
        attempt = snapshot.saving.attempt
        fate = self.calls.fates.get(attempt.step, Fate())
        if fate.seal == "unread":
            image = snapshot.images.images[0]
            snapshot.digested.put(Digested(digest_image(attempt, image, lambda: False), image.bytes))
            raise StoreError("the second image cannot be read, on purpose")
        in_the_way = [slot / "manifest.json" for slot in self._memory.glob(f"*/*/{snapshot.slot}")]
        for path in in_the_way if fate.seal == "full" else ():
            path.unlink(missing_ok=True)
            path.mkdir()
        _SEAL(rank, snapshot, before)
        for path in in_the_way if fate.seal == "full" else ():
            path.rmdir()

    def settle(self) -> None:
        """Wait until the last snapshot is sealed or will not be, and its flush has ended or is stuck; then look."""
        for thread in threading.enumerate():
            if thread.name in ("ckpt-seal", "ckpt-take"):
                thread.join(30)  # it prepares the other slot at its end
        while (left := under_way(self.ckpt)).steps and not (left.stuck and self.calls.stuck.is_set()):
            time.sleep(0.001)  # a flush that is only slow is waited for, whatever the timeout
        self.look()

    def train(self, *steps: int) -> None:
        for step in steps:
            self.ckpt.step(step, state_of(step))
            self.settle()

    def end(self) -> int:
        """Die; return the newest step that a restart can restore."""
        die(self.ckpt)
        return self.safe


def end_threads(lives: Iterable[Life]) -> None:
    """Let what is stuck in the store of dead lives fail, and wait for it."""
    for life in lives:
        life.calls.over.set()
        until(lambda: not under_way(life.ckpt).steps)  # noqa: B023 (called at once)
        with suppress(CkptError):
            life.ckpt.wait()
