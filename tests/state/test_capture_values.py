"""Plain values: whatever the vocabulary has comes back as it was; the rest is refused by its path."""

from __future__ import annotations

import datetime as dt
import io
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from copy import deepcopy
from enum import Enum, Flag, IntEnum
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from torch import nn

from ckpt_tasks.errors import IntegrityError, StateMismatchError, UnsupportedStateError
from ckpt_tasks.format.tree import KINDS, TensorRef, Typed
from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.kinds.group_parts import GroupState
from ckpt_tasks.state.restoring import plan_restore
from ckpt_tasks.state.tensors.tensor_sources import HeldTensors
from ckpt_tasks.state.tensors.tensors import DTYPES, allocate, same_bits
from tests.support.roundtrip import assert_same, restore, save, trip


class Colour(Enum):
    RED = 1
    BLUE = "b"


class Level(IntEnum):
    LOW = 0


class Rights(Flag):
    READ = 1
    WRITE = 2
    RUN = 4


class Pair(NamedTuple):
    a: Any
    b: Any


VALUES: list[Any] = [
    *(None, 0, False, 0.0, -0.0, "", b"", b"\x00\xff", float("nan"), float("-inf"), 1 << 200, complex(0.0, -1.5)),
    {"0": "text", 0: "number"},
    {"a/b": 1, "a": {"b": 2}, "~tensor": "not one"},
    {True: 1, None: 2, (1, "x"): 3, 2.5: 4, b"k": 5, frozenset({(1, "a"), 2}): 6, "None": 7, "~dict": 8, "\ud800": 9},
    {"__class__": "os.system", "args": ["false"]},
    *(dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-3, seconds=7))), float("inf"), -(1 << 63)),
    *([1, (2, [3]), {}, [], ()], {1, "a", (2, 3)}, frozenset({1}), OrderedDict(b=1, a=2), Counter({"x": 0, 30: 2})),
    *(deque([1, 2], maxlen=3), dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC), dt.date(2026, 1, 2)),
    *(dt.timedelta(days=-1, microseconds=3), torch.float8_e5m2, torch.device("cuda", 3), torch.Size([0, 2])),
    *(np.float32(0.1), np.int64(-(1 << 62)), np.bool_(False), np.complex64(1 + 2j)),
    {np.int32(3): np.float64("nan"), torch.float16: 1},
    *(range(5, 0, -2), Path("/a/b"), PureWindowsPath("c:\\a"), bytearray(b"ab"), np.str_("a\0"), np.str_("")),
    *(np.datetime64(1, "ns"), np.datetime64("NaT"), np.timedelta64(-5, "D"), deque([np.random.SeedSequence([1, 2])])),
    *(Colour.RED, Level.LOW, Rights.READ | Rights.RUN, Rights(0), Pair(1, [Colour.RED]), defaultdict(list, {1: [2]})),
    {Colour.BLUE: 1, Level.LOW: 2, Path("a"): 3, np.str_("k"): 4, Pair(1, 2): 5, np.datetime64(0, "s"): 7},
    *({Colour.RED, Rights.RUN}, defaultdict(None, a=1), deque([Pair(1, torch.ones(2)), Pair(2, np.zeros(2))])),
    *(dt.datetime(2024, 10, 27, 2, 30, fold=1), dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=dt.UTC)),  # noqa: DTZ001
    *(np.array(["a", "bcd"]), np.array([["a", "b"]]).T, np.array([1, 2], ">i4"), np.array([1], "M8[ns]")),
    *(np.array([(1, [1, 2])], [("a", "u1"), ("b", "<f8", (2,))]), np.zeros((0, 2), "U3"), np.array("abc")),
    *(np.array([b"x"]), np.empty(2, "V0"), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(9)[::-2]),
    *(np.array(1.5, "f2"), np.zeros((0, 3), "u8"), np.array([1 + 2j], "c8"), np.broadcast_to([True, False], (3, 2))),
    *(np.frombuffer(b"abcd", "i1"), io.BytesIO(b"abc"), [io.BytesIO()]),
]
ODD_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "uncoalesced": lambda: torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.ones(2), (3,), check_invariants=True),
    "empty": lambda: torch.sparse_coo_tensor(torch.zeros(1, 0), torch.zeros(0), (4,), check_invariants=True),
    "gradient": lambda: torch.eye(2).to_sparse().requires_grad_(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.eye(3).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.5, 3, torch.quint8),
    "by channel": lambda: torch.quantize_per_channel(
        torch.eye(2), torch.tensor([0.5, 0.1]), torch.tensor([0, 1]), 1, torch.qint8
    ),
}


# A set's order changes from process to process, and the workers of xdist must name a test alike.
@pytest.mark.parametrize(
    "value", VALUES, ids=lambda v: f"{type(v).__name__}-{sorted(map(repr, v)) if isinstance(v, set) else v!r:.25}"
)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    """P6, P9, P27, P62: type by type, also beside what the program holds; digit strings stay strings, zeros zeros."""
    for fresh in (None, [0], deepcopy(value)):
        assert_same(value, trip(value, fresh))
    assert not isinstance(value, np.ndarray) or trip(value).flags.writeable
    assert_same([value, value], trip([value, value], [deepcopy(value), None]))


