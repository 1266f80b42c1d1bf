"""Restores from a store that is far away: every byte is asked for once, and what comes is checked."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.checkpoint.restore.restore import restore_one
from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.opening import open_checkpoint
from ckpt_tasks.storage.objects import ObjectStore
from ckpt_tasks.storage.port import WrappedStore


class Recorded(WrappedStore):
    """A store that keeps what was read, and can change a byte on the way."""

    def __init__(self, inner: ObjectStore, spoil: Callable[[str, int], bool] = lambda name, tries: False):
        super().__init__(inner)
        self.reads: list[tuple[str, int, int]] = []
        self.got_bytes = 0
        self._spoil = spoil
        self._tries: dict[tuple[str, int], int] = {}

    def get(self, name: str, max_bytes: int) -> bytes:
        data = super().get(name, max_bytes)
        self.got_bytes += len(data)
        return data

    def read(self, name: str, begin: int, into: memoryview) -> None:
        super().read(name, begin, into)
        self.reads.append((name, begin, into.nbytes))
        tries = self._tries[name, begin] = self._tries.get((name, begin), 0) + 1
        if begin and self._spoil(name, tries):  # not the header
            into[into.nbytes // 2] ^= 1


def state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(257, 511) for _ in range(6)]
    model = torch.nn.ModuleList([*layers, torch.nn.LayerNorm(3), torch.nn.Embedding(3000, 1500)])
    return {"model": model, "other": torch.nn.Linear(100, 100)}


@pytest.fixture
def saved() -> tuple[ObjectStore, Checkpoint]:
    url = f"memory://download/{secrets.token_hex(8)}"
    with Checkpointer(CheckpointConfig(checkpoint_dir=url, memory_dir=None)) as ckpt:
        return ObjectStore(url), ckpt.save(1, state(1))


def equal(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return all(
        torch.equal(a, b) for name in one for a, b in zip(one[name].parameters(), two[name].parameters(), strict=True)
    )


def test_no_byte_is_asked_for_twice(saved: tuple[ObjectStore, Checkpoint]) -> None:
    """P57: a restore reads the tensors once, in few requests, and nothing between them."""
    store = Recorded(saved[0])
    target = state(2)
    report = restore_one(store, saved[1], target)
    assert equal(target, state(1))
    data = [(name, begin, count) for name, begin, count in store.reads if begin]
    assert sum(count for _, _, count in data) == report.size_bytes
    assert len(data) <= report.size_bytes / (8 << 20) + 6


def test_a_part_costs_what_it_weighs(saved: tuple[ObjectStore, Checkpoint]) -> None:
    """One group of several is restored with reads of at most 1.05 times its bytes, headers included."""
    store = Recorded(saved[0])
    wanted = {"model": state(2)["model"]}
    report = restore_one(store, saved[1], wanted, partial=True)
    assert {name.rpartition("/")[2][:6] for name, _, _ in store.reads} == {"model-"}
    assert sum(count for _, _, count in store.reads) <= 1.05 * report.size_bytes


def test_a_byte_that_changed_on_the_way_is_asked_for_again(saved: tuple[ObjectStore, Checkpoint]) -> None:
    """P48: a read whose digest is wrong is made once more; the restore is right then."""
    store, target = Recorded(saved[0], lambda name, tries: tries == 1), state(2)
    restore_one(store, saved[1], target)
    assert equal(target, state(1))


def test_bytes_that_stay_wrong_leave_the_target_alone(saved: tuple[ObjectStore, Checkpoint]) -> None:
    """P26: where every read is wrong the checkpoint is given up, and nothing of the target has changed."""
    store, target = (
        Recorded(saved[0], lambda name, tries: name.endswith("other-00000-of-00001-0.safetensors")),
        state(2),
    )
    with pytest.raises(IntegrityError, match="other"):
        restore_one(store, saved[1], target)
    assert equal(target, state(2))
    assert len({read for read in store.reads if "other" in read[0] and read[1]}) == 1


def test_a_reader_finds_everything_by_two_requests_and_one_each(saved: tuple[ObjectStore, Checkpoint]) -> None:
    """Opening a checkpoint takes its manifest and its index, whatever the number of tensors."""
    store = Recorded(saved[0])
    found = Run(History(store), None).find("latest")
    before = store.got_bytes
    opened = open_checkpoint(store, replace(found))
    assert store.got_bytes - before == opened.manifest.index.size_bytes + len(store.get(found.manifest, 1 << 30))
    assert not store.reads
