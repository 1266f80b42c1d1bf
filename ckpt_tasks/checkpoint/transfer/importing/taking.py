"""Decide which parts of a foreign file become groups of a run, of which kind and name; read and write nothing.

A file has less information than a checkpoint. The import guesses nothing: it omits an unclear part, with the reason.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt_tasks.checkpoint.transfer.importing.naming import clean_names, names_of_parameters
from ckpt_tasks.checkpoint.transfer.importing.sources import Source, SourceTensor
from ckpt_tasks.errors import ConfigError, IntegrityError, UnsupportedStateError
from ckpt_tasks.format.keys import is_group
from ckpt_tasks.format.saved_kinds import RNG
from ckpt_tasks.format.tree import TensorRef, encode, tensor_refs
from ckpt_tasks.state.kinds.generators import capture_generator
from ckpt_tasks.state.kinds.optimizers import pack_optimizer
from ckpt_tasks.state.tensors.packing import pack
from ckpt_tasks.state.tensors.tensors import TensorSet

_MODEL = "model"
_SUFFIX = "_state_dict"
_EXTRA = "_extra_state"
_OBJECTS = re.compile(r"_state_dict$|schedul|scaler|sampler|loader", re.IGNORECASE)
_KEYS_OF_OBJECTS = ({"last_epoch", "_last_lr"}, {"scale", "_growth_tracker"})
_UNWANTED = "it was not asked for"
_LIGHTNINGS_OWN = "it is Lightning's own: Trainer.fit(ckpt_path=…) reads it"


class Taken(NamedTuple):
    """An imported group: its name, its name in the file, its kind and tensors, and a note on how it was read."""

    group: str
    name: str
    kind: str
    tensors: int
    size_bytes: int
    note: str = ""


@dataclass
class Taking:
    """The groups in the form of a manifest, their tensors by full key, and the reasons why parts are left out."""

    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor | SourceTensor] = field(default_factory=dict)
    taken: list[Taken] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


class _Part(NamedTuple):
    """One object of a file: the name of its group, its name in the file, and its value.

    If our own export wrote the file, `said` is the object's kind, and `parameters` names an optimizer's parameters.
    """

    group: str
    name: str
    value: Any
    said: str | None = None
    parameters: tuple[str, ...] | None = None

    @property
    def kind(self) -> str:
        if self.said is not None:
            return self.said
        if _is_weights(self.value):
            return "module"
        if _is_optimizer(self.value):
            return "optimizer"
        return "stateful" if isinstance(self.value, Mapping) and _is_stateful(self.name, self.value) else "plain"


def take(source: Source, wanted: Sequence[str] = ()) -> Taking:
    """Make groups from a file; `wanted` are GROUP or GROUP=NAME (default: all groups that can be imported).

    Raises ConfigError if nothing in the file can be imported, or if the file lacks a wanted group.
    """
    parts, left = _parts(source)
    parts, unwanted = _chosen(parts, wanted)
    taker = _Taker({**source.left, **left, **dict.fromkeys(unwanted, _UNWANTED)})
    for kind in (
        "module",
        "optimizer",
        "stateful",
        "plain",
        # If two groups share a tensor, the group of the earlier kind stores it.
    ):
        for part in parts:
            if part.kind == kind:
                taker.add(part)
    done = taker.taking
    if not done.groups:
        # Report a requested part rather than a part that was not requested.
        reasons = sorted(done.left.items(), key=lambda one: one[1] == _UNWANTED)
        why = next(iter(reasons), None)
        raise ConfigError(
            f"nothing of {source.name} can be taken", hint=f"{why[0]}: {why[1]}." if why else "It is empty."
        )
    order = [part.group for part in parts]
    done.groups = {name: done.groups[name] for name in order if name in done.groups}
    done.taken.sort(key=lambda one: order.index(one.group))
    taker.add_streams()
    return done


def seeded_streams() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a group of random streams seeded with 0, and its tensors: a foreign file has no random streams."""
    numpy = np.random.RandomState(0)  # NumPy's global stream has this type.
    streams = {"python": random.Random(0), "numpy": numpy, "torch": torch.Generator().manual_seed(0)}
    tensors = TensorSet(None)
    tree = {name: capture_generator(stream, f"{RNG}/{name}", tensors) for name, stream in streams.items()}
    return {"kind": RNG, "tree": encode(tree, RNG)}, tensors.tensors


def _parts(source: Source) -> tuple[list[_Part], dict[str, str]]:
    values, left = source.values, dict[str, str]()
    if source.is_lightning:
        return _of_lightning(values)
    if source.about is not None:
        return _of_export(values, source.about), left
    if _is_weights(values):
        return [_Part(_MODEL, "", values)], left
    parts: list[_Part] = []
    for key, value in values.items():
        name = _group_name(key) if isinstance(key, str) else None
        if name is None:
            left[f"{key!r:.80}"] = "no group can have this name"
        else:
            parts += _split(name, key, value)
    return _unique(parts, left), left


