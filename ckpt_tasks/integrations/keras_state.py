"""Keras: the variables of a model and its optimizer in a state, and the seeds from which Keras draws."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.random.seed_generator import global_seed_generator

from ckpt_tasks.integrations.arrays import array_difference, array_of, compared, tensor_of

BACKEND = keras.config.backend()


def state_of(model: keras.Model) -> dict[str, Any]:
    """Return the state of a compiled model for Checkpointer, in a loop of your own.

    Its groups are `model` (weights, other variables, the seeds of its layers), `optimizer` and `seeds`, the generator
    of functions without a seed of their own.
    """
    optimizer = model.optimizer
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return {
        "model": Variables(lambda: named(model.variables), model),
        "optimizer": Variables(lambda: named(optimizer.variables), model),
        "seeds": _Seeds(_made_seeds, model),
    }


class Variables:
    """Keras variables in a state, by their paths; `of` returns the variables, `model` is the model that `fit` trains.

    Raises StateMismatchError if paths, shapes or dtypes differ. Numbers that Keras adds to names may differ: Keras
    increases them if a process makes a model twice.
    """

    def __init__(self, of: Callable[[], Mapping[str, Any]], model: Any):
        self._of = of
        self._model = model
        self._loaded: Mapping[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the variables by their paths, in the variables' own memory."""
        if BACKEND == "jax":
            self._model.jax_state_sync()  # Within `fit` the variables are out of date.
        return {name: _value_of(variable, name) for name, variable in self._of().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Assign the restored values to the variables."""
        live = self._of()
        saved = dict(zip(live, state_dict.values(), strict=False)) if _alike(live, state_dict) else state_dict
        different = [array_difference(name, saved[name], _value_of(live[name], name)) for name in live if name in saved]
        compared(saved, live, "the model", different=filter(None, different))
        self._loaded = saved
        self.assign_again()

    def assign_again(self) -> None:
        """Assign the restored values again, because Keras has changed them since."""
        live = self._of()
        for name, value in self._loaded.items():
            live[name].assign(value if BACKEND == "torch" else array_of(value))


def named(variables: Sequence[Any]) -> dict[str, Any]:
    """Return variables by their paths; if several have one path, the later ones get a number."""
    by_path: dict[str, Any] = {}
    for variable in variables:
        name, count = variable.path, 1
        while name in by_path:
            count += 1
            name = f"{variable.path}~{count}"
        by_path[name] = variable
    return by_path


def _alike(live: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Return True if names differ only by the numbers that Keras gives to layers."""
    bare = [[re.sub(r"_\d+(?=[/_]|$)", "", name) for name in names] for names in (live, saved)]
    return bare[0] == bare[1]


def _value_of(variable: Any, name: str) -> Any:
    value = variable.value
    if BACKEND == "torch":
        return value.detach()
    array = np.asarray(value.read_value() if BACKEND == "tensorflow" else value)
    return tensor_of(array, name, constant=BACKEND == "jax")


def _made_seeds() -> dict[str, Any]:
    """Return the state of Keras's own generator, if Keras has made one."""
    return {"state": made.state} if (made := get_global_attribute("global_seed_generator")) else {}


class _Seeds(Variables):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() or {"state": None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if state_dict["state"] is not None:
            global_seed_generator()  # Create the generator now: else the first layer that draws would create it.
            super().load_state_dict(state_dict)
