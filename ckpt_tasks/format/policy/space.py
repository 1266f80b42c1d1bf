"""Forecast how much disk space a run will need, from the policy and the size of one checkpoint.

A save is written before the checkpoint that it replaces is deleted, so the peak has one checkpoint more than the policy
keeps. Frozen parameters are stored once, however many checkpoints use them. The forecast is an upper bound: the best
and the pinned checkpoints may be among the newest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_tasks.format.policy.retention import Candidate, RetentionPolicy

_FEW = 3  # Warn when the disk has room for only this many more saves.


class CheckpointSize(NamedTuple):
    """The bytes that each checkpoint writes, and the bytes that are written once for all checkpoints."""

    own_bytes: int
    shared_bytes: int = 0

    def of_ranks(self, count: int) -> CheckpointSize:
        """Return the size of a checkpoint with as many parts of this size."""
        return CheckpointSize(count * self.own_bytes, count * self.shared_bytes)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The bytes that a run still needs on the disk, and the bytes that are free there.

    `most` is the number of checkpoints at the peak, including the one being written. `grows`: the policy keeps more and
    more checkpoints, so any disk will be full one day; then `most` counts only up to the next save.
    """

    most: int
    grows: bool
    own_bytes: int
    needed_bytes: int
    free_bytes: int

    @property
    def room_for(self) -> int:
        """How many more checkpoints fit on the disk."""
        return self.free_bytes // max(self.own_bytes, 1)

    @property
    def fits(self) -> bool:
        """Whether the disk has room for the most that the policy keeps at once, and for a few more if the run grows."""
        return self.free_bytes >= self.needed_bytes and not (self.grows and self.room_for < _FEW)

    @property
    def words(self) -> str:
        """The space that the run needs and the space that is free, in one clause."""
        each = f"checkpoint{'' if self.most == 1 else 's'} of {gib(self.own_bytes)}"
        if self.grows:
            room = f"room for {self.room_for} more {'checkpoint' if self.room_for == 1 else 'checkpoints'}"
            return f"{gib(self.free_bytes)} free: {room} of {gib(self.own_bytes)}, and the policy keeps ever more"
        return f"{gib(self.free_bytes)} free, {gib(self.needed_bytes)} more needed: up to {self.most} {each} at once"


def forecast(
    policy: RetentionPolicy | None,
    live: Sequence[Candidate],
    *,
    pinned: Collection[str],
    size: CheckpointSize,
    free_bytes: int,
) -> Forecast:
    """Forecast the peak of a run from its `live` checkpoints; `pinned` holds the identities of pinned ones.

    Without a policy, assume that the run keeps as many checkpoints as it has now.
    """
    most = max(_most(policy, live, pinned), len(live) + 1)
    return Forecast(
        most=most,
        grows=policy is not None and policy.grows,
        own_bytes=size.own_bytes,
        needed_bytes=(most - len(live)) * size.own_bytes + (0 if live else size.shared_bytes),
        free_bytes=free_bytes,
    )


def _most(policy: RetentionPolicy | None, live: Sequence[Candidate], pinned: Collection[str]) -> int:
    if policy is None or policy.max_num_checkpoints is None:
        return len(live) + 1
    stay = len({one.manifest_digest for one in live} & {*pinned, *policy.preserved(live)})
    best = policy.keep_best if policy.best_metric else 0
    return policy.max_num_checkpoints + stay + best + 1


def gib(size_bytes: float) -> str:
    """Write a size in GiB, or in MiB or KiB if it is small."""
    for unit_bytes, unit in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if size_bytes >= unit_bytes / 10:
            return f"{size_bytes / unit_bytes:.1f} {unit}"
    return f"{size_bytes / 1024:.0f} KiB"
