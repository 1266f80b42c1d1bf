"""A data loader and the random streams of training: a resume gives the same batches and the same weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableSampler
from ckpt_tasks.errors import StoreError
from ckpt_tasks.testing import settle
from tests.support.pipelines import Refusing, opened
from tests.support.roundtrip import restore, same_module, save

SAMPLES, BATCH, LAST = 20, 2, 25


def build(seed: int, *, workers: int, own: bool, persistent: bool = False) -> dict[str, Any]:
    """Return a state whose model draws for dropout, and whose loader shuffles by the process's stream or by its own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(3) if own else None
    loader: Any = StatefulDataLoader(
        TensorDataset(torch.arange(float(SAMPLES)).unsqueeze(1)),
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        generator=generator,
        persistent_workers=persistent,
    )
    state = {"data": loader, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3)}
    return state | ({"order": generator} if own else {})


def train(state: dict[str, Any], step: int, at: Callable[[int], None] = lambda step: None) -> list[list[float]]:
    """Train to the last step, epoch after epoch; return the batches."""
    batches: list[list[float]] = []
    at(step)
    while step < LAST:
        for (batch,) in state["data"]:
            batches.append(batch.flatten().tolist())
            state["optimizer"].zero_grad()
            state["model"](batch).square().mean().backward()
            state["optimizer"].step()
            step += 1
            at(step)
            if step == LAST:
                break
    return batches


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("workers", "persistent", "stop"),
    [
        *((0, False, stop) for stop in (0, 1, 10, 13)),
        *(pytest.param(2, p, stop, marks=pytest.mark.slow) for p in (False, True) for stop in (0, 10, 13)),
        (2, False, 3),
    ],
)
def test_a_stateful_data_loader_gives_the_same_batches_and_weights(
    own: bool, workers: int, persistent: bool, stop: int
) -> None:
    """P22, P73: what the loader's iter() draws is drawn before the streams are set: also through a second resume."""
    how: dict[str, Any] = {"workers": workers, "own": own, "persistent": persistent}
    whole, first, second = build(0, **how), build(8, **how), build(9, **how)
    kept: dict[int, Any] = {}

    def keep(state: dict[str, Any]) -> Callable[[int], None]:
        return lambda step: kept.update({step: save(state)}) if step in (stop, 17) else None

    expected = train(whole, 0, keep(whole))
    restore(kept[stop], first)
    assert train(first, stop, keep(first)) == expected[stop:]
    same_module(first["model"], whole["model"])
    restore(kept[17], second)
    assert train(second, 17) == expected[17:]
    same_module(second["model"], whole["model"])


def test_a_loader_that_loses_its_order_is_warned_of(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P22: a plain DataLoader that shuffles, in a variable or a program, is one warning; one that resumes is none."""
    data = TensorDataset(torch.zeros(8, 1))
    sampler = ResumableSampler(8, 2)
    quiet = [
        DataLoader(data, batch_size=2),
        DataLoader(data, batch_sampler=sampler),
        StatefulDataLoader(data, batch_size=2, shuffle=True),
    ]

    def warnings_of(name: str, count: int) -> int:
        caplog.clear()
        with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir / name), step_interval=1)) as ckpt:
            for step in range(1, count + 1):
                ckpt.step(step, {"w": torch.zeros(2), "data": sampler})
        return sum("DataLoader with shuffle=True" in one.getMessage() for one in caplog.records)

    caplog.set_level(logging.WARNING)
    assert warnings_of("quiet", 2) == 0
    quiet.append(DataLoader(data, batch_size=2, shuffle=True))
    assert warnings_of("loud", 3) == 1
    assert warnings_of("again", 1) == 0


def test_live_objects_are_looked_through_once(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P1: the look at all live objects is at the first save, not at every one until the store takes a checkpoint."""
    state = {"weights": torch.zeros(3)}
    with opened(run_dir, Refusing(), on_flush_failure="warn") as ckpt:
        ckpt.step(1, state)
        settle(ckpt)
        assert ckpt.last_commit is None
        loader = DataLoader(TensorDataset(torch.zeros(4)), shuffle=True)
        ckpt.step(2, state)
        settle(ckpt)
        assert "shuffle=True keeps no position" not in caplog.text, loader
        with pytest.raises(StoreError, match="no room, on purpose"):
            ckpt.wait()
