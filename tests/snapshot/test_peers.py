"""Copies of one host's memory on another: a host is a memory directory here; bytes travel by a call."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import IntegrityError, StoreError
from ckpt_tasks.snapshot import cache
from ckpt_tasks.snapshot.peers import HostMemory, Offer, Piece
from ckpt_tasks.testing import die, seal, settle
from tests.support.cli_runs import flip


class Host:
    """A host of its own, with its memory directory; as a Source it may break off, flip a bit or be refilled."""

    def __init__(self, root: Path, name: str, run_dir: Path):
        self.host = name
        self.memory_dir = root / name
        self.memory_dir.mkdir()
        self.config = CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=self.memory_dir, step_interval=1)
        self.before_read: Callable[[int], None] = lambda number: None
        self.reads = 0

    @property
    def memory(self) -> HostMemory:
        return HostMemory(self.config, 1)

    def offers(self, ranks: Collection[int]) -> list[Offer]:
        return self.memory.offers(ranks)

    def read(self, offer: Offer, pieces: list[Piece]) -> list[bytes] | None:
        self.before_read(self.reads)
        self.reads += 1
        return self.memory.read(offer, pieces)

    def files(self) -> dict[str, bytes]:
        """Return every file of its memory, with its bytes, but locks."""
        found = [path for path in self.memory_dir.rglob("*") if path.is_file() and path.name != "lock"]
        return {str(path.relative_to(self.memory_dir)): path.read_bytes() for path in found}

    def lose(self) -> None:
        shutil.rmtree(self.memory_dir)


LARGE = 4_200_000  # Values that take three requests.


def state(value: float, size: int = 1000) -> dict[str, object]:
    return {"weights": torch.full((size,), value), "table": [value]}


def seals(host: Host) -> list[int]:
    """Return the steps that are sealed on a host."""
    return [int(offer.attempt.partition("/")[0][-12:]) for offer in host.memory.offers([0])]


def advance(training: Checkpointer, step: int, size: int = 1000) -> None:
    training.step(step, state(float(step), size))
    seal(training)
    settle(training)


def follow(host: Host, source: Host) -> bool:
    return host.memory.follow(source, [0], lambda: None)


@pytest.fixture
def hosts(tmp_path: Path, run_dir: Path) -> tuple[Host, Host]:
    return Host(tmp_path, "one", run_dir), Host(tmp_path, "two", run_dir)


def sealed(host: Host, step: int, size: int = 1000) -> Checkpointer:
    """Train on a host until a step is sealed in memory and committed; the process goes on."""
    training = Checkpointer(host.config)
    training.restore(state(0.0, size))
    for at in range(1, step + 1):
        advance(training, at, size)
    return training


def restored(host: Host, size: int = 1000) -> tuple[int, float, float]:
    """Return what a new process on a host restores: step, value, and the share that came from a peer."""
    with Checkpointer(host.config, take_over=True) as training:
        held = state(0.0, size)
        step = training.restore(held)
        assert training.last_restore is not None
        report = training.last_restore
        return step, float(held["weights"][0]), report.peer_bytes / report.size_bytes  # type: ignore[index]


def test_a_copy_is_restored_where_the_host_is_lost(hosts: tuple[Host, Host], run_dir: Path) -> None:
    """With the storage's bytes gone as well, the newest step comes from the copy, bit-equal, and is said to."""
    one, two = hosts
    training = sealed(one, 2)
    assert follow(two, one)
    assert not follow(two, one)
    die(training)
    one.lose()
    for shard in run_dir.glob("checkpoint_*/*/*.safetensors"):
        shard.unlink()
    assert restored(two) == (2, 2.0, 1.0)


