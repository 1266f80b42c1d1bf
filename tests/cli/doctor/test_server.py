"""`ckpt doctor` beside a real server: what it sees of automations, pools, workers and deployments there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.states import Cancelled, Running
from prefect.workers.process import ProcessWorker

from ckpt_tasks.cli.doctor import server_checks
from ckpt_tasks.cli.doctor.checks import Check
from ckpt_tasks.cli.doctor.server_checks import check_prefect
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.flows.site.automations import apply, build_automations, remove

JOB: dict[str, Any] = {
    "command": "prefect flow-run execute",
    "env": {"PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR": "reschedule", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"},
}


@pytest.fixture
def client(client: SyncPrefectClient) -> Iterator[SyncPrefectClient]:
    """Return a client of the server, on which nothing stands: what does is judged as a whole."""
    for left in client.read_deployments():  # by other tests
        client.delete_deployment(left.id)
    yield client
    remove()


@pytest.fixture
def pool(client: SyncPrefectClient) -> str:
    """Return the name of a new process work pool."""
    name = f"doctor-{uuid4().hex[:8]}"
    template = ProcessWorker.get_default_base_job_template()
    client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))
    return name


def give(client: SyncPrefectClient, pool: str, defaults: dict[str, Any], **fixed: Any) -> None:
    """Give a pool job variables of its own: defaults, or fixed ones that no deployment can change."""
    template = ProcessWorker.get_default_base_job_template()
    template["job_configuration"].update(fixed)
    for name, value in defaults.items():
        template["variables"]["properties"][name]["default"] = value
    client.update_work_pool(pool, WorkPoolUpdate(base_job_template=template))


def checks(pool: str | None = None, deployment: str | None = None) -> dict[str, Check]:
    return {check.name: check for check in check_prefect(pool, deployment)}


def deploy(client: SyncPrefectClient, pool: str, name: str, job: dict[str, Any], **options: Any) -> str:
    flow_id = client.create_flow_from_name("doctored")
    client.create_deployment(flow_id=flow_id, name=name, work_pool_name=pool, job_variables=job, **options)
    return f"doctored/{name}"


def test_a_real_server_and_its_automations(client: SyncPrefectClient) -> None:
    """Server, packages, lease storage and clock are seen; the automations are missed, found, and found paused."""
    remove()
    before = checks()
    assert {name: before[name].verdict for name in ("server", "fastapi", "lease storage", "clock")} == {
        "server": "ok",
        "fastapi": "ok",
        "lease storage": "warning",
        "clock": "ok",
    }
    assert (before["zombies"].verdict, before["resuming"].verdict) == ("wrong", "wrong")
    assert before["work pool"].verdict in ("not checked", "ok", "wrong")  # another test may have made it
    apply(build_automations())
    after = checks()
    assert (after["zombies"].verdict, after["resuming"].verdict) == ("ok", "ok")
    assert "after 90 s" in after["zombies"].seen
    paused = next(one for one in client.read_automations() if "resumed" in one.name)
    assert paused.id is not None
    client.pause_automation(paused.id)
    assert checks()["resuming"].verdict == "wrong"


@pytest.mark.slow
def test_a_real_pool(client: SyncPrefectClient, pool: str) -> None:
    """A pool that is not there, without a worker, with one, and paused; its own job variables count."""
    assert checks("no-such-pool")["work pool"].verdict == "wrong"
    assert checks("../admin/settings")["work pool"].verdict in ("wrong", "not checked")
    bare = checks(pool)
    assert (bare["work pool"].verdict, bare["preemption"].verdict, bare["heartbeat"].verdict) == (
        "wrong",
        "warning",
        "warning",
    )
    client.send_worker_heartbeat(pool, "a worker", heartbeat_interval_seconds=30)
    for variables in ({"defaults": JOB}, {"defaults": {}, **JOB}):
        give(client, pool, **variables)
        whole = checks(pool)
        assert {whole[name].verdict for name in ("work pool", "preemption", "heartbeat")} == {"ok"}
    client.update_work_pool(pool, WorkPoolUpdate(is_paused=True))
    assert checks(pool)["work pool"].verdict == "wrong"


@pytest.mark.slow
def test_real_deployments(client: SyncPrefectClient, pool: str) -> None:
    """Every deployment of the pool is looked at, with its variables over the pool's; a named one by itself."""
    apply(build_automations())
    good = deploy(client, pool, "good", JOB, tags=["ckpt-tasks"])
    found = checks(pool)
    assert {found[name].verdict for name in ("preemption", "heartbeat", "tags")} == {"ok"}
    dotted = {"command": JOB["command"], "env.PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "60"}
    other = deploy(client, pool, "other", dotted, tags=["ckpt-tasks"], concurrency_limit=1)
    untagged = deploy(client, pool, "untagged", {})
    found = checks(pool)
    assert (found["heartbeat"].verdict, f"{other}: every 60 s" in found["heartbeat"].seen) == ("warning", True)
    assert (found["preemption"].verdict, found["lease storage"].verdict) == ("warning", "wrong")
    assert other in found["lease storage"].seen
    assert (found["tags"].verdict, untagged in found["tags"].seen) == ("warning", True)
    alone = checks(deployment=good)
    assert {alone[name].verdict for name in ("preemption", "heartbeat", "tags")} == {"ok"}
    assert pool in alone["work pool"].seen
    give(client, pool, {"env": JOB["env"]})
    inherits = deploy(client, pool, "inherits", {"command": JOB["command"]}, tags=["ckpt-tasks"])
    alone = checks(deployment=inherits)
    assert {alone[name].verdict for name in ("preemption", "heartbeat")} == {"ok"}
    for name in ("doctored/nobody", "doctored"):
        with pytest.raises(ConfigError, match="no deployment"):
            checks(deployment=name)


@pytest.mark.slow
def test_a_process_that_trains_for_an_ended_flow_run_is_named(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of this host whose flow run is cancelled is wrong, by its pid; one whose flow run runs is not."""
    monkeypatch.setattr(server_checks, "_ENDING_S", -60.0)
    deployed = client.create_deployment(client.create_flow_from_name("cancelled"), uuid4().hex)
    run = client.create_flow_run_from_deployment(deployed)
    environment = {**os.environ, "PREFECT__FLOW_RUN_ID": str(run.id)}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        try:
            client.set_flow_run_state(run.id, Running(), force=True)
            before = server_checks.check_processes(client)
            client.set_flow_run_state(run.id, Cancelled(), force=True)
            after = server_checks.check_processes(client)
        finally:
            process.kill()
    assert f"process {process.pid} " not in before.seen
    assert after.verdict == "wrong"
    assert f"process {process.pid} works for {run.name}, Cancelled" in after.seen