def _of_export(values: Mapping[str, Any], about: Mapping[str, Any]) -> list[_Part]:
    """Return the groups that our own export names; raise IntegrityError if the file does not hold such a group."""
    parts = []
    for name, kind in about["kinds"].items():
        value, parameters = values.get(name), about["parameters"].get(name)
        fits = {
            "module": isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
            "optimizer": _is_optimizer(value) and _are_names(parameters, value or {}),
            "stateful": True,
            "plain": True,
        }
        if name not in values or not is_group(name) or name == RNG or not fits.get(kind, False):
            raise IntegrityError("the file does not hold the group that it says it does", key=f"{name!s:.80}")
        parts.append(_Part(name, name, value, kind, tuple(parameters) if kind == "optimizer" else None))
    return parts


def _are_names(names: Any, optimizer: Mapping[str, Any]) -> bool:
    """Return True if `names` has one distinct name for each of an optimizer's parameters."""
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    named = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    return named and len(names) == len({*names}) == len(numbers) == len({*map(repr, numbers)})


def _of_lightning(values: Mapping[str, Any]) -> tuple[list[_Part], dict[str, str]]:
    parts = [_Part(_MODEL, "state_dict", values["state_dict"])]
    for one, many, name in (
        ("optimizer", "optimizers", "optimizer_states"),
        ("scheduler", "schedulers", "lr_schedulers"),
    ):
        items = values.get(name) or []
        for n, value in enumerate(items):
            parts.append(_Part(one if len(items) == 1 else f"{many}_{n}", f"{name}/{n}", value))
    parts += [_Part(name, name, values[name]) for name in ("epoch",) if name in values]
    known = {"state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"}
    return parts, {str(name): _LIGHTNINGS_OWN for name in values if name not in known}


def _group_name(key: str) -> str | None:
    """Return the group name for a name in a file, such as model for "model_state_dict"; None if none is valid."""
    name = _MODEL if key == "state_dict" else key.removesuffix(_SUFFIX)
    name = re.sub(r"^[^A-Za-z]+", "", re.sub(r"[^A-Za-z0-9_]", "_", name))[:64]
    name = "rng_state" if name == RNG else name
    return name if is_group(name) else None


def _split(group: str, name: str, value: Any) -> Iterator[_Part]:
    """Yield one part for a value; for a container of modules and optimizers, yield one part for each of them."""
    items: Any = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    )
    inside = [(key, item) for key, item in items if _is_weights(item) or _is_optimizer(item)]
    if not inside or _is_weights(value) or _is_optimizer(value) or len(inside) < len(value):
        yield _Part(group, name, value)
        return
    for key, item in inside:
        yield _Part(_group_name(f"{group}_{key}") or group, f"{name}/{key}", item)


def _unique(parts: list[_Part], left: dict[str, str]) -> list[_Part]:
    by_group: dict[str, _Part] = {}
    for part in parts:
        first = by_group.setdefault(part.group, part)
        if first is not part:
            left[part.name] = f"its group {part.group} is that of {first.name} already"
    return [*by_group.values()]


def _chosen(parts: list[_Part], wanted: Sequence[str]) -> tuple[list[_Part], list[str]]:
    if not wanted:
        return parts, []
    by_name = {part.group: part for part in parts} | {part.name: part for part in parts}
    chosen: dict[str, _Part] = {}
    for text in wanted:
        group, equals, name = text.partition("=")
        if not is_group(group) or group == RNG or group in chosen:
            raise ConfigError(f"{text!r:.80} does not name a new group", hint="Write GROUP or GROUP=NAME.")
        part = by_name.get(name) if equals else by_name.get(group, _only_weights(parts))
        if part is None:
            there = ", ".join(part.name or part.group for part in parts)
            raise ConfigError(f"the file has no {name or group!r:.80}", hint=f"It has {there}.")
        chosen[group] = part._replace(group=group)
    groups = {part.name: part.group for part in chosen.values()}
    left = [part.name for part in parts if part.name not in groups]
    return [_renamed(part, groups) for part in chosen.values()], left


def _only_weights(parts: list[_Part]) -> _Part | None:
    """Return the only part of a file that is itself a state_dict, where the part has no name; else None."""
    return parts[0] if len(parts) == 1 and not parts[0].name else None


def _renamed(part: _Part, groups: Mapping[str, str]) -> _Part:
    """Replace the group in the names of an optimizer's parameters by the new name of the model's group."""
    cut = (name.partition("/") for name in part.parameters or ())
    parameters = tuple(f"{groups.get(group, group)}{slash}{rest}" for group, slash, rest in cut)
    return part if part.parameters is None else part._replace(parameters=parameters)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | SourceTensor)


