"""Rows that do not divide by the ranks: every rank's part is where it says, and all of them come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckpt_tasks import Checkpointer
from tests.checkpoint.ranks.training import config, steps_of
from tests.support.gang import run

Mesh = tuple[int, int]  # ranks of fully_shard, and of tensor parallelism in each


def whole_model(rows: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, rows), nn.ReLU(), nn.Linear(rows, 8))


def state_of(mesh: Mesh, rows: int, *, zeros: bool = False) -> dict[str, Any]:
    """Return a model that is cut over a mesh, and an optimizer whose moments are the parameters; or all of it zeros."""
    model = whole_model(rows)
    if mesh != (1, 1):
        here = init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "tp"))
        if mesh[1] > 1:
            parallelize_module(model, here["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=here["dp"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(not zeros)
            parameter.grad = parameter.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def local_values(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return this rank's part of every parameter and moment."""
    found = {}
    for name, parameter in state["model"].named_parameters():
        moment = state["optimizer"].state[parameter]["momentum_buffer"]
        for key, value in ((name, parameter), (f"{name}/moment", moment)):
            found[key] = (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def save(rank: int, size: int, root: str, mesh: Mesh, rows: int) -> None:
    with Checkpointer(config(root)) as ckpt:
        ckpt.save(1, state_of(mesh, rows))


def restore(rank: int, size: int, root: str, mesh: Mesh, rows: int) -> bool:
    """Restore over zeros; say whether every value of this rank is what it was before it was saved."""
    wanted, state = local_values(state_of(mesh, rows)), state_of(mesh, rows, zeros=True)
    with Checkpointer(config(root)) as ckpt:
        assert ckpt.restore(state) == 1
    return same(local_values(state), wanted)


def size_of(mesh: Mesh) -> int:
    return mesh[0] * mesh[1]


def goes_through(root: Path, mesh: Mesh, rows: int, others: list[Mesh]) -> None:
    """Save on a mesh; restore on others."""
    run(size_of(mesh), save, str(root), mesh, rows)
    assert steps_of(root) == [1]
    for other in others:
        assert all(run(size_of(other), restore, str(root), other, rows)), other


@pytest.mark.parametrize(
    ("mesh", "rows", "others"),
    [
        ((3, 2), 7, [(1, 1)]),
        *(
            pytest.param(mesh, rows, [mesh, (1, 1), (3, 1)], marks=pytest.mark.slow)
            for mesh, rows in [((3, 2), 7), ((3, 2), 13), ((4, 2), 9), ((2, 3), 7), ((2, 2), 5)]
        ),
    ],
)
def test_fsdp_over_tensor_parallel_with_uneven_rows(tmp_path: Path, mesh: Mesh, rows: int, others: list[Mesh]) -> None:
    """P58: also where DCP loses rows, every row is restored: on the same mesh, in one process, and on three ranks."""
    goes_through(tmp_path, mesh, rows, others)


def by_dcp(rank: int, size: int, root: str, mesh: Mesh, rows: int) -> str:
    """Save the model and read it again, both with DCP; say what became of this rank's rows."""
    wanted, state = state_of(mesh, rows), state_of(mesh, rows, zeros=True)
    found = state["model"].state_dict()
    try:
        dcp_save(wanted["model"].state_dict(), checkpoint_id=root)
        dcp_load(found, checkpoint_id=root)
    except CheckpointException:
        return "refused"
    pairs = zip(wanted["model"].state_dict().values(), found.values(), strict=True)
    return "equal" if all(torch.equal(one.to_local(), other.to_local()) for one, other in pairs) else "lost"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "rows", "says"), [((3, 2), 7, "lost"), ((4, 2), 9, "lost"), ((3, 2), 13, "refused"), ((2, 2), 5, "equal")]
)
def test_what_dcp_does_with_uneven_rows(tmp_path: Path, mesh: Mesh, rows: int, says: str) -> None:
    """docs/RANKS.md says what DCP of torch 2.13 does beside us; where this fails, torch has mended it: say so there."""
    assert says in run(size_of(mesh), by_dcp, str(tmp_path), mesh, rows)
