"""Many ranks do not write again what has not changed: a frozen base under an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckpt_tasks import Checkpointer
from ckpt_tasks.errors import StoreError
from ckpt_tasks.format.keys import unfold
from ckpt_tasks.ledger.history import History
from ckpt_tasks.storage.local import LocalStore
from tests.ranks.test_failures import steps_of
from tests.ranks.training import config, digests
from tests.support.gang import run

WIDTH = 1024
BASE_BYTES = 4 * WIDTH * WIDTH


def adapted(kind: str, size: int) -> dict[str, Any]:
    """Build a large layer that is frozen and a small one that learns."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 4))
    model[0].requires_grad_(False)  # type: ignore[index]
    if size > 1 and kind == "fsdp":
        fully_shard(model)
    elif size > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return {"model": model, "optimizer": optimizer}


_put = LocalStore.put


def _full(self: LocalStore, name: str, parts: Any) -> None:
    raise StoreError("no space left on device", key=name)


def adapt(rank: int, size: int, kind: str, root: str, plan: tuple[int, bool]) -> tuple[int, dict[str, str]]:
    """Train to a step and save every one; the first save fails if it is to, in rank 1."""
    last, fails = plan
    state = adapted(kind, size)
    with Checkpointer(config(root, memory_dir=None, step_interval=None, max_num_checkpoints=2)) as ckpt:
        start = ckpt.restore(state)
        for step in range(start + 1, last + 1):
            state["model"](torch.ones(2, WIDTH)).sum().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            if fails and step == start + 1:
                LocalStore.put = _full if rank else _put  # type: ignore[method-assign,assignment]
                with pytest.raises(StoreError):
                    ckpt.save(step, state)
                LocalStore.put = _put  # type: ignore[method-assign]
            else:
                ckpt.save(step, state)
        ckpt.prune()
    return start, digests(state["model"], state["optimizer"])


def large_shards(root: Path) -> set[str]:
    """Name what holds a part of the base, by attempt."""
    return {str(p.relative_to(root)) for p in root.glob("*/*/*.safetensors") if p.stat().st_size > 1 << 20}


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_frozen_base_is_written_once(tmp_path: Path, kind: str) -> None:
    """Each rank names the shard of the first step, also after a restart, and no prune takes it."""
    [(start, trained), _] = run(2, adapt, kind, str(tmp_path), (4, False))
    assert start == 0
    written = large_shards(tmp_path)
    assert {name.partition("/")[0] for name in written} == {"checkpoint_000000000001"}
    assert len(written) == 2
    [(start, again), _] = run(2, adapt, kind, str(tmp_path), (5, False))
    assert start == 4
    assert large_shards(tmp_path) == written
    assert steps_of(tmp_path) == [4, 5]
    live = History(LocalStore(tmp_path)).head().state.live
    assert all({*unfold(checkpoint.reuses)} == written for checkpoint in live)
    assert trained["0.weight"] == again["0.weight"]
    assert trained["1.weight"] != again["1.weight"]


@pytest.mark.slow
def test_after_a_failed_save_nothing_is_reused(tmp_path: Path) -> None:
    """A rank that does not know whether a save was committed writes everything once more."""
    run(2, adapt, "fsdp", str(tmp_path), (2, False))
    run(2, adapt, "fsdp", str(tmp_path), (5, True))
    assert steps_of(tmp_path) == [4, 5]
    assert {name.partition("/")[0] for name in large_shards(tmp_path)} == {"checkpoint_000000000004"}
