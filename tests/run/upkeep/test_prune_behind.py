"""Pruning goes on behind a commit: it makes no committed save fail, and removes nothing that a save under way needs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import Checkpointer, open_run
from ckpt_tasks.checkpoint import checkpointer
from ckpt_tasks.errors import CheckpointNotFoundError, FencedError, StoreError
from ckpt_tasks.storage.port import Store, WrappedStore
from ckpt_tasks.testing import settle
from tests.support.calls import WatchedCalls
from tests.support.pipelines import committed, opened, restored, state_at
from tests.support.waiting import until


class Reads(WrappedStore):
    """A store that holds the pruner's reads of shards until `opened` is set; `reached` is set when one waits."""

    def __init__(self, inner: Store):
        super().__init__(inner)
        self.opened, self.reached = threading.Event(), threading.Event()

    def read(self, name: str, begin: int, into: memoryview) -> None:
        if threading.current_thread().name == "ckpt-prune":
            self.reached.set()
            assert self.opened.wait(120)
        super().read(name, begin, into)


def held(ckpt: Checkpointer) -> Reads:
    store = Reads(ckpt.run.history.store)
    ckpt.run.history.store = store
    return store


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a close wait no longer than this for a prune that is stuck."""
    monkeypatch.setattr(checkpointer, "_PRUNE_S", 0.05)


def kinds(run_dir: Path) -> list[str]:
    run = open_run(str(run_dir))
    return [str(run.history.read_entry(n)[0].event["kind"]) for n in range(run.head().next_n)]


@pytest.mark.usefixtures("short")
def test_a_prune_that_stands_still_fails_no_save(run_dir: Path) -> None:
    """P43, P60: saves return at their commit while a checkpoint is read back for ever; the next owner prunes."""
    ckpt = opened(run_dir, max_num_checkpoints=1, flush_timeout_s=30.0)
    store = held(ckpt)
    for step in (1, 2, 3, 4):
        assert ckpt.save(step, state_at(step)).step == step
    assert store.reached.wait(60)
    assert committed(run_dir) == [1, 2, 3, 4]
    ckpt.close()
    assert kinds(run_dir)[-1] == "release"
    store.opened.set()
    settle(ckpt)
    assert committed(run_dir) == [1, 2, 3, 4]  # it was cancelled: nothing is retired by an owner that has released
    with opened(run_dir, max_num_checkpoints=1) as ckpt:
        ckpt.restore(state_at(0))
        ckpt.prune()
    assert committed(run_dir) == [4]


class NoReads(WrappedStore):
    """A store that gives no part of an object until `good` is set."""

    good = False

    def read(self, name: str, begin: int, into: memoryview) -> None:
        if not self.good:
            raise StoreError("no reading, on purpose", key=name)
        super().read(name, begin, into)


def test_a_prune_that_fails_is_logged_once_and_tried_after_the_next_commit(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """P28: what prune meets is not a failure of the save; it is said once, and made good by a later prune."""
    with opened(run_dir, max_num_checkpoints=1) as ckpt, caplog.at_level(logging.WARNING, "ckpt_tasks"):
        store = NoReads(ckpt.run.history.store)
        ckpt.run.history.store = store
        for step in (1, 2, 3, 4):
            ckpt.save(step, state_at(step))
            settle(ckpt)
        assert committed(run_dir) == [1, 2, 3, 4]
        assert caplog.text.count("Older checkpoints were not removed") == 1
        store.good = True
        ckpt.save(5, state_at(5))
    assert committed(run_dir) == [5]
    assert caplog.text.count("Older checkpoints were not removed") == 1


class Steps(WatchedCalls):
    """Hold every write to a step's objects until the step is let through."""

    def __init__(self) -> None:
        super().__init__()
        self.through = {step: threading.Event() for step in (3, 4)}

    def cut(self, fd: int, piece: Any) -> Any:
        for step, event in self.through.items():
            if f"checkpoint_{step:012d}" in self.paths[fd]:
                assert event.wait(120)
        return piece


@pytest.fixture
def steps() -> Iterator[Steps]:
    made = Steps()
    yield made
    for event in made.through.values():
        event.set()


def test_what_a_save_under_way_reuses_is_not_retired(run_dir: Path, steps: Steps) -> None:
    """P64, P65: while step 4, which reuses an object of step 2, is written, prune removes step 2 but not the object."""

    def state(step: int) -> dict[str, Any]:
        return {"large": torch.zeros(1 << 19), "small": torch.full((1,), float(step)), "step": step}

    with opened(run_dir, steps, max_num_checkpoints=1) as ckpt:
        ckpt.save(2, state(2))
        ckpt.step(3, state(3))
        ckpt.step(4, state(4))
        steps.through[3].set()
        until(lambda: committed(run_dir) == [3])
        steps.through[4].set()
        ckpt.wait()
        assert ckpt.checkpoints()[0].reuses
    assert committed(run_dir) == [4]
    target = state(1)
    run = open_run(str(run_dir))
    run.restore(run.find(4), target)
    assert torch.equal(target["large"], torch.zeros(1 << 19))
    assert target["small"].item() == 4.0


def test_a_fenced_prune_removes_nothing(run_dir: Path) -> None:
    """P33: the run is taken over while a prune reads: it ends without an entry, and the next save is fenced."""
    first = opened(run_dir, max_num_checkpoints=1)
    store = held(first)
    for step in (1, 2):
        first.save(step, state_at(step))
    assert store.reached.wait(60)
    second = opened(run_dir, take_over=True)
    second.restore(state_at(0))
    store.opened.set()
    settle(first)
    assert "retire" not in kinds(run_dir)
    assert committed(run_dir) == [1, 2]
    with pytest.raises(FencedError):
        first.save(3, state_at(3))
    second.close()
    assert restored(run_dir, 1)["step"] == 1


def test_what_is_pruned_while_it_is_pinned_is_not_pinned(run_dir: Path) -> None:
    """P66: a pin that comes after the checkpoint went is an error, and no pin of nothing."""
    with opened(run_dir, max_num_checkpoints=1) as ckpt:
        ckpt.save(1, state_at(1))
        settle(ckpt)
        first = ckpt.checkpoints()[0]

        class PrunedMeanwhile(WrappedStore):
            def put_if_absent(self, name: str, body: bytes) -> None:
                if b'"kind":"pin"' in body and run.head().state.live == (first,):
                    ckpt.run.history.store = self.inner
                    ckpt.save(2, state_at(2))
                    settle(ckpt)
                super().put_if_absent(name, body)

        run = open_run(str(run_dir))
        ckpt.run.history.store = PrunedMeanwhile(ckpt.run.history.store)
        with pytest.raises(CheckpointNotFoundError, match="just been pruned"):
            ckpt.pin(1, "late")
        assert run.head().state.pins == {}
    assert committed(run_dir) == [2]
