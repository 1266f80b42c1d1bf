"""Many ranks: every form of parallelism and every state goes on bit for bit, and goes on in any other form."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from ckpt_tasks import Checkpointer
from tests.checkpoint.ranks.training import (
    WIDE,
    build,
    config,
    digests,
    state_bytes,
    state_of,
    stepped,
    steps_of,
    watch,
)
from tests.support.cli_runs import ckpt as command
from tests.support.gang import run
from tests.support.sweeps import quick_first, sparse

VOCABULARY = 5  # on four ranks: two rows, two, one and none
State = dict[str, Any]


# ── states ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Tied(nn.Module):
    """A model whose last layer is its embedding."""

    def __init__(self, vocabulary: int = VOCABULARY):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.middle = nn.Linear(8, 8)
        self.out = nn.Linear(8, vocabulary, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.middle(self.embedding(ids)))
        return found


class Running(nn.Module):
    """A layer with running statistics, and a running value that its output depends on: each rank's own."""

    running: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 30), nn.BatchNorm1d(30), nn.Linear(30, 2))
        self.register_buffer("running", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        self.running.lerp_(out.detach().mean(0), 0.5)
        return out - self.running


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    layers = [] if isinstance(model, Tied) else [child for child in model.children() if isinstance(child, nn.Linear)]
    for layer in (*layers, model):
        fully_shard(layer, **options)
    return model


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 7), nn.ReLU(), nn.Linear(7, 16))


def adamw(model: nn.Module, **options: Any) -> State:
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2, **options)}


def with_lbfgs(model: nn.Module) -> State:
    return {"model": model, "optimizer": torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)}


def tied_over_tensor_parallel(size: int) -> State:
    model = Tied(8)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "out": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    model.out.weight = model.embedding.weight
    return adamw(model)


