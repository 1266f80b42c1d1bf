"""What a value is among the ranks: every kind of value × whether ranks differ × kind of parallelism."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch.distributed.fsdp import FullyShardedDataParallel

from ckpt_tasks import ByRank, Checkpointer
from tests.ranks.test_disagreeing import attempt
from tests.ranks.test_failures import steps_of
from tests.ranks.training import build, config
from tests.support.gang import run

LARGE = 200_000  # elements: as a parameter it would be divided among the ranks


class Holder:
    """An object with a state_dict of its own."""

    def __init__(self, **held: Any):
        self._held = held

    def state_dict(self) -> dict[str, Any]:
        return self._held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._held = state


def metric(own: float) -> torchmetrics.Metric:
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


def tried(rank: int, size: int, root: str, parallel: str) -> dict[str, Any]:
    """Save the kinds of value: all of them equal, all by rank, and each one different; restore what was committed."""
    model = build(parallel, size)
    makes = {kind.replace(" ", "_").replace(",", ""): make for kind, (make, _, _) in ONE.items()}
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
        for step, (kind, (make, _, _)) in enumerate(ONE.items()):
            found[kind] = attempt(ckpt.save, step, {"model": model, "x": make(rank + 1.0)})
    return found


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_value_comes_back_as_it_was_or_is_refused(tmp_path: Path, parallel: str) -> None:
    """P58: a value that all ranks have alike comes back; one that differs fails the save, by its key and both values.

    It never comes back as a mix, nor as another rank's. By rank, each rank has its own again.
    """
    for rank, found in enumerate(run(2, tried, str(tmp_path), parallel)):
        for form, own in (("equal", 1.0), ("by_rank", rank + 1.0)):
            assert [*found[form].values()] == [content(make(own)) for make, _, _ in ONE.values()]
        for kind, (_, key, values) in ONE.items():
            name, words = found[kind]
            assert name == "StateError", kind
            assert "rank 1 and rank 0 have different values: " in words
            assert f"at {key})" in words, words
            assert values in words, words
            assert "ByRank(value)" in words
    assert steps_of(tmp_path / "different") == []


def in_fsdp1(rank: int, size: int, root: str) -> list[tuple[str, str]]:
    model = FullyShardedDataParallel(build("plain", size), device_id=torch.device("cpu"))
    with Checkpointer(config(root)) as ckpt:
        return [attempt(call, {"model": model}) for call in (ckpt.restore, partial(ckpt.save, 1))]


def test_fsdp1_is_refused_by_its_name(tmp_path: Path) -> None:
    """P7: a module in FullyShardedDataParallel fails the first restore and the first save, with what to do instead."""
    for said in run(2, in_fsdp1, str(tmp_path)):
        for name, words in said:
            assert name == "UnsupportedStateError"
            assert "FullyShardedDataParallel (FSDP1)" in words
            assert "fully_shard(model)" in words
    assert not [*tmp_path.iterdir()]


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
