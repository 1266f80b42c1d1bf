"""A state on a CUDA device is restored. Skipped where there is none; the same without one: tensors/test_staging.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.tensors.tensors import same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def trained(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    conv = nn.Conv2d(8, 8, 3)
    conv.weight.data = conv.weight.data.to(memory_format=torch.channels_last)
    model = nn.Sequential(nn.Linear(2048, 4096), conv).cuda()
    model.register_buffer("turning", torch.randn(1 << 18, dtype=torch.complex128, device="cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = dict(state["model"].state_dict())
    for number, kept in state["optimizer"].state_dict()["state"].items():
        found |= {f"{number}.{name}": value for name, value in kept.items()}
    return {name: value.clone() for name, value in found.items()}


@pytest.mark.parametrize("memory", [False, True], ids=["storage", "memory"])
@pytest.mark.parametrize("stream", [False, True], ids=["default stream", "a stream of the program's"])
def test_a_state_on_a_device_is_restored(run_dir: Path, tmp_path: Path, memory: bool, stream: bool) -> None:
    """P2: bit by bit, though kernels of the program that write the same tensors are still queued."""
    memory_dir = str(tmp_path) if memory else None
    with (
        Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=memory_dir)) as ckpt,
        torch.cuda.stream(torch.cuda.Stream() if stream else torch.cuda.default_stream()),  # type: ignore[no-untyped-call]
    ):
        saved, state = trained(1), trained(2)
        wanted = tensors(saved)
        ckpt.save(1, saved)
        torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
        for parameter in state["model"].parameters():
            parameter.data.fill_(7.0)
        ckpt.restore(state)
        assert ckpt.last_restore is not None
        assert ("ckpt-tasks-" in ckpt.last_restore.source) == memory
        found = tensors(state)
        assert [name for name in wanted if not same_bits(found[name], wanted[name])] == []
