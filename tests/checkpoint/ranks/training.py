"""A small training in every form of parallelism, and what tests want to know of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import CkptError, StoreError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.opening import open_checkpoint
from ckpt_tasks.run.upkeep.verifying import verify_checkpoint
from ckpt_tasks.storage.local import LocalStore

HIDDEN = 40
WIDE = 8184  # large beside headers and random streams; 2, 3 and 4 ranks divide it, as tensor parallelism wants


def build(kind: str, size: int, hidden: int = HIDDEN) -> nn.Module:
    """Build the model, the same in every form: plain, ddp, fsdp, tp, hsdp, or 2d (FSDP over tensor parallel)."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 16))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if size == 1:
        return model
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        for layer in (model[0], model[2], model):  # type: ignore[index]
            fully_shard(layer)
    elif kind == "tp":
        parallelize_module(model, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)), plan)
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))
    elif kind == "2d":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    return model


def full(value: Any) -> torch.Tensor:
    """Return all of a tensor, or of a list of tensors or a number, on every rank."""
    if isinstance(value, list):
        return torch.cat([full(one).reshape(-1) for one in value])
    if not isinstance(value, torch.Tensor):
        return torch.tensor(-1.0 if value is None else value)
    if isinstance(value, DTensor):
        value = value.full_tensor()
    found: torch.Tensor = value.detach()
    return found


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Digest every whole parameter and every whole tensor of the optimizer's state."""
    values = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        entry = optimizer.state.get(parameter, {})
        values |= {f"{name.removeprefix('module.')}/{key}": value for key, value in entry.items()}
    return {name: digest_hex(full(value).contiguous().numpy().tobytes()) for name, value in sorted(values.items())}


def state_of(kind: str, size: int, hidden: int = HIDDEN) -> dict[str, Any]:
    model = build(kind, size, hidden)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "epoch": 0}


def stepped(kind: str, size: int) -> dict[str, Any]:
    """Return a wide state whose optimizer has its moments."""
    state = state_of(kind, size, WIDE)
    state["model"](torch.randn(4, 16, generator=torch.Generator().manual_seed(1))).pow(2).mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    return state


def watch(*, far: bool, on_read: Callable[[], object] = lambda: None) -> list[int]:
    """Note how many bytes this process reads of shards from now on; perhaps as if the store were far away."""
    count: list[int] = []
    read = LocalStore.read

    def counting(self: LocalStore, name: str, begin: int, into: memoryview) -> None:
        if name.endswith(".safetensors"):
            count.append(len(into))
            if begin > 0:
                on_read()
        read(self, name, begin, into)

    LocalStore.read = counting  # type: ignore[method-assign]
    LocalStore.near = not far
    return count


def state_bytes(root: Path) -> int:
    """Count what all ranks together want of the newest checkpoint."""
    history = History(LocalStore(root))
    opened = open_checkpoint(history.store, history.head().state.live[-1])
    return sum(row.end - row.begin for row in opened.rows)


def steps_of(root: Path) -> list[int]:
    """Return the steps of the live checkpoints, oldest first; each of them is good."""
    history = History(LocalStore(root))
    live = history.head().state.live
    assert [fault for checkpoint in live for fault in verify_checkpoint(history.store, checkpoint)] == []
    return [checkpoint.step for checkpoint in live]


def attempt(call: Any, *arguments: Any, **options: Any) -> tuple[str, str]:
    """Return the name of what a call raises, and its words; "None" where it raises nothing."""
    try:
        call(*arguments, **options)
    except CkptError as error:
        return type(error).__name__, str(error)
    return "None", ""


put = LocalStore.put


def refuse(self: LocalStore, name: str, parts: Any) -> None:
    """Put nothing, as a store that is full."""
    raise StoreError("no space left on device", key=name)


def config(root: str, **options: Any) -> CheckpointConfig:
    return CheckpointConfig(checkpoint_dir=root, **{"step_interval": 2, "flush_timeout_s": 60, **options})


def takes_over(rank: int, size: int, root: str) -> int:
    """Take a run over from the gang that holds it, and commit step 20,000; return the step that was restored."""
    state = state_of("fsdp", size)
    with Checkpointer(config(root, memory_dir=None), take_over=True) as ckpt:
        step = ckpt.restore(state)
        ckpt.save(20_000, state)
    return step


def train(rank: int, size: int, kind: str, root: str, last: int | tuple[int, dict[str, Any]]) -> dict[str, Any]:
    """Train from the newest checkpoint to the `last` step, perhaps with options of the Checkpointer.

    Return where it began, and digests of all that there is at the end.
    """
    steps, options = last if isinstance(last, tuple) else (last, {})
    take_over = options.get("take_over", False)
    configured = config(root, **{name: value for name, value in options.items() if name != "take_over"})
    state = state_of(kind, size)
    model, optimizer = state["model"], state["optimizer"]
    batches = torch.randn(100, 8, 16, generator=torch.Generator().manual_seed(5))
    draws = []
    with Checkpointer(configured, take_over=take_over) as ckpt:
        start = ckpt.restore(state)
        if start == steps:
            ckpt.save(start, state)
        for step in range(start + 1, steps + 1):
            draws.append(float(torch.rand(()) + rank))
            loss = model(batches[step]).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step, state)
        ckpt.wait()
        derived = ckpt.last_restore.derived_streams if ckpt.last_restore else None
    return {"start": start, "digests": digests(model, optimizer), "draws": draws, "derived": derived}
