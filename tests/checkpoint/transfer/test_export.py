"""Exports: every tensor under the name that others expect, bit by bit, verified, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.checkpoint.transfer.export import ExportReport, export_checkpoint, plan_export, write_export
from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.layout.image import STORED_DTYPES
from ckpt_tasks.format.layout.regions import Box
from ckpt_tasks.storage.local import LocalStore
from tests.support.cli_runs import flip, only, save
from tests.support.exports import INDEX, about, bits, export, export_for_torch, loaded, parts

VIEWED = {"complex128", "complex32", "float8_e8m0fnu", "float4_e2m1fn_x2"}
DTYPES = [name for name in STORED_DTYPES if hasattr(torch, name)]
numbers = count()


class Tied(nn.Module):
    """A language model in small: the embedding is the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)  # its counter is an int64 without dimensions
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def some(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Make a tensor of random bits: NaN payloads and all."""
    size_bytes = STORED_DTYPES[dtype].nbytes
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (*shape, size_bytes), dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).reshape(shape)


@contextmanager
def place(root: Path) -> Iterator[Path]:
    made = root / str(next(numbers))
    made.mkdir()
    try:
        yield made
    finally:
        rmtree(made)


# ── names and values ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("out", ["m.safetensors", "shards"])
def test_one_module_has_the_names_of_its_state_dict(tmp_path: Path, out: str) -> None:
    """P40: weights, float and integer buffers of a module go straight into load_state_dict, strictly."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    run = save(tmp_path / "run", {"model": model, "optimizer": torch.optim.Adam(model.parameters())}, 7)
    report = export(run, tmp_path / out, max_shard_bytes=None if "." in out else 40)
    fresh = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    fresh.load_state_dict(loaded(tmp_path / out), strict=True)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in fresh.state_dict().items())
    assert (report.step, report.run_key, report.groups) == (7, "run", ("model",))
    assert report.tensors == len(model.state_dict())
    assert report.size_bytes == sum(Path(file.path).stat().st_size for file in report.files)
    assert {Path(file.path) for file in report.files} == ({*(tmp_path / out).glob("*")} or {tmp_path / out})


@given(st.data())
def test_any_tensors_in_any_shards(fast_dir: Path, data: st.DataObject) -> None:
    """P6, P38, P39, P40: every bit of every tensor comes out, ties too, whatever the dtypes, shapes and shards are."""
    names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter("__metadata__".__ne__)
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    tensors = st.builds(some, st.sampled_from(DTYPES), shapes)
    state = data.draw(st.dictionaries(names, tensors, min_size=1, max_size=6))
    twice = data.draw(st.dictionaries(names, st.sampled_from(sorted(state)), max_size=3))
    state = {**{name: state[of] for name, of in twice.items()}, **state}
    limit = data.draw(st.none() | st.integers(1, 2000))
    with place(fast_dir) as here:
        run = save(here / "run", {"weights": state})
        out = here / ("out" if limit else "out.safetensors")
        report = export(run, out, groups=["weights"], max_shard_bytes=limit)
        found = loaded(out)
        assert found.keys() | report.tied.keys() == state.keys()
        assert not found.keys() & report.tied.keys()
        for name, tensor in state.items():
            assert bits(found[report.tied.get(name, name)]) == bits(tensor), name
        kinds = {name: str(state[name].dtype).removeprefix("torch.") for name in found}
        assert report.dtypes == {name: kind for name, kind in kinds.items() if kind in VIEWED}, "the file says so"
        if limit:
            check_index(out, report, limit)


def check_index(out: Path, report: ExportReport, limit: int) -> None:
    index = json.loads((out / INDEX).read_text())
    sizes = {}
    for n, file in enumerate(report.files[:-1], 1):
        path = Path(file.path)
        assert path.name == f"model-{n:05d}-of-{len(report.files) - 1:05d}.safetensors"
        sizes[path.name] = {name: tensor.nbytes for name, tensor in load_file(path).items()}
        assert len(sizes[path.name]) == 1 or sum(sizes[path.name].values()) <= limit
    assert index["weight_map"] == {name: file for file, names in sizes.items() for name in names}
    assert index["metadata"]["total_size"] == sum(sum(names.values()) for names in sizes.values())
    assert {p.name for p in out.iterdir()} == {*sizes, INDEX}


@pytest.mark.parametrize("out", ["m.safetensors", "shards"])
def test_tied_tensors_are_stored_once(tmp_path: Path, out: str) -> None:
    """P4: of names that share a tensor the first is stored, the others are listed, and a strict load has them all."""
    model = Tied()
    report = export(save(tmp_path / "run", {"model": model}), tmp_path / out)
    assert report.tied == {"head.weight": "embed.weight"}
    state = loaded(tmp_path / out)
    assert "head.weight" not in state
    file = tmp_path / out if "." in out else tmp_path / out / "model-00001-of-00001.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    assert metadata["head.weight"] == "embed.weight"  # as safetensors.torch.save_model lists it
    assert metadata["format"] == "pt"
    tied = json.loads(metadata["ckpt_tasks"])["tied"]
    assert tied == report.tied
    fresh = Tied()
    load_model(fresh, file, strict=True)
    assert torch.equal(fresh.head.weight, model.embed.weight)
    if "." not in out:
        index = json.loads((tmp_path / out / INDEX).read_text())["metadata"]
        assert index["head.weight"] == "embed.weight"
        assert index["ckpt_tasks"] == json.loads(metadata["ckpt_tasks"])


