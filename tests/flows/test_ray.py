"""`ckpt train --engine ray`, against a real server: a node is lost, the cluster's head is lost and comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.sorting import FlowRunSort

from ckpt_tasks.flows.gang.gang_session import GangSession
from tests.support.agents import MARK, config_of
from tests.support.elastic import ELASTIC, trained
from tests.support.waiting import until
from tools.sources import ROOT

if TYPE_CHECKING:
    from tests.support.nodes import Nodes

pytestmark = [pytest.mark.framework, pytest.mark.usefixtures("harness"), pytest.mark.slow]


@contextmanager
def flow(
    run_dir: Path, server: dict[str, str], nodes: Nodes, total: int, **params: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `ckpt train` with up to four ranks of a cluster; it is killed at the end of the block."""
    command = [sys.executable, "-m", "ckpt_tasks", "train", ELASTIC, "--steps", str(total), "--batch-steps", "5"]
    command += ["--ranks", "4", "--engine", "ray", "--min-ranks", "2", "--step-interval", "4"]
    command += ["--checkpoint-dir", str(run_dir), "--max-num-checkpoints", "none", "--params", json.dumps(params)]
    environment = {**server, "RAY_ADDRESS": nodes.address, "PYTHONPATH": str(ROOT)}
    with run_dir.with_name("flow.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def plain(run_dir: Path, *parts: tuple[int, int]) -> None:
    """Train a run on this host, in batches of 5 steps: with so many ranks up to a step, then with others."""
    for ranks, until_step in parts:
        with GangSession(config_of(run_dir), ELASTIC, {}, ranks=ranks) as session:
            while session.restore() < until_step:
                session.run(session.position + 5)
                session.save(session.position)


def pages(run_dir: Path) -> tuple[list[str], list[list[dict[str, str]]]]:
    """Return the states of the flow runs of a run, oldest first, and what their pages show of their gangs."""
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=200)
        runs = [one for one in found if "total_steps" in one.parameters and str(run_dir) in json.dumps(one.parameters)]
        runs.sort(key=lambda one: str(one.created))
        mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[one.id for one in runs]))
        artifacts = client.read_artifacts(artifact_filter=mine)
    rows = [json.loads(str(one.data)) for one in artifacts if str(one.key).endswith("-ranks")]
    return [one.state_name or "" for one in runs], rows


def test_a_lost_node_is_a_retry_with_the_ranks_that_are_left(
    run_dir: Path, tmp_path: Path, server: dict[str, str]
) -> None:
    """A node killed in the middle of a batch: Prefect retries it on the other one, and its pages name the hosts.

    The end is bit-equal to that of a run on one host that went on with two ranks at the same step.
    """
    from tests.support.nodes import Nodes

    with Nodes(2, 3, mark=f"{MARK}={tmp_path}") as nodes:
        with flow(run_dir, server, nodes, 15, stops_at=7, folder=str(tmp_path)) as process:
            until((tmp_path / "stopped").exists)
            nodes.kill(3)
            assert process.wait(300) == 0, run_dir.with_name("flow.log").read_text()
        until(lambda: nodes.ranks() == [])
    states, [rows] = pages(run_dir)
    assert states == ["Completed"]
    assert [(row["ranks"], row["hosts"]) for row in rows] == [
        ("2", "127.0.0.2: 0 to 1"),
        ("4", "127.0.0.2: 0 to 1, 127.0.0.3: 2 to 3"),
    ]
    assert rows[0]["steps"] == "5 to 15"
    assert rows[1]["steps"] in {"0 to 5", "0 to 6"}  # the step before the last one may not have been told of
    assert rows[1]["ended by"].startswith("the node 127.0.0.3 of rank 2, 3 is lost: ")
    plain(tmp_path / "plain", (4, 5), (2, 15))
    assert trained(run_dir) == trained(tmp_path / "plain")