def _is_weights(value: Any) -> bool:
    """Return True if a value is a module's state_dict: tensors by name, and little else."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(key, str) for key in value):
        return False
    others = [item for key, item in value.items() if not _is_tensor(item) and not key.endswith(_EXTRA)]
    tensors = sum(map(_is_tensor, value.values()))
    return tensors > len(others) and not any(isinstance(item, Mapping | list) for item in others)


def _is_stateful(name: str, value: Mapping[Any, Any]) -> bool:
    """Return True if a dict looks like the state of an object (a schedule, a scaler), not like a dict of the user."""
    return _OBJECTS.search(name) is not None or any(keys <= value.keys() for keys in _KEYS_OF_OBJECTS)


def _is_optimizer(value: Any) -> bool:
    if not isinstance(value, Mapping) or not {"state", "param_groups"} <= value.keys():
        return False
    groups = value["param_groups"]
    return (
        isinstance(value["state"], Mapping)
        and isinstance(groups, list)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)
    )


class _Taker:
    """Turns parts into groups; add modules first: they have the names of an optimizer's parameters."""

    def __init__(self, left: dict[str, str]):
        self.taking = Taking(left=left)
        self._set = TensorSet(None)
        self._set.tensors = self.taking.tensors  # type: ignore[assignment]  # all parts share one dict
        self._keys: dict[int, str] = {}  # The full key of each safetensors tensor, by the tensor's id().
        self._modules: dict[str, dict[str, Any]] = {}  # For each group, its tensors by clean name, in order.

    def add(self, part: _Part) -> None:
        """Make a group from one part, or record why that is impossible."""
        name = part.name or part.group
        try:
            tree, note = self._tree(part)
            encoded = {"kind": part.kind, "tree": encode(tree, part.group)}
        except UnsupportedStateError as error:
            where = f" (at {error.key})" if error.key not in (None, part.group) else ""
            self.taking.left[name] = error.message + where  # Omit the error's hint, which is about saving.
            return
        self.taking.groups[part.group] = encoded
        keys = {ref.key for ref in tensor_refs(tree)}
        size_bytes = sum(self.taking.tensors[key].nbytes for key in keys)
        self.taking.taken.append(Taken(part.group, part.name, part.kind, len(keys), size_bytes, note))

    def add_streams(self) -> None:
        """Add a group of random streams."""
        self.taking.groups[RNG], tensors = seeded_streams()
        self.taking.tensors |= tensors

    def _tree(self, part: _Part) -> tuple[Any, str]:
        if part.kind == "module":
            return self._module(part)
        if part.kind == "optimizer":
            return self._optimizer(part)
        return self._packed(part.value, part.group), ""

    def _packed(self, value: Any, path: str) -> Any:
        # Pack into a separate TensorSet first: if this fails, self._set has no tensors of the value.
        pack(value, path, TensorSet(None))
        return pack(value, path, self._set)

    def _module(self, part: _Part) -> tuple[dict[str, Any], str]:
        tree: dict[str, Any] = {}
        names = {name: name for name in part.value} if part.said else clean_names([*part.value])
        for name, value in part.value.items():
            clean = names[name]
            place = f"{part.group}/{clean}"
            try:
                if isinstance(value, SourceTensor):
                    tree[clean] = self._source_ref(value, place)
                elif isinstance(value, torch.Tensor) and not clean.endswith(_EXTRA):
                    tree[clean] = self._set.add(value, place, exact=False)
                elif clean.endswith(_EXTRA):
                    tree[clean] = self._packed(value, place)
                else:
                    self.taking.left[f"{part.name or part.group}/{name}"] = "it is not a tensor"
            except UnsupportedStateError as error:
                self.taking.left[f"{part.name or part.group}/{name}"] = error.message
        self._modules[part.group] = {names[name]: value for name, value in part.value.items() if _is_tensor(value)}
        cut = sorted({name[: len(name) - len(clean)] for name, clean in names.items() if name != clean})
        return tree, f"without {cut[0]!r} before each name" if cut and cut[0] else ""

    def _source_ref(self, tensor: SourceTensor, place: str) -> TensorRef:
        key = self._keys.setdefault(id(tensor), place)
        self.taking.tensors[key] = tensor
        return TensorRef(key)

    def _optimizer(self, part: _Part) -> tuple[dict[str, Any], str]:
        numbers = [number for group in part.value["param_groups"] for number in group["params"]]
        try:
            names, note = (
                (part.parameters, "") if part.parameters is not None else names_of_parameters(part.value, self._modules)
            )
        except UnsupportedStateError as error:
            error.key = part.group
            raise
        by_number = dict(zip(numbers, names, strict=True))
        # Pack into a separate TensorSet first, as `_packed` does.
        pack_optimizer(part.value, by_number, part.group, TensorSet(None))
        tree = pack_optimizer(part.value, by_number, part.group, self._set)
        return {**tree, "shapes": {}, "on_cpu": None}, note
