"""A snapshot that memory cannot take whole does not cost the sealed one that a restart needs."""

from __future__ import annotations

import errno
import itertools
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckpt_tasks.errors import CkptError, StoreError
from ckpt_tasks.format.keys import FORMAT_NAME
from ckpt_tasks.format.records import Seal
from ckpt_tasks.saving.parts import Digested, digest_image
from ckpt_tasks.saving.pipeline import Snapshot
from ckpt_tasks.saving.rank_saver import RankSaver
from ckpt_tasks.snapshot.cache import SnapshotCache
from ckpt_tasks.snapshot.memory import MemoryDirectory
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.testing import die, under_way
from tests.crash.memory_loop import state_of, step_of
from tests.support.calls import WatchedCalls
from tests.support.pipelines import committed, opened
from tests.support.waiting import until

SIZE = 1 << 8


class Fate(NamedTuple):
    """What becomes of a snapshot in memory (sealed; no room for its seal; no digest), and of its flush."""

    seal: str
    store: str


FATES = [Fate(*fate) for fate in itertools.product(("sealed", "full", "unread"), ("stored", "refused", "stuck"))]
SEQUENCES = [*itertools.product(FATES, repeat=3)]
WORST = [
    [Fate("full", "refused"), Fate("unread", "refused"), Fate("full", "stuck")],
    [Fate("full", "stuck"), Fate("sealed", "stored"), Fate("sealed", "stored")],
    [Fate("unread", "stuck"), Fate("sealed", "stored"), Fate("sealed", "stored")],
]


class Fated(WatchedCalls):
    """Let the store take, refuse, or not answer, as the fate of each step says."""

    def __init__(self, fates: Mapping[int, Fate]):
        super().__init__()
        self.fates = fates
        self.stuck = threading.Event()
        self.over = threading.Event()

    def do(self, name: str, path: str, call: Callable[[], Any]) -> Any:
        store = next((fate.store for step, fate in self.fates.items() if f"/checkpoint_{step:012d}/" in path), "stored")
        if name == "pwrite" and store != "stored":
            if store == "stuck":
                self.stuck.set()
                self.over.wait(60)
            raise OSError(errno.EIO, "on purpose")
        return super().do(name, path, call)


SEAL = RankSaver.seal
LIVES: dict[str | None, Life] = {}


@pytest.fixture(autouse=True)
def fated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every snapshot be sealed as its owner's life says."""
    monkeypatch.setattr(
        RankSaver, "seal", lambda rank, snapshot, before: _life_of(snapshot).seal(rank, snapshot, before)
    )


def _life_of(snapshot: Snapshot) -> Life:
    return LIVES[snapshot.tenure.owner.id]


class Life:
    """A process that saves one step after another; `safe` is the newest step that a restart could restore."""

    def __init__(self, run_dir: Path, memory: Path, fates: Mapping[int, Fate], safe: int = 0):
        self.safe = safe
        self._run_dir, self._memory = run_dir, memory
        self._calls = Fated(fates)
        timeout_s = 0.1 if any(fate.store == "stuck" for fate in fates.values()) else 60.0
        options: dict[str, Any] = {"memory_dir": str(memory), "on_flush_failure": "warn"}
        self.ckpt = opened(run_dir, self._calls, flush_timeout_s=timeout_s, **options)
        self.ckpt.acquire()
        LIVES[under_way(self.ckpt).owner] = self
        self.restored = self.ckpt.restore(state := state_of(0, SIZE))
        assert step_of(state) == self.restored >= safe
        self.settle()

    def look(self) -> None:
        """Raise AssertionError if neither memory nor storage has the newest step that was safe, or a newer one."""
        seals = (Seal.from_bytes(path.read_bytes()) for path in self._memory.rglob("seal.json"))
        safe = max([0, *committed(self._run_dir), *(seal.checkpoint.step for seal in seals)])
        assert safe >= self.safe
        self.safe = safe

    def seal(self, rank: RankSaver, snapshot: Snapshot, before: Snapshot | None) -> None:
        """Look while the slot has no seal, then seal it as its fate says."""
        self.look()
        attempt = snapshot.saving.attempt
        fate = self._calls.fates.get(attempt.step, FATES[0])
        if fate.seal == "unread":
            image = snapshot.images.images[0]
            snapshot.digested.put(Digested(digest_image(attempt, image, lambda: False), image.bytes))
            raise StoreError("the second image cannot be read, on purpose")
        in_the_way = [slot / "manifest.json" for slot in self._memory.glob(f"*/*/{snapshot.slot}")]
        for path in in_the_way if fate.seal == "full" else ():
            path.unlink(missing_ok=True)
            path.mkdir()
        SEAL(rank, snapshot, before)
        for path in in_the_way if fate.seal == "full" else ():
            path.rmdir()

    def settle(self) -> None:
        """Wait until the last snapshot is sealed or will not be, and its flush has ended or is stuck; then look."""
        for thread in threading.enumerate():
            if thread.name in ("ckpt-seal", "ckpt-take"):
                thread.join(30)  # it prepares the other slot at its end
        while (left := under_way(self.ckpt)).steps and not (left.stuck and self._calls.stuck.is_set()):
            time.sleep(0.001)  # a flush that is only slow is waited for, whatever the timeout
        self.look()

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            self.ckpt.step(step, state_of(step, SIZE))
            self.settle()

    def end(self) -> int:
        """Die; return the newest step that a restart can restore."""
        die(self.ckpt)
        return self.safe

    def end_threads(self) -> None:
        self._calls.over.set()
        until(lambda: not under_way(self.ckpt).steps)
        with suppress(CkptError):
            self.ckpt.wait()


