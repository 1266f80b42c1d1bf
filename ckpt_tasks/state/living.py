"""The live objects of a class, as the garbage collector knows them.

A list of every object, as `gc.get_objects()` gives it, holds what other threads are making: `tuple(x for x in …)` in
another thread then fails with SystemError, because CPython resizes a tuple only while nothing else holds it. So such a
list never outlives one call in C, during which no other thread runs: it gives the types that have objects. The objects
of a type are then those that refer to it.
"""

from __future__ import annotations

import gc
from itertools import chain
from typing import Any, TypeVar

__all__ = ["live_objects"]

_T = TypeVar("_T")


def live_objects(kind: type[_T]) -> list[_T]:
    """Return every object of a Python class and its subclasses that is alive in this process.

    An object's own word on its class (`__class__`) is not asked for: that may run code of others.
    """
    everything: Any = chain.from_iterable(map(gc.get_objects, (None,)))  # made and dropped within `set`
    types = set(map(type, everything))
    kinds = {one for one in types if issubclass(one, kind)}
    return [one for one in gc.get_referrers(*kinds) if type(one) in kinds]
