"""Find names for the contents of foreign files: names of tensors without wrappers, names of optimizers' parameters.

torch numbers an optimizer's parameters. A number gets a name only if the file has the names, or if the shapes in the
optimizer's state match the model's parameters, in order, in exactly one way. Otherwise a parameter could silently get
the moments of another parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckpt_tasks.checkpoint.transfer.importing.sources import SourceTensor
from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.state.kinds.names import bare_name
from ckpt_tasks.state.tensors.tensors import identity

_DDP = "module."
_BUFFERS = ("running_mean", "running_var")  # These buffers of torch's norm layers have the shapes of parameters.

Modules = Mapping[str, Mapping[str, Any]]  # The tensors of each group by name, in the order of the model.
Named = tuple[str, tuple[int, ...]]  # A parameter's name and shape.


def clean_names(names: Sequence[str]) -> dict[str, str]:
    """Map names to names without wrappers' prefixes (DDP, torch.compile); if two would be equal, keep all names."""
    clean = {name: bare_name(name) for name in names}
    if all(name.startswith(_DDP) for name in clean.values()):
        clean = {name: one.removeprefix(_DDP) for name, one in clean.items()}
    unique = len({*clean.values()}) == len(clean) and all(clean.values())
    return clean if unique else {name: name for name in names}


def names_of_parameters(optimizer: Mapping[str, Any], modules: Modules) -> tuple[list[str], str]:
    """Return the names of an optimizer's parameters, in the order of its groups, and a note on how they were found.

    `optimizer` is the optimizer's state_dict. Raises UnsupportedStateError with the reason if a name would be a guess.
    """
    groups, state = optimizer["param_groups"], optimizer["state"]
    numbers = [number for group in groups for number in group["params"]]
    if not numbers or len({*map(repr, numbers)}) != len(numbers):
        raise UnsupportedStateError("its numbers of parameters are not those of an optimizer")
    if all(isinstance(group.get("param_names"), list) for group in groups):
        first = {module: _first_names(tensors) for module, tensors in modules.items()}
        names = [_full_name(name, modules, first) for group in groups for name in group["param_names"]]
        known = [name for name in names if name is not None]
        if len(names) == len(numbers) == len({*known}):
            return known, ""
        raise UnsupportedStateError("the names of its parameters are not those of the model")
    if len(modules) != 1:
        why = f"{len(modules)} models are taken" if modules else "no model is taken with it"
        raise UnsupportedStateError(f"its parameters have numbers, and {why} to name them")
    if len(groups) != 1:
        why = f"its parameters have numbers in {len(groups)} groups, and the file does not say which is which"
        raise UnsupportedStateError(why)
    ((module, tensors),) = modules.items()
    places = _only_order([_shapes(state.get(n)) for n in numbers], [*_first_names(tensors).values()])
    return [f"{module}/{name}" for name in places], "parameters named in the order of the model"


def _full_name(name: Any, modules: Modules, first: Mapping[str, Mapping[Any, Named]]) -> str | None:
    """Return the name that `capture` gives to a parameter with this name in the file; None if not exactly one fits."""
    if not isinstance(name, str):
        return None
    clean = bare_name(name)
    matches = {
        f"{module}/{known[0]}"
        for module, tensors in modules.items()
        for candidate in (clean, clean.removeprefix(_DDP), clean.removeprefix(f"{module}."))
        if candidate in tensors and (known := first[module].get(_known(candidate, tensors[candidate]))) is not None
    }
    return matches.pop() if len(matches) == 1 else None


def _known(name: str, tensor: Any) -> Any:
    return (identity(tensor) or name) if isinstance(tensor, torch.Tensor) else id(tensor)


def _first_names(tensors: Mapping[str, Any]) -> dict[Any, Named]:
    """Return the tensors that may be parameters, in the model's order: tensor identity → (name, shape).

    A tied tensor appears once, under its first name in alphabetical order. Known buffers are left out.
    """
    names: dict[Any, Named] = {}
    for name, tensor in tensors.items():
        dtype = tensor.dtype if isinstance(tensor, SourceTensor) else str(tensor.dtype).removeprefix("torch.")
        if dtype.startswith(("float", "bfloat", "complex")) and name.rpartition(".")[2] not in _BUFFERS:
            known = _known(name, tensor)
            first = names.setdefault(known, (name, tuple(tensor.shape)))
            if name < first[0]:
                names[known] = (name, first[1])
    return names


def _shapes(entry: Any) -> set[tuple[int, ...]]:
    """Return the shapes of the tensors that an optimizer keeps for one parameter; skip scalars, such as counts."""
    values = entry.values() if isinstance(entry, Mapping) else ()
    return {tuple(value.shape) for value in values if isinstance(value, torch.Tensor) and value.dim()}


def _only_order(kept: Sequence[set[tuple[int, ...]]], parameters: Sequence[Named]) -> list[str]:
    """Name each of an optimizer's parameters, if the model's order and the shapes allow exactly one match.

    Raises UnsupportedStateError if the first match from the left differs from the first match from the right.
    """
    left = _first_places(kept, parameters)
    right = _first_places(kept[::-1], parameters[::-1])
    if left is None or right is None:
        raise UnsupportedStateError("the shapes of its state do not follow the order of the model")
    if left != [len(parameters) - 1 - place for place in right[::-1]]:
        raise UnsupportedStateError("its parameters have numbers, and fit the model in more than one way")
    return [parameters[place][0] for place in left]


def _first_places(kept: Sequence[set[tuple[int, ...]]], parameters: Sequence[Named]) -> list[int] | None:
    places, at = [], 0
    for shapes in kept:
        while at < len(parameters) and shapes and parameters[at][1] not in shapes:
            at += 1
        if at == len(parameters):
            return None
        places.append(at)
        at += 1
    return places