def lived(run_dir: Path, memory: Path, start: str, sequence: Sequence[Fate]) -> None:
    """Save step 1 for memory alone, and then three snapshots with these fates; die and restore."""
    first = Life(run_dir, memory, {1: Fate("sealed", "refused")} | dict(enumerate(sequence, start=2)))
    first.train([1])
    lives = [first]
    if start == "restored from memory":
        # It saves step 1 again.
        lives += [Life(run_dir, memory, dict(enumerate(sequence, start=1)), first.end())]
    lives[-1].train(range(len(lives) + 1, 4))
    last = Life(run_dir, memory, {}, lives[-1].end())
    assert committed(run_dir)[-1] == last.restored
    last.ckpt.close()
    for life in lives:
        life.end_threads()


@pytest.mark.parametrize(
    "sequences", [WORST, pytest.param(random.Random(1).sample(SEQUENCES, 200), marks=pytest.mark.slow)], ids=len
)
@pytest.mark.parametrize("start", ["in one process", "restored from memory"])
def test_what_a_restart_needs_stays_in_memory(fast_dir: Path, start: str, sequences: list[Sequence[Fate]]) -> None:
    """P44: whichever snapshots cannot be sealed, with a store that refuses or is stuck, no step that was safe is lost.

    At every moment memory or storage has the newest step that one of them ever had.
    """
    for number, sequence in enumerate(sequences):
        (place := fast_dir / f"{start} {len(sequences)} {number}").mkdir(mode=0o700)
        (place / "memory").mkdir(mode=0o700)
        lived(place / "run", place / "memory", start, sequence)
        shutil.rmtree(place)


@pytest.mark.parametrize("store", ["stored", "refused", "stuck"])
def test_without_a_second_slot_the_first_one_stays_until_a_commit(run_dir: Path, memory: Path, store: str) -> None:
    """P37, P44: a slot that cannot be made does not cost the snapshot in the other one that storage lacks.

    Later snapshots are private to the process. Once one is committed, the memory directory is empty.
    """
    first = Life(run_dir, memory, {1: Fate("sealed", "refused")})
    first.train([1])
    safe = first.end()
    (slot,) = (path.parent for path in memory.rglob("seal.json"))
    other = slot.with_name("b" if slot.name == "a" else "a")
    shutil.rmtree(other)
    other.write_bytes(b"")  # no directory of a slot can be made here
    second = Life(run_dir, memory, {step: Fate("sealed", store) for step in (1, 2, 3)}, safe)
    assert second.ckpt.restore(state_of(0, SIZE)) == 1  # in the same process as well
    second.train([2, 3])
    seals = [Seal.from_bytes(path.read_bytes()) for path in memory.rglob("seal.json")]
    assert [seal.checkpoint.step for seal in seals] == ([] if store == "stored" else [1])
    last = Life(run_dir, memory, {}, second.end())
    assert last.restored == (3 if store == "stored" else 1)
    last.ckpt.close()
    first.end_threads()
    second.end_threads()


@pytest.mark.parametrize(
    "fates",
    [
        [Fate("sealed", "refused"), Fate("full", "stored"), Fate("full", "stuck"), Fate("sealed", "stored")],
        [Fate("sealed", "refused"), Fate("full", "refused"), Fate("sealed", "stored")],
    ],
    ids=len,
)
def test_a_sealed_snapshot_holds_nothing_up(run_dir: Path, memory: Path, fates: list[Fate]) -> None:
    """P43, P44: the only sealed snapshot gives its slot up once a newer step is committed; till then the other one."""
    life = Life(run_dir, memory, dict(enumerate(fates, start=1)))
    life.train(range(1, len(fates) + 1))
    assert life.end() == len(fates)
    life.end_threads()


def test_a_slot_that_is_not_used_any_more_loses_its_seal_when_it_changes(tmp_path: Path) -> None:
    """P31: images that private memory shares with a memory directory are never sealed while they change."""
    (tmp_path / "run").mkdir()
    store = LocalStore(tmp_path / "run")
    store.put(FORMAT_NAME, [b"{}"])
    cache = SnapshotCache(store, tmp_path)
    cache.open("key")
    cache.take("a", {"x": 1})
    assert isinstance(cache.memory, MemoryDirectory)
    cache.memory.seal("a", {}, b"seal")
    (cache.memory.path / "b").write_bytes(b"")
    cache.take("b", {"x": 1})
    assert [*tmp_path.rglob("seal.json")]
    cache.unseal("a")
    assert not [*tmp_path.rglob("seal.json")]
    cache.close(keep=False)
