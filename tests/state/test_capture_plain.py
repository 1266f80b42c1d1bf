"""Plain values: restored into the objects that the program holds, and only where they fit."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import FormatVersionError, StateMismatchError, UnsupportedStateError
from ckpt_tasks.state.kinds.group_parts import GroupState
from ckpt_tasks.state.restoring import plan_restore
from tests.support.roundtrip import Meter, assert_same, restore, save


class Place(NamedTuple):
    """A named tuple of the program's."""

    n: int
    name: str


def test_parameters_in_a_list_keep_their_memory() -> None:
    """P20: tensors that an optimizer holds are copied into, not replaced; one too few is an error."""
    params = [torch.ones(2, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)]
    saved = save({"it": {"params": params, "step": 1}})
    fresh = [torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)]
    state: dict[str, Any] = {"it": {"params": [*fresh], "step": 0}}
    restore(saved, state)
    assert state["it"]["params"][0] is fresh[0]
    assert [p.detach().tolist() for p in fresh] == [[1.0, 1.0], [2.0, 2.0, 2.0]]
    with pytest.raises(StateMismatchError) as caught:
        restore(saved, {"it": {"params": [*fresh, torch.zeros(1, requires_grad=True)]}})
    assert caught.value.missing == ("it/params/2",)
    with pytest.raises(StateMismatchError) as caught:
        restore(saved, {"it": {"params": fresh[::-1]}})
    assert len(caught.value.different) == 2


@pytest.mark.parametrize(
    ("stored", "here", "said"),
    [
        (torch.ones(3), torch.zeros(2, requires_grad=True), "float32[2] here, float32[3] in the checkpoint"),
        (1, torch.zeros(2), "another value in the checkpoint"),
        (np.ones(2), torch.zeros(2), "an array in the checkpoint"),
        (torch.ones(2), np.zeros(2), "another value in the checkpoint"),
        (nn.Linear(1, 1), {}, "it (plain (dict) here, module in the checkpoint)"),
        ({}, nn.Linear(1, 1), "it (module (Linear) here, plain in the checkpoint)"),
    ],
)
def test_a_tensor_takes_no_other_kind_and_a_parameter_no_other_shape(stored: Any, here: Any, said: str) -> None:
    """P50: nothing is broadcast or cast into a tensor of the state's own, nor a module poured into a dict."""
    before = save({"it": here}).tensors
    with pytest.raises(StateMismatchError) as caught:
        restore(save({"it": stored}), {"it": here})
    assert said in caught.value.different[0]
    assert_same(save({"it": here}).tensors, before)


@dataclass
class Record:
    """A dataclass of the program's."""

    it: Any


PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "top": (lambda value: value, lambda state: state),
    "dict": (lambda value: {"k": value}, lambda state: state["k"]),
    "list": (lambda value: [0, value], lambda state: state[1]),
    "tuple": (lambda value: (value, 0), lambda state: state[0]),
    "beside a module": (lambda value: [value, nn.Linear(1, 1)], lambda state: state[0]),
    "dataclass": (Record, lambda state: state.it),
    "stateful": (lambda value: Meter(it=value), lambda state: state.values["it"]),
}
FRESH: dict[str, Callable[[int], Any]] = {
    "tensor": torch.zeros,
    "array": np.zeros,
    "texts": lambda n: np.full(n, "a"),
    "records": lambda n: np.zeros(n, [("a", "i4")]),
    "sparse": lambda n: torch.zeros(n, n).to_sparse(),
}


