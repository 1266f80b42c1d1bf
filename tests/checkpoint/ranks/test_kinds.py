"""What a value is among the ranks: every kind of value × whether ranks differ × kind of parallelism."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckpt_tasks import ByRank, Checkpointer, open_run
from ckpt_tasks.checkpoint.memory.samples import take_samples
from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.state.tensors.device import Devices
from tests.checkpoint.ranks.training import attempt, build, config, steps_of
from tests.support.gang import run
from tests.support.sweeps import quick_first

SAVES = 64
LARGE = 200_000  # elements: as a parameter it would be divided among the ranks


class Holder:
    """An object with a state_dict of its own."""

    def __init__(self, **held: Any):
        self._held = held

    def state_dict(self) -> dict[str, Any]:
        return self._held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._held = state


def metric(own: float) -> Any:
    import torchmetrics  # takes seconds, in each rank of each test

    made = torchmetrics.SumMetric()
    made.persistent(mode=True)
    made.update(own)
    return made


# Values that are one for all ranks, made of a number that differs where ranks differ; where that is, and as what.
ONE: dict[str, tuple[Callable[[float], Any], str, str]] = {
    "number": (lambda own: own, "x", "2.0 and 1.0"),
    "tree": (lambda own: {"seen": [1, {"best": own}], "pair": (2, 3)}, "x/seen/1/best", "2.0 and 1.0"),
    "tuple": (lambda own: ("one", {"two": own, 3: 4}), "x/1/0/1", "2.0 and 1.0"),
    "tensor": (lambda own: torch.full((3,), own), "x/value", "[2.0, 2.0, 2.0] and float32[3] [1.0, 1.0, 1.0]"),
    "large tensor": (lambda own: {"big": torch.full((LARGE,), own)}, "x/big", "float32[1"),
    "array": (lambda own: {"a": np.full(5, own)}, "x/a", "float64[5] "),
    "large array": (lambda own: {"a": np.full(LARGE, own)}, "x/a", "float64["),
    "tensors": (lambda own: deque([torch.tensor(own), torch.tensor(3)], maxlen=9), "x/0", "float32[] 2.0 and"),
    "many tensors": (lambda own: [torch.full((n % 7,), own) for n in range(300)], "x/0", "and"),
    "stateful": (lambda own: Holder(sum=torch.tensor(own), count=2), "x/sum", "float32[] 2.0 and float32[] 1.0"),
    "stateful, no tensors": (lambda own: Holder(sum=own), "x/sum", "2.0 and 1.0"),
    "metric": (metric, "x/sum_value", "float32[] 2.0 and float32[] 1.0"),
    "object in a list": (lambda own: [Holder(w=torch.full((LARGE,), own))], "x_0/w", "float32["),
}
PARALLEL = ["plain", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ddp", "fsdp", "tp"))]


def content(value: Any) -> Any:
    """Return what a value holds, to be compared and sent."""
    if isinstance(value, ByRank):
        return content(value.value)
    if isinstance(value, (list, tuple, deque)):
        return [*map(content, value)]
    if isinstance(value, dict):
        return {key: content(item) for key, item in value.items()}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return sorted({*value.reshape(-1).tolist()}), [*value.shape]
    return content(dict(value.state_dict())) if hasattr(value, "state_dict") else value


def tried(rank: int, size: int, root: str, parallel: str, kinds: list[str]) -> dict[str, Any]:
    """Save the kinds of value: all of them equal, all by rank, and each one different; restore what was committed."""
    model = build(parallel, size)
    makes = {kind.replace(" ", "_").replace(",", ""): ONE[kind][0] for kind in kinds}
    found: dict[str, Any] = {}
    for form, own in (("equal", 1.0), ("by_rank", rank + 1.0)):
        state, again = ({kind: make(of) for kind, make in makes.items()} for of in (own, 9.0))
        if form == "by_rank":
            state, again = ({kind: ByRank(value) for kind, value in one.items()} for one in (state, again))
        with Checkpointer(config(f"{root}/{form}")) as ckpt:
            ckpt.save(1, {"model": model, **state})
            again["model"] = model
            assert ckpt.restore(again) == 1
        found[form] = {kind: content(again[kind]) for kind in makes}
    with Checkpointer(config(f"{root}/different")) as ckpt:
        for step, kind in enumerate(kinds):
            found[kind] = attempt(ckpt.save, step, {"model": model, "x": ONE[kind][0](rank + 1.0)})
    return found


OURS = [kind for kind in ONE if kind != "metric"]


@pytest.mark.parametrize("kinds", [OURS, pytest.param(["metric"], marks=pytest.mark.framework)], ids=["ours", "metric"])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_value_comes_back_as_it_was_or_is_refused(tmp_path: Path, parallel: str, kinds: list[str]) -> None:
    """P58: a value that all ranks have alike comes back; one that differs fails the save, by its key and both values.

    It never comes back as a mix, nor as another rank's. By rank, each rank has its own again.
    """
    for rank, found in enumerate(run(2, tried, str(tmp_path), parallel, kinds)):
        for form, own in (("equal", 1.0), ("by_rank", rank + 1.0)):
            assert [*found[form].values()] == [content(ONE[kind][0](own)) for kind in kinds]
        for kind in kinds:
            (_, key, values), (name, words) = ONE[kind], found[kind]
            assert name == "StateError", kind
            assert "rank 1 and rank 0 have different values: " in words
            assert f"at {key})" in words, words
            assert values in words, words
            assert "ByRank(value)" in words
    assert steps_of(tmp_path / "different") == []


def in_fsdp1(rank: int, size: int) -> Any:
    return FullyShardedDataParallel(build("plain", size), device_id=torch.device("cpu"))


def in_zero(rank: int, size: int) -> Any:
    return ZeroRedundancyOptimizer(build("ddp", size).parameters(), torch.optim.AdamW)


def on_meta(rank: int, size: int) -> Any:
    with torch.device("meta"):
        return torch.nn.Linear(3, 3)


def cut_oddly(rank: int, size: int) -> Any:
    mesh = init_device_mesh("cpu", (size,))
    local = torch.zeros(2 + rank)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([5]), stride=(1,))


def of_one_rank(rank: int, size: int) -> Any:
    return ByRank({"seen": distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (size,)), [Shard(0)])})


def in_a_pipeline(rank: int, size: int) -> Any:
    return torch.nn.ModuleDict({f"layer{rank}": torch.nn.Linear(3, 3)})


REFUSED: dict[Callable[[int, int], Any], str] = {
    in_a_pipeline: "rank 1 and rank 0 have different values",
    in_fsdp1: r"FullyShardedDataParallel \(FSDP1\).*fully_shard\(model\)",
    in_zero: r"a ZeroRedundancyOptimizer cannot be stored.*at x.*fully_shard\(model\)",
    on_meta: "at x/weight",
    cut_oddly: "at x",
    of_one_rank: "a DTensor of one rank alone cannot be stored .at x/seen",
}


def refused(rank: int, size: int, root: str) -> list[list[tuple[str, str]]]:
    found = []
    for make in REFUSED:
        state = {"x": make(rank, size)}
        with Checkpointer(config(f"{root}/{make.__name__}")) as ckpt:
            calls = (ckpt.restore, partial(ckpt.save, 1)) if make in (in_fsdp1, in_zero) else (partial(ckpt.save, 1),)
            found.append([attempt(call, state) for call in calls])
    return found


def test_what_ranks_cannot_save_is_refused_by_name(tmp_path: Path) -> None:
    """P7: values without bytes, a part that is not where it says, a module that hides its parameters, other tensors.

    Their key is named, it is said what to do instead, and nothing is written.
    """
    for rank in run(2, refused, str(tmp_path)):
        for make, said in zip(REFUSED, rank, strict=True):
            for name, words in said:
                assert name == ("StateError" if make is in_a_pipeline else "UnsupportedStateError"), make
                assert re.search(REFUSED[make], words, re.DOTALL), words
    assert [path.name for path in tmp_path.iterdir()] == [in_a_pipeline.__name__]
    assert not [*tmp_path.glob("*/checkpoint_*/*/*")]


def by_rank(rank: int, size: int, root: str, step: int) -> tuple[Any, ...]:
    """Save what each rank has, or go on from what another number of ranks has saved; return what came of it."""
    state: dict[str, Any] = {
        "model": build("plain", size),
        "seen": ByRank(10.0 + rank),
        "more": [ByRank(Holder(a=rank))],
    }
    with Checkpointer(config(root)) as ckpt:
        if step:
            ckpt.save(step, state)
        said = attempt(ckpt.restore, state)
        taken = None if said[0] == "None" else ckpt.restore(state, leave=["seen", "more_0"])
    return said, taken, content([state["seen"], state["more"]])


class Sum:
    """An object with a state of its own, a tensor and a number."""

    def __init__(self, start: float):
        self.total, self.steps = torch.tensor([start]), 0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.steps = state["total"], state["steps"]


def merged(saved: list[dict[str, Any]], rank: int, ranks: int) -> dict[str, Any]:
    """Give each rank its share of the sums of all."""
    return {"total": sum(each["total"] for each in saved) / ranks, "steps": max(each["steps"] for each in saved)}


def dealt(saved: list[Any], rank: int, ranks: int) -> list[Any]:
    """Deal the rows of all ranks out anew."""
    return [row for rows in saved for row in rows][rank::ranks]


def others(rank: int, size: int, root: str, step: int) -> tuple[Any, ...]:
    """Save what each rank has if `step`; else restore it, into a list and an object that the program holds, too."""
    rows, sums = ([torch.tensor(10.0 * rank), f"row {rank}"], Sum(1.0 + rank)) if step else ([], Sum(0.0))
    sums.steps = step + rank
    state: dict[str, Any] = {
        "rows": ByRank(rows, others=dealt),
        "sums": ByRank(sums, others=merged),
        "seen": ByRank(rank + 1 if step else 0, others=100),
    }
    with Checkpointer(config(root)) as ckpt:
        if step:
            ckpt.save(step, state)
        ckpt.restore(state)
    rows = [float(row) if isinstance(row, torch.Tensor) else row for row in rows]
    return rows, (sums.total.item(), sums.steps), state["seen"].value


def test_another_number_of_ranks_restores_what_others_says(tmp_path: Path) -> None:
    """Of 3 ranks' values 2, 4 and 1 get what a function makes of all, or their own, and additional ranks a value.

    A list that the program holds is refilled. The number of ranks that has saved them gets what it had.
    """
    root = str(tmp_path)
    had = [([10.0 * rank, f"row {rank}"], (1.0 + rank, 5 + rank), rank + 1) for rank in range(3)]
    assert run(3, others, root, 5) == had
    assert run(3, others, root, 0) == had
    rows = [row for rank in range(3) for row in (10.0 * rank, f"row {rank}")]
    for size in (2, 4):
        wanted = [(rows[rank::size], (6.0 / size, 7), rank + 1 if rank < 3 else 100) for rank in range(size)]
        assert run(size, others, root, 0) == wanted
    assert others(0, 1, root, 0) == (rows, (6.0, 7), 1)


@pytest.mark.slow
def test_others_that_fails_or_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    """A function that raises, or makes what cannot be stored, leaves the state as it was; `others` needs one value."""
    run(2, others, str(tmp_path), 5)

    def fails(saved: list[Any], rank: int, ranks: int) -> Any:
        raise ZeroDivisionError("injected")

    for make, error in ((fails, ZeroDivisionError), (lambda *_: {"rows": object()}, UnsupportedStateError)):
        rows, sums = ["here"], Sum(7.0)
        state = {"rows": ByRank(rows, others=make), "sums": ByRank(sums, others=merged), "seen": ByRank(0, others=1)}
        with Checkpointer(config(str(tmp_path))) as ckpt, pytest.raises(error):
            ckpt.restore(state)
        assert (rows, sums.total.item(), state["seen"].value) == (["here"], 7.0, 0)
    for value in (torch.nn.Linear(1, 1), [Sum(0.0), Sum(1.0)]):
        with pytest.raises(UnsupportedStateError, match="others is for a plain value or an object with a state"):
            open_run(str(tmp_path)).restore(open_run(str(tmp_path)).find("latest"), {"x": ByRank(value, others=merged)})


def test_another_number_of_ranks_is_told_what_it_cannot_restore(tmp_path: Path) -> None:
    """P48: what 2 ranks have by rank, neither 3 nor 1 get, nor is 1's dealt out to 2: by its key, with what to do."""
    root = str(tmp_path)
    assert [found[2] for found in run(2, by_rank, root, 1)] == [[10.0, [{"a": 0}]], [11.0, [{"a": 1}]]]
    alone = by_rank(0, 1, root + "/alone", 1)
    assert alone[2] == [10.0, [{"a": 0}]]
    for found in (*run(3, by_rank, root, 0), by_rank(0, 1, root, 0), *run(2, by_rank, root + "/alone", 0)):
        (name, words), taken, left = found
        assert name == "StateMismatchError"
        assert "seen (each rank's own, of" in words
        assert "more_0 (each rank's own, of" in words
        assert "leave=['seen', 'more_0']" in words
        assert taken == 1
        assert left[0] >= 10.0


@pytest.mark.parametrize("others", quick_first([0, 7, 200]))
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
