"""The judgements of `ckpt doctor`: what is well, what is not, and what to do about it.

Pure decisions over plain facts, which other modules collect (orchestration/doctor.py, cli/doctor.py).
docs/OPERATING.md explains the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpt_tasks.policy.space import Forecast, gib

__all__ = [
    "AutomationFacts",
    "Check",
    "DiskFacts",
    "JobFacts",
    "MemoryFacts",
    "PoolFacts",
    "ServerFacts",
    "judge_automations",
    "judge_clock",
    "judge_disk",
    "judge_fastapi",
    "judge_heartbeat",
    "judge_leases",
    "judge_memory",
    "judge_pool",
    "judge_server",
    "judge_stopping",
    "judge_tags",
    "judge_threads",
]

Verdict = Literal["ok", "warning", "wrong", "not checked"]

HEARTBEAT = "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"
SIGTERM_BEHAVIOR = "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"
WAIT_POLICY = "OMP_WAIT_POLICY"
_LEASES = "prefect.server.concurrency.lease_storage"
_COMMAND = "prefect flow-run execute"
TAG = "ckpt-tasks"
_PREFIX = "ckpt-tasks: "
_ZOMBIES = f"{_PREFIX}zombie flow runs are crashed"
_RESUMES = f"{_PREFIX}crashed flow runs are resumed"

_REPEATED = ("evaluate", "upkeep", "watch")  # flows of ours whose next run completes what the last one left

_BEATS = 3  # a healthy process may be late twice
_HEARTBEAT_S = 30  # the smallest that Prefect takes
_DEFAULT_HEARTBEAT_S = 180  # Prefect's own
_SET_HEARTBEAT = f"Set {HEARTBEAT}={_HEARTBEAT_S} in the job variables' env of the pool or the deployment."
_SKEW_S, _MOST_SKEW_S = 2.0, 30.0  # a silent owner may be taken over from after 120 s
_NAMED = 5


@dataclass(frozen=True)
class Check:
    """One check: its verdict, what was seen, and what to do if it is not well."""

    name: str
    verdict: Verdict
    seen: str
    do: str = ""


@dataclass(frozen=True, kw_only=True)
class AutomationFacts:
    """An automation of Prefect's server; `within_s` is its trigger's."""

    name: str
    enabled: bool = True
    proactive: bool = True
    within_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """How flow runs start: a deployment's job variables over its pool's, or the pool's alone (not `deployed`)."""

    name: str
    command: str | None = None
    env: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    tags: tuple[str, ...] = ()
    limit: int | None = None
    deployed: bool = True


