"""Upkeep of a run that may be training meanwhile: read everything back, and remove what its policy no longer keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import IntegrityError, OwnedError
from ckpt_tasks.ledger.config import CheckpointConfig
from ckpt_tasks.ledger.ownership import identify, why_free
from ckpt_tasks.reading.reading import run_of
from ckpt_tasks.upkeep.upkeep import verify_run_directory

__all__ = ["Pruned", "Verified", "check_good", "prune_run", "verify_run"]


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was read back: the steps whose checkpoints are good, the bytes that they have, and what is wrong."""

    steps: tuple[int, ...]
    size_bytes: int
    faults: tuple[str, ...]

    def __str__(self) -> str:
        """Say it in one line."""
        good = f"{len(self.steps)} checkpoints are good, {self.size_bytes / 2**20:,.1f} MiB were read"
        return f"{good}; {len(self.faults)} faults: {'; '.join(self.faults)}" if self.faults else good


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """The steps whose checkpoints stay, and those whose checkpoints were removed."""

    kept: tuple[int, ...]
    removed: tuple[int, ...]


def verify_run(config: CheckpointConfig) -> Verified:
    """Read every checkpoint of a run back, and what lies beside them; a checkpoint that is pruned meanwhile is none.

    Raises CheckpointNotFoundError where there is no run, RunMismatchError where it is another.
    """
    found = verify_run_directory(run_of(config).history)
    checkpoints = found.checkpoints.values()
    good = [checkpoint for checkpoint, faults in checkpoints if not faults]
    damaged = [f"step {checkpoint.step}: {fault}" for checkpoint, faults in checkpoints for fault in faults]
    return Verified(
        steps=tuple(sorted(one.step for one in good)),
        size_bytes=sum(one.size_bytes for one in good),
        faults=(*damaged, *found.damaged),
    )


def check_good(verified: Verified, run_key: str) -> None:
    """Raise IntegrityError, with every fault, where anything is damaged."""
    if verified.faults:
        raise IntegrityError(
            f"the run {run_key} is damaged: {'; '.join(verified.faults)}",
            hint="`ckpt verify` lists the damage; a restore passes over it. Nothing was pruned.",
        )


def prune_run(config: CheckpointConfig) -> Pruned | None:
    """Remove what the policy no longer keeps; None where the run is training, as it prunes after its own saves.

    What may be training elsewhere is left alone, however long it has shown no life.
    """
    if why_free(run_of(config).head().state.owner, identify(None), None, math.inf) is None:
        return None
    with Checkpointer(config) as ckpt:
        try:
            ckpt.acquire()
            verdicts = ckpt.prune()
        except OwnedError:
            return None
    return Pruned(
        kept=tuple(sorted(one.step for one in verdicts if one.keep)),
        removed=tuple(sorted(one.step for one in verdicts if not one.keep)),
    )