def test_several_groups_carry_their_names(tmp_path: Path) -> None:
    """Two modules keep apart by their groups' names, a tie across them is stored once, an optimizer has full keys."""
    model, other = nn.Linear(2, 3), nn.Linear(3, 2)
    other.bias = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": model, "critic": other, "again": model, "optimizer": optimizer}
    run = save(tmp_path / "run", state)
    report = export(run, tmp_path / "all.safetensors")
    assert report.groups == ("model", "critic", "again")
    assert {*load_file(tmp_path / "all.safetensors")} == {
        "model.weight", "model.bias", "critic.weight", "critic.bias",
    }  # fmt: skip
    assert report.tied == {"again.weight": "model.weight", "again.bias": "model.bias"}
    export(run, tmp_path / "again.safetensors", groups=["again"])
    nn.Linear(2, 3).load_state_dict(load_file(tmp_path / "again.safetensors"))
    report = export(run, tmp_path / "o.safetensors", groups=["optimizer", "critic", "optimizer"])
    found = load_file(tmp_path / "o.safetensors")
    assert {name for name in found if not name.startswith("optimizer/")} == {"critic.weight", "critic.bias"}
    buffers = {name: t for name, t in found.items() if name.endswith("weight/momentum_buffer")}
    assert [*map(bits, buffers.values())] == [bits(optimizer.state[model.weight]["momentum_buffer"])]


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_names_that_no_header_can_hold(tmp_path: Path, name: str) -> None:
    """P42: a name that safetensors cannot have makes its group one with full keys, which are all fit for it."""
    run = save(tmp_path / "run", {"odd": {name: torch.ones(2), "x": torch.zeros(1)}})
    export(run, tmp_path / "o.safetensors", groups=["odd"])
    found = load_file(tmp_path / "o.safetensors")
    assert sorted(map(bits, found.values())) == sorted([bits(torch.ones(2)), bits(torch.zeros(1))])
    assert all(key.startswith("odd/") for key in found)


def test_what_is_no_tensor_is_left_out_by_name(tmp_path: Path) -> None:
    """P39: an extra state does not get into the file, not even its tensors, and the report names it."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": torch.ones(1), "count": 3}

        def set_extra_state(self, state: Any) -> None: ...

    report = export(save(tmp_path / "run", {"model": Extra(2, 2)}), tmp_path / "m.safetensors")
    assert report.left_out == ("model/_extra_state",)
    assert {*load_file(tmp_path / "m.safetensors")} == {"weight", "bias"}


def test_an_export_says_where_it_came_from_and_nothing_else(tmp_path: Path) -> None:
    """Two exports are equal byte by byte, name run, step and digest, and tell progress of every byte."""
    run = save(tmp_path / "run", {"model": nn.Linear(20, 30)}, 3)
    source = open_run(str(run))
    for name in ("a", "b"):
        told: list[int] = []
        plan = plan_export(source.history.store, source.find(3), tmp_path / f"{name}.safetensors")
        assert not (tmp_path / f"{name}.safetensors").exists()
        assert write_export(source.history.store, plan, told.append) == plan.report
        assert sum(told) == plan.read_bytes == 4 * (20 * 30 + 30)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    origin = about(tmp_path / "a.safetensors")
    assert (origin["run_key"], origin["step"]) == ("run", 3)
    assert origin["manifest_digest"] == source.find(3).manifest_digest


# ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────────


CUBE = torch.arange(60.0).reshape(3, 4, 5)
WITHIN = [*(Box((n, m, 0), (1, 2, 5)) for n in (0, 1, 2) for m in (2, 0))]
COLUMNS = [Box((0, 0, 0), (3, 1, 2)), Box((0, 1, 0), (3, 3, 5)), Box((0, 0, 2), (3, 1, 3))]
ELEMENTS = [Box((a, b, c), (1, 1, 1)) for c in range(5) for b in range(4) for a in range(3)]


@pytest.mark.parametrize("boxes", [WITHIN, COLUMNS, ELEMENTS], ids=["within rows", "columns", "elements"])
def test_a_tensor_is_put_together_from_objects_of_other_checkpoints(tmp_path: Path, boxes: list[Box]) -> None:
    """P38, P58: parts of a tensor in several objects, of older checkpoints, go where they belong, in any order."""
    store = LocalStore(tmp_path / "run")
    export_checkpoint(store, parts(store, CUBE, boxes), tmp_path / "w.safetensors")
    assert torch.equal(load_file(tmp_path / "w.safetensors")["w"], CUBE)


# ── damage and failures ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def damaged(fast_dir: Path) -> Path:
    torch.manual_seed(0)
    return save(fast_dir / "damaged", {"model": nn.Linear(40, 30)})


@given(
    st.sampled_from(["model-*", "manifest.json", "index.arrow"]),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(["new", "new.safetensors", "new.pt"]),
)
def test_a_damaged_byte_anywhere_is_an_error(damaged: Path, pattern: str, where: float, out: str) -> None:
    """P49, P47: with any one bit flipped in an object that is needed, there is an error and no export."""
    path = only(damaged, f"checkpoint_*/*/{pattern}")
    at = int(where * path.stat().st_size)
    before = sorted(damaged.parent.iterdir())
    flip(path, at)
    try:
        with pytest.raises(IntegrityError):
            (export_for_torch if out.endswith(".pt") else export)(damaged, damaged.parent / out)
        assert sorted(damaged.parent.iterdir()) == before
    finally:
        flip(path, at)


def test_another_group_may_be_damaged(tmp_path: Path) -> None:
    """What is not exported is not read: weights can be had from a checkpoint whose optimizer is lost."""
    model = nn.Linear(2, 2)
    run = save(tmp_path / "run", {"model": model, "other": {"w": torch.ones(3)}})
    only(run, "checkpoint_*/*/other-*").unlink()
    export(run, tmp_path / "m.safetensors")
    model.load_state_dict(load_file(tmp_path / "m.safetensors"))
