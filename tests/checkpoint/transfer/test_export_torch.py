"""Exports for torch: one file that torch.load(weights_only=True) reads, verified, whole or not at all."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt_tasks import Checkpointer
from ckpt_tasks.checkpoint.importing import ImportedRun
from ckpt_tasks.checkpoint.transfer.export import write_export
from ckpt_tasks.checkpoint.transfer.export_torch import plan_torch_export
from ckpt_tasks.checkpoint.transfer.importing.plan import plan_import
from ckpt_tasks.errors import ConfigError, IntegrityError, UnsupportedStateError
from ckpt_tasks.format.layout.image import STORED_DTYPES
from ckpt_tasks.format.layout.regions import Box
from ckpt_tasks.storage.local import LocalStore
from tests.support.cli_runs import config, save
from tests.support.exports import bits, equal, parts
from tests.support.exports import export_for_torch as export

CUBE = torch.arange(60.0).reshape(3, 4, 5)
ROWS = [Box((2, 0, 0), (1, 4, 5)), Box((0, 0, 0), (2, 4, 5))]
COLUMNS = [Box((0, 0, 0), (3, 1, 2)), Box((0, 1, 0), (3, 3, 5)), Box((0, 0, 2), (3, 1, 3))]


class Extra(nn.Linear):
    """A module with an extra state and a buffer."""

    def __init__(self, width: int):
        super().__init__(width, width)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.calls = {"n": 0}

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


def loaded(out: Path) -> Any:
    return torch.load(out, weights_only=True)


def fresh() -> dict[str, Any]:
    """Return what a loop has: two models that share a tensor, an optimizer over both in two groups, a schedule."""
    first, head = Extra(4), nn.Linear(4, 4, bias=False)
    model = nn.Sequential(first, nn.BatchNorm1d(4))
    head.weight = first.weight
    groups: list[dict[str, Any]] = [
        {"params": [*model[1].parameters()], "lr": 0.5},
        {"params": [*model[0].parameters()]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    values = {"average": {"a": torch.ones(3)}, "seen": (1, [2.5, None]), "odd": {7: "x"}}
    return {"model": model, "head": head, "optimizer": optimizer, "clock": schedule, **values}


def trained() -> dict[str, Any]:
    torch.manual_seed(3)
    state = fresh()
    for _ in range(3):
        state["head"](state["model"](torch.randn(5, 4))).square().sum().backward()
        state["optimizer"].step()
        state["clock"].step()
    state["model"][0].calls = {"n": 3}
    state["average"]["a"] += 1
    return state


def values_of(state: Any) -> Any:
    return {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in state.items()}


def test_a_loop_goes_on_from_the_file(tmp_path: Path, run_dir: Path) -> None:
    """P40: each group is what its object's state_dict() gives, and load_state_dict takes it; plain values are equal."""
    state = trained()
    report = export(save(run_dir, state, 7), tmp_path / "all.pt")
    found = loaded(tmp_path / "all.pt")
    about = found.pop("ckpt_tasks")
    assert equal(found, values_of(state))
    assert (about["run_key"], about["step"], report.left_out) == ("run", 7, ("rng",))
    assert report.files[0].size_bytes == (tmp_path / "all.pt").stat().st_size
    other = fresh()
    for name in ("model", "head", "optimizer", "clock"):
        other[name].load_state_dict(found[name])
        assert equal(other[name].state_dict(), state[name].state_dict())
    assert found["model"]["0.weight"].data_ptr() == found["head"]["weight"].data_ptr()


def test_there_and_back(tmp_path: Path, run_dir: Path) -> None:
    """P40: `import` makes the same groups of an export again, kinds, names of parameters and step; all is restored."""
    state = trained()
    export(save(run_dir, state, 7), tmp_path / "all.pt")
    plan = plan_import(tmp_path / "all.pt")
    again = config(tmp_path / "again", memory_dir=None)
    ImportedRun(again).add(plan)
    assert (plan.step, dict(plan.left)) == (7, {})
    other = {**fresh(), "average": {"a": torch.zeros(3)}, "seen": (0, []), "odd": {}}
    with Checkpointer(again) as ckpt:
        assert ckpt.restore(other) == 7
    assert equal(values_of(other), values_of(state))


