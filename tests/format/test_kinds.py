"""The trees of each kind of group: what a restore takes at its word is checked before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.saved_kinds import check_group, check_ref
from ckpt_tasks.format.tree import TensorRef

NUMPY = {"type": "numpy", "state": {"state": {"key": TensorRef("rng/key"), "pos": 624}, "buffer_pos": 4}}
GOOD: dict[str, Any] = {
    "module": {"weight": TensorRef("model/weight")},
    "optimizer": {
        "state": {"model/w": {"step": 1}},
        "shared": {},
        "other": {},
        "shapes": {"model/w": [2, 0]},
        "param_groups": [{"params": ["model/w"], "options": {"lr": 0.1}}],
        "on_cpu": ["model/w"],
    },
    "generator": NUMPY,
    "rng": {"numpy": NUMPY},
}
BAD: dict[str, list[Callable[[Any], Any]]] = {
    "module": [lambda tree: [1], lambda tree: 3, lambda tree: {1: 2}, lambda tree: {**tree, None: 1}],
    "optimizer": [
        *(lambda tree, part=part: {**tree, part: [["a", {}]]} for part in ("state", "shared", "other", "shapes")),
        *(lambda tree, part=part: {k: v for k, v in tree.items() if k != part} for part in GOOD["optimizer"]),
        lambda tree: tree["state"].update({1: {}}),
        lambda tree: tree["state"].update({"model/w": [1]}),
        lambda tree: tree["shapes"].update({1: [2]}),
        *(lambda tree, shape=shape: tree["shapes"].update({"v": shape}) for shape in ("2", [-1], [1.0], [True])),
        *(lambda tree, groups=groups: {**tree, "param_groups": groups} for groups in ({"a": 1}, None, [1])),
        *(lambda tree, names=names: tree["param_groups"][0].update(params=names) for names in ("w", [1], [[1]])),
        *(lambda tree, options=options: tree["param_groups"][0].update(options=options) for options in ([1], None)),
        *(lambda tree, names=names: {**tree, "on_cpu": names} for names in (7, "w", [1])),
    ],
    "generator": [
        lambda tree: [1],
        lambda tree: {**tree, "type": 1},
        lambda tree: {"state": tree["state"]},
        lambda tree: {"type": "numpy"},
        *(lambda tree, pos=pos: tree["state"]["state"].update(pos=pos) for pos in (625, -1, "1", 1.0, True, None)),
        *(lambda tree, pos=pos: tree["state"].update(buffer_pos=pos) for pos in (5, -1, "1", 1.0, True, None)),
    ],
    "rng": [
        lambda tree: [NUMPY],
        lambda tree: {**tree, 1: NUMPY},
        lambda tree: {**tree, "torch": [1]},
        lambda tree: tree["numpy"]["state"]["state"].update(pos=2**31 - 1),
    ],
}


@pytest.mark.parametrize("kind", GOOD)
def test_what_is_captured_is_taken(kind: str) -> None:
    """The tree of a group is not a fault of its kind; an optimizer may say nothing of the CPU."""
    check_group("rng" if kind == "rng" else "group", kind, GOOD[kind])
    check_group("group", "optimizer", {**GOOD["optimizer"], "on_cpu": None})
    check_group("group", "of another version", [1])


@pytest.mark.parametrize(("kind", "change"), [(kind, change) for kind, changes in BAD.items() for change in changes])
def test_what_nobody_captures_is_refused(kind: str, change: Callable[[Any], Any]) -> None:
    """P49: NumPy follows a position beyond its numbers out of its memory; a restore never sees such a tree."""
    tree = copy.deepcopy(GOOD[kind])
    changed = change(tree)
    name = "rng" if kind == "rng" else "group"
    with pytest.raises(IntegrityError, match=f"the tree of kind {kind} is malformed") as caught:
        check_group(name, kind, tree if changed is None else changed)
    assert caught.value.key == name


@pytest.mark.parametrize(("name", "kind"), [("rng", "plain"), ("rng", "generator"), ("noise", "rng")])
def test_the_random_streams_are_a_group_by_their_name(name: str, kind: str) -> None:
    """P49: a tree of another kind in the place of the streams would be restored unchecked."""
    with pytest.raises(IntegrityError, match="is of the kind"):
        check_group(name, kind, {"numpy": NUMPY})


A = TensorRef("a")
REFS: list[tuple[TensorRef, str, tuple[int, ...], bool]] = [
    *((A._replace(array=True), dtype, (2,), False) for dtype in ("bfloat16", "float8_e5m2")),
    *((A._replace(requires_grad=True), dtype, (2,), False) for dtype in ("int64", "bool")),
    (A._replace(array=True, requires_grad=True), "float32", (2,), False),
    *((A._replace(stride=stride), "float32", (2, 2), False) for stride in ((1,), (2, 1, 1), ())),
    (A._replace(array=True, stride=(1, 2)), "complex128", (2, 2), True),
    (A._replace(array=True), "uint16", (), True),
    (A._replace(requires_grad=True), "bfloat16", (2,), True),
    (A._replace(requires_grad=True, stride=()), "complex64", (), True),
    (A, "bool", (2,), True),
]


@pytest.mark.parametrize(("ref", "dtype", "shape", "good"), REFS)
def test_a_tensor_can_be_what_is_said_of_it(ref: TensorRef, dtype: str, shape: tuple[int, ...], good: bool) -> None:
    """P49: no array of a dtype that NumPy lacks, gradient of whole numbers, or other strides than dimensions."""
    if good:
        check_ref(ref, dtype, shape)
        return
    with pytest.raises(IntegrityError) as caught:
        check_ref(ref, dtype, shape)
    assert caught.value.key == "a"
