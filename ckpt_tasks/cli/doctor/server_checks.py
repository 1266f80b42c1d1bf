"""Ask Prefect's server for the facts that `ckpt doctor` judges: each question once, with a timeout of 4 s.

The questions change nothing and start no server; the doctor reports a missing server.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar
from uuid import UUID

import httpx
import prefect
import prefect.context  # The import reads the settings: do that now, not during a check.
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas import filters
from prefect.client.schemas.objects import StateType, WorkerStatus, WorkPool
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events.schemas.automations import Automation, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.settings import get_current_settings

from ckpt_tasks.cli.doctor.checks import (
    AutomationFacts,
    Check,
    JobFacts,
    PoolFacts,
    PrefectFacts,
    judge_clock,
    judge_prefect,
)
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.flows.prefect.abandoned import Limits, find_abandoned
from ckpt_tasks.flows.prefect.events import client_without_retries, read_all
from ckpt_tasks.flows.prefect.starts import crash_lost_trainings
from ckpt_tasks.flows.site import TAG
from ckpt_tasks.flows.site.site_parts import site_processes
from ckpt_tasks.storage.secrets import without_secrets

_POOL = "ckpt-tasks"
_PATIENCE_S = 4.0
_QUESTIONS = 3
# The server returns at most this many rows in one answer.
_MOST = 200
_NAMED = 5
_ENDING_S = 60.0  # A process may end its step, commit and report meanwhile.
# This is three times the interval in the schedule of `watch`.
_LATEST_LOOK_S = 900.0
_T = TypeVar("_T")


def check_prefect(pool: str | None = None, deployment: str | None = None) -> list[Check]:
    """Check the server, and a work pool (default: the pool of deployments/prefect.yaml) or one deployment.

    Raises ConfigError if the deployment does not exist, or is in no work pool.
    """
    facts = ask_server()
    if not facts.answered:
        return judge_prefect(facts)
    named = pool or (None if deployment else _POOL)
    with client_without_retries(_PATIENCE_S) as client:
        pool_facts = _answer(lambda: _pool(client, named, deployment))
        runs = _answer(lambda: check_flow_runs(client))
        processes = _answer(lambda: check_processes(client))
    beat_s = get_current_settings().flows.heartbeat_frequency
    asked = pool is not None or deployment is not None
    return [
        *judge_prefect(replace(facts, pool=pool_facts, asked=asked, own_beat_s=beat_s)),
        runs or Check("flow runs", "not checked", "the server did not answer"),
        processes or Check("processes", "not checked", "the server did not answer"),
        judge_clock("clock", facts.ahead_s, facts.within_s, "Prefect's server"),
    ]


def ask_server() -> PrefectFacts:
    """Ask the configured server for its version, settings, automations and time; `failure` says what failed."""
    settings = get_current_settings()
    facts = PrefectFacts(
        url=None,
        client_version=prefect.__version__,
        fastapi_version=_installed("fastapi"),
        sqlalchemy_version=_installed("sqlalchemy"),
    )
    if not settings.api.url:
        return facts
    facts = replace(facts, url=without_secrets(settings.api.url))
    failure, ahead_s, within_s = _check_health(settings.api.url)
    if failure is not None:
        return replace(facts, failure=failure)
    try:
        with client_without_retries(_PATIENCE_S) as client:
            server_version = str(client.request("GET", "/admin/version").json())
            server_settings = _answer(lambda: client.request("GET", "/admin/settings").json())
            automations = _answer(lambda: read_all(client.read_automations))
    except (httpx.HTTPError, ValueError) as error:
        return replace(facts, failure=_why(error))
    return replace(
        facts,
        version=server_version,
        settings=server_settings if isinstance(server_settings, Mapping) else None,
        automations=None if automations is None else tuple(map(_automation, automations)),
        ahead_s=ahead_s,
        within_s=within_s,
    )


def check_flow_runs(client: SyncPrefectClient, tag: str = TAG, limits: Limits | None = None) -> Check:
    """Check that a process works on every flow run, and that `watch` will look at them soon.

    Marks trainings without a site as crashed if their process is gone.
    """
    crashed = crash_lost_trainings(client)
    abandoned = [*find_abandoned(client, tag, limits or Limits())]
    named = "; ".join(f"{each.run.name}: {each.why}" for each in abandoned[:_NAMED])
    seen = f"nobody works at {len(abandoned)}: {named}{'; …' if len(abandoned) > _NAMED else ''}"
    if any(each.due != "worker" for each in abandoned):
        return Check("flow runs", "wrong", seen, "Start the deployment `watch` once; its schedule should do it.")
    if abandoned:
        return Check("flow runs", "warning", seen, "Start a worker of their work pool, or resume the pool.")
    scheduled = filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=[StateType.SCHEDULED]))
    planned = client.read_flow_runs(
        flow_filter=filters.FlowFilter(name=filters.FlowFilterName(any_=["watch"])),
        flow_run_filter=filters.FlowRunFilter(state=scheduled),
        sort=FlowRunSort.EXPECTED_START_TIME_ASC,
        limit=1,
    )
    now = datetime.now(UTC)
    next_s = max(((run.expected_start_time or now) - now).total_seconds() for run in planned) if planned else 0.0
    if next_s > _LATEST_LOOK_S:
        seen = f"`watch` looks at them in {next_s / 60:.0f} minutes: was the server's clock set back?"
        return Check("flow runs", "warning", seen, "Deploy again (`ckpt up`), which plans its schedule anew.")
    marked = f"; marked as crashed, since their processes were gone: {', '.join(crashed)}" if crashed else ""
    return Check("flow runs", "ok", f"none waits for a process that is gone{marked}")


def check_processes(client: SyncPrefectClient) -> Check:
    """Check that no process of this host works for a flow run that Prefect calls ended for more than a minute."""
    working, wrong = site_processes("")[1], []
    for process in working:
        with suppress(ObjectNotFound, ValueError):
            run = client.read_flow_run(UUID(process.flow_run_id))
            if run.state is not None and run.state.is_final():
                since_s = (datetime.now(UTC) - run.state.timestamp).total_seconds()
                if since_s > _ENDING_S and process.trains.lives:
                    wrong.append(
                        f"process {process.trains.pid} works for {run.name}, {run.state.name} {since_s:.0f} s ago"
                    )
    if wrong:
        todo = "kill -TERM it: it commits after its step, and ends."
        return Check("processes", "wrong", "; ".join(wrong[:_NAMED]), todo)
    return Check("processes", "ok", f"{len(working)} here, none for a flow run that has ended")


def clock_of(url: str) -> tuple[float | None, float]:
    """Return how many seconds the clock of the server at a URL is ahead of ours, and the possible error in seconds.

    The first number is None without an answer, or if the answer has no date; a refusal counts as an answer.
    """
    try:
        with httpx.Client(timeout=_PATIENCE_S, verify=_trust()) as client:
            return _ahead(lambda: client.head(url))[1:]
    except (httpx.HTTPError, httpx.InvalidURL):
        return None, 0.0


# ── private helpers ──────────────────────────────────────────────────────────────────────────────────────────────


def _check_health(url: str) -> tuple[str | None, float | None, float]:
    """Return why no server answers at a URL (None if one does), and the two numbers of `clock_of` for its clock.

    Do not use Prefect's client here: it would retry for a minute.
    """
    try:
        with httpx.Client(timeout=_PATIENCE_S, verify=_trust(), follow_redirects=True) as client:
            answer, ahead_s, within_s = _ahead(lambda: client.get(f"{url.rstrip('/')}/health"))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return _why(error), None, 0.0
    if answer.status_code == 404:
        return "answers 404: this is not the address of Prefect's API, which ends with /api", None, 0.0
    return None, ahead_s, within_s


def _ahead(ask: Callable[[], httpx.Response]) -> tuple[httpx.Response, float | None, float]:
    """Ask a server; return its last answer, and the two numbers of `clock_of`.

    A server that was too busy to renew the date of its answers seems to be behind: ask it again.
    """
    asked = 0
    while True:
        asked += 1
        began_s = time.time()
        answer = ask()
        ended_s = time.time()
        try:
            # The date is rounded down to the second, so add half a second.
            theirs_s = parsedate_to_datetime(answer.headers["date"]).timestamp() + 0.5
        except (KeyError, ValueError, TypeError, OverflowError):
            return answer, None, 0.0
        ahead_s, within_s = theirs_s - (began_s + ended_s) / 2, (ended_s - began_s) / 2 + 0.5
        if ahead_s + within_s > -1 or asked == _QUESTIONS:
            return answer, ahead_s, within_s
        time.sleep(1)  # Servers renew the date each second.


def _trust() -> ssl.SSLContext | bool:
    """Return how to verify TLS certificates, by Prefect's settings."""
    settings = get_current_settings().api
    if settings.tls_insecure_skip_verify:
        return False
    return ssl.create_default_context(cafile=settings.ssl_cert_file) if settings.ssl_cert_file else True


