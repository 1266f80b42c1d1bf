"""Ranks that have drifted apart: what they hold alike is compared at every save, a few slices of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt_tasks import Checkpointer
from ckpt_tasks.errors import StateError
from ckpt_tasks.snapshot.device import Devices
from ckpt_tasks.snapshot.samples import take_samples
from tests.ranks.test_failures import steps_of
from tests.ranks.training import config
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


def buffers_of(rank: int, size: int, root: str) -> set[float]:
    """Save buffers that hold the rank's number, small ones and one that is large; return what a restore brings."""
    layers = nn.ModuleList([nn.BatchNorm1d(3, dtype=torch.float64) for _ in range(8)])
    layers.register_buffer("large", torch.zeros(1 << 17))
    for buffer in layers.buffers():
        buffer.fill_(rank)
    with Checkpointer(config(root)) as ckpt:
        ckpt.save(1, {"model": layers})
        for buffer in layers.buffers():
            buffer.fill_(9)
        ckpt.restore({"model": layers})
    return {float(value) for buffer in layers.buffers() for value in buffer.reshape(-1)}


def test_buffers_are_those_of_rank_0(tmp_path: Path) -> None:
    """Running statistics come back as DistributedDataParallel takes them: whole, and of rank 0."""
    assert run(2, buffers_of, str(tmp_path)) == [{0.0}, {0.0}]


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
