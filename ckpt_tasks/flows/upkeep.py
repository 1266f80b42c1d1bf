"""Verify every checkpoint of a run, and prune what its policy no longer keeps: the deployment `upkeep/byte-lm`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.restore.reading import run_of
from ckpt_tasks.errors import ConfigError, IntegrityError, OwnedError
from ckpt_tasks.flows.prefect.config import config_of_run
from ckpt_tasks.flows.session.drill import drill_run
from ckpt_tasks.format.records import RunCheck
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.ownership import identify, why_free
from ckpt_tasks.run.report.words import check_words
from ckpt_tasks.run.upkeep.verifying import record_verification, verify_run_directory


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The results of verifying: the steps of the good checkpoints, their total size, and every fault."""

    steps: tuple[int, ...]
    size_bytes: int
    faults: tuple[str, ...]

    def __str__(self) -> str:
        """Summarise the result in one line."""
        good = f"{len(self.steps)} checkpoints are good, {self.size_bytes / 2**20:,.1f} MiB were read"
        return f"{good}; {len(self.faults)} faults: {'; '.join(self.faults)}" if self.faults else good


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """The results of pruning: the steps whose checkpoints stay, and those whose checkpoints were removed."""

    kept: tuple[int, ...]
    removed: tuple[int, ...]


def verify_run(config: CheckpointConfig) -> Verified:
    """Verify every checkpoint, ledger entry and evaluation of a run, except checkpoints that are pruned meanwhile.

    Records the result in the run if possible. Raises CheckpointNotFoundError if there is no run, and RunMismatchError
    if the directory has another run.
    """
    history = run_of(config).history
    run_faults = verify_run_directory(history)
    if unrecorded := record_verification(history, run_faults):
        get_run_logger().warning("The run does not keep the result: %s", unrecorded)
    checkpoints = run_faults.checkpoints.values()
    good = [checkpoint for checkpoint, faults in checkpoints if not faults]
    damaged = [f"step {checkpoint.step}: {fault}" for checkpoint, faults in checkpoints for fault in faults]
    return Verified(
        steps=tuple(sorted(checkpoint.step for checkpoint in good)),
        size_bytes=sum(checkpoint.size_bytes for checkpoint in good),
        faults=(*damaged, *run_faults.damaged),
    )


def check_good(verified: Verified, run_key: str) -> None:
    """Raise IntegrityError, which lists every fault, if there is a fault."""
    if verified.faults:
        raise IntegrityError(
            f"the run {run_key} is damaged: {'; '.join(verified.faults)}",
            hint="`ckpt verify` lists the damage; a restore skips it. Nothing was pruned.",
        )


def check_drilled(drill: RunCheck, run_key: str) -> None:
    """Raise IntegrityError if this host could not restore the run in a drill."""
    if drill.fault is not None:
        raise IntegrityError(
            f"{drill.host} cannot restore the run {run_key}: {drill.fault}",
            step=int(drill.figures["step"]),
            hint="Nothing was pruned. `ckpt restore-drill` tries again.",
        )


def prune_run(config: CheckpointConfig) -> Pruned | None:
    """Prune a run by its policy; return None if the run is training, since it prunes itself.

    Does not prune a run that may be training on another host, however old its heartbeat is.
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
        kept=tuple(sorted(verdict.step for verdict in verdicts if verdict.keep)),
        removed=tuple(sorted(verdict.step for verdict in verdicts if not verdict.keep)),
    )


verify = task(name="verify", cache_policy=NO_CACHE, persist_result=False)(verify_run)
drill = task(name="restore drill", cache_policy=NO_CACHE, persist_result=False)(drill_run)
prune = task(name="prune", cache_policy=NO_CACHE, persist_result=False)(prune_run)


@dataclass(frozen=True, kw_only=True)
class UpkeepResult:
    """The results of verifying and pruning; `pruned` is None if the run is training, since it prunes itself.

    `drilled` is the restore drill; None if none was requested.
    """

    run_key: str
    verified: Verified
    pruned: Pruned | None
    drilled: RunCheck | None = None


@flow(name="upkeep", flow_run_name="{run_key}", persist_result=False)
def upkeep(
    *, run_key: str, checkpoint: CheckpointConfig, restore_drill: bool = False, program: str | None = None
) -> UpkeepResult:
    """Verify every byte of the run `run_key`, then prune it by the policy in `checkpoint`.

    If anything is damaged, the flow run fails, lists every fault, and prunes nothing: a damaged checkpoint may be the
    only one that is left. `restore_drill` also restores the newest checkpoint into the run's program, or into
    `program`, in fresh processes of this host; if this is impossible, the flow run fails and prunes nothing.
    Raises ConfigError for a `program` without `restore_drill`.
    """
    if program is not None and not restore_drill:
        raise ConfigError("program is for a restore drill, which is not asked for", hint="Set restore_drill.")
    config = config_of_run(checkpoint, run_key)
    verified = verify(config)
    get_run_logger().info("%s", verified)
    check_good(verified, run_key)
    drilled = drill(config.location, program, run_key=run_key) if restore_drill else None
    if drilled is not None:
        get_run_logger().info("%s", check_words(drilled))
        check_drilled(drilled, run_key)
    pruned = prune(config)
    get_run_logger().info("%s", pruned or "Not pruned: the run is training, and prunes after its saves.")
    return UpkeepResult(run_key=run_key, verified=verified, pruned=pruned, drilled=drilled)
