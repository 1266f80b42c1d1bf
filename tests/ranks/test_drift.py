"""Ranks that have drifted apart: what they hold alike is compared at every save, a few slices of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from ckpt_tasks import Checkpointer
from ckpt_tasks.errors import StateError
from ckpt_tasks.snapshot.samples import take_samples
from ckpt_tasks.tensors.device import Devices
from tests.ranks.test_failures import steps_of
from tests.ranks.training import config, digests
from tests.support.cli_runs import ckpt as ckpt_verb
from tests.support.gang import run

SAVES = 64


def drifts(rank: int, size: int, root: str, what: str) -> tuple[str, str | None]:
    """Save, drift in one way, and save again; return what the second save raises, and the key that it names."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 2000), nn.BatchNorm1d(2000), nn.Linear(2000, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Checkpointer(config(root)) as ckpt:
        ckpt.save(1, state)
        if what == "a batch of its own":
            model(torch.full((4, 40), 1.0 + rank))  # running statistics
        elif rank == 1:
            optimizer.step()
        try:
            ckpt.save(2, state)
        except StateError as error:
            for tensor in (*model.parameters(), *_tensors_of(optimizer)):
                torch.distributed.broadcast(tensor.data, 0)
            ckpt.save(3, state)
            return str(error), error.key
    return "", None


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for values in optimizer.state.values() for value in values.values()]


@pytest.mark.parametrize(("what", "steps"), [("a step of its own", [1, 3]), ("a batch of its own", [1, 2])])
def test_ranks_that_have_drifted_apart_are_named(tmp_path: Path, what: str, steps: list[int]) -> None:
    """A step that one rank took alone fails the next save in all, with a key; statistics of buffers are each rank's.

    What the error says next to do is done: the save after it counts.
    """
    for words, key in run(2, drifts, str(tmp_path), what):
        if 3 in steps:
            assert key is not None
            assert key.partition("/")[0] in {"model", "optimizer"}
            assert "rank 1 and rank 0 have different values" in words
            assert "broadcast the parameters and the optimizer's tensors from rank 0 before every save" in words
        else:
            assert words == ""
    assert steps_of(tmp_path) == steps


class Running(nn.Module):
    """A layer with running statistics, and a running value that its output depends on."""

    running: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 30), nn.BatchNorm1d(30), nn.Linear(30, 2))
        self.register_buffer("running", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        self.running.lerp_(out.detach().mean(0), 0.5)
        return out - self.running


def with_buffers(rank: int, size: int, root: str, kind: str) -> list[dict[str, str]]:
    """Train six steps on batches of this rank, and three and three; return digests of all that there is after each."""
    six = trained(rank, f"{root}/whole", kind, 6)
    trained(rank, f"{root}/parts", kind, 3)
    return [six, trained(rank, f"{root}/parts", kind, 6)]


def trained(rank: int, root: str, kind: str, last: int) -> dict[str, str]:
    model: nn.Module = (inner := Running())
    if kind == "fsdp":
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(inner, broadcast_buffers=kind == "ddp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "seen": dict(inner.named_buffers())}
    torch.manual_seed(rank)
    with Checkpointer(config(root, step_interval=3)) as ckpt:
        for step in range(ckpt.restore(state) + 1, last + 1):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step, state)
    return digests(inner, optimizer)


@pytest.mark.parametrize("kind", ["fsdp", *(pytest.param(k, marks=pytest.mark.slow) for k in ("ddp", "ddp, own"))])
def test_each_rank_goes_on_from_its_own_buffers(tmp_path: Path, kind: str) -> None:
    """P58: six steps are three and three bit for bit, also where buffers differ by rank; one process gets rank 0's."""
    ranks = run(2, with_buffers, str(tmp_path), kind)
    for whole, parts in ranks:
        assert whole == parts
    assert ranks[0][0]["running"] != ranks[1][0]["running"]
    model = Running()
    with Checkpointer(config(str(tmp_path / "parts"))) as ckpt:
        assert ckpt.restore({"model": model}, only=["model"]) == 6
    alone = digests(model, torch.optim.SGD(model.parameters()))
    assert alone == {name: ranks[0][0][name] for name in alone}
    assert ckpt_verb("diff", tmp_path / "whole", tmp_path / "parts", "--ignore", "rng").status == 0
    assert ckpt_verb("verify", tmp_path / "parts").status == 0


def buffers_of(rank: int, size: int, how: tuple[str, int]) -> set[float]:
    """Save buffers that hold the rank's number, also large and replicated ones; return what a restore brings.

    Where there is a step already, restore that, and save another one with a buffer that differs in all but rank 0.
    """
    root, step = how
    mesh = init_device_mesh("cpu", (size,))
    layers = nn.ModuleList([nn.BatchNorm1d(3, dtype=torch.float64) for _ in range(8)])
    layers.register_buffer("large", torch.zeros(1 << 17))
    layers.register_buffer("replicated", DTensor.from_local(torch.zeros(5), mesh, [Replicate()], run_check=False))
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
    """Running statistics come back whole, to each rank its own, from a copy too; a diff names the rank that differs."""
    root, copy = tmp_path / "run", tmp_path / "copy"
    assert run(3, buffers_of, (str(root), 0)) == [{0.0}, {1.0}, {2.0}]
    assert ckpt_verb("sync", root, copy).status == 0
    assert run(3, buffers_of, (str(copy), 1)) == [{0.0}, {1.0}, {2.0}]
    assert ckpt_verb("diff", root, f"{copy}@1").status == 0
    found = ckpt_verb("diff", root, copy, "--group", "model", "--json").data["differences"]
    assert {one["place"] for one in found} == {f"model/{rank:05d}/large" for rank in (1, 2)}


@pytest.mark.parametrize("others", [0, 7, 200])
def test_one_element_is_seen_when_its_turn_comes(others: int) -> None:
    """Whichever element of whichever tensor differs, one save of 64 compares it; each looks at a few tensors."""
    torch.manual_seed(0)
    held = {
        "scalar": torch.tensor(3.0),
        "matrix": torch.randn(300, 70),
        "transposed": torch.randn(70, 300).t(),
        "cube": torch.randn(20, 9, 20).to(torch.bfloat16),
        **{f"other {n}": torch.randn(3) for n in range(others)},
    }
    turns = [_look(held, turn) for turn in range(SAVES)]
    for key in ("scalar", "matrix", "transposed", "cube"):
        for _ in range(5):
            place = tuple(int(torch.randint(extent, ())) for extent in held[key].shape)
            changed = {**held, key: held[key].clone()}
            changed[key][place] += 1
            seen = [turn for turn in range(SAVES) if _look(changed, turn) != turns[turn]]
            assert seen, (key, place)
    assert all(len(found) <= 2 * SAVES for found in turns)


def _look(held: dict[str, torch.Tensor], turn: int) -> dict[str, str]:
    return take_samples({key: (one, (0,) * one.dim()) for key, one in held.items()}, turn, Devices()).digests()
