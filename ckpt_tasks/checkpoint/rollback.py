"""A rollback: go back to an older checkpoint, and skip the batches that spoilt the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.format.keys import MAX_STEP
from ckpt_tasks.format.records import Checkpoint, Rollback
from ckpt_tasks.state.groups import objects_of


def can_leave_out(state: Mapping[str, Any]) -> bool:
    """Return True if an object of the state can skip batches, by a method `skip_batches(count)`."""
    return any(callable(getattr(value, "skip_batches", None)) for value in objects_of(state))


def goes_back(rollback: Rollback | None, newest_first: Sequence[Checkpoint]) -> bool:
    """Return True if nothing was committed after the rollback: restoring a snapshot in memory would undo it."""
    newest = newest_first[0].manifest_digest if newest_first else None
    return rollback is not None and rollback.pending and rollback.identity == newest


def checked_skip(skip: tuple[int, int] | None, step: int) -> tuple[int, int] | None:
    """Return the batches to skip after the checkpoint of `step`; raise ConfigError if they precede it."""
    if skip is not None and not step < skip[0] <= skip[1] <= MAX_STEP:
        raise ConfigError(
            f"batches {skip[0]} to {skip[1]} do not come after step {step}",
            hint=f"Name them by the steps that would take them, from {step + 1} on: 401-410, or how many: 10.",
        )
    return skip


def parse_skip(text: str | None, step: int) -> tuple[int, int] | None:
    """Read "401-410" (the steps that would use the batches) or "10" (how many after `step`) as (first, last).

    Raises ConfigError for any other text.
    """
    if text is None:
        return None
    first, dash, last = (part.strip() for part in text.partition("-"))
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise ConfigError(f"{text!r:.80} names no batches", hint='Write "401-410", or how many: "10".')
    return checked_skip((int(first), int(last)) if dash else (step + 1, step + int(first)), step)
