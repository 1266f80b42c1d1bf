"""Every optimizer of torch and of the libraries for fine-tuning, resumed twice in a program that changes nothing."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer

LAST = 6
# bitsandbytes 0.50.2 itself fails in the first step of these two on the CPU.
LEFT_OUT = {"Optimizer", "SparseAdam", "AdEMAMix32bit", "PagedAdEMAMix32bit"}
BEFORE = pytest.param("schedulefree", True, id="schedulefree, train() before the restore")
AFTER = pytest.param("schedulefree:AdamWScheduleFree", False, id="schedulefree, train() after the restore")
# Those of torch also go on in tests/objects/test_optimizer_state.py.
SLOW = ("schedulefree", "torch.optim", "bitsandbytes.optim")
OTHERS = [pytest.param(library, False, marks=pytest.mark.slow) for library in SLOW]


def kinds(library: str) -> Iterator[Any]:
    """Yield the optimizers of a library that train dense weights, or the one that is named behind it."""
    module, _, wanted = library.partition(":")
    for name, kind in sorted(vars(pytest.importorskip(module)).items()):
        is_one = isinstance(kind, type) and (issubclass(kind, torch.optim.Optimizer) or "Wrapper" in name)
        if is_one and name not in LEFT_OUT and wanted in {"", name}:
            yield kind


def made(kind: Any, model: nn.Module, **options: Any) -> Any:
    """Make an optimizer; its weights are matrices, since Muon takes no others."""
    weights = [p for p in model.parameters() if p.ndim == 2]
    if "Wrapper" in kind.__name__:
        return kind(torch.optim.SGD(weights, 0.01))  # It refuses most others at the first step.
    takes = inspect.signature(kind).parameters
    momentum = {"momentum": 0.9} if "momentum" in takes and kind.__module__.startswith("bitsandbytes") else {}
    return kind(weights, **({"lr": 0.01} if "lr" in takes else {}), **momentum, **options)


def trained(kind: Any, place: Path, last: int, *, train_first: bool, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = made(kind, model, **options)
    state = {"model": model, "optimizer": optimizer}

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = (model(x) - x.flip(1)).square().mean()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    turn = getattr(optimizer, "train", lambda: None)
    with Checkpointer(CheckpointConfig(checkpoint_dir=place, memory_dir=None)) as ckpt:
        if train_first:
            turn()
        step = ckpt.restore(state)
        turn()
        for _ in range(step, last):
            x = torch.randn(4, 64)
            if "Closure" in kind.__name__ or kind is torch.optim.LBFGS:
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()
        ckpt.save(last, state)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore")  # of bitsandbytes, on a host without a GPU
@pytest.mark.parametrize(("library", "train_first"), [BEFORE, AFTER, *OTHERS])
def test_an_optimizer_goes_on_and_a_right_program_is_told_nothing(
    library: str, train_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """P73: resumed twice, each optimizer ends bit for bit; what it counts in its param groups is no setting of yours.

    schedulefree's `train()` may come before the restore or after it. Its wrapper keeps the mode outside of its state:
    there `train()` comes before.
    """
    caplog.set_level(logging.WARNING, "ckpt_tasks")
    for kind in kinds(library):
        if "Wrapper" in kind.__name__ and not train_first:
            continue
        home = tmp_path / kind.__name__
        whole = trained(kind, home / "whole", LAST, train_first=train_first)
        legs = [trained(kind, home / "run", last, train_first=train_first) for last in (2, 4, LAST)]
        assert all(map(torch.equal, whole, legs[-1])), kind
        assert [one.getMessage() for one in caplog.records if one.name == "ckpt_tasks"] == [], kind


@pytest.mark.parametrize("train_first", [False, True])
def test_a_changed_option_is_told_of(train_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P50: an option that the restore replaces is told of, also where schedulefree's `train()` has come first."""
    kind = pytest.importorskip("schedulefree").AdamWScheduleFree
    trained(kind, tmp_path, 2, train_first=train_first)
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        trained(kind, tmp_path, 4, train_first=train_first, eps=1e-6)
    (said,) = caplog.messages
    assert "optimizer eps" in said
    assert said.count("optimizer ") == 1
