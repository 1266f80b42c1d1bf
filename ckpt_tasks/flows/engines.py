"""Choose the engine that starts the ranks of a flow, by the flow's parameters."""

from __future__ import annotations

import os

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.flows.gang.engine import Engine
from ckpt_tasks.flows.gang.processes import Gang
from ckpt_tasks.flows.prefect.blocks import RayCluster
from ckpt_tasks.flows.prefect.config import check_ranks


def find_engine(name: str, ranks: int, min_ranks: int | None = None) -> Engine | None:
    """Return the engine of a name: "local", "ray" (the cluster at RAY_ADDRESS) or "block://NAME" (a RayCluster).

    Returns None for one rank on this host, which needs no engine. Never starts a cluster. Raises ConfigError for
    options that do not fit together, without a cluster's address, or if Ray is not installed.
    """
    check_ranks(ranks, name, min_ranks)
    if name == "local":
        return Gang() if ranks > 1 else None
    try:
        from ckpt_tasks.flows.gang.ray import RayGang
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"engine={name!r} needs Ray: {error}", hint="Install it: pip install 'ckpt-tasks[ray]'."
        ) from error
    cluster = RayCluster(address=os.environ.get("RAY_ADDRESS", "")) if name == "ray" else RayCluster.named(name)
    if cluster.address in ("", "local"):
        raise ConfigError(
            "engine='ray' has no address of a cluster, and starts none of its own",
            hint="Set RAY_ADDRESS to that of its head (HOST:6379), or to auto on one of its nodes.",
        )
    least, resources = min_ranks or ranks, cluster.resources_per_rank
    return RayGang(ranks, least, cluster.address, resources, cluster.runtime_env)