@pytest.mark.parametrize("refills", [False, True], ids=["dies", "refills"])
def test_a_copy_that_breaks_off_leaves_the_one_before_it(hosts: tuple[Host, Host], refills: bool) -> None:
    """Whichever request is the last: no seal of the new copy is there, and the older one stays whole.

    The source dies, or refills its slot while it is read: then its bytes are of two snapshots, and count for nothing.
    """
    one, two = hosts
    training = sealed(one, 1, LARGE)
    follow(two, one)
    requests, kept = one.reads, two.files()
    assert requests >= 3
    for last in range(requests):
        step = training.position + 1
        advance(training, step, LARGE)
        one.before_read = partial(breaks, training, one.reads + last, refills)
        with pytest.raises(StoreError, match=r"the source is gone|has refilled a slot of rank 0 before it was copied"):
            follow(two, one)
        one.before_read = lambda number: None
        assert two.files() == kept
    die(training)
    one.lose()
    step = training.position
    assert restored(two, LARGE) == (step, float(step), 0.0), "storage has the newer steps"


def breaks(training: Checkpointer, last: int, refills: bool, number: int) -> None:
    """At the request `last`: the source dies, or both of its slots are refilled."""
    if number == last and not refills:
        raise StoreError("the source is gone")
    if number == last:
        for step in range(training.position + 1, training.position + 3):
            advance(training, step, LARGE)


def test_damage_at_the_source_is_not_copied(hosts: tuple[Host, Host]) -> None:
    """A bit that has flipped in the source's memory is found by the receiver, which keeps its older copy.

    Parts that are copied one by one: the damaged one is named with its error, and the one after it is copied.
    """
    one, two = hosts
    training = sealed(one, 1)
    follow(two, one)
    advance(training, 2)
    images = sorted(one.memory_dir.rglob("table-*.safetensors")) + sorted(one.memory_dir.rglob("weights-*.safetensors"))
    for image in images or sorted(one.memory_dir.rglob("*.safetensors")):
        flip(image, -1)
    with pytest.raises(IntegrityError, match="a copy of a peer's memory is damaged"):
        follow(two, one)
    assert seals(two) == [1]
    advance(training, 3)
    damaged, good = sorted(one.offers([0]), key=lambda offer: offer.attempt)
    [(part, why)] = two.memory.copy_each([damaged, good], one, lambda: None)
    assert (part, type(why)) == (damaged, IntegrityError)
    assert sorted(seals(two)) == [1, 3]
    die(training)


def test_damage_of_the_copy_is_noticed_and_storage_is_read(hosts: tuple[Host, Host]) -> None:
    """A bit that flips in the copy after it was sealed: the restore passes it over, says so, and reads storage."""
    one, two = hosts
    training = sealed(one, 2)
    follow(two, one)
    die(training)
    one.lose()
    for image in two.memory_dir.rglob("*.safetensors"):
        flip(image, -1)
    with Checkpointer(two.config, take_over=True) as again:
        held = state(0.0)
        assert again.restore(held) == 2
        report = again.last_restore
    assert report is not None
    assert report.peer_bytes == 0
    [(step, reason)] = report.skipped
    assert (step, reason.startswith("in memory: ")) == (2, True)
    assert torch.equal(held["weights"], torch.full((1000,), 2.0))  # type: ignore[arg-type]


def test_without_room_nothing_is_copied(hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiving host's room is asked as for its own images: without it there is no copy, and no file of one."""
    one, two = hosts
    training = sealed(one, 1)
    monkeypatch.setattr(cache, "default_directory", lambda size_bytes: None if size_bytes else two.memory_dir)
    two.config = replace(two.config, memory_dir="auto")
    with pytest.raises(StoreError, match="no room"):
        follow(two, one)
    assert two.files() == {}
    die(training)


def test_copies_end_with_the_run(hosts: tuple[Host, Host]) -> None:
    """A run whose own ranks have removed their memory leaves no copy; one that may be resumed keeps them."""
    one, two = hosts
    training = sealed(one, 1)
    follow(two, one)
    (own := two.memory_dir / "own").mkdir()
    two.memory.release([0])
    assert seals(two) == [1], "rank 0 has memory here"
    two.memory.release([])
    assert two.files() == {}
    assert own.exists()
    training.close()