@dataclass(frozen=True, kw_only=True)
class PoolFacts:
    """A work pool: `type` is None if there is none of that name, `online` counts its workers that are."""

    name: str
    type: str | None = None
    paused: bool = False
    online: int = 0
    jobs: tuple[JobFacts, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """The answers of Prefect's server; None for those that it did not give, `failure` says why.

    `url` is None if every process starts an embedded server. `ahead_s` is how far its clock is ahead of ours, to
    within `within_s`.
    """

    url: str | None
    client_version: str
    fastapi_version: str | None = None
    failure: str | None = None
    version: str | None = None
    settings: Mapping[str, Any] | None = None
    automations: tuple[AutomationFacts, ...] | None = None
    ahead_s: float | None = None
    within_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """A local run's disk: a directory that this user cannot write, bytes free, and what as many checkpoints need."""

    unwritable: str | None
    free_bytes: int
    forecast: Forecast | None


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """The memory for snapshots: bytes free, bytes that two snapshots need; `fits` is what a run would decide."""

    directory: str
    there: bool
    free_bytes: int = 0
    total_bytes: int = 0
    needed_bytes: int | None = None
    fits: bool | None = None


# ── Prefect's server ─────────────────────────────────────────────────────────────────────────────────────────────


def judge_server(facts: ServerFacts) -> Check:
    """Judge whether there is a server that outlives a process, of a version that this client understands."""
    if facts.url is None:
        return Check(
            "server",
            "warning",
            "none: each process starts an embedded server, and a crashed run is not started again",
            "Start one with ckpt up, and set PREFECT_API_URL as it says.",
        )
    if facts.failure is not None:
        do = "Start it (ckpt up starts one on this machine), or set PREFECT_API_URL to where it is."
        return Check("server", "wrong", f"{facts.url}: {facts.failure}", do)
    seen = f"{facts.url}, version {facts.version or 'unknown'}; this client has {facts.client_version}"
    theirs, ours = _numbers(facts.version or ""), _numbers(facts.client_version)
    if theirs[:1] != ours[:1]:
        return Check("server", "wrong", seen, "Give both the same version of Prefect.")
    if theirs[:2] < ours[:2]:
        return Check("server", "warning", seen, "Upgrade the server: it is older than its client.")
    return Check("server", "ok", seen)


def judge_fastapi(facts: ServerFacts) -> Check:
    """Judge whether a server started from this environment would run; a remote server's packages are unknown."""
    name, version = "fastapi", facts.fastapi_version
    numbers = _numbers(version or "")
    if not numbers:
        return Check(name, "not checked", "not installed here")
    seen = f"{version} is installed here"
    if numbers[:2] <= (0, 150):
        return Check(name, "ok", seen)
    running = facts.url is not None and facts.failure is None
    matter = "does not start" if numbers >= (0, 155) else "refuses some requests (422)"
    return Check(
        name,
        "warning" if running or numbers < (0, 152) else "wrong",
        f"{seen}: a server of Prefect 3.8 {matter} with it",
        "pip install 'fastapi<=0.150' where the server runs.",
    )


def judge_leases(facts: ServerFacts, jobs: Sequence[JobFacts] = ()) -> Check:
    """Judge whether concurrency limits survive a restart of the server; by default it keeps them in memory."""
    name = "lease storage"
    storage = _at(facts.settings, "server", "concurrency", "lease_storage")
    if not isinstance(storage, str):
        return Check(
            name, "not checked", "the server does not say; PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE on its host"
        )
    if storage != f"{_LEASES}.memory":
        return Check(name, "ok", storage.removeprefix(f"{_LEASES}."))
    limited = [job.name for job in jobs if job.limit is not None]
    seen = "the server's memory: when it restarts, healthy runs that hold a slot of a limit are crashed"
    if limited:
        seen += f"; {_some(limited)} {'are' if limited[1:] else 'is'} limited"
    do = f"Set PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE={_LEASES}.filesystem for the server, or set no limits."
    return Check(name, "wrong" if limited else "warning", seen, do)


def judge_automations(facts: ServerFacts) -> list[Check]:
    """Judge whether the automations notice a dead process and start a crashed run again."""
    do = "python -m deployments.automations apply"
    if facts.automations is None:
        return [Check("automations", "not checked", "the server does not say")]
    if _at(facts.settings, "server", "services", "triggers", "enabled") is False:
        do = "Set PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED=true for the server."
        return [Check("automations", "wrong", "the server evaluates no triggers", do)]
    checks = []
    for name, wanted in (("zombies", _ZOMBIES), ("resuming", _RESUMES)):
        matches = [automation for automation in facts.automations if automation.name == wanted]
        if not matches:
            checks.append(Check(name, "wrong", f"no automation {wanted!r}", do))
        elif len(matches) > 1:
            checks.append(Check(name, "wrong", f"{len(matches)} automations {wanted!r}", do))
        elif not matches[0].enabled:
            checks.append(Check(name, "wrong", f"{wanted!r} is paused", "Enable it in Prefect's pages: Automations."))
        elif not matches[0].proactive:
            seen = f"{wanted!r} is reactive: it would act twice on one crash"
            checks.append(Check(name, "wrong", seen, do))
        else:
            checks.append(Check(name, "ok", f"{wanted!r}, after {matches[0].within_s or 0:.0f} s"))
    return checks


def judge_heartbeat(facts: ServerFacts, jobs: Sequence[JobFacts], own_s: int | None) -> Check:
    """Judge whether flow runs send heartbeats often enough for the automations; `own_s` is this process's setting."""
    within_s = next((rule.within_s for rule in facts.automations or () if rule.name == _ZOMBIES), None)
    if within_s is not None and jobs:
        jobs = [job for job in jobs if TAG in job.tags or not job.deployed]
        if not jobs:
            return Check("heartbeat", "not checked", "the automations hold for no deployment of the pool")
    beats = {job.name: _seconds(job.env.get(HEARTBEAT)) for job in jobs} or {"this process": own_s}
    return _judge_beats(beats, within_s)


def _judge_beats(beats: Mapping[str, int | None], within_s: float | None) -> Check:
    slow = {name: beat_s for name, beat_s in beats.items() if beat_s is not None and beat_s > _allowed(within_s)}
    if slow:
        name, beat_s = max(slow.items(), key=lambda item: item[1])
        seen = f"{name}: every {beat_s} s"
        if within_s is None:
            return Check("heartbeat", "warning", seen, _SET_HEARTBEAT)
        seen += f", and after {within_s:.0f} s a silent run is taken for dead"
        return Check("heartbeat", "wrong" if beat_s >= within_s else "warning", seen, _SET_HEARTBEAT)
    if unset := [name for name, beat_s in beats.items() if beat_s is None]:
        seen = f"not set for {_some(unset)}: the worker's own counts, {_DEFAULT_HEARTBEAT_S} s by default"
        return Check("heartbeat", "warning" if within_s is None else "wrong", seen, _SET_HEARTBEAT)
    return Check("heartbeat", "ok", f"every {max(beat_s or 0 for beat_s in beats.values())} s")


def _allowed(within_s: float | None) -> float:
    return _HEARTBEAT_S if within_s is None else within_s / _BEATS


# ── the work pool ────────────────────────────────────────────────────────────────────────────────────────────────


def judge_pool(pool: PoolFacts | None, *, asked: bool) -> Check:
    """Judge whether a worker picks up scheduled runs; `asked`: the user named the pool."""
    if pool is None:
        return Check("work pool", "not checked", "the server does not say")
    if pool.type is None:
        do = f"prefect work-pool create {pool.name} --type process, or name yours: --pool NAME"
        return Check("work pool", "wrong" if asked else "not checked", f"there is no pool {pool.name!r}", do)
    deployed = sum(job.deployed for job in pool.jobs)
    seen = f"{pool.name}, {pool.type}, workers online: {pool.online}, deployments: {deployed}"
    if pool.paused:
        return Check("work pool", "wrong", f"{seen}; it is paused", f"prefect work-pool resume {pool.name}")
    if not pool.online and not pool.type.endswith((":push", ":managed")):
        return Check("work pool", "wrong", seen, f"prefect worker start --pool {pool.name}")
    return Check("work pool", "ok", seen)


def judge_stopping(pool: PoolFacts, jobs: Sequence[JobFacts]) -> Check:
    """Judge whether a flow run that gets SIGTERM is scheduled again, which must be configured."""
    if pool.type not in ("process", "docker"):  # a Kubernetes worker requests it by itself
        return Check("preemption", "not checked", f"a pool of the type {pool.type} has its own way")
    jobs = [job for job in jobs if not _is_repeated(job)]
    if not jobs:
        return Check("preemption", "not checked", "all flows of the pool run again anyway")
    wrong = [
        job.name
        for job in jobs
        if _COMMAND not in " ".join((job.command or "").split()) or job.env.get(SIGTERM_BEHAVIOR) != "reschedule"
    ]
    if not wrong:
        return Check("preemption", "ok", f"SIGTERM schedules a flow run again: {_some([job.name for job in jobs])}")
    do = f"Set command: {_COMMAND} and env {SIGTERM_BEHAVIOR}=reschedule in the job variables."
    return Check("preemption", "warning", f"SIGTERM ends a flow run for good: {_some(wrong)}", do)


def judge_threads(jobs: Sequence[JobFacts]) -> Check:
    """Judge whether waiting OpenMP threads free their cores, by the environment variable that OpenMP reads."""
    unset = [job.name for job in jobs if not job.env.get(WAIT_POLICY)]
    if not unset:
        return Check("threads", "ok", f"{WAIT_POLICY} is set: {_some([job.name for job in jobs])}")
    seen = f"{WAIT_POLICY} is not set for {_some(unset)}: threads spin while they wait, and steps may take 5 × as long"
    return Check("threads", "warning", seen, f"Set {WAIT_POLICY}=passive in the job variables' env.")


def judge_tags(facts: ServerFacts, jobs: Sequence[JobFacts]) -> Check | None:
    """Judge whether the automations hold for the deployments; None if there are none of either."""
    if not any(automation.name in (_ZOMBIES, _RESUMES) for automation in facts.automations or ()):
        return None
    deployed = [job for job in jobs if job.deployed and not _is_repeated(job)]
    if not deployed:
        return None
    without = [job.name for job in deployed if TAG not in job.tags]
    if not without:
        return Check("tags", "ok", f"the automations hold for {_some([job.name for job in deployed])}")
    seen = f"the automations do not hold for {_some(without)}"
    return Check("tags", "warning", seen, f"Give what trains the tag {TAG}, and deploy it again.")


# ── this host ────────────────────────────────────────────────────────────────────────────────────────────────────


def judge_clock(name: str, ahead_s: float | None, within_s: float, whose: str) -> Check:
    """Judge whether two clocks agree: a take-over compares the owner's heartbeat with its own clock.

    `ahead_s` is how far theirs is ahead of ours, with an error of `within_s`; only a certain difference counts.
    """
    if ahead_s is None:
        return Check(name, "not checked", f"{whose} tells no time")
    certain_s = max(abs(ahead_s) - within_s, 0.0)
    if certain_s < _SKEW_S:
        bound_s = math.ceil(max(abs(ahead_s), within_s, 0.1) * 10) / 10  # a bound is not rounded down
        return Check(name, "ok", f"agrees with {whose} to within {bound_s:.12g} s")
    which = "behind" if ahead_s > 0 else "ahead of"
    do = "Set the clocks by NTP: a process that lives could be taken for dead, and a dead one for alive."
    seen = f"this host is {abs(ahead_s):.0f} s {which} {whose}"
    return Check(name, "wrong" if certain_s >= _MOST_SKEW_S else "warning", seen, do)


def judge_disk(facts: DiskFacts) -> Check:
    """Judge whether the next save has permission and room to write."""
    seen = f"{gib(facts.free_bytes)} free"
    if facts.unwritable is not None:
        do = "Mount it for writing, or give its directories and files to the user who trains."
        return Check("disk", "wrong", f"{facts.unwritable} cannot be written by this user", do)
    if facts.forecast is None:
        return Check("disk", "ok", seen)
    seen += f", the next checkpoint needs {gib(facts.forecast.needed_bytes)}"
    do = "Free space: ckpt prune, or a smaller max_num_checkpoints. A save is written before an older one goes."
    if not facts.forecast.fits:
        return Check("disk", "wrong", f"{seen}: the next save fails", do)
    if facts.forecast.room_for < 2:
        return Check("disk", "warning", seen, do)
    return Check("disk", "ok", seen)


def judge_memory(facts: MemoryFacts) -> Check:
    """Judge whether the next process on this host would find the snapshots of a killed one."""
    if not facts.there:
        do = "Mount a tmpfs at /dev/shm, or name a memory_dir; without one a restart goes back to storage."
        return Check("memory", "warning", f"no {facts.directory}: snapshots end with their process", do)
    seen = f"{facts.directory}: {gib(facts.free_bytes)} of {gib(facts.total_bytes)} free"
    if facts.needed_bytes is None:
        return Check("memory", "ok", seen)
    seen += f", two snapshots of the newest checkpoint's size need {gib(facts.needed_bytes)}"
    if facts.fits:
        return Check("memory", "ok", seen)
    do = "Give it more (a container: --shm-size), or name a memory_dir; without room a restart goes back to storage."
    return Check("memory", "warning", f"{seen}: there is no room, or too little memory", do)


# ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _is_repeated(job: JobFacts) -> bool:
    return job.deployed and job.name.partition("/")[0] in _REPEATED


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading whole numbers of a version."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _seconds(text: str | None) -> int | None:
    return int(text) if text is not None and str(text).isdecimal() else None


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
