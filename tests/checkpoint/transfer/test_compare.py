"""Compare two checkpoints: every kind of difference is found, at its place, and nothing else is."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.checkpoint.transfer.comparison import Comparison, compare_checkpoints
from ckpt_tasks.checkpoint.transfer.distances import Regions, distances
from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.layout.regions import Box
from ckpt_tasks.run.opening import Opened, open_checkpoint
from ckpt_tasks.storage.local import LocalStore
from tests.support.cli_runs import flip, only, save
from tests.support.exports import parts


def compare(run_a: Path, run_b: Path) -> Comparison:
    a, b = open_run(str(run_a)), open_run(str(run_b))
    return compare_checkpoints(a.history.store, a.find("latest"), b.history.store, b.find("latest"))


def compared(tmp_path: Path, a: Any, b: Any) -> list[tuple[str, str]]:
    """Save two values as the group "x" and return (place, what) of their differences."""
    for name, value in (("a", a), ("b", b)):
        torch.manual_seed(0)  # the random streams are part of the state
        save(tmp_path / name, {"x": value})
    return [(one.place, one.what) for one in compare(tmp_path / "a", tmp_path / "b").differences]


def everything() -> dict[str, Any]:
    shared = torch.arange(6.0).reshape(2, 3)
    return {
        "tensor": torch.tensor([math.nan, -0.0, math.inf]),
        "tied": [shared, shared],
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "empty": torch.empty(0, 3),
        "point": torch.tensor(7),
        "array": np.arange(3, dtype=np.int16),
        "parameter": torch.ones(2, requires_grad=True),
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "plain": [None, True, 1, 1.0, -0.0, math.nan, 2**70, "é", b"\0", 1j, (1, [2]), {3: "int", "3": "str"}],
        "more": [deque([1], 4), {1, "a"}, frozenset(), OrderedDict(b=1, a=2), Counter("aab"), np.float32(0.5)],
        "words": [torch.float16, torch.device("cpu"), torch.Size([2]), datetime(2026, 1, 1, tzinfo=UTC)],
    }


def test_equal_states_are_equal(tmp_path: Path) -> None:
    """A state with every kind of value, saved twice, has no difference, and is counted in full."""
    for name in ("a", "b"):
        torch.manual_seed(0)
        save(tmp_path / name, {"x": everything(), "model": torch.nn.Linear(2, 2)})
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.equal
    assert found.groups["x"].tensors == 9
    assert found.groups["x"].values == 26


ONE = torch.tensor([1.0, 2.0, 3.0])


def shared(*, tied: bool) -> list[torch.Tensor]:
    first = ONE.clone()
    return [first, first if tied else first.clone()]


CASES: dict[str, tuple[Any, Any, list[tuple[str, str]]]] = {
    "values": ({"w": ONE}, {"w": ONE + torch.tensor([0, 0, 1])}, [("x/w", "values")]),
    "sign of zero": ({"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])}, [("x/w", "values")]),
    "NaN payload": (
        {"w": torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)},
        {"w": torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)},
        [("x/w", "values")],
    ),
    "dtype": ({"w": ONE}, {"w": ONE.double()}, [("x/w", "dtype")]),
    "shape": ({"w": ONE}, {"w": ONE[:2]}, [("x/w", "shape")]),
    "shape of as many": ({"w": torch.zeros(2, 3)}, {"w": torch.zeros(3, 2)}, [("x/w", "shape")]),
    "layout": ({"w": torch.zeros(2, 3)}, {"w": torch.zeros(3, 2).T}, [("x/w", "layout")]),
    "requires_grad": ({"w": ONE}, {"w": ONE.clone().requires_grad_()}, [("x/w", "requires_grad")]),
    "array": ({"w": ONE}, {"w": ONE.numpy()}, [("x/w", "type")]),
    "sharing": ({"w": shared(tied=True)}, {"w": shared(tied=False)}, [("x/w/1", "sharing")]),
    "tensor or number": ({"w": torch.tensor(1.0)}, {"w": 1.0}, [("x/w", "type")]),
    "missing": ({"w": ONE, "v": ONE}, {"w": ONE}, [("x/v", "only in A")]),
    "unexpected": ({"w": ONE}, {"w": ONE, "v": {"deep": [1]}}, [("x/v", "only in B")]),
    "number": ({"n": 1}, {"n": 2}, [("x/n", "value")]),
    "float": ({"n": 0.1}, {"n": math.nextafter(0.1, 1)}, [("x/n", "value")]),
    "float's sign of zero": ({"n": 0.0}, {"n": -0.0}, [("x/n", "value")]),
    "int or float": ({"n": 1}, {"n": 1.0}, [("x/n", "type")]),
    "int or bool": ({"n": 1}, {"n": True}, [("x/n", "type")]),
    "set of ints or bools": ({"n": {1}}, {"n": {True}}, [("x/n", "value")]),
    "kind of key": ({"n": {1: "a"}}, {"n": {"1": "a"}}, [("x/n/1", "only in A"), ("x/n/1", "only in B")]),
    "None": ({"n": None}, {"n": 0}, [("x/n", "type")]),
    "list or tuple": ({"n": [1]}, {"n": (1,)}, [("x/n", "type")]),
    "length": ({"n": [1, 2]}, {"n": [1]}, [("x/n", "length")]),
    "length and value": ({"n": [1, 2]}, {"n": [3]}, [("x/n/0", "value"), ("x/n", "length")]),
    "maxlen": ({"n": deque([1], 2)}, {"n": deque([1], 3)}, [("x/n", "value")]),
    "order": ({"n": OrderedDict(a=1, b=2)}, {"n": OrderedDict(b=2, a=1)}, [("x/n", "order")]),
    "order and a key": ({"n": OrderedDict(a=1, b=2, c=3)}, {"n": OrderedDict(c=3, a=1)}, [("x/n/b", "only in A")]),
    "order of a dict": ({"n": {"a": 1, "b": 2}}, {"n": {"b": 2, "a": 1}}, []),
    "NumPy scalar": ({"n": np.float32(1)}, {"n": np.float64(1)}, [("x/n", "value")]),
    "time zone": ({"n": datetime(2026, 1, 1)}, {"n": datetime(2026, 1, 1, tzinfo=UTC)}, [("x/n", "value")]),  # noqa: DTZ001
}


@pytest.mark.parametrize("case", CASES)
def test_each_kind_of_difference(tmp_path: Path, case: str) -> None:
    """P9, P50: what differs between two states is found, at its place, by its kind, and nothing else is."""
    a, b, expected = CASES[case]
    assert compared(tmp_path, a, b) == expected


def test_how_much(tmp_path: Path) -> None:
    """P50: of a tensor the differing elements are counted and the largest difference is given, of a number too."""
    torch.manual_seed(0)
    a = save(tmp_path / "a", {"x": {"w": torch.zeros(2, 3), "rate": 0.5, "text": "one"}})
    torch.manual_seed(0)
    w = torch.tensor([[0.0, 0.25, 0.0], [0.0, 0.0, -2.0]])
    b = save(tmp_path / "b", {"x": {"w": w, "rate": 0.75, "text": "two"}})
    values, rate, text = compare(a, b).differences
    assert (values.elements, values.differing, values.max_abs, values.a) == (6, 2, 2.0, "float32 [2, 3]")
    assert (rate.a, rate.b, rate.max_abs) == ("0.5", "0.75", 0.25)
    assert (text.a, text.b, text.max_abs) == ("'one'", "'two'", None)


@pytest.mark.parametrize("side", ["a", "b"])
def test_damaged_bytes_are_never_equal(tmp_path: Path, side: str) -> None:
    """P49: states whose digests agree while the bytes of one have changed are no equal states: IntegrityError."""
    for name in ("a", "b"):
        torch.manual_seed(0)
        save(tmp_path / name, {"x": ONE})
    shard = only(tmp_path / side, "checkpoint_*/*/x-*")
    flip(shard, shard.stat().st_size - 1)
    with pytest.raises(IntegrityError):
        compare(tmp_path / "a", tmp_path / "b")


def parts_of(store: LocalStore, tensor: torch.Tensor, boxes: list[Box]) -> Opened:
    """Write one tensor cut into boxes, each in an object of its own, as the ranks of a sharded save would."""
    return open_checkpoint(store, parts(store, tensor, boxes))


WHOLE = [Box((0, 0), (6, 8))]
ROWS = [Box((0, 0), (2, 8)), Box((2, 0), (4, 8))]
COLUMNS = [Box((0, 0), (6, 3)), Box((0, 3), (6, 3)), Box((0, 6), (6, 2))]
TILES = [Box((row, column), (1, 1)) for row in range(6) for column in range(8)]


@pytest.mark.parametrize(("cut_a", "cut_b"), [(WHOLE, TILES), (ROWS, COLUMNS), (TILES, ROWS)])
def test_however_a_tensor_is_cut(tmp_path: Path, cut_a: list[Box], cut_b: list[Box]) -> None:
    """P58: the same tensor cut in two ways is equal, and two changed elements are found once each."""
    a, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    c = LocalStore(tmp_path / "c")
    tensor = torch.arange(48.0).reshape(6, 8)
    other = tensor.clone()
    other[1, 2] += 0.5
    other[5, 7] -= 3
    opened_a, opened_b, opened_c = parts_of(a, tensor, cut_a), parts_of(b, tensor, cut_b), parts_of(c, other, cut_b)
    pair = [("x/w", "x/w")]
    assert distances(Regions(a, opened_a), Regions(b, opened_b), pair) == {}
    far = distances(Regions(a, opened_a), Regions(c, opened_c), pair)["x/w", "x/w"]
    assert (far.differing, far.max_abs) == (2, 3.0)


def test_the_same_bytes_elsewhere_are_not_equal(tmp_path: Path) -> None:
    """P58: a region whose bytes another region of the other side has, at another place, is not an equal one."""
    a, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    one = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    other = torch.tensor([[1.0], [1.0], [2.0], [4.0]])
    in_two = [Box((0, 0), (2, 1)), Box((2, 0), (2, 1))]
    in_three = [Box((0, 0), (1, 1)), Box((1, 0), (2, 1)), Box((3, 0), (1, 1))]
    sides = Regions(a, parts_of(a, one, in_two)), Regions(b, parts_of(b, other, in_three))
    assert distances(*sides, [("x/w", "x/w")])["x/w", "x/w"].differing == 2


def test_whole_groups(tmp_path: Path) -> None:
    """P50: a group on one side only, and one of another kind, are each one difference."""
    torch.manual_seed(0)
    a = save(tmp_path / "a", {"x": {"weight": ONE}, "y": {"n": 1, "w": ONE}})
    torch.manual_seed(0)
    b = save(tmp_path / "b", {"x": torch.nn.Linear(1, 1)})
    found = [(one.place, one.what) for one in compare(a, b).differences if not one.place.startswith("rng")]
    assert found == [("x", "kind"), ("y", "only in A")]
    assert compare(a, b).groups["y"].tensors == 1
