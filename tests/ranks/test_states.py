"""Many ranks: what can be in a state goes on bit for bit, and what cannot be saved is refused by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from ckpt_tasks import ByRank, Checkpointer, ResumableLoader, ResumableSampler
from ckpt_tasks.errors import CkptError, ConfigError
from ckpt_tasks.format.digests import digest_hex
from tests.ranks.test_failures import steps_of
from tests.ranks.training import build, config, full
from tests.support.gang import run

VOCABULARY = 5  # on four ranks: two rows, two, one and none
State = dict[str, Any]


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


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    layers = [] if isinstance(model, Tied) else [child for child in model.children() if isinstance(child, nn.Linear)]
    for layer in (*layers, model):
        fully_shard(layer, **options)
    return model


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 7), nn.ReLU(), nn.Linear(7, 16))


def adamw(model: nn.Module, **options: Any) -> State:
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2, **options)}


def with_lbfgs(model: nn.Module) -> State:
    return {"model": model, "optimizer": torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)}


def with_average(size: int) -> State:
    state = adamw(sharded(plain()))
    average = sharded(plain())
    state["average"] = average
    return state


def with_scaler(size: int) -> State:
    return {**adamw(sharded(plain())), "scaler": torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)}


def tied() -> State:
    torch.manual_seed(0)
    return adamw(sharded(Tied()))


def tied_over_tensor_parallel(size: int) -> State:
    torch.manual_seed(0)
    model = Tied(8)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "out": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    model.out.weight = model.embedding.weight
    return adamw(model)


def replicated_and_sharded_and_tensor_parallel(size: int) -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 16))
    mesh = init_device_mesh("cpu", (2, size // 4, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return adamw(sharded(model, mesh=mesh["dp_replicate", "dp_shard"]))


def flattened(size: int) -> State:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp_shard", "cp"))
    return adamw(sharded(plain(), mesh=mesh["dp_shard", "cp"]._flatten("dp_shard_cp")))


STATES: dict[str, tuple[int, Callable[[int], State]]] = {
    "mixed precision": (2, lambda size: adamw(sharded(plain(), mp_policy=MixedPrecisionPolicy(torch.bfloat16)))),
    "kept whole after forward": (2, lambda size: adamw(sharded(plain(), reshard_after_forward=False))),
    "offloaded": (2, lambda size: adamw(sharded(plain(), offload_policy=CPUOffloadPolicy(pin_memory=False)))),
    "foreach": (2, lambda size: adamw(sharded(plain()), foreach=True)),
    "fused": (2, lambda size: adamw(sharded(plain()), fused=True)),
    "amsgrad, uneven": (4, lambda size: adamw(sharded(plain()), amsgrad=True)),
    "LBFGS, replicated": (2, lambda size: with_lbfgs(build("ddp", size))),
    "average": (2, with_average),
    "scaler": (2, with_scaler),
    "tied, one rank without a row": (4, lambda size: tied()),
    "tied over tensor parallel": (2, tied_over_tensor_parallel),
    "compiled": (2, lambda size: adamw(torch.compile(build("ddp", size), backend="eager"))),  # type: ignore[arg-type]
    "flattened mesh": (4, flattened),
    "three dimensions": (8, replicated_and_sharded_and_tensor_parallel),
}
QUICK = ("tied, one rank without a row",)


def one_step(state: State, step: int) -> None:
    model, optimizer, scaler = state["model"], state["optimizer"], state.get("scaler")
    generator = torch.Generator().manual_seed(step)

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
        return
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


def digested(state: State) -> dict[str, str]:
    """Digest every whole tensor of a state."""
    model = state["model"]
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{key}": value for key, value in state["optimizer"].state[parameter].items()}
    if "average" in state:
        found |= {f"average/{name}": value for name, value in state["average"].state_dict().items()}
    tensors = {name: full(value) for name, value in found.items() if isinstance(value, torch.Tensor)}
    said = {
        name: digest_hex(value.contiguous().view(torch.uint8).numpy().tobytes())
        for name, value in tensors.items()
        if value.dim()
    }
    if "scaler" in state:
        said["scaler"] = str(state["scaler"].state_dict())
    return said


def save_and_go_on(rank: int, size: int, root: str, name: str) -> tuple[Any, Any]:
    """Train five steps, saved after three; and the last two again from the checkpoint, with new objects."""
    _, make = STATES[name]
    state = make(size)
    with Checkpointer(config(root)) as ckpt:
        for step in range(1, 6):
            one_step(state, step)
            if step == 3:
                ckpt.save(step, state)
    again = make(size)
    with Checkpointer(config(root)) as ckpt:
        assert ckpt.restore(again) == 3
        for step in range(4, 6):
            one_step(again, step)
    return digested(state), digested(again)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STATES]
)
def test_a_state_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    """P12, P58: whatever the state is of, training that goes on from it is the same as without a break."""
    size, _ = STATES[name]
    for without, resumed in run(size, save_and_go_on, str(tmp_path), name):
        assert resumed == without
        assert without
    assert steps_of(tmp_path) == [3]


def refused(rank: int, size: int, root: str, what: str) -> tuple[str, str]:
    state: State
    if what == "meta":
        with torch.device("meta"):
            state = {"model": nn.Linear(3, 3)}
    elif what == "pipeline":
        state = {"model": nn.ModuleDict({f"layer{rank}": nn.Linear(3, 3)})}
    elif what == "by rank":
        state = {
            "own": ByRank({"seen": distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (size,)), [Shard(0)])})
        }
    else:
        local = torch.zeros(2 + rank)
        mesh = init_device_mesh("cpu", (size,))
        odd = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([5]), stride=(1,))
        state = {"odd": odd}
    ckpt = Checkpointer(config(root))
    try:
        ckpt.save(1, state)
    except CkptError as error:
        return type(error).__name__, str(error)
    finally:
        ckpt.close()
    return "None", ""


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("meta", "UnsupportedStateError", "model/weight"),
        ("odd cut", "UnsupportedStateError", "at odd"),
        ("by rank", "UnsupportedStateError", "a DTensor of one rank alone cannot be stored (at own/seen"),
        ("pipeline", "StateError", "different values"),
    ],
)
def test_what_ranks_cannot_save_is_refused_by_name(tmp_path: Path, what: str, kind: str, words: str) -> None:
    """P7: values without bytes, a part that is not where it says, and ranks that hold other tensors than rank 0."""
    for found, said in run(2, refused, str(tmp_path), what):
        assert found == kind, said
        assert words in said
    assert not [*tmp_path.glob("checkpoint_*/*/*")]
    if what != "pipeline":
        assert not [*tmp_path.iterdir()]


SAMPLES = 53


def take_batches(rank: int, size: int, root: str, steps: int) -> list[tuple[int, list[int]]]:
    """Take batches from where the last gang stopped; return each with its epoch."""
    sampler = ResumableSampler(SAMPLES, 3, rank=rank, world_size=size, drop_last=False, seed=7)
    state = {"data": sampler}
    taken: list[tuple[int, list[int]]] = []
    with Checkpointer(config(root, step_interval=1)) as ckpt:
        start = ckpt.restore(state)
        for step in range(start + 1, start + steps + 1):
            if sampler.epoch == 2:
                break
            epoch = sampler.epoch
            taken.append((epoch, next(iter(sampler))))
            sampler.advance()
            ckpt.save(step, state)
    return taken


def take_in_batches_of(rank: int, size: int, root: str, batch_size: int, steps: int) -> tuple[list[int], list[str]]:
    """Train under DDP from where the last gang stopped; return the samples, and what is said of the batch size."""
    loader = ResumableLoader(range(SAMPLES), batch_size, shuffle=True)  # type: ignore[arg-type]
    state = {"model": build("ddp", size), "data": loader}
    taken: list[int] = []
    with Checkpointer(config(root, step_interval=1)) as ckpt:
        start = ckpt.restore(state)
        for step, batch in zip(range(start + 1, start + steps + 1), loader, strict=False):
            taken += batch.tolist()
            ckpt.save(step, state)
        return taken, [said.partition(".")[0] for said in ckpt.last_restore.replaced] if ckpt.last_restore else []


def test_another_batch_size_under_ddp_goes_on_at_the_same_sample(tmp_path: Path) -> None:
    """P26: two ranks with batches of 4, then of 3, then of 5: each sample comes once in the epoch; a line says so."""
    plan = ((4, 2), (3, 4), (5, 99))
    legs = [run(2, take_in_batches_of, str(tmp_path), batch_size, steps) for batch_size, steps in plan]
    assert Counter(sample for leg in legs for taken, _ in leg for sample in taken) == Counter(range(SAMPLES))
    lines = [[], ["samples in a step: 8 → 6"], ["samples in a step: 6 → 10"]]
    assert [[said for _, said in leg] for leg in legs] == [[line] * 2 for line in lines]


DEALT = [("2d", "numbers"), ("tp", ""), ("tp", "mesh"), ("fsdp", ""), ("hsdp", ""), ("ddp", "")]


@pytest.mark.slow
def test_no_sample_is_lost_or_comes_twice(tmp_path: Path) -> None:
    """P26: two epochs over 1, 2, 4, 3 and 1 ranks: each sample comes once an epoch, in one order whatever the ranks."""
    counts: list[Counter[int]] = [Counter(), Counter()]
    for size, steps in ((1, 3), (2, 2), (4, 3), (3, 4), (1, 100)):
        for rank in run(size, take_batches, str(tmp_path), steps):
            for epoch, batch in rank:
                counts[epoch].update(batch)
    assert counts == [Counter(range(SAMPLES))] * 2


def deal(rank: int, size: int, root: str, kind: str, given: str) -> Any:
    """Save and restore a model and a loader; return the error by its key, or each rank's samples."""
    model = build(kind, size)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    places: dict[str, dict[str, Any]] = {"mesh": {"mesh": mesh["dp"]}, "numbers": {"rank": rank // 2, "world_size": 2}}
    loader = ResumableLoader(range(SAMPLES), 4, shuffle=True, **places.get(given, {}))  # type: ignore[arg-type]
    state = {"model": model, "data": [loader]}
    found = []
    for call in ("restore", "save"):
        with Checkpointer(config(f"{root}/{call}")) as ckpt:
            try:
                assert ckpt.restore(state) == 0 if call == "restore" else ckpt.save(1, state)
            except ConfigError as error:
                found.append((error.key, "ResumableLoader gives every rank other samples" in str(error)))
    return found or [sorted(batch.tolist()) for batch in loader]


@pytest.mark.parametrize(
    ("kind", "given"),
    [("2d", ""), ("2d", "mesh"), *(pytest.param(kind, given, marks=pytest.mark.slow) for kind, given in DEALT)],
)
def test_ranks_of_one_model_get_the_same_samples(tmp_path: Path, kind: str, given: str) -> None:
    """P26: under tensor parallelism a loader is told the mesh, or refused; FSDP2, HSDP and DDP need nothing."""
    ranks = run(4, deal, str(tmp_path), kind, given)
    if given or kind in {"fsdp", "hsdp", "ddp"}:
        groups = [ranks[0], ranks[2]] if given else ranks
        assert Counter(sample for batches in groups for batch in batches for sample in batch) == Counter(range(SAMPLES))
        assert not given or (ranks[0] == ranks[1] and ranks[2] == ranks[3])
    else:
        assert ranks == [[("0.weight", True)] * 2] * 4