@pytest.mark.filterwarnings("ignore:.*(quantize|Sparse|sparse|rototype|deprecated).*")
def test_every_row_of_the_table_is_tried() -> None:
    """P59: a kind of value that no other test here has fails this one."""
    saved = save({"it": [*VALUES, *(make() for make in ODD_TENSORS.values())]}, rng=False)
    untried = {"~wrapper"}  # test_a_tensor_that_is_made_of_others_comes_back_as_it_was
    assert {row.tag for row in KINDS if f'{{"{row.tag}": ' not in saved.manifest} == untried


@pytest.mark.filterwarnings("ignore:.*(quantize|Sparse|sparse|rototype|deprecated).*")
@pytest.mark.parametrize("name", ODD_TENSORS)
def test_a_sparse_or_quantised_tensor_comes_back_as_it_was(name: str) -> None:
    """P6: layout, values and their order, coalesced or not, scales and gradient flag, at the top and inside."""
    make = ODD_TENSORS[name]
    for value, fresh in ((make(), None), (make(), make()), ([{"a": make()}], [{"a": make()}]), (Pair(1, make()), None)):
        assert_same(value, trip(value, fresh))


@pytest.mark.parametrize(
    ("value", "elements"),
    [
        *((torch.randn(3, 5).T, 15), (torch.randn(3, 3).T, 9), (torch.tensor(2.0).expand(3, 0), None)),
        (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), 120),
        (torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), 720),
        *((torch.randn(4, 1).expand(4, 3), 4), (torch.randn(1, 4, 1).expand(2, 4, 3), 4)),
        (torch.randn(3, 5, 2).permute(2, 0, 1), 30),
        *((torch.randn(6, 8)[1::2, ::3], 9), (torch.randn(6, 8).T[::2], 24), (torch.arange(9.0).unfold(0, 3, 1), 21)),
        (torch.randn(4, 6)[:, ::2].unsqueeze(0).expand(5, 4, 3), 12),
    ],
    ids=lambda one: str(one.stride()) if isinstance(one, torch.Tensor) else None,
)
def test_strides_come_back(value: torch.Tensor, elements: int | None) -> None:
    """P4, P5: dense tensors keep their strides, expanded ones stay so, gaps close, overlaps are ordinary memory."""
    back, turned = trip([value, value.T if value.dim() == 2 else 0])
    assert same_bits(back, value)
    assert value.dim() != 2 or same_bits(turned, value.T)
    if elements is not None:
        assert back.untyped_storage().nbytes() == 4 * elements
        assert back.stride() == value.stride() or len({*value.stride()}) < value.dim() or elements in (9, 24, 12)


@pytest.mark.parametrize("stride", [(1,), (1, -1), (10**9, 1), (4, 2)])
def test_strides_from_a_manifest_take_no_memory_that_they_should_not(stride: tuple[int, ...]) -> None:
    """P49: strides that do not fit the shape are an error, not an allocation."""
    with pytest.raises(IntegrityError, match="strides"):
        allocate(torch.zeros(2, 3), TensorRef("it", stride=stride), torch.device("cpu"))


def test_one_tensor_in_two_places_comes_back_as_one() -> None:
    """P4: identity inside a value is kept, between tensors and arrays too; equal values in two tensors stay two."""
    shared, twin = torch.arange(4), torch.arange(4)
    array = np.zeros(3)
    value = {"a": shared, "b": [shared, twin], "n": array, "t": torch.from_numpy(array)}
    saved = save({"it": value}, rng=False)
    assert len(saved.tensors) == 3
    back = trip(value)
    assert back["a"] is back["b"][0]
    assert back["a"] is not back["b"][1]
    back["n"][0] = 5
    assert back["t"][0] == 5


def test_requires_grad_comes_back() -> None:
    """P7: a leaf that requires a gradient does so again; a result with a history is refused."""
    back = trip([torch.ones(2, requires_grad=True), torch.ones(2), nn.Parameter(torch.ones(1))])
    assert [t.requires_grad for t in back] == [True, False, True]
    with pytest.raises(UnsupportedStateError, match="autograd history") as caught:
        capture({"it": {"loss": [torch.ones(2, requires_grad=True).sum()]}})
    assert caught.value.key == "it/loss/0"


class Words(dict[str, int]):
    pass


class More(Pair):
    """A subclass without slots, whose values may have attributes of their own."""


def with_attribute() -> More:
    made = More(1, 2)
    made.extra = 3  # type: ignore[attr-defined]
    return made


def cyclic() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