def _read_only(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    return value


CHANGES: dict[str, Callable[[str], tuple[Any, Any]]] = {
    "grown": lambda kind: (FRESH[kind](2), FRESH[kind](3)),
    "another dtype": lambda kind: (FRESH[kind](2), torch.ones(2).int() if kind == "tensor" else np.ones(2, "i2")),
    "read-only": lambda kind: (_read_only(FRESH[kind](2)), _read_only(FRESH[kind](2))),
    "the same": lambda kind: (FRESH[kind](2), FRESH[kind](2)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", FRESH)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_saved_is_restored_wherever_it_is(place: str, kind: str, change: str) -> None:
    """P50: a tensor or array that grew, changed its dtype or is read-only comes back in every place of a state."""
    put, get = PLACES[place]
    here, there = CHANGES[change](kind if (kind, change) != ("sparse", "another dtype") else "tensor")
    state = {"it": put(here)}
    restore(save({"it": put(there)}), state)
    assert_same(get(state["it"]), there)
    if change == "the same" and kind != "sparse" and place != "stateful":
        assert get(state["it"]) is here


def test_what_a_frozen_place_could_not_take_is_refused_at_the_save() -> None:
    """P7: nothing can be assigned into a tuple beside a module, so a read-only array or a sparse tensor is refused."""
    for value in (_read_only(np.zeros(2)), _read_only(FRESH["records"](2)), torch.eye(2).to_sparse()):
        with pytest.raises(UnsupportedStateError, match="in a tuple or frozen"):
            save({"it": (nn.Linear(1, 1), value)})
    saved = save({"it": (nn.Linear(1, 1), np.zeros(3))})
    with pytest.raises(StateMismatchError, match=r"it_1 \(float64\[2\] here, float64\[3\] in the checkpoint"):
        restore(saved, {"it": (nn.Linear(1, 1), np.zeros(2))})


REPLACED: list[tuple[Any, Any, str]] = [
    (3, [1, 2], "it: list of 2 → int 3. The first is restored"),
    ({"a": 1}, "text", "it: str 'text' → dict of 1. The first is restored"),
    ({"a": {"b": [1]}}, {"a": {"b": (1, 2)}}, "it/a/b: tuple of 2 → list of 1. The first is restored"),
    ([{}], [defaultdict(list, a=[1])], "it/0: defaultdict of 1 → dict {}. The first is restored"),
    ({"a": np.zeros(2)}, {"a": torch.ones(2)}, "it/a: float32 [2] → float64 [2]. The first is restored"),
    (np.zeros(2), np.zeros(3), "it: float64 [3] → float64 [2]. The first is restored"),
]
QUIET: list[tuple[Any, Any]] = [
    *((None, {"a": 1}), (0, 0.5), (float("inf"), np.float32(1)), (0.0, torch.tensor(0.5)), ([], [1, 2]), ("a", "b")),
    *(({}, {"a": 1}), ({"a": None}, {"a": torch.ones(2)}), ((), (1, 2)), (Path("a"), Path("b")), ({1}, set())),
    *((deque([Place(0, "a")]), deque([Place(1, "b")])), ({"a": torch.zeros(2)}, {"a": torch.zeros(3)})),
    ({"a": {}}, {"a": nn.Linear(1, 1).state_dict()}),
]


def test_a_value_of_another_kind_is_restored_and_said(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P50: one line names the key, what it was and what it is; numbers, None and longer lists are no other kind."""
    cases = {f"it{n}": case for n, case in enumerate([*REPLACED, *((*pair, "") for pair in QUIET)])}
    said = [case[2].replace("it", name, 1) for name, case in cases.items() if case[2]]
    config = CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=None)
    with Checkpointer(config) as ckpt:
        ckpt.save(1, {name: there for name, (_, there, _) in cases.items()})
    with Checkpointer(config) as ckpt:
        state = {name: here for name, (here, _, _) in cases.items()}
        assert ckpt.restore(state) == 1
        assert ckpt.last_restore is not None
        replaced = ckpt.last_restore.replaced
    assert [line in one for line, one in zip(said, replaced, strict=True)] == [True] * len(REPLACED)
    for name, (_, there, _) in cases.items():
        assert_same(state[name], there)
    (warned,) = [one.getMessage() for one in caplog.records if "other settings" in one.getMessage()]
    assert all(line in warned for line in said)


def test_a_read_only_state_is_refused_where_assigning_is_needed() -> None:
    """P50: a number in a state that cannot be assigned to is an error; a container in it is refilled."""
    saved = save({"numbers": [1]})
    held: list[int] = []
    restore(saved, MappingProxyType({"numbers": held}))
    assert held == [1]
    with pytest.raises(UnsupportedStateError, match="read-only"):
        restore(save({"step": 1}), MappingProxyType({"step": 0}))


def test_a_kind_from_the_future_is_refused() -> None:
    """P59: a group of a kind that this version does not know is not skipped."""
    with pytest.raises(FormatVersionError, match="unknown kind"):
        plan_restore({"it": 1}, {"it": GroupState("hologram", {})}, {}, rng=False)
