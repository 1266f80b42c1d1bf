"""Sparse tensors of a state: in modules, as values and as gradients, on one rank and on many, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer, Gradients
from ckpt_tasks.errors import StateMismatchError
from tests.support.gang import run
from tests.support.roundtrip import restore, save
from tests.support.sweeps import quick_first

pytestmark = pytest.mark.filterwarnings("ignore:.*[sS]parse.*")

Make = Callable[[torch.Tensor], torch.Tensor]
LAYOUTS: dict[str, Make] = {
    "COO": lambda tensor: tensor,
    "coalesced": lambda tensor: tensor.coalesce(),
    "CSR": lambda tensor: tensor.coalesce().to_sparse_csr(),
    "CSC": lambda tensor: tensor.coalesce().to_sparse_csc(),
}


def coo(*values: float, rows: tuple[int, ...] = (2, 0, 2)) -> torch.Tensor:
    """Return a matrix of 3 × 4, by default with one place twice and in no order."""
    columns = [1] * len(values)
    return torch.sparse_coo_tensor(torch.tensor([rows[: len(values)], columns]), torch.tensor(values), (3, 4))


def parts(tensor: torch.Tensor) -> list[Any]:
    """Return all that a sparse tensor has, also the places and values that it has twice."""
    if tensor.layout is torch.sparse_coo:
        return [tensor.is_coalesced(), tensor._indices().tolist(), tensor._values().tolist()]
    names = ("crow_indices", "col_indices") if tensor.layout is torch.sparse_csr else ("ccol_indices", "row_indices")
    return [*(getattr(tensor, name)().tolist() for name in names), tensor.values().tolist()]


class Graph(torch.nn.Module):
    def __init__(self, edges: torch.Tensor):
        super().__init__()
        self.top = torch.nn.Linear(3, 3)
        self.register_buffer("edges", edges)


@pytest.mark.parametrize(
    ("layout", "fresh"),
    quick_first([*((layout, (0.1, 0.2, 0.3)) for layout in LAYOUTS), ("COO", (0.5,)), ("coalesced", (0.5,))], 2),
)
def test_a_sparse_buffer_of_a_module_comes_back(layout: str, fresh: tuple[float, ...]) -> None:
    """A sparse buffer is restored with its places, their order and its values; one in COO may have had fewer."""
    make = LAYOUTS[layout]
    saved, target = Graph(make(coo(1.0, 2.0, 3.0))), Graph(make(coo(*fresh)))
    restore(save({"graph": saved}), {"graph": target})
    assert parts(target.get_buffer("edges")) == parts(saved.get_buffer("edges"))
    assert torch.equal(target.top.weight, saved.top.weight)


@pytest.mark.parametrize(
    "make", [lambda: LAYOUTS["CSR"](coo(1.0, 2.0)), lambda: torch.zeros(3, 4), lambda: torch.eye(3).to_sparse()]
)
def test_another_layout_or_shape_is_a_difference(make: Callable[[], torch.Tensor]) -> None:
    """A buffer of another layout or shape is refused with its name, and the module stays as it is."""
    target = Graph(make())
    before = target.top.weight.detach().clone()
    for saved in (coo(1.0), LAYOUTS["CSR"](coo(1.0))):
        with pytest.raises(StateMismatchError, match="graph/edges"):
            restore(save({"graph": Graph(saved)}), {"graph": target})
    assert torch.equal(target.top.weight, before)


@pytest.mark.parametrize("there", quick_first([None, "sparse", "dense"], 2))
def test_a_sparse_gradient_comes_back(there: str | None) -> None:
    """Gradients of an nn.Embedding(sparse=True) come back uncoalesced, whatever gradient is there, and train on."""

    def model() -> tuple[torch.nn.Embedding, torch.optim.Optimizer]:
        torch.manual_seed(0)
        rows = torch.nn.Embedding(10, 4, sparse=True)
        return rows, torch.optim.SparseAdam(rows.parameters(), lr=0.1)

    (rows, optimizer), (again, other) = model(), model()
    for ids in ([1, 2], [1, 1, 3]):
        rows(torch.tensor(ids)).sum().backward()
        if ids == [1, 2]:
            optimizer.step()
            optimizer.zero_grad()
    if there is not None:
        again.weight.grad = torch.eye(10, 4).to_sparse() if there == "sparse" else torch.ones(10, 4)
    names = ("rows", "gradients", "optimizer")
    saved = save(dict(zip(names, (rows, Gradients(rows), optimizer), strict=True)))
    restore(saved, dict(zip(names, (again, Gradients(again), other), strict=True)))
    assert rows.weight.grad is not None
    assert again.weight.grad is not None
    assert parts(again.weight.grad) == parts(rows.weight.grad)
    optimizer.step()
    other.step()
    assert torch.equal(again.weight, rows.weight)


def of_ranks(rank: int, size: int, place: str) -> list[Any]:
    """Save and restore a graph of which each rank has other edges."""
    graph = Graph(coo(1.0, 2.0, 3.0 + rank))
    with torch.no_grad():
        graph.top.weight.fill_(1.0)
        graph.top.bias.fill_(2.0)
    with Checkpointer(CheckpointConfig(checkpoint_dir=place, memory_dir=None)) as ckpt:
        begun = ckpt.restore({"graph": graph})
        if not begun:
            ckpt.save(1, {"graph": graph})
            torch.nn.init.zeros_(graph.top.weight)
            graph.edges = coo(9.0)
            ckpt.restore({"graph": graph})
    return [begun, parts(graph.get_buffer("edges"))]


def test_each_rank_has_its_own_sparse_buffer(tmp_path: Path) -> None:
    """Each rank gets its own sparse buffer back, and another number of ranks rank 0's, as with any buffer."""
    expected = [parts(coo(1.0, 2.0, 3.0 + rank)) for rank in range(2)]
    assert run(2, of_ranks, str(tmp_path)) == [[0, one] for one in expected]
    assert run(3, of_ranks, str(tmp_path)) == [[1, expected[0]]] * 3