def in_three_dimensions(size: int) -> State:
    model = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 16))
    mesh = init_device_mesh("cpu", (2, size // 4, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return adamw(sharded(model, mesh=mesh["dp_replicate", "dp_shard"]))


def flattened(size: int) -> State:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp_shard", "cp"))
    return adamw(sharded(plain(), mesh=mesh["dp_shard", "cp"]._flatten("dp_shard_cp")))


def own_buffers(size: int) -> State:
    model = nn.parallel.DistributedDataParallel(Running(), broadcast_buffers=False)
    return {**adamw(model), "seen": dict(model.module.named_buffers())}


STATES: dict[str, tuple[int, Callable[[int], State]]] = {
    **{
        f"{kind} on {size}": (size, lambda size, kind=kind: state_of(kind, size))  # type: ignore[misc]
        for kind, size in [("2d", 4), ("ddp", 2), ("fsdp", 3), ("tp", 2), ("hsdp", 4), ("2d", 6)]
    },
    # DDP on more than two ranks changes its buckets after the first step, and its order of sums. These options do not.
    "ddp on 4": (4, lambda _: adamw(nn.parallel.DistributedDataParallel(plain(), find_unused_parameters=True))),
    "mixed precision": (2, lambda size: adamw(sharded(plain(), mp_policy=MixedPrecisionPolicy(torch.bfloat16)))),
    "kept whole after forward": (2, lambda size: adamw(sharded(plain(), reshard_after_forward=False))),
    "offloaded": (2, lambda size: adamw(sharded(plain(), offload_policy=CPUOffloadPolicy(pin_memory=False)))),
    "foreach": (2, lambda size: adamw(sharded(plain()), foreach=True)),
    "fused": (2, lambda size: adamw(sharded(plain()), fused=True)),
    "amsgrad, uneven": (4, lambda size: adamw(sharded(plain()), amsgrad=True)),
    "LBFGS, replicated": (2, lambda size: with_lbfgs(build("ddp", size))),
    "average": (2, lambda size: {**adamw(sharded(plain())), "average": sharded(plain())}),
    "scaler": (
        2,
        lambda size: {**adamw(sharded(plain())), "scaler": torch.amp.GradScaler("cpu", 64.0, growth_interval=2)},
    ),
    "tied, one rank without a row": (4, lambda size: adamw(sharded(Tied()))),
    "tied over tensor parallel": (2, tied_over_tensor_parallel),
    "compiled": (2, lambda size: adamw(torch.compile(build("ddp", size), backend="eager"))),  # type: ignore[arg-type]
    "flattened mesh": (4, flattened),
    "three dimensions": (8, in_three_dimensions),
    "buffers of each rank": (2, own_buffers),
    "buffers beside shards": (2, lambda size: adamw(sharded(Running()))),
}


def one_step(state: State) -> float:
    """Take a step with a batch of this rank's own stream, as dropout would; return a number of that stream."""
    model, optimizer, scaler = state["model"], state["optimizer"], state.get("scaler")
    own = torch.rand(())
    # LBFGS keeps its loss: with batches of their own the ranks would differ, and no save would be possible.
    alike = isinstance(optimizer, torch.optim.LBFGS) or not isinstance(model, nn.parallel.DistributedDataParallel)
    seed = 7 if alike else int(torch.randint(1 << 30, ()))
    generator = torch.Generator().manual_seed(seed)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        if isinstance(model, Tied):
            ids = torch.randint(0, VOCABULARY, (8,), generator=generator)
            found = functional.cross_entropy(model(ids), ids.roll(1))
        else:
            found = model(torch.randn(8, 16, generator=generator)).float().pow(2).mean()
        (scaler.scale(found) if scaler else found).backward()
        return found

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(loss)  # type: ignore[no-untyped-call]
        return float(own)
    loss()
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    if "average" in state:
        with torch.no_grad():
            for average, live in zip(state["average"].parameters(), model.parameters(), strict=True):
                average.lerp_(live, 0.1)
    return float(own)


def said_of(state: State) -> dict[str, str]:
    """Digest every whole tensor of a state."""
    said = digests(state["model"], state["optimizer"])
    if "average" in state:
        said |= {
            f"average/{name}": one for name, one in digests(state["average"], torch.optim.SGD([{"params": []}])).items()
        }
    return {**said, "scaler": str(state["scaler"].state_dict())} if "scaler" in state else said


def save_and_go_on(rank: int, size: int, root: str, name: str) -> tuple[Any, Any]:
    """Train five steps, saved after three; and the last two again from the checkpoint, with new objects."""
    _, make = STATES[name]
    torch.manual_seed(0)
    state = make(size)
    torch.manual_seed(rank)
    with Checkpointer(config(root)) as ckpt:
        draws = [one_step(state) for _ in range(3)]
        ckpt.save(3, state)
    draws = [one_step(state) for _ in range(2)]
    torch.manual_seed(99)
    again = make(size)
    with Checkpointer(config(root)) as ckpt:
        assert ckpt.restore(again) == 3
    drawn = [one_step(again) for _ in range(2)]
    return (said_of(state), draws), (said_of(again), drawn)


@pytest.mark.parametrize("name", quick_first(STATES))
def test_a_state_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    """P12, P58: whatever the state is of, training that goes on from it is the same as without a break.

    Parameters, moments, buffers of each rank and every rank's random stream are.
    """
    size, _ = STATES[name]
    for without, resumed in run(size, save_and_go_on, str(tmp_path), name):
        assert resumed == without
        assert without[0]
    assert steps_of(tmp_path) == [3]


# ── another number of ranks ──────────────────────────────────────────────────────────────────────────────────────────


def hop(rank: int, size: int, kind: str, root: str, step: int) -> dict[str, Any]:
    """Restore the step before, if there is one, and save this one; return what was read and what there is."""
    state, count = state_of(kind, size, WIDE) if step > 1 else stepped(kind, size), watch(far=True)
    with Checkpointer(config(root, memory_dir=None)) as ckpt:
        assert ckpt.restore(state) == step - 1
        derived = ckpt.last_restore.derived_streams if ckpt.last_restore else None
        ckpt.save(step, state)
    return {"read": sum(count), "derived": derived, "digests": digests(state["model"], state["optimizer"])}


CHAINS = [
    [("fsdp", 2), ("fsdp", 3), ("tp", 2), ("ddp", 1)],
    [("2d", 4), ("ddp", 2)],
]
KINDS = ["fsdp", "tp", "ddp"]
WORLDS = [*product(KINDS, (1, 2, 3, 4)), ("2d", 4), ("hsdp", 4)]
MORE_CHAINS = [
    [("tp", 4), ("hsdp", 4), ("2d", 6), ("tp", 2), ("ddp", 3)],
    [("hsdp", 6), ("2d", 4), ("fsdp", 6), ("ddp", 2)],
]
# Each world once before each other one of every kind.
PAIRS = [[one, other, one] for one, other in product(WORLDS, WORLDS) if one < other]


@pytest.mark.parametrize("chain", quick_first([*CHAINS, *MORE_CHAINS]) + sparse(PAIRS, 5))
def test_another_number_of_ranks_has_the_same_tensors(tmp_path: Path, chain: list[tuple[str, int]]) -> None:
    """P48, P58: sharded along any dimension or replicated, with any number of ranks, the whole is the same.

    A host reads 1.05 times what it wants at most. Random streams are derived where the number is another one.
    """
    [*_, first] = run(chain[0][1], hop, chain[0][0], str(tmp_path), 1)
    for step, ((_, before), (kind, size)) in enumerate(pairwise(chain), start=2):
        wanted = state_bytes(tmp_path)
        found = run(size, hop, kind, str(tmp_path), step)
        assert all(rank["digests"] == first["digests"] for rank in found)
        assert all(bool(rank["derived"]) == (size != before) for rank in found)
        assert sum(rank["read"] for rank in found) <= 1.05 * wanted
    assert steps_of(tmp_path)[-1] == len(chain)


# ── buffers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def buffers_of(rank: int, size: int, root: str, step: int) -> set[float]:
    """Save buffers that hold the rank's number, also large and replicated ones; return what a restore brings.

    Where there is a step already, restore that, and save another one with a buffer that differs in all but rank 0.
    """
    mesh = init_device_mesh("cpu", (size,)) if size > 1 else None
    layers = nn.ModuleList([nn.BatchNorm1d(3, dtype=torch.float64) for _ in range(8)])
    layers.register_buffer("large", torch.zeros(1 << 17))
    replicated = torch.zeros(5)
    whole = DTensor.from_local(replicated, mesh, [Replicate()], run_check=False) if mesh else replicated
    layers.register_buffer("replicated", whole)
    held = [buffer.to_local() if isinstance(buffer, DTensor) else buffer for buffer in layers.buffers()]
    with Checkpointer(config(root)) as ckpt:
        for buffer in held:
            buffer.fill_(9 if step else rank)
        if not step:
            ckpt.save(1, {"model": layers})
            for buffer in held:
                buffer.fill_(9)
        ckpt.restore({"model": layers})
        found = {float(value) for buffer in held for value in buffer.reshape(-1)}
        if step:
            layers.get_buffer("large").mul_(2)
            ckpt.save(2, {"model": layers})
    return found


def test_buffers_are_those_of_each_rank(tmp_path: Path) -> None:
    """P58: running statistics come back whole, to each rank its own, from a copy too; one process gets rank 0's.

    A diff names the rank that differs.
    """
    root, copy = tmp_path / "run", tmp_path / "copy"
    assert run(3, buffers_of, str(root), 0) == [{0.0}, {1.0}, {2.0}]
    assert command("sync", root, copy).status == 0
    assert run(3, buffers_of, str(copy), 1) == [{0.0}, {1.0}, {2.0}]
    assert command("diff", root, f"{copy}@1").status == command("verify", root).status == 0
    found = command("diff", root, copy, "--group", "model", "--json").data["differences"]
    assert {one["place"] for one in found} == {f"model/{rank:05d}/large" for rank in (1, 2)}
    assert buffers_of(0, 1, str(root), 1) == {0.0}
