"""The names of a DCP state: DCP's flat names, and the groups and trees that they become in a checkpoint.

DCP flattens a state: a value's name is its path, joined by dots. Here the first part of a path is a group, as for a
Checkpointer, and the rest is the path in the group's tree. Values without a group of their own (the tensors of a model
whose state_dict is the whole state) are in the *root* group, whose name is not part of DCP's names. If DCP's own
flattening of the groups would not give the same names and paths again, a group `dcp` holds both unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element

from ckpt_tasks.errors import ConfigError, IntegrityError
from ckpt_tasks.format.keys import is_group
from ckpt_tasks.format.saved_kinds import RNG
from ckpt_tasks.format.tree import TensorRef, encode
from ckpt_tasks.state.kinds.group_parts import Saved
from ckpt_tasks.state.kinds.optimizers import as_state_dict, parameters_in

ROOT = "dcp_root"  # This key of a manifest's environment names the root group, or NO_ROOT.
NO_ROOT = "-"
_EXACT = "dcp"  # The group that holds names and paths unchanged.
_EXTRA = "_extra_state"

Path = tuple[str | int, ...]
Paths = Mapping[str, Path]
Values = Mapping[str, Any]


class Naming(NamedTuple):
    """The names of a state: the root group; `places` has for each of DCP's names its group and its path in the group.

    `exact`: the group `dcp` holds names and `paths`; `paths` is None if DCP's planner has none.
    """

    root: str
    places: Mapping[str, tuple[str, Path]]
    keys: Mapping[str, str]
    paths: Paths | None
    exact: bool


def name_all(tensors: Mapping[str, bool], paths: Paths | None) -> Naming:
    """Choose the groups of a state; `tensors` says for each of DCP's names whether it is a tensor."""
    known = paths is not None or all(tensors.values())
    full = {name: tuple((paths or {}).get(name, (name,))) for name in tensors}
    tops = {path[0] for name, path in full.items() if len(path) > 1 or not tensors[name]}
    own = {str(top) for top in tops if is_group(str(top)) and top != RNG}
    root = next(
        name for name in ("model", "state", "root_state", *map("root_{}".format, range(len(own)))) if name not in own
    )
    places = {name: (str(path[0]), path[1:]) if path[0] in own else (root, path) for name, path in full.items()}
    used = root if any(group == root for group, _ in places.values()) else NO_ROOT
    naming = Naming(used, places, _keys(places, tensors), paths, False)
    if known and _derived(naming, tensors) == full:
        return naming
    places = {name: (_EXACT, (name,)) for name in tensors}
    return Naming(_EXACT, places, _keys(places, tensors), paths, True)


def _derived(naming: Naming, tensors: Mapping[str, bool]) -> Paths | None:
    """Return the names and paths that `flat_state` will return; None if it cannot derive them."""
    leaf = torch.empty(0)
    try:
        trees = _trees(naming, {name: leaf if is_tensor else 0 for name, is_tensor in tensors.items()})
        return flatten_state_dict(_state(trees, naming.root))[1]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None


def _keys(places: Mapping[str, tuple[str, Path]], tensors: Mapping[str, bool]) -> dict[str, str]:
    """Return each tensor's key: its group and its path, joined by slashes; a taken key gets a number."""
    keys: dict[str, str] = {}
    taken = set[str]()
    for name, is_tensor in tensors.items():
        if is_tensor:
            group, path = places[name]
            key, number = f"{group}/{'/'.join(map(str, path))}", 2
            while key in taken or key.endswith("__metadata__"):
                key, number = f"{group}/{'/'.join(map(str, path))}~{number}", number + 1
            keys[name] = key
            taken.add(key)
    return keys


