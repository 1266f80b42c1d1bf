"""What a save asks of the loaders of a state: whether a resume goes on with the samples that the loop takes next."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from torch import distributed, nn

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.state.data.loader import ResumableLoader
from ckpt_tasks.state.data.passes import is_within
from ckpt_tasks.state.data.sampler import ResumableSampler
from ckpt_tasks.state.groups import objects_of
from ckpt_tasks.state.tensors.placements import cut_beside_data

_log = logging.getLogger("ckpt_tasks")
_BELOW = (
    "Steps are saved below the loop over the loader, in the same epoch: a resume begins the next epoch, and leaves out "
    "what this epoch trains after the save. Train in the loop over the loader, or in one over a second ResumableLoader "
    "that is in the state"
)

_BEFORE = (
    "The loop trains with one loader after another in an epoch: a resume from here begins the first one's next epoch. "
    "Write `for epoch in loader.epochs(n):` around both. Leave a loader that only measures out of the state"
)


def check_passes(state: Mapping[str, Any], step: int) -> None:
    """Raise ConfigError if a resume from a save now would not go on with the batches of a loader's loop."""
    loaders = [value for value in objects_of(state) if isinstance(value, ResumableLoader)]
    for value in loaders:
        value._check_passes()
        value._again, value._ends.over = False, None
    if len(loaders) < 2 and all(value._over for value in loaders):
        return
    here = getattr(inspect.currentframe(), "f_back", None)  # This function's own frame would refer to itself.
    if (owner := next((value for value in loaders if not value._over), None)) is not None:
        _note_passes(owner, [value for value in loaders if value is not owner], step, here)
    else:
        _tell_of_order(loaders, here)


def _tell_of_order(loaders: list[ResumableLoader], here: Any) -> None:
    """Warn of a pass over a loader that stands below one that is over, in a loop whose epochs are no epochs()."""
    for inner in (value for value in loaders if value._has_pass and is_within(value.place, here)):
        over = [value.place for value in loaders if not value._has_pass and is_within(value.place, here)]
        before = [place for place in over if place and inner.place and place[1] < inner.place[1]]
        if before and inner._tells_below:
            inner._tells_below = False
            _log.warning(_BEFORE)


def _note_passes(owner: ResumableLoader, others: list[ResumableLoader], step: int, here: Any) -> None:
    """Note which loaders' passes are over in an epoch that a resume enters again; `owner`: whose epochs() it is."""
    begun = owner._ends.epoch_at
    if owner._ends.passes(begun) and not owner._has_pass:
        owner._again = any(other._has_pass and is_within(other.place, here, but=owner._loop_at) for other in others)
        if not owner._again:
            epoch_at, before = owner._saved_below or (0, 0)
            if owner._tells_below and epoch_at == begun and before < step:
                owner._tells_below = False
                _log.warning(_BELOW)
            owner._saved_below = begun, step
            return
    for other in others:
        goes_on = other._restored or (other._has_pass and not other.is_ending)
        done = other._ends.passes(begun)
        done += other._ends.empty - (done > 0 and other._has_pass and not other.is_ending)
        other._ends.over = (done, goes_on) if done else None


def check_dealt(state: Mapping[str, Any]) -> None:
    """Raise ConfigError if a loader or sampler gives different samples to ranks with parts of one model."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    objects = [*objects_of(state)]
    for dealer in objects:
        sampler = dealer.sampler if isinstance(dealer, ResumableLoader) else dealer
        if isinstance(dealer, ResumableLoader):
            dealer._take_place()
        if not isinstance(sampler, ResumableSampler) or sampler.has_mesh:
            continue
        if sampler.world_size == distributed.get_world_size() > 1:
            names = (cut_beside_data(value, sampler.world_size) for value in objects if isinstance(value, nn.Module))
            if key := next((name for name in names if name), None):
                raise ConfigError(
                    f"the {type(dealer).__name__} gives every rank other samples, and ranks that hold parts of one "
                    "model need the same ones",
                    key=key,
                    hint='Give it the data-parallel part of the mesh (mesh=mesh["dp"]), or rank= and world_size= of '
                    "data parallelism: rank=0, world_size=1 where there is none.",
                )