@pytest.mark.parametrize("lie", [{"model": "optimizer"}, {"gone": "plain"}])
def test_a_file_that_lies_about_itself_is_refused(tmp_path: Path, lie: dict[str, str]) -> None:
    """P49: an import believes no kind that the value is not of."""
    about = {"kinds": lie, "parameters": {}, "step": 3}
    torch.save({"model": {"w": torch.ones(2)}, "rng": 1, "ckpt_tasks": about}, tmp_path / "a.pt")
    with pytest.raises(IntegrityError, match="does not hold the group"):
        plan_import(tmp_path / "a.pt")


def test_one_group_is_the_file(tmp_path: Path, run_dir: Path) -> None:
    """One group that is named is the whole content, as its state_dict; several are a dict of their names."""
    state = trained()
    save(run_dir, state)
    export(run_dir, tmp_path / "model.pt", groups=["model"])
    assert equal(loaded(tmp_path / "model.pt"), dict(state["model"].state_dict()))
    export(run_dir, tmp_path / "two.pt", groups=["head", "seen"])
    assert loaded(tmp_path / "two.pt").keys() == {"head", "seen", "ckpt_tasks"}


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")  # torch says so of every complex32
def test_every_dtype(tmp_path: Path, run_dir: Path) -> None:
    """P40: every dtype comes back with its bits, its shape and its flag; also mapped, and without elements."""
    found: dict[str, torch.Tensor] = {"grad": torch.ones(2).requires_grad_(), "turned": torch.ones(2, 3).T}
    for dtype in (name for name in STORED_DTYPES if hasattr(torch, name)):
        size_bytes = STORED_DTYPES[dtype].nbytes
        raw = torch.randint(0, 2 if dtype == "bool" else 256, (2, 3, size_bytes), dtype=torch.uint8)
        tensor = raw.view(getattr(torch, dtype)).reshape(2, 3)
        found |= {dtype: tensor, f"no {dtype}": tensor[:0], f"one {dtype}": tensor[0, 0]}
    export(save(run_dir, {"t": found}), tmp_path / "t.pt", groups=["t"])
    for mapped in (False, True):
        back = torch.load(tmp_path / "t.pt", weights_only=True, mmap=mapped)
        for name, one in found.items():
            assert (back[name].dtype, back[name].shape) == (one.dtype, one.shape)
            assert back[name].requires_grad == one.requires_grad
            assert bits(back[name]) == bits(one)


@pytest.mark.parametrize("boxes", [ROWS, COLUMNS], ids=["rows", "columns"])
def test_a_tensor_is_put_together(tmp_path: Path, boxes: list[Box]) -> None:
    """P38, P58: a tensor that ranks have cut into several objects is whole; the zip file's own sums are right."""
    store = LocalStore(tmp_path / "run")
    plan = plan_torch_export(store, parts(store, CUBE, boxes), tmp_path / "w.pt", groups=["x"])
    told: list[int] = []
    write_export(store, plan, told.append)
    assert sum(told) == plan.read_bytes == CUBE.nbytes
    assert torch.equal(loaded(tmp_path / "w.pt")["w"], CUBE)
    with zipfile.ZipFile(tmp_path / "w.pt") as file:
        assert file.testzip() is None


@pytest.mark.parametrize(
    ("value", "where"),
    [(np.ones(2), "x/a"), (np.float64(1), "x/a"), (frozenset({1}), "x/a")],
    ids=["array", "scalar", "frozenset"],
)
def test_what_torch_would_not_read_is_refused(tmp_path: Path, run_dir: Path, value: Any, where: str) -> None:
    """P39: a value that weights_only=True refuses is an error with its path and what to do; nothing is written."""
    save(run_dir, {"model": nn.Linear(2, 2), "x": {"a": value}})
    for groups in (None, ["x"]):
        with pytest.raises(UnsupportedStateError, match="--group") as refused:
            export(run_dir, tmp_path / "m.pt", groups=groups)
        assert refused.value.key == where
    assert [*tmp_path.iterdir()] == [run_dir]
    export(run_dir, tmp_path / "m.pt", groups=["model"])


def test_streams_are_not_for_others(tmp_path: Path, run_dir: Path) -> None:
    """Random streams are left out, and refused where they are asked for."""
    save(run_dir, {"model": nn.Linear(2, 2), "own": random.Random(3)})
    assert export(run_dir, tmp_path / "m.pt").left_out == ("own", "rng")
    for group in ("own", "rng"):
        with pytest.raises(ConfigError, match="random streams"):
            export(run_dir, tmp_path / "n.pt", groups=["model", group])
