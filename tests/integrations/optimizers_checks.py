"""Optimizers of the libraries for fine-tuning: an evaluation's mode, and options that a restore replaces."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer


def trained(place: Path, last: int, *, train_first: bool, **options: Any) -> list[torch.Tensor]:
    """Train with schedulefree, whose `train()` may come before the restore or after it."""
    schedulefree = pytest.importorskip("schedulefree")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01, **options)
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(CheckpointConfig(checkpoint_dir=place, memory_dir=None)) as ckpt:
        if train_first:
            optimizer.train()
        step = ckpt.restore(state)
        optimizer.train()
        for _ in range(step, last):
            x = torch.randn(4, 8)
            optimizer.zero_grad()
            (model(x) - x.flip(1)).square().mean().backward()
            optimizer.step()
        ckpt.save(last, state)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("train_first", [False, True])
def test_an_optimizer_with_modes_goes_on(train_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P50, P73: resumed twice it ends bit for bit, and nothing is told; an option that the restore replaces is told of.

    `optimizer.train()` before the first restore is no training.
    """
    caplog.set_level(logging.WARNING, "ckpt_tasks")
    whole = trained(tmp_path / "whole", 6, train_first=train_first)
    legs = [trained(tmp_path / "run", last, train_first=train_first) for last in (2, 4, 6)]
    assert all(map(torch.equal, whole, legs[-1]))
    assert caplog.messages == []
    trained(tmp_path / "run", 8, train_first=train_first, eps=1e-6)
    (said,) = caplog.messages
    assert "optimizer eps" in said
    assert said.count("optimizer ") == 1


def test_an_optimizer_that_has_taken_steps_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A step before the first restore of a new run is training that no checkpoint has."""
    schedulefree = pytest.importorskip("schedulefree")
    model = nn.Linear(2, 1)
    optimizer = schedulefree.AdamWScheduleFree(model.parameters())
    optimizer.train()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    config = CheckpointConfig(checkpoint_dir=tmp_path, memory_dir=None)
    with caplog.at_level(logging.WARNING, "ckpt_tasks"), Checkpointer(config) as ckpt:
        ckpt.restore({"model": model, "optimizer": optimizer})
    assert "optimizer has taken steps" in caplog.text
