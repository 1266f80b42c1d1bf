"""Run an unchanged script so that its training is resumable: the rewritten source calls the hook of this module."""

from __future__ import annotations

import ast
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from ckpt_tasks.checkpoint.resumable import Epochs, resumable
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.ledger.config import CheckpointConfig
from ckpt_tasks.objects.kinds import kind_of
from ckpt_tasks.session.script import HOOK, hint, resumable_source

_CONTAINERS = (list, dict, set, deque, np.ndarray, torch.Tensor)
_VALUES = (int, float, str, bytes, type(None), tuple, *_CONTAINERS)


def run_script(script: Path, arguments: Iterable[str], config: CheckpointConfig, say: Callable[[str], None]) -> None:
    """Run a script as `python SCRIPT ARGUMENTS` would, with its training resumable.

    `say` gets a text that names the objects in the state. Raises ConfigError for a script whose loop is not understood,
    before it runs.
    """
    try:
        tree = ast.parse(script.read_bytes(), str(script))  # Bytes: the script may name its encoding.
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{script} cannot be read as Python: {error}") from error
    hook = _Hook(config, script, say)
    resumable_source(tree, hook.run)
    hook.module.__file__ = str(script)
    vars(hook.module)[HOOK] = hook
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    sys.modules["__main__"] = hook.module
    exec(compile(tree, str(script), "exec"), vars(hook.module))  # noqa: S102 (the user's own script)
    if hook.epochs is None:
        raise ConfigError("the script ended, and its loop over epochs never began", hint=hint(hook.run))


