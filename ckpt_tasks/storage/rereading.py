"""Read once more what came with wrong bytes: a bit may have flipped on the way, and the store may have it right."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ckpt_tasks.errors import IntegrityError, ObjectNotFoundError
from ckpt_tasks.storage.port import ReadableStore

__all__ = ["read_good"]

_READS = 3
_PAUSE_S = 0.1

_T = TypeVar("_T")


def read_good(store: ReadableStore, read: Callable[[], _T], *, listed: bool = False) -> _T:
    """Return what `read` reads and verifies, at the third try at the latest.

    `listed`: the object is known to be there, so that a store which does not find it is asked again as well.
    """
    again = (IntegrityError, ObjectNotFoundError) if listed else (IntegrityError,)
    for _ in range(_READS - 1):
        try:
            return read()
        except again:
            if not store.near:
                time.sleep(_PAUSE_S)
    return read()
