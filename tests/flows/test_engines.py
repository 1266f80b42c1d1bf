"""What starts the ranks of a flow, from its parameters; no cluster is needed to refuse what cannot be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.flow_engine import run_flow
from prefect.states import Scheduled

from ckpt_tasks import CheckpointConfig
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.flows.engines import find_engine
from ckpt_tasks.flows.gang.processes import Gang
from ckpt_tasks.flows.prefect.blocks import RayCluster
from ckpt_tasks.flows.prefect.endings import CrashError
from ckpt_tasks.flows.train import train


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"engine": "slurm"}, 'engine must be "local", "ray" or "block://NAME", not \'slurm\''),
        ({"min_ranks": 1}, "min_ranks needs an engine of several hosts"),
        ({"engine": "ray", "min_ranks": 3}, "min_ranks is 3, and ranks is 2"),
        ({"engine": "ray", "min_ranks": 0}, "min_ranks must be a whole number from 1 on"),
        ({"ranks": 0}, "ranks must be a whole number from 1 on"),
        pytest.param(
            {"engine": "ray"},
            "engine='ray' has no address of a cluster, and starts none of its own.*RAY_ADDRESS",
            marks=pytest.mark.framework,
        ),
    ],
    ids=["name", "local", "more", "none", "no ranks", "address"],
)
def test_what_does_not_fit_is_refused(
    harness: None, run_dir: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], why: str
) -> None:
    """Engines and numbers of ranks that cannot be are refused by name, before anything is written or connected to."""
    monkeypatch.setenv("RAY_ADDRESS", "local")  # which makes Ray start a cluster of its own: no address of one
    config = CheckpointConfig(checkpoint_dir=str(run_dir))
    with pytest.raises(ConfigError, match=why):
        train(run_key="refused", total_steps=5, checkpoint=config, **{"ranks": 2, **options})
    assert not run_dir.exists()


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Ray is not installed the error says what to install; an engine of one host does not need it."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ckpt_tasks.flows.gang.ray", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'ckpt-tasks\[ray\]'"):
        find_engine("ray", 2)
    assert isinstance(find_engine("local", 2), Gang)


@pytest.mark.framework
def test_a_block_names_a_cluster(harness: None) -> None:
    """block://NAME is a RayCluster on Prefect's server; one that is not there is named with the way to make it."""
    RayCluster(address="10.1.2.3:6379", resources_per_rank={"GPU": 2.0}).save("gpus")
    assert RayCluster.named("block://gpus").resources_per_rank == {"GPU": 2.0}
    engine = find_engine("block://gpus", 4, min_ranks=2)
    assert engine is not None
    assert type(engine).__name__ == "RayGang"
    assert [engine.keep_to(ranks) for ranks in (1, 2, 5)] == [False, True, False]
    with pytest.raises(
        ConfigError, match=r"no block 'nobody' of the type training-ray-cluster.*RayCluster\(address=…\)"
    ):
        find_engine("block://nobody", 2)


@pytest.mark.framework
def test_a_block_that_an_outage_hides_is_a_crash(harness: None, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment's flow run whose cluster's block cannot be read, since Prefect's API is away, is resumed."""

    def away(*_: Any, **__: Any) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(SyncPrefectClient, "read_block_document_by_name", away)
    options = {"run_key": "away", "total_steps": 5, "ranks": 2, "engine": "block://gpus"}
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(flow_id=client.create_flow(train), name="away")
        made = client.create_flow_run_from_deployment(deployment, state=Scheduled())
        with pytest.raises(CrashError, match="the block 'gpus' cannot be read: refused"):
            run_flow(train, client.read_flow_run(made.id), {**options, "checkpoint": {"checkpoint_dir": str(run_dir)}})
        ended = client.read_flow_run(made.id).state
    assert ended is not None
    assert ended.is_crashed()