Local = Enum("Missing", ["ONE"])  # type: ignore[misc]  # under another name than its own
Again = Enum("Colour", ["RED"], module=__name__)  # type: ignore[misc]  # as after a reload of its module
NAN, NAT = float("nan"), np.datetime64("NaT", "s")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        *((lambda: 1, ""), (threading.Lock(), ""), (object(), ""), (Words(), ""), (nn.Linear, ""), (Local.ONE, "")),
        *((defaultdict(lambda: 0), ""), (np.array([object()]), ""), (np.longdouble(1), ""), (with_attribute(), "")),
        *((np.ma.masked_array([1]), ""), ({Pair(1, torch.ones(1)): 2}, ""), (type("Number", (int,), {})(3), "")),
        *((iter([]), ""), (..., ""), (1 << 100_000, ""), (dt.datetime(2024, 1, 1, tzinfo=ZoneInfo("Asia/Tokyo")), "")),
        *((torch.ones(2, device="meta"), ""), (nn.Parameter(torch.ones(1)).as_subclass(torch.Tensor) * 1, "")),
        ({Colour.RED: 1, Again.RED: 2}, "/<key <Colour.RED: 1>>"),
        *(({(-NAN, 1): 1, (NAN, 1): 2}, "/<key (nan, 1)>"), ({NAT, NAT.copy()}, f"/<key {NAT!r}>")),
        ({frozenset({np.float32(NAN), np.float32(NAN)}): 1}, "/<key np.float32(nan)>"),
        *((deque([nn.Linear(1, 1)]), "/0"), ({"x": {1: {object(): 2}}}, "/x/1"), (cyclic(), "/0/0/0")),
    ],
    ids=lambda v: str(type(v).__name__),
)
def test_what_cannot_be_stored_is_refused_by_path(value: Any, path: str) -> None:
    """P7: refused when planning, before a byte is written, with the path and with what to do."""
    with pytest.raises(UnsupportedStateError) as caught:
        save({"fine": 1, "it": {"deep": [0, value]}})
    assert (caught.value.key or "").startswith(f"it/deep/1{path}")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        (Typed("~named", ("builtins:tuple",), {"a": 1}), StateMismatchError),
        (Typed("~named", (f"{__name__}:Pair",), {"a": 1}), StateMismatchError),
        (Typed("~enum", (f"{__name__}:Colour", "GREEN"), {}), StateMismatchError),
        (Typed("~enum", ("os:abort", "RED"), {}), StateMismatchError),
        (Typed("~enum", ("no_such_module:Colour", "RED"), {}), StateMismatchError),
        (Typed("~enum", (f"{__name__}:Colour", "RED", "BLUE"), {}), IntegrityError),
        (Typed("~array", ("|O", [1]), {"bytes": 3}), IntegrityError),
        (Typed("~array", ("<U9", [1 << 40]), {"bytes": TensorRef("it/b", array=True)}), IntegrityError),
        (Typed("~sparse", ("torch.sparse_coo", [2], False, False), {"indices": TensorRef("it/i"), "values": 1}), None),
        (Typed("~quantized", (0.1, 0), {"values": TensorRef("it/b")}), IntegrityError),
        (Typed("~seeds", (1, [], 1 << 40, 0), {}), IntegrityError),
        (Typed("~path", ("os.system", "x"), {}), IntegrityError),
        (Typed("~time", ("O", 1), {}), IntegrityError),
    ],
    ids=str,
)
def test_what_is_not_what_it_claims_is_an_error(tree: Typed, error: type[Exception] | None) -> None:
    """P21, P49: a class of another form, an object that is none, bounds of other bytes: nothing is run or changed."""
    stored = {"it/b": torch.zeros(2), "it/i": torch.tensor([[5]])}
    shapes = {key: (DTYPES[tensor.dtype], tuple(tensor.shape)) for key, tensor in stored.items()}
    state = {"it": 1}
    with pytest.raises(error or IntegrityError):
        plan_restore(state, {"it": GroupState("plain", tree)}, shapes, rng=False).apply(HeldTensors(stored))
    assert state == {"it": 1}


@pytest.mark.parametrize("name", ["", "0", "a-b", "a/b", "../x", "rng", "a" * 65, "ünl", 3, None])
def test_a_name_that_cannot_be_a_group_is_refused(name: Any) -> None:
    """P42: group names are part of file names: letters, digits and underscores, and rng is taken."""
    with pytest.raises(UnsupportedStateError, match="name"):
        capture({name: 1})
    with pytest.raises(UnsupportedStateError, match="name"):
        restore(save({"it": 1}), {name: 1})
    with pytest.raises(UnsupportedStateError, match="dict of named objects"):
        capture(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_a_capture_does_not_change_when_the_state_does() -> None:
    """P1: containers are copied by the capture, so that a history that grows does not grow in the checkpoint."""
    state = {"history": [1, {"a": [2]}], "seen": {1}, "queue": deque([1])}
    captured = capture(state)
    state["history"][1]["a"].append(3)  # type: ignore[index]
    state["seen"].add(2)  # type: ignore[attr-defined]
    state["queue"].append(2)  # type: ignore[attr-defined]
    trees = {name: group.tree for name, group in captured.groups.items() if name != "rng"}
    assert trees == {"history": [1, {"a": [2]}], "seen": {1}, "queue": deque([1])}
