"""The steps that an owner has trained and not committed yet: one small object beside its heartbeat, for pages alone.

It is not durable, and nothing is decided by it. A foreign, torn or old object counts as none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from ckpt_tasks.errors import IntegrityError, ObjectNotFoundError, StoreError
from ckpt_tasks.format.digests import canonical_json
from ckpt_tasks.format.keys import MAX_STEP
from ckpt_tasks.format.parsing import declared
from ckpt_tasks.format.records import Owner
from ckpt_tasks.storage.port import Store

LIVE_STEPS_NAME = "heartbeat/steps.json"
_MOST_STEPS, _MOST_METRICS, _LONGEST_NAME = 200, 16, 100
_MOST_BYTES = 1 << 20
_MOST_S = 1e12


@dataclass(frozen=True)
class LiveStep:
    """A completed step that no commit has; `at_s` is in seconds since 1970 by the owner's clock."""

    step: Annotated[int, Meta(ge=0, le=MAX_STEP)]
    at_s: Annotated[float, Meta(ge=0, le=_MOST_S)]
    metrics: dict[Annotated[str, Meta(max_length=_LONGEST_NAME)], float]


@declared
@dataclass(frozen=True)
class _Body:
    owner: str
    steps: Annotated[list[LiveStep], Meta(max_length=_MOST_STEPS + 1)]


def write_live_steps(store: Store, owner: Owner, steps: Iterable[LiveStep]) -> None:
    """Replace the object; of many steps every n-th one is kept, and the last. Raises StoreError."""
    known = [*steps]
    every = math.ceil(len(known) / _MOST_STEPS) or 1
    kept = [*known[:-1:every], *known[-1:]]
    rows = [{"step": one.step, "at_s": one.at_s, "metrics": _short(one.metrics)} for one in kept]
    store.replace(LIVE_STEPS_NAME, canonical_json({"owner": owner.id, "steps": rows}))


def drop_live_steps(store: Store) -> None:
    """Delete the object if the store answers."""
    with suppress(StoreError):
        store.delete_all([LIVE_STEPS_NAME])


def read_live_steps(store: Store, owner: Owner | None, committed: int | None) -> list[LiveStep]:
    """Return the steps after a committed one that the owner has trained; [] if it shows none. Raises StoreError."""
    if owner is None or owner.released:
        return []
    try:
        body = msgspec.json.decode(store.get(LIVE_STEPS_NAME, _MOST_BYTES), type=_Body)
    except (ObjectNotFoundError, IntegrityError, msgspec.MsgspecError, ValueError, RecursionError):
        return []
    steps = body.steps if body.owner == owner.id else []
    return [one for one in steps if one.step > (-1 if committed is None else committed)]


def _short(metrics: Mapping[str, float]) -> dict[str, float]:
    finite = ((name, value) for name, value in metrics.items() if math.isfinite(value) and len(name) <= _LONGEST_NAME)
    return dict([*finite][:_MOST_METRICS])
