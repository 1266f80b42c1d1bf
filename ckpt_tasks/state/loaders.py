"""Data loaders beside the state: their order is lost at a resume, and the program hears of it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from torch.utils.data import DataLoader, RandomSampler

__all__ = ["warn_of_lost_order"]

_log = logging.getLogger("ckpt_tasks")
_warned: WeakSet[DataLoader[Any]] = WeakSet()


def warn_of_lost_order() -> None:
    """Warn, once for each, of every live DataLoader that shuffles by itself: it keeps no position.

    The garbage collector lists the loaders: a training loop has its own in a variable, a program in an attribute.
    """
    loaders = [loader for loader in _live_loaders() if loader not in _warned]
    for loader in loaders:
        _warned.add(loader)
    if loaders:
        _log.warning(
            "A DataLoader with shuffle=True keeps no position: after a resume in the middle of an epoch it goes on "
            "with other batches. Use ResumableSampler, or a StatefulDataLoader in the state"
        )


def _live_loaders() -> Iterator[DataLoader[Any]]:
    for one in gc.get_objects():
        kind = type(one)  # what an object says itself of its class may run code of others
        if issubclass(kind, DataLoader) and isinstance(vars(one).get("sampler"), RandomSampler):
            yield one  # torchdata's loader has samplers of its own