def groups_of(naming: Naming, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Make a manifest's groups from packed values by DCP's names, with a TensorRef for each tensor."""
    if naming.exact:
        paths = None if naming.paths is None else {name: [*path] for name, path in naming.paths.items()}
        tree = {"paths": paths, "values": dict(values)}
        return {_EXACT: {"kind": "plain", "tree": encode(tree, _EXACT)}}
    trees = _trees(naming, values)
    modules = {group for group, tree in trees.items() if _is_module(tree)}
    groups = {}
    for group, tree in trees.items():
        kind = "module" if group in modules else "stateful" if isinstance(tree, dict) else "plain"
        named = _named(tree, {name: trees[name] for name in modules})
        kind, tree_of = (kind, tree) if named is None else ("optimizer", named)
        groups[group] = {"kind": kind, "tree": encode(tree_of, group)}
    return groups


def _trees(naming: Naming, values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, (group, path) in naming.places.items():
        if name in values:
            set_element(nested, (group, *path), values[name])
    return nested


def _is_module(tree: Any) -> bool:
    """Return True if a tree is that of a module's state_dict: tensors by name, and results of get_extra_state."""
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        return False
    others = [name for name, value in tree.items() if type(value) is not TensorRef]
    return len(others) < len(tree) and all(name.endswith(_EXTRA) for name in others)


# ── optimizers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _named(tree: Any, modules: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the tree as an optimizer's, if it names its parameters like one module, as torch's get_state_dict does.

    Returns None for any other tree: the parameters of its numbers could only be guessed.
    """
    if not _is_optimizer(tree):
        return None
    param_groups = tree["param_groups"]
    names = [*tree["state"], *(name for group in param_groups for name in group["params"])]
    owners = [group for group, module in modules.items() if all(name in module for name in names)]
    if not names or len(owners) != 1 or not all(isinstance(entry, dict) for entry in tree["state"].values()):
        return None
    module = owners[0]
    return {
        "state": {f"{module}/{name}": entry for name, entry in tree["state"].items()},
        "shared": {},
        "param_groups": [
            {
                "params": [f"{module}/{name}" for name in group["params"]],
                "options": {name: value for name, value in group.items() if name != "params"},
            }
            for group in param_groups
        ],
        "other": {},
        "shapes": {},
        "on_cpu": None,
    }


def _is_optimizer(tree: Any) -> bool:
    """Return True if a tree has the form of an optimizer's, with lists of names as its parameters."""
    if not isinstance(tree, dict) or set(tree) != {"state", "param_groups"} or not isinstance(tree["state"], dict):
        return False
    groups = tree["param_groups"]
    if not isinstance(groups, list) or not all(type(group) is dict and "params" in group for group in groups):
        return False
    return all(type(group["params"]) is list and all(type(name) is str for name in group["params"]) for group in groups)


def _unnamed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's tree in the form of torch's get_state_dict: parameters by their names in the module."""
    names = [*tree["state"], *parameters_in(tree)]
    one = len({name.partition("/")[0] for name in names}) == 1 and all("/" in name for name in names)
    return as_state_dict(tree, lambda name: name.partition("/")[2] if one else name)


# ── from a checkpoint ────────────────────────────────────────────────────────────────────────────────────────────────


def flat_state(groups: Mapping[str, Saved], root: str | None, group: str | None = None) -> tuple[Values, Paths | None]:
    """Return a checkpoint's values by DCP's names, as packed trees and TensorRefs; and DCP's paths of these values.

    `root` is the root group named in the manifest; None if DCP did not write the checkpoint. With `group`, returns only
    that group's values, by names without the group. Random streams and generators are left out of a DCP state. Raises
    ConfigError if there is no such group, and IntegrityError if two values have one name.
    """
    if group is not None and group not in groups:
        raise ConfigError(f"the checkpoint has no group {group!r:.80}", hint=f"It has {', '.join(groups)}.")
    trees = {
        name: _unnamed(saved.tree) if saved.kind == "optimizer" else saved.tree
        for name, saved in groups.items()
        if group in (None, name) and saved.kind not in (RNG, "generator")
    }
    if root == _EXACT and groups[_EXACT].kind == "plain" and _EXACT in trees:
        paths = trees[_EXACT]["paths"]
        return trees[_EXACT]["values"], None if paths is None else {name: tuple(path) for name, path in paths.items()}
    leaves: dict[int, tuple[torch.Tensor, TensorRef]] = {}
    state = _state({name: _hollow(tree, leaves) for name, tree in trees.items()}, root if group is None else group)
    try:
        flat, paths = flatten_state_dict(state)
    except ValueError as error:
        raise IntegrityError(f"two values have one name for DCP: {error}", key=group) from error
    return {name: leaves[id(value)][1] if id(value) in leaves else value for name, value in flat.items()}, paths


def _state(trees: Mapping[str, Any], root: str | None) -> dict[str, Any]:
    """Return DCP's nested state: the root group's values beside the other groups."""
    inside = {name: tree for name, tree in trees.items() if name == root}
    whole = next((tree for tree in inside.values() if isinstance(tree, dict)), inside)
    return {**whole, **{name: tree for name, tree in trees.items() if name != root}}


def _hollow(tree: Any, leaves: dict[int, tuple[torch.Tensor, TensorRef]]) -> Any:
    """Return a tree with an empty tensor for each TensorRef in dicts and lists, where DCP looks for tensors."""
    if type(tree) is TensorRef and not tree.array:  # For DCP an array is an ordinary value.
        leaf = torch.empty(0)
        leaves[id(leaf)] = leaf, tree
        return leaf
    if isinstance(tree, dict):
        return {name: _hollow(value, leaves) for name, value in tree.items()}
    return [_hollow(value, leaves) for value in tree] if type(tree) is list else tree