def _answer(question: Callable[[], _T]) -> _T | None:
    """Return the server's answer to `question`; None for an unexpected answer. Raises ConfigError."""
    try:
        return question()
    except ConfigError:
        raise
    except (httpx.HTTPError, PrefectException, ValueError, AttributeError, TypeError, KeyError):
        return None  # Report the check as not made; the server is known to run by now.


def _why(error: Exception) -> str:
    if isinstance(error, httpx.TimeoutException):
        return f"no answer within {_PATIENCE_S:.0f} s"
    if isinstance(error, httpx.HTTPStatusError):
        code = error.response.status_code
        reason = ": PREFECT_API_AUTH_STRING or PREFECT_API_KEY is missing or wrong" if code in (401, 403) else ""
        return f"answers {code}{reason}"
    message = " ".join(without_secrets(str(error)).split())
    return f"{message:.200}" if message else type(error).__name__


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _automation(automation: Automation) -> AutomationFacts:
    trigger = automation.trigger
    within_s = trigger.within.total_seconds() if isinstance(trigger, EventTrigger) else None
    proactive = isinstance(trigger, EventTrigger) and trigger.posture == Posture.Proactive
    return AutomationFacts(name=automation.name, enabled=automation.enabled, proactive=proactive, within_s=within_s)


def _pool(client: SyncPrefectClient, name: str | None, deployment: str | None) -> PoolFacts:
    deployments = [_deployment(client, deployment)] if deployment else []
    name = name or (deployments[0].work_pool_name if deployments else None)
    if not name:
        raise ConfigError(f"the deployment {deployment!r:.100} is in no work pool")
    try:
        pool = client.read_work_pool(name)
    except ObjectNotFound:
        return PoolFacts(name=name)
    workers = client.read_workers_for_work_pool(name)
    if not deployments:
        of_pool = filters.WorkPoolFilter(name=filters.WorkPoolFilterName(any_=[name]))
        deployments = client.read_deployments(work_pool_filter=of_pool, limit=_MOST)
    return PoolFacts(
        name=name,
        type=pool.type,
        paused=pool.is_paused,
        online=sum(worker.status == WorkerStatus.ONLINE for worker in workers),
        jobs=_jobs(client, pool, deployments),
    )


