"""Ask Prefect's server what `ckpt doctor` wants to know: each thing once, within seconds, and nothing is changed.

No server is started for it: where none is configured, that is the finding.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import httpx
import prefect
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterId, WorkPoolFilter, WorkPoolFilterName
from prefect.client.schemas.objects import WorkerStatus, WorkPool
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events.schemas.automations import Automation, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.policy.health import (
    AutomationFacts,
    Check,
    JobFacts,
    PoolFacts,
    ServerFacts,
    judge_automations,
    judge_clock,
    judge_fastapi,
    judge_heartbeat,
    judge_leases,
    judge_pool,
    judge_server,
    judge_stopping,
    judge_tags,
    judge_threads,
)
from ckpt_tasks.storage.secrets import without_secrets

__all__ = ["ask_pool", "ask_server", "check_prefect", "clock_of", "read_automations"]

_POOL = "ckpt-tasks"
_PATIENCE_S = 4.0
_MOST = 200  # what the server gives in one answer
_T = TypeVar("_T")


def check_prefect(pool: str | None = None, deployment: str | None = None) -> list[Check]:
    """Look at the server, and at a work pool (by default that of deployments/prefect.yaml) or one deployment."""
    facts = ask_server()
    checks = [judge_server(facts), judge_fastapi(facts)]
    if facts.url is None or facts.failure is not None:
        return checks
    found = ask_pool(pool or (None if deployment else _POOL), deployment)
    jobs = found.jobs if found is not None else ()
    checks += [judge_leases(facts, jobs), *judge_automations(facts)]
    checks.append(judge_heartbeat(facts, jobs, get_current_settings().flows.heartbeat_frequency))
    checks.append(judge_pool(found, asked=pool is not None or deployment is not None))
    if found is not None and found.type is not None:
        tags = judge_tags(facts, jobs)
        checks += [judge_stopping(found, jobs), judge_threads(jobs), *([] if tags is None else [tags])]
    return [*checks, judge_clock("clock", facts.ahead_s, facts.within_s, "Prefect's server")]


def ask_server() -> ServerFacts:
    """Ask the configured server for its version, settings, automations and time."""
    settings = get_current_settings()
    known = ServerFacts(url=None, client_version=prefect.__version__, fastapi_version=_installed("fastapi"))
    if not settings.api.url:
        return known
    known = replace(known, url=without_secrets(settings.api.url))
    failure, ahead_s, within_s = _look(settings.api.url)
    if failure is not None:
        return replace(known, failure=failure)
    try:
        with _client() as client:
            found = str(client.request("GET", "/admin/version").json())
            server_settings = _asked(lambda: client.request("GET", "/admin/settings").json())
            automations = _asked(lambda: read_automations(client))
    except (httpx.HTTPError, ValueError) as error:
        return replace(known, failure=_why(error))
    return replace(
        known,
        version=found,
        settings=server_settings if isinstance(server_settings, Mapping) else None,
        automations=None if automations is None else tuple(map(_automation, automations)),
        ahead_s=ahead_s,
        within_s=within_s,
    )


def ask_pool(name: str | None, deployment: str | None = None) -> PoolFacts | None:
    """Ask for a work pool, its workers and the jobs of its deployments; None where the server does not say.

    With a `deployment` ("flow/name") only that one counts, and its pool where none is named. Raises ConfigError where
    there is no such deployment, or it is in no pool.
    """
    with _client() as client:
        return _asked(lambda: _pool(client, name, deployment))


def read_automations(client: SyncPrefectClient) -> list[Automation]:
    """Read every automation of the server, however many answers that takes."""
    found: list[Automation] = []
    while more := client.read_automations(limit=_MOST, offset=len(found)):
        found += more
    return found


def clock_of(url: str) -> tuple[float | None, float]:
    """Return how many seconds the clock of who answers at a URL is ahead of ours, and to within how many.

    None if no answer comes or it has no time; any answer will do, also a refusal.
    """
    try:
        with httpx.Client(timeout=_PATIENCE_S, verify=_trust()) as client:
            began_s = time.time()
            return _ahead(client.head(url), began_s)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None, 0.0


# ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _client() -> Iterator[SyncPrefectClient]:
    """Give a client that asks once, and not for longer than a person waits."""
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(httpx_settings={"timeout": _PATIENCE_S}, sync_client=True) as client,
    ):
        yield client


def _look(url: str) -> tuple[str | None, float | None, float]:
    """Say why there is no server at a URL (None: there is one), and what its clock says.

    With a client without retries: Prefect's own would go on for a minute.
    """
    try:
        with httpx.Client(timeout=_PATIENCE_S, verify=_trust(), follow_redirects=True) as client:
            began_s = time.time()
            answer = client.get(f"{url.rstrip('/')}/health")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return _why(error), None, 0.0
    if answer.status_code == 404:
        return "answers 404: no API of Prefect is there; its address ends with /api", None, 0.0
    return None, *_ahead(answer, began_s)


def _ahead(answer: httpx.Response, began_s: float) -> tuple[float | None, float]:
    ended_s = time.time()
    try:
        theirs_s = parsedate_to_datetime(answer.headers["date"]).timestamp() + 0.5  # it is cut to the second
    except (KeyError, ValueError, TypeError, OverflowError):
        return None, 0.0
    return theirs_s - (began_s + ended_s) / 2, (ended_s - began_s) / 2 + 0.5


def _trust() -> ssl.SSLContext | bool:
    """Return whom TLS trusts, by Prefect's settings."""
    settings = get_current_settings().api
    if settings.tls_insecure_skip_verify:
        return False
    return ssl.create_default_context(cafile=settings.ssl_cert_file) if settings.ssl_cert_file else True


