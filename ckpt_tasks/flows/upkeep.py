"""Verify every checkpoint of a run and prune what its policy no longer keeps: the deployment `upkeep/byte-lm`."""

from __future__ import annotations

from dataclasses import dataclass

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from ckpt_tasks.format.records import Drill
from ckpt_tasks.ledger.config import CheckpointConfig
from ckpt_tasks.orchestration.config import config_of_run
from ckpt_tasks.orchestration.upkeep import Pruned, Verified, check_drilled, check_good, prune_run, verify_run
from ckpt_tasks.report.words import drill_words
from ckpt_tasks.session.drill import drill_run

verify = task(name="verify", cache_policy=NO_CACHE, persist_result=False)(verify_run)
drill = task(name="restore drill", cache_policy=NO_CACHE, persist_result=False)(drill_run)
prune = task(name="prune", cache_policy=NO_CACHE, persist_result=False)(prune_run)


@dataclass(frozen=True, kw_only=True)
class UpkeepResult:
    """The results of verifying and pruning; `pruned` is None if the run is training, since it prunes itself.

    `drilled` is the restore drill; None if none was asked for.
    """

    run_key: str
    verified: Verified
    pruned: Pruned | None
    drilled: Drill | None = None


@flow(name="upkeep", flow_run_name="{run_key}", persist_result=False)
def upkeep(
    *, run_key: str, checkpoint: CheckpointConfig, restore_drill: bool = False, program: str | None = None
) -> UpkeepResult:
    """Verify every byte of the run `run_key`, then prune it by the policy in `checkpoint`.

    If anything is damaged, the flow run fails, lists every fault, and prunes nothing: a damaged checkpoint may be the
    only one that is left. With `restore_drill` the newest checkpoint is also restored into its program, or into
    `program`, in a fresh process of this host; the flow run fails if it cannot be.
    """
    config = config_of_run(checkpoint, run_key)
    verified = verify(config)
    get_run_logger().info("%s", verified)
    check_good(verified, run_key)
    drilled = drill(config.location, program, run_key=run_key) if restore_drill else None
    if drilled is not None:
        get_run_logger().info("%s", drill_words(drilled))
        check_drilled(drilled, run_key)
    pruned = prune(config)
    get_run_logger().info("%s", pruned or "Not pruned: the run is training, and prunes after its saves.")
    return UpkeepResult(run_key=run_key, verified=verified, pruned=pruned, drilled=drilled)
