"""Verify every checkpoint of a run and prune what its policy no longer keeps: the deployment `upkeep/byte-lm`."""

from __future__ import annotations

from dataclasses import dataclass

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from ckpt_tasks.ledger.config import CheckpointConfig
from ckpt_tasks.orchestration.config import config_of_run
from ckpt_tasks.orchestration.upkeep import Pruned, Verified, check_good, prune_run, verify_run

verify = task(name="verify", cache_policy=NO_CACHE, persist_result=False)(verify_run)
prune = task(name="prune", cache_policy=NO_CACHE, persist_result=False)(prune_run)


@dataclass(frozen=True, kw_only=True)
class UpkeepResult:
    """The results of verifying and pruning; `pruned` is None if the run is training, since it prunes itself."""

    run_key: str
    verified: Verified
    pruned: Pruned | None


@flow(name="upkeep", flow_run_name="{run_key}", persist_result=False)
def upkeep(*, run_key: str, checkpoint: CheckpointConfig) -> UpkeepResult:
    """Verify every byte of the run `run_key`, then prune it by the policy in `checkpoint`.

    If anything is damaged, the flow run fails, lists every fault, and prunes nothing: a damaged checkpoint may be the
    only one that is left.
    """
    config = config_of_run(checkpoint, run_key)
    verified = verify(config)
    get_run_logger().info("%s", verified)
    check_good(verified, run_key)
    pruned = prune(config)
    get_run_logger().info("%s", pruned or "Not pruned: the run is training, and prunes after its saves.")
    return UpkeepResult(run_key=run_key, verified=verified, pruned=pruned)