def _asked(question: Callable[[], _T]) -> _T | None:
    """Return the answer, None where there is none that can be understood."""
    try:
        return question()
    except ConfigError:
        raise
    except (httpx.HTTPError, PrefectException, ValueError, AttributeError, TypeError, KeyError):
        return None  # said as "the server does not say"; that it is there has been seen


def _why(error: Exception) -> str:
    if isinstance(error, httpx.TimeoutException):
        return f"no answer within {_PATIENCE_S:.0f} s"
    if isinstance(error, httpx.HTTPStatusError):
        code = error.response.status_code
        refused = ": PREFECT_API_AUTH_STRING or PREFECT_API_KEY is missing or wrong" if code in (401, 403) else ""
        return f"answers {code}{refused}"
    words = " ".join(without_secrets(str(error)).split())
    return f"{words:.200}" if words else type(error).__name__


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _automation(found: Automation) -> AutomationFacts:
    trigger = found.trigger
    within_s = trigger.within.total_seconds() if isinstance(trigger, EventTrigger) else None
    proactive = isinstance(trigger, EventTrigger) and trigger.posture == Posture.Proactive
    return AutomationFacts(name=found.name, enabled=found.enabled, proactive=proactive, within_s=within_s)


def _pool(client: SyncPrefectClient, name: str | None, deployment: str | None) -> PoolFacts:
    found = [_deployment(client, deployment)] if deployment else []
    name = name or (found[0].work_pool_name if found else None)
    if not name:
        raise ConfigError(f"the deployment {deployment!r:.100} is in no work pool")
    try:
        pool = client.read_work_pool(name)
    except ObjectNotFound:
        return PoolFacts(name=name)
    workers = client.read_workers_for_work_pool(name)
    if not found:
        of_pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[name]))
        found = client.read_deployments(work_pool_filter=of_pool, limit=_MOST)
    return PoolFacts(
        name=name,
        type=pool.type,
        paused=pool.is_paused,
        online=sum(worker.status == WorkerStatus.ONLINE for worker in workers),
        jobs=_jobs(client, pool, found),
    )


def _deployment(client: SyncPrefectClient, name: str) -> DeploymentResponse:
    try:
        return client.read_deployment_by_name(name)
    except (ObjectNotFound, ValueError) as error:
        raise ConfigError(
            f"there is no deployment {name!r:.100}", hint="Write FLOW/NAME, as `prefect deployment ls` does."
        ) from error


def _jobs(client: SyncPrefectClient, pool: WorkPool, found: list[DeploymentResponse]) -> tuple[JobFacts, ...]:
    template = pool.base_job_template
    command, env = _of_template(template, "command"), _of_template(template, "env")
    own = JobFacts(
        name=f"the pool {pool.name}",
        command=command if isinstance(command, str) else None,
        env=env if isinstance(env, Mapping) else {},
        deployed=False,
    )
    if not found:
        return (own,)
    only = FlowFilter(id=FlowFilterId(any_=[one.flow_id for one in found]))
    flows = {flow.id: flow.name for flow in client.read_flows(flow_filter=only, limit=_MOST)}
    return tuple(_job(f"{flows.get(one.flow_id, '?')}/{one.name}", one, own) for one in found)


def _of_template(template: Mapping[str, Any], name: str) -> Any:
    """Return what a pool's template says: a value of its own, or the default of its variable."""
    value = template.get("job_configuration", {}).get(name)
    default = template.get("variables", {}).get("properties", {}).get(name, {}).get("default")
    if isinstance(value, Mapping):
        return {**value, **(default or {})}
    return value if value and "{{" not in str(value) else default


def _job(name: str, deployment: DeploymentResponse, pool: JobFacts) -> JobFacts:
    """Put a deployment's job variables over its pool's, as a worker does."""
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
