"""Check the arguments of the public functions: raise a ConfigError that names a wrong one before anything is done."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Collection, Mapping
from functools import cache, wraps
from inspect import Parameter, signature, unwrap
from typing import Any, ParamSpec, Protocol, TypeVar, Union, get_args, get_origin

from ckpt_tasks.errors import ConfigError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Raise ConfigError for an argument that is not of its annotated type; numbers may be NumPy's or torch's.

    Annotations are resolved at the first call. A type that is imported for type checkers only is not checked.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        names, kinds = _parameters(function)
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if name in kinds and not _fits(value, kinds[name]):
                raise ConfigError(
                    f"{function.__qualname__} got {value!r:.80}",
                    key=name,
                    hint=f"Give {signature(function).parameters[name].annotation}.",
                )
        return function(*args, **kwargs)

    return call


@cache
def _parameters(function: Callable[..., Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the names of the positional parameters, and the type of each parameter whose annotation resolves."""
    parameters = signature(function).parameters.values()
    kinds = {}
    for parameter in parameters:
        if isinstance(parameter.annotation, str) and parameter.kind is not Parameter.VAR_KEYWORD:
            try:
                kinds[parameter.name] = eval(parameter.annotation, unwrap(function).__globals__)  # noqa: S307 (our own source)
            except NameError:
                continue
    return [parameter.name for parameter in parameters], kinds


def _fits(value: Any, kind: Any) -> bool:
    origin: Any = get_origin(kind) or kind
    of = get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in of)
    if origin in _NUMBERS:
        return _converts(value, _NUMBERS[origin])
    if origin is Callable:
        return callable(value)
    if origin is Any or not isinstance(origin, type):
        return True
    if Protocol in origin.__bases__ or origin.__module__.startswith("torch.utils.data"):  # Accept any dataset.
        return all(hasattr(value, name) for name in vars(origin) if not name.startswith("_"))
    if not isinstance(value, origin):
        return origin is tuple and isinstance(value, list) and _fits(tuple(value), kind)
    return _items_fit(value, origin, of)


def _items_fit(items: Any, origin: Any, of: tuple[Any, ...]) -> bool:
    if origin is tuple:
        return len(items) == len(of) and all(map(_fits, items, of))
    if issubclass(origin, Mapping):
        return all(_fits(key, of[0]) and _fits(item, of[1]) for key, item in items.items())
    # Do not check the items of an iterator: that would consume it.
    return not (of and isinstance(items, Collection)) or all(_fits(item, of[0]) for item in items)


def _converts(value: Any, number: Callable[[Any], object]) -> bool:
    try:
        return number(value) is not None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def _switch(value: Any) -> object:
    return True if value in (0, 1) else None


def _float(value: Any) -> object:
    return None if isinstance(value, (str, bytes, bytearray)) else float(value)


_NUMBERS: dict[Any, Callable[[Any], object]] = {int: operator.index, float: _float, bool: _switch}
