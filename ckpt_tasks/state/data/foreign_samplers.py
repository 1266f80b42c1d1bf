"""Samplers that are not ours: whether one draws numbers, deals out the data, or begins its epoch again."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import distributed
from torch.utils.data import sampler as samplers
from torch.utils.data.distributed import DistributedSampler

DRAWING = (samplers.RandomSampler, samplers.SubsetRandomSampler, samplers.WeightedRandomSampler)
# In the code of a sampler's own __iter__: it draws numbers, from whatever stream.
_DRAWN = {"choice", "choices", "multinomial", "permutation", "permuted", "randint", "randperm"}
# In the name of a place to begin at.
_BEGIN = re.compile("start|begin|skip|consumed|offset|position|resume|index|step")
_LIBRARIES = ("accelerate.", "lightning.", "pytorch_lightning.", "torch.", "transformers.", "trl.", "ckpt_tasks.")


def deals_out(sampler: Any, *, shuffled: bool) -> bool:
    """Return True if a sampler without a position gives each rank its part, in order or `shuffled`.

    A class with an __iter__ of its own may begin in the middle of an epoch, if it has a number to begin at.
    """
    if hasattr(sampler, "state_dict") or not (hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")):
        return False
    own = type(sampler).__iter__ is not DistributedSampler.__iter__
    return bool(getattr(sampler, "shuffle", True)) is shuffled and not (own and _has_begin(sampler))


def draws(sampler: Any) -> bool:
    """Return True if a sampler's own class draws in its __iter__, and has neither a state nor a number to begin at."""
    kind = type(sampler)
    code = getattr(getattr(kind, "__iter__", None), "__code__", None)
    if code is None or kind.__module__.startswith(_LIBRARIES) or hasattr(sampler, "state_dict"):
        return False
    codes = [code, *(one for one in code.co_consts if inspect.iscode(one))]
    names = {name for one in codes for name in one.co_names}
    is_drawn = bool(names & _DRAWN) or ("random" in names and bool(names & {"sample", "shuffle"}))
    return is_drawn and not _has_begin(sampler)


def is_whole(sampler: Any, dataset: Any) -> bool:
    """Return True if a sampler without a position yields an epoch, or a rank's part of it, from its begin."""
    if deals_out(sampler, shuffled=False):
        return True
    is_drawn = isinstance(sampler, DRAWING) or draws(sampler) or deals_out(sampler, shuffled=True)
    if is_drawn or hasattr(sampler, "state_dict") or _has_begin(sampler):
        return False
    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    try:
        count, size = len(sampler), len(dataset)
    except TypeError:  # A DataLoader with a sampler asks neither for its length.
        return False
    # A list of the samples that are left is shorter.
    return count in (size, size // ranks, -(-size // ranks))


def _has_begin(sampler: Any) -> bool:
    return any(map(_BEGIN.search, getattr(sampler, "__dict__", {})))