def _deployment(client: SyncPrefectClient, name: str) -> DeploymentResponse:
    try:
        return client.read_deployment_by_name(name)
    except (ObjectNotFound, ValueError) as error:
        raise ConfigError(
            f"there is no deployment {name!r:.100}", hint="Write FLOW/NAME, as `prefect deployment ls` does."
        ) from error


def _jobs(client: SyncPrefectClient, pool: WorkPool, deployments: list[DeploymentResponse]) -> tuple[JobFacts, ...]:
    template = pool.base_job_template
    command, env = _of_template(template, "command"), _of_template(template, "env")
    pool_job = JobFacts(
        name=f"the pool {pool.name}",
        command=command if isinstance(command, str) else None,
        env=env if isinstance(env, Mapping) else {},
        deployed=False,
    )
    if not deployments:
        return (pool_job,)
    of_deployments = filters.FlowFilter(
        id=filters.FlowFilterId(any_=[deployment.flow_id for deployment in deployments])
    )
    flows = {flow.id: flow.name for flow in client.read_flows(flow_filter=of_deployments, limit=_MOST)}
    return tuple(
        _job(f"{flows.get(deployment.flow_id, '?')}/{deployment.name}", deployment, pool_job)
        for deployment in deployments
    )


def _of_template(template: Mapping[str, Any], name: str) -> Any:
    """Return a value of a pool's job template: the value itself, or the default of the variable that it names."""
    value = template.get("job_configuration", {}).get(name)
    default = template.get("variables", {}).get("properties", {}).get(name, {}).get("default")
    if isinstance(value, Mapping):
        return {**value, **(default or {})}
    return value if value and "{{" not in str(value) else default


def _job(name: str, deployment: DeploymentResponse, pool: JobFacts) -> JobFacts:
    """Merge a deployment's job variables over its pool's, as a worker does."""
    variables = deployment.job_variables or {}
    dotted = {key.removeprefix("env."): value for key, value in variables.items() if key.startswith("env.")}
    limit = deployment.global_concurrency_limit
    return JobFacts(
        name=name,
        command=variables.get("command", pool.command),
        env={**pool.env, **dotted, **(variables.get("env") or {})},
        tags=tuple(deployment.tags or ()),
        limit=None if limit is None else limit.limit,
    )
