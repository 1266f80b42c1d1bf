"""deployments/pools/: templates of work pools whose runs survive preemption, as far as that shows without a cluster."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prefect.workers.base import BaseJobConfiguration

ROOT = Path(__file__).parents[3]
POOLS = sorted((ROOT / "deployments" / "pools").glob("*.json"))
ENVIRONMENT = {
    "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR": "reschedule",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "OMP_WAIT_POLICY": "passive",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_CLASS": "ckpt_tasks.flows.prefect.console_log.UnreadConsole",
}


def template(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("path", POOLS, ids=lambda path: path.stem)
def test_every_placeholder_has_its_variable(path: Path) -> None:
    """What a job is made of is a variable of the pool, and no variable leads nowhere."""
    found = template(path)
    placeholders = {*re.findall(r"{{ (\w+) }}", json.dumps(found["job_configuration"]))}
    assert placeholders == {*found["variables"]["properties"]}


@pytest.mark.usefixtures("harness")
@pytest.mark.parametrize("path", POOLS, ids=lambda path: path.stem)
def test_a_preempted_run_is_rescheduled(path: Path) -> None:
    """With our deployments' variables and without, Prefect's supervisor gets SIGTERM, and no OpenMP thread spins."""
    deployment = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())["deployments"][0]
    choices: list[dict[str, Any]] = [{}, deployment["work_pool"]["job_variables"]]
    for values in choices:
        made: Any = asyncio.run(BaseJobConfiguration.from_template_and_values(template(path), values))
        assert made.command == "prefect flow-run execute"
        assert made.env == ENVIRONMENT


def test_kubernetes_leaves_time_and_memory() -> None:
    """The pod has two minutes to end its step and commit it, memory for snapshots, and no retries of its own."""
    found = template(ROOT / "deployments" / "pools" / "kubernetes.json")
    defaults = {name: one.get("default") for name, one in found["variables"]["properties"].items()}
    job = found["job_configuration"]["job_manifest"]["spec"]
    pod = job["template"]["spec"]
    assert (job["backoffLimit"], defaults["backoff_limit"]) == ("{{ backoff_limit }}", 0)
    assert (pod["terminationGracePeriodSeconds"], defaults["grace_period_s"]) == ("{{ grace_period_s }}", 120)
    shm = pod["volumes"][0]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "{{ shared_memory }}"}
    assert pod["containers"][0]["volumeMounts"] == [{"name": shm["name"], "mountPath": "/dev/shm"}]


@pytest.mark.parametrize("name", ["kubernetes", "docker"])
def test_the_workers_own_models_accept_it(name: str) -> None:
    """Where the worker's package is installed, its configuration is made of the template."""
    worker = pytest.importorskip(f"prefect_{name}.worker")
    configuration = next(getattr(worker, one) for one in dir(worker) if one.endswith("WorkerJobConfiguration"))
    values = {"image": "registry.example.org/training:7", **({"shared_memory": "16Gi"} if name == "kubernetes" else {})}
    made = asyncio.run(
        configuration.from_template_and_values(template(ROOT / f"deployments/pools/{name}.json"), values)
    )
    if name == "docker":
        assert (made.image, made.container_create_kwargs["shm_size"]) == (values["image"], "8g")
    else:
        assert made.job_manifest["spec"]["template"]["spec"]["volumes"][0]["emptyDir"]["sizeLimit"] == "16Gi"