class _Carried:
    """The variables that the loops carry over, as an object of the state."""

    def __init__(self) -> None:
        self.saved: dict[str, dict[str, Any]] = {}
        self.handed_back = True  # False from a restore until the variables have the restored values.
        self.loops: dict[str, Callable[[], dict[str, Any]]] = {}

    def state_dict(self) -> dict[str, Any]:
        if not self.handed_back:
            return self.saved
        return {loop: {name: _packed(value) for name, value in values().items()} for loop, values in self.loops.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.saved, self.handed_back = state_dict, False


class _Hook:
    """The hook that the rewritten script calls."""

    def __init__(self, config: CheckpointConfig, script: Path, say: Callable[[str], None]):
        self.epochs: Epochs | None = None
        self.values: list[Any] = []
        self.run = str(config.checkpoint_dir)
        self.module = ModuleType("__main__")
        self._config, self._say = config, say
        self._folder = str(script.resolve().parent)
        self._loader: Any = None
        self._carried = _Carried()
        self._state: dict[str, Any] = {}
        self._changed: dict[str, Any] = {}

    def sees(self, variables: Mapping[str, Any], changed: Mapping[str, Any], of_functions: list[str]) -> None:
        """Find the objects of the state among the script's variables, and what the loop may change in place."""
        self._state = _objects(variables)
        stateful = {*map(id, self._state.values())}
        self._changed = {
            name: value
            for name, value in changed.items()
            if id(value) not in stateful and (isinstance(value, _CONTAINERS) or self._is_own(value))
        }
        there = vars(self.module)
        self._carried.loops = {
            "changed": lambda: self._changed,
            "globals": lambda: {name: there[name] for name in of_functions if self._is_carried(there.get(name))},
        }

    def begin(self, loader: Any, numbers: Any, names: list[str], values: Callable[[], list[Any]]) -> Any:
        """Restore the script's variables from the checkpoint; return the loader over which its loop must iterate.

        `numbers`: the range of the epochs. `names`: the variables that the loop over epochs replaces. `values` returns
        their values; the script then sets the variables to `self.values`.
        """
        todo = hint(self.run)
        if self.epochs is not None:
            raise ConfigError("the loop over epochs begins a second time", hint=todo)
        if not isinstance(numbers, range):
            raise ConfigError(f"the epochs are {numbers!r:.80}, and not a range", hint=todo)
        kinds = {kind_of(value) for value in self._state.values()}
        if not {"module", "optimizer"} <= kinds:
            raise ConfigError("no variable of the script has the model, or none has the optimizer", hint=todo)
        try:
            before = dict(zip(names, values(), strict=True))
        except NameError as error:
            raise ConfigError(f"the loop replaces what is not there before it: {error}", hint=todo) from error
        for name, value in before.items():
            if name in self._state or not isinstance(value, _VALUES):
                raise ConfigError(f"the loop replaces {name}, of type {type(value).__name__}", key=name, hint=todo)
        self._carried.loops["epochs"] = lambda: dict(zip(names, values(), strict=True))
        self._loader, self.epochs = resumable(self._config, loader, numbers, **self._state, carried=self._carried)
        for name, value in self._carried.saved.get("changed", {}).items():
            _fill(self._changed[name], value)
        there = vars(self.module)
        for name, value in self._carried.saved.get("globals", {}).items():
            there[name] = _filled(there[name], value)
        self._carried.handed_back = True
        self.values = [*(before | self._carried.saved.get("epochs", {})).values()]
        self._say(f"In the state: {', '.join([*self._state, *self._changed, *names])}, and the place in the data.")
        return self._loader

    @property
    def batch(self) -> int:
        """The number of the next batch in its epoch."""
        return int(self._loader.batch)

    def within(self, names: list[str], values: Callable[[], list[Any]]) -> list[Any]:
        """Return the values with which the loop over batches begins; in the middle of an epoch, the saved ones."""

        def carried() -> dict[str, Any]:
            pairs = zip(names, values(), strict=True)
            return {name: value for name, value in pairs if self._is_carried(value)}

        before = dict(zip(names, values(), strict=True))
        self._carried.loops["batches"] = carried
        saved = self._carried.saved.pop("batches", {}) if self.batch else {}
        return [_filled(value, saved[name]) if name in saved else value for name, value in before.items()]

    def log(self, **metrics: Any) -> None:
        """Log the loss of a step if it is one number."""
        if self.epochs is not None:
            of_one = {name: value for name, value in metrics.items() if getattr(value, "numel", int)() == 1}
            self.epochs.log(**{name: value.detach() for name, value in of_one.items()})

    def _is_own(self, value: Any) -> bool:
        """Return True if a value is an object of a class that the script defines, such as a meter of its losses."""
        module = sys.modules.get(type(value).__module__)
        file = str(getattr(module, "__file__", None) or "")
        has_state = hasattr(value, "state_dict") or not hasattr(value, "__dict__") or isinstance(value, Dataset)
        return not has_state and os.path.abspath(file).startswith(self._folder + os.sep)

    def _is_carried(self, value: Any) -> bool:
        return (isinstance(value, _VALUES) or self._is_own(value)) and id(value) not in {*map(id, self._state.values())}


def _packed(value: Any) -> Any:
    return value if isinstance(value, _VALUES) else dict(vars(value))


def _filled(value: Any, saved: Any) -> Any:
    """Return a saved value; change a container or an object in place, since other variables may refer to it."""
    if isinstance(value, _VALUES) and not isinstance(value, _CONTAINERS):
        return saved
    _fill(value, saved)
    return value


def _fill(value: Any, saved: Any) -> None:
    if isinstance(value, dict | set):
        value.clear()
        value.update(saved)
    elif isinstance(value, list):
        value[:] = saved
    elif isinstance(value, deque):
        value.clear()
        value.extend(saved)
    elif isinstance(value, np.ndarray | torch.Tensor):
        value[...] = saved
    else:
        vars(value).update(saved)


def _objects(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the distinct objects with a state of their own that the variables name."""
    objects: dict[int, tuple[str, Any]] = {}
    for name, value in variables.items():
        has_state = hasattr(value, "load_state_dict") and hasattr(value, "state_dict") and not isinstance(value, type)
        if name.startswith("_") or not (has_state or isinstance(value, torch.Generator)):
            continue
        if isinstance(value, nn.Module) and not [*value.parameters(), *value.buffers()]:
            continue
        objects.setdefault(id(value), (name, value))
    modules = [value for _, value in objects.values() if isinstance(value, nn.Module)]
    parts = {id(part) for module in modules for part in module.modules() if part is not module}
    return {name: value for name, value in objects.values() if id(value) not in parts}
