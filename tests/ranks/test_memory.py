"""Snapshots in the memory of many ranks: each seals its part, and a restart takes the newest that all have sealed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from ckpt_tasks import Checkpointer
from ckpt_tasks.storage.local import LocalStore
from tests.ranks.test_failures import steps_of
from tests.ranks.training import build, config, train
from tests.support.gang import Gang, report, run

SIZE = 2


def slots(memory: Path, rank: int, size: int = SIZE) -> dict[int, Path]:
    """Return a rank's sealed slots by step."""
    found = {}
    for seal in memory.glob(f"*/*-{rank:05d}-of-{size:05d}/*/seal.json"):
        found[json.loads(seal.read_text())["checkpoint"]["step"]] = seal.parent
    return found


def never(self: LocalStore, name: str, body: Sequence[bytes | memoryview]) -> None:
    """Stand for a store that takes nothing of a checkpoint any more."""
    time.sleep(600)


def is_hung(rank: int, size: int, kind: str, places: tuple[str, str], last: int) -> None:
    """Train to step 4; from then on the store takes nothing. Report once `last` is sealed in memory, and hang."""
    root, memory = places
    model = build(kind, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    batches = torch.randn(100, 8, 16, generator=torch.Generator().manual_seed(5))
    ckpt = Checkpointer(config(root, memory_dir=memory))
    for step in range(ckpt.restore(state) + 1, last + 1):
        torch.rand(())
        model(batches[step]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(step, state)
        if step == 4:
            ckpt.wait()
            LocalStore.put = never  # type: ignore[method-assign]
    until(lambda: last in slots(Path(memory), rank, size))
    report("sealed")
    time.sleep(600)


def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.01)


def killed_before_the_commit(root: Path, memory: Path, kind: str = "fsdp", size: int = SIZE, last: int = 6) -> None:
    """Leave steps 2 and 4 committed, and the ones up to `last` in the memory of all ranks only."""
    memory.mkdir(exist_ok=True)
    with Gang(size, is_hung, kind, (str(root), str(memory)), last) as gang:
        assert [gang.said(rank)[1] for rank in range(size)] == ["sealed"] * size
        for rank in range(size):
            os.kill(gang.pid(rank), signal.SIGKILL)
    assert steps_of(root)[-1] == 4


@pytest.mark.parametrize(
    ("kind", "size"), [("fsdp", 2), *(pytest.param(*form, marks=pytest.mark.slow) for form in [("ddp", 2), ("2d", 4)])]
)
def test_a_step_that_all_have_sealed_survives_them(tmp_path: Path, kind: str, size: int) -> None:
    """P55: all ranks are killed before the commit; the restart goes on from memory, bit for bit, and commits it."""
    whole = run(size, train, kind, str(tmp_path / "whole"), (10, {"memory_dir": None}))
    root, memory = tmp_path / "run", tmp_path / "memory"
    killed_before_the_commit(root, memory, kind, size)
    resumed = run(size, train, kind, str(root), (10, {"memory_dir": str(memory), "max_num_checkpoints": None}))
    assert [rank["start"] for rank in resumed] == [6] * size
    assert [rank["digests"] for rank in resumed] == [rank["digests"] for rank in whole]
    assert [rank["draws"] for rank in resumed] == [rank["draws"][6:] for rank in whole]
    assert steps_of(root)[:3] == [2, 4, 6]
