"""Runs to copy, and what must hold of every copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.checkpoint.transfer.syncing import SyncReport, plan_sync, run_sync
from ckpt_tasks.errors import StoreError
from ckpt_tasks.format.ledger import lineage
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import Store, WrappedStore


def opened(run_dir: Path, **options: Any) -> Checkpointer:
    return Checkpointer(
        CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=None, **{"max_num_checkpoints": None, **options})
    )


def state_of(step: int, frozen: float = 0.5) -> dict[str, Any]:
    """Return a state with a base that stays the same, large enough to be stored once, and a part that changes."""
    model = nn.ParameterDict({
        "base": nn.Parameter(torch.full((1 << 19,), frozen), requires_grad=False),
        "adapter": nn.Parameter(torch.full((100,), float(step))),
    })  # fmt: skip
    return {"model": model, "seen": [step]}


def small(step: int) -> dict[str, Any]:
    return {"x": {"w": torch.full((8,), float(step))}, "seen": [step]}


def train(run_dir: Path, *steps: int, of: Callable[[int], dict[str, Any]] = small, **options: Any) -> Run:
    """Go on with a run, or begin one, through these steps."""
    with opened(run_dir, **options) as ckpt:
        if ckpt.checkpoints():
            ckpt.restore(of(0))
        for step in steps:
            ckpt.save(step, of(step), metrics={"loss": 1 / (1 + step)})
    return open_run(str(run_dir))


def copy(source: Run, target: Path | Store, step: int | None = None, **options: Any) -> SyncReport:
    store = LocalStore(target) if isinstance(target, Path) else target
    return run_sync(source, store, plan_sync(source, store, None if step is None else source.find(step)), **options)


def outcomes(report: SyncReport) -> dict[int, str]:
    return {row.checkpoint.step: row.outcome for row in report.rows}


def same(one: Checkpoint) -> dict[str, Any]:
    """Return what a checkpoint's record says, without the number of the entry, which is each ledger's own."""
    return {name: repr(value) for name, value in vars(one).items() if name != "n"}


def check(target: Path, source: Run, *, leased: bool = False) -> None:
    """Both runs are the same to whoever reads them, and every byte is good; `leased`: a copy was killed before."""
    there = open_run(str(target))
    a, b = source.head().state, there.head().state
    assert verify_run_directory(there.history).good
    assert [same(c) for c in lineage(b.live)] == [same(c) for c in lineage(a.live)]
    assert {(e.manifest_digest, e.suite): e for e in b.evaluations} == {
        (e.manifest_digest, e.suite): e for e in a.evaluations
    }
    assert b.pins == a.pins
    assert (b.best_metric, b.best_mode) == (a.best_metric, a.best_mode)
    assert leased or a.leases == ()
    assert leased or b.owner is None or b.owner.released


class Full(WrappedStore):
    """Have no room for an index."""

    def put_if_absent(self, name: str, body: bytes) -> None:
        if name.endswith("index.arrow"):
            raise StoreError("the disk is full", key=name)
        super().put_if_absent(name, body)


def prune(run_dir: Path, newest: int) -> None:
    """Prune a run to its newest checkpoints, as `ckpt prune` does."""
    with opened(run_dir, max_num_checkpoints=newest) as ckpt:
        ckpt.acquire()
        ckpt.prune()


class Meanwhile(WrappedStore):
    """Do something once, when the first shard is put."""

    def __init__(self, inner: Store, what: Callable[[], object]):
        super().__init__(inner)
        self._what: Callable[[], object] | None = what

    def put_if_absent(self, name: str, body: bytes) -> None:
        if name.endswith(".safetensors") and self._what is not None:
            what, self._what = self._what, None
            what()
        super().put_if_absent(name, body)
