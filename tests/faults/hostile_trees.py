"""What an attacker does to the trees of a checkpoint: values that nobody captures, and groups that are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.faults.hostile import Body, Hostile, Raw, on_manifest
from tests.faults.hostile_cases import Case, add_to_tree

_PRIME = 2**61 - 1  # whole numbers that are multiples of it have the hash 0
NODES: dict[str, Any] = {
    "an unknown kind": {"~os.system": "true"},
    "a class": {"__reduce__": ["os.system", ["true"]]},
    "keys of one hash": {"~dict": [[n * _PRIME, 0] for n in range(1, 30_000)]},
    "a set of one hash": {"~set": [n * _PRIME for n in range(1, 30_000)]},
    "a frozen set of one hash in a key": {"~dict": [[{"~frozenset": [n * _PRIME for n in range(1, 30_000)]}, 0]]},
    "a deque without end": {"~deque": [2**62, []]},
    "a deque of too much": {"~deque": [2**70, []]},
    "a huge time": {"~timedelta": [10**20, 0, 0]},
    "a huge whole number": Raw("9" * 4300),
    "a scalar out of its bounds": {"~numpy": ["int8", 1000]},
    "a scalar that is a list": {"~numpy": ["float64", [1, 2]]},
    "a scalar of an object": {"~numpy": ["object", 1]},
    "a float for a whole scalar": {"~numpy": ["int64", {"~float": "nan"}]},
    "a device that is none": {"~torch": ["device", "banana"]},
    "a device of many digits": {"~torch": ["device", "cuda:99999999999999999999"]},
    "a size of too much": {"~torch": ["size", [2**70]]},
    "a negative size": {"~torch": ["size", [-1]]},
    "a module for a dtype": {"~torch": ["dtype", "nn"]},
    "half a pair for a dtype": {"~torch": ["dtype", "\ud800"]},
    "a tensor in a key": {"~dict": [[{"~tuple": [{"~tensor": "extra/big"}]}, 0]]},
    "a tensor in a set": {"~set": [{"~tensor": "extra/big"}]},
    "a tensor that is not there": {"~tensor": "extra/nothing"},
    "a tensor of another group": {"~tensor": "model/table"},
    "strides without end": {"~tensor": ["extra/big", {"stride": [2**62]}]},
    "strides of too much": {"~tensor": ["extra/big", {"stride": [2**70]}]},
    "negative strides": {"~tensor": ["extra/big", {"stride": [-1]}]},
    "too many strides": {"~tensor": ["extra/big", {"stride": [1] * 100_000}]},
    "a gradient for whole numbers": {"~tensor": ["extra/array", {"requires_grad": True}]},
    "an array that takes a gradient": {"~tensor": ["extra/big", {"requires_grad": True, "array": True}]},
    "bytes that are none": {"~bytes": "\ud800"},
    "a time that is none": {"~datetime": "9999-99-99"},
    "texts for pairs": {"~dict": ["ab", "cd"]},
    "half a pair": "\ud800",
    "half a pair for a key": {"\ud800": 1},
    "deep tuples": Raw('{"~tuple":[' * 120 + "1" + "]}" * 120),
}


def _on_groups(body: Body, change: Callable[[Body], Any]) -> None:
    change(body["groups"])


def _numpy_state(groups: Body, **changes: Any) -> None:
    for generator in (groups["rng"]["tree"]["numpy"], groups["noise"]["tree"]):
        generator["state"]["state"].update(changes)


def trees() -> Iterator[Case]:
    """Put what nobody captures into the trees of groups."""
    verbs = ("verify", "show", "diff", "export", "part", "go on")
    for what, node in NODES.items():
        yield Case(f"tree with {what}", on_manifest(add_to_tree, node), "any", verbs=verbs)
    streams: dict[str, Callable[[Body], Any]] = {
        "a position beyond its numbers": lambda g: _numpy_state(g, pos=2**31 - 1),
        "a position before its numbers": lambda g: _numpy_state(g, pos=-(2**31)),
        "a position that is a text": lambda g: _numpy_state(g, pos="1"),
        "a position of many digits": lambda g: _numpy_state(g, pos=10**30),
        "too few numbers": lambda g: _numpy_state(g, key={"~tensor": ["extra/array", {"array": True}]}),
        "texts for numbers": lambda g: _numpy_state(g, key="numbers"),
        "Python's stream of another length": lambda g: g["rng"]["tree"]["python"]["state"].update(numbers=[1, 2]),
        "Python's stream of huge numbers": lambda g: g["rng"]["tree"]["python"]["state"].update(numbers=[2**70] * 625),
        "another version": lambda g: g["rng"]["tree"]["python"]["state"].update(version=99),
        "torch's stream of another tensor": lambda g: g["rng"]["tree"]["torch"].update(state={"~tensor": "extra/big"}),
        "another kind, and a position beyond its numbers": lambda g: [
            g["rng"].update(kind="plain"),
            g["rng"]["tree"]["numpy"]["state"]["state"].update(pos=2**31 - 2),
        ],
        "no stream": lambda g: g["rng"].update(tree={}),
        "a stream of a device": lambda g: g["rng"]["tree"].update({"cuda:99": g["rng"]["tree"]["torch"]}),
        "a gauss that is none": lambda g: g["rng"]["tree"]["python"]["state"].update(gauss="x"),
    }
    for what, change in streams.items():
        yield Case(f"streams with {what}", on_manifest(_on_groups, change), "any", verbs=("verify", "go on"))
    groups: dict[str, Callable[[Body], Any]] = {
        "a module that is a list": lambda g: g["model"].update(tree=[1]),
        "a module that is nothing": lambda g: g["model"].update(tree=None),
        "a module that is an optimizer": lambda g: g["model"].update(kind="optimizer"),
        "an optimizer that is a module": lambda g: g["optimizer"].update(kind="module"),
        "a group of an unknown kind": lambda g: g["extra"].update(kind="pickle"),
        "an optimizer's state as pairs": lambda g: g["optimizer"]["tree"].update(state=[["a", {}]]),
        "an optimizer's state for others": lambda g: g["optimizer"]["tree"]["state"].update({"x/y": {}}),
        "an optimizer's entry of texts": lambda g: g["optimizer"]["tree"]["state"].update({"model/layer.bias": "x"}),
        "shapes of texts": lambda g: g["optimizer"]["tree"].update(shapes={"model/layer.bias": "x"}),
        "parameters that are lists": lambda g: g["optimizer"]["tree"]["param_groups"][0].update(params=[[1]]),
        "no parameter groups": lambda g: g["optimizer"]["tree"].update(param_groups=[]),
        "entries on the CPU that are numbers": lambda g: g["optimizer"]["tree"].update(on_cpu=7),
        "an optimizer's step of huge shape": lambda g: [
            entry.update(step={"~tensor": "model/table"}) for entry in g["optimizer"]["tree"]["state"].values()
        ],
        "100,000 groups": lambda g: g.update({f"g{n}": {"kind": "plain", "tree": 1} for n in range(100_000)}),
        "an object's state that it cannot take": lambda g: g["counting"].update(tree={"count": "x"}),
        "no groups": lambda g: g.clear(),
        "whole numbers of 3,000 digits": lambda g: g["extra"]["tree"]["~dict"][0].__setitem__(1, Raw("9" * 3000)),
    }
    for what, change in groups.items():
        harm = "values" if "whole numbers" in what else "any"
        yield Case(f"groups with {what}", on_manifest(_on_groups, change), harm)
    yield Case("an object named twice", lambda h: h.change_manifest(lambda b: b["objects"].append(b["objects"][0])),
               "checkpoint", named="manifest")  # fmt: skip
    yield Case("too many objects", _many_objects, "checkpoint", slow=True)


def _many_objects(h: Hostile) -> None:
    record = h.manifest()["objects"][0]
    names = (record[0].rpartition("/")[0] + f"/x-{n:05d}-of-00001-0.safetensors" for n in range(100_000))
    h.change_manifest(lambda body: body["objects"].extend([name, *record[1:]] for name in names))
