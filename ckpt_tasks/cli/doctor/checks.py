"""The table of checks of `ckpt doctor`: what is in order, what is not, and what to do about it.

The functions only judge facts, which the other modules of the package collect. docs/OPERATING.md explains the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from ckpt_tasks.flows.site import TAG
from ckpt_tasks.format.policy.space import Forecast, gib
from ckpt_tasks.format.records import RunCheck
from ckpt_tasks.run.report.words import check_words

HEARTBEAT = "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"
SIGTERM_BEHAVIOR = "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"
WAIT_POLICY = "OMP_WAIT_POLICY"
_LEASES = "prefect.server.concurrency.lease_storage"
_COMMAND = "prefect flow-run execute"
_ZOMBIES = "ckpt-tasks: zombie flow runs are crashed"
_RESUMES = "ckpt-tasks: crashed flow runs are resumed"

# The next run of such a flow completes the work of the last one, so a missed run does no harm.
_REPEATED = ("evaluate", "upkeep", "watch")

# This many heartbeats must fit into the limit of an automation: a healthy process may be late by two.
_BEATS = 3
# The smallest heartbeat that Prefect accepts, and Prefect's default.
_HEARTBEAT_S, _DEFAULT_HEARTBEAT_S = 30, 180
_SET_HEARTBEAT = f"Set {HEARTBEAT}={_HEARTBEAT_S} in the job variables' env of the pool or the deployment."
# An owner without a new heartbeat may be taken over after 120 s, so clocks must agree.
_SKEW_S, _MOST_SKEW_S = 2.0, 30.0
_NAMED = 5


@dataclass(frozen=True)
class Check:
    """One check: its verdict, what was observed, and what to do if it is not in order."""

    name: str
    verdict: Literal["ok", "warning", "wrong", "not checked"]
    seen: str
    do: str = ""


@dataclass(frozen=True, kw_only=True)
class AutomationFacts:
    """An automation of Prefect's server; `within_s` is the time limit of its trigger."""

    name: str
    enabled: bool = True
    proactive: bool = True
    within_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """How flow runs start: the job variables of a deployment merged over its pool's, or only the pool's."""

    name: str
    command: str | None = None
    env: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    tags: tuple[str, ...] = ()
    limit: int | None = None
    deployed: bool = True


@dataclass(frozen=True, kw_only=True)
class PoolFacts:
    """A work pool: `type` is None if no pool has this name, `online` counts its workers that are online."""

    name: str
    type: str | None = None
    paused: bool = False
    online: int = 0
    jobs: tuple[JobFacts, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PrefectFacts:
    """The answers of Prefect's server, None for each missing one; `failure` says why the server does not answer.

    `url` is None if every process starts an embedded server. `ahead_s` is how far the server's clock is ahead of ours,
    with an error of `within_s`. `asked`: the user named the pool or a deployment. `own_beat_s` is this process's
    heartbeat.
    """

    url: str | None
    client_version: str
    fastapi_version: str | None = None
    sqlalchemy_version: str | None = None
    failure: str | None = None
    version: str | None = None
    settings: Mapping[str, Any] | None = None
    automations: tuple[AutomationFacts, ...] | None = None
    ahead_s: float | None = None
    within_s: float = 0.0
    pool: PoolFacts | None = None
    asked: bool = False
    own_beat_s: int | None = None

    @property
    def answered(self) -> bool:
        """True if a Prefect server is configured and answers."""
        return self.url is not None and self.failure is None

    @property
    def jobs(self) -> Sequence[JobFacts]:
        """How the flow runs of the pool start."""
        return () if self.pool is None else self.pool.jobs


def judge_prefect(facts: PrefectFacts) -> list[Check]:
    """Judge a server, its automations and a work pool; if no server answers, only the server and its packages."""
    table = _OF_SERVER if facts.answered else _OF_SERVER[:2]
    return [check for judge in table for check in judge(facts)]


# ── Prefect's server ─────────────────────────────────────────────────────────────────────────────────────────────


def _server(facts: PrefectFacts) -> Iterator[Check]:
    """Check that a separate server is configured, that it answers, and that its version fits this client's."""
    if facts.url is None:
        seen = "none: each process starts an embedded server, and a crashed run is not started again"
        yield Check("server", "warning", seen, "Start one with ckpt up, and set PREFECT_API_URL as it says.")
        return
    if facts.failure is not None:
        do = "Start it (ckpt up starts one on this machine), or set PREFECT_API_URL to where it is."
        do = "Set it as ckpt up says." if "PREFECT_API_AUTH_STRING" in facts.failure else do
        yield Check("server", "wrong", f"{facts.url}: {facts.failure}", do)
        return
    seen = f"{facts.url}, version {facts.version or 'unknown'}; this client has {facts.client_version}"
    theirs, ours = _numbers(facts.version or ""), _numbers(facts.client_version)
    if theirs[:1] != ours[:1]:
        yield Check("server", "wrong", seen, "Give both the same version of Prefect.")
    elif theirs[:2] < ours[:2]:
        yield Check("server", "warning", seen, "Upgrade the server: it is older than its client.")
    else:
        yield Check("server", "ok", seen)


def _packages(facts: PrefectFacts) -> Iterator[Check]:
    """Check that a server can run from this environment; the packages of a remote server are unknown."""
    bounds = {"fastapi": (facts.fastapi_version, (0, 151)), "sqlalchemy": (facts.sqlalchemy_version, (2, 1))}
    for name, (version, too_new) in bounds.items():
        numbers, seen = _numbers(version or ""), f"{version} is installed here"
        if not numbers:
            yield Check(name, "not checked", "not installed here")
        elif numbers < too_new or _numbers(facts.client_version) >= (3, 9):  # 3.9 works with the newest of both.
            yield Check(name, "ok", seen)
        else:
            refuses = "does not start" if numbers >= (0, 155) else "refuses some requests (422)"
            matter = refuses if name == "fastapi" else "starts no scheduled flow runs"
            verdict: Any = "warning" if facts.answered or numbers < (0, 152) else "wrong"
            do = f"pip install '{name}<{too_new[0]}.{too_new[1]}' where the server runs, or prefect>=3.9."
            yield Check(name, verdict, f"{seen}: a server of Prefect 3.8 {matter} with it", do)


def _leases(facts: PrefectFacts) -> Iterator[Check]:
    """Check that concurrency limits survive a restart of the server: by default it keeps them in memory."""
    storage = _at(facts.settings, "server", "concurrency", "lease_storage")
    if not isinstance(storage, str):
        seen = "the server does not say; PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE on its host"
        yield Check("lease storage", "not checked", seen)
        return
    if storage != f"{_LEASES}.memory":
        yield Check("lease storage", "ok", storage.removeprefix(f"{_LEASES}."))
        return
    limited = [job.name for job in facts.jobs if job.limit is not None]
    seen = "the server's memory: when it restarts, healthy runs that hold a slot of a limit are crashed"
    if limited:
        seen += f"; {_some(limited)} {'are' if limited[1:] else 'is'} limited"
    do = f"Set PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE={_LEASES}.filesystem for the server, or set no limits."
    yield Check("lease storage", "wrong" if limited else "warning", seen, do)


def _automations(facts: PrefectFacts) -> Iterator[Check]:
    """Check that the automations notice a dead process, and start a crashed run again."""
    if facts.automations is None:
        yield Check("automations", "not checked", "the server does not say")
        return
    if _at(facts.settings, "server", "services", "triggers", "enabled") is False:
        do = "Set PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED=true for the server."
        yield Check("automations", "wrong", "the server evaluates no triggers", do)
        return
    for name, wanted in (("zombies", _ZOMBIES), ("resuming", _RESUMES)):
        rules = [rule for rule in facts.automations if rule.name == wanted]
        fault, do = "", "python -m deployments.automations apply"
        if len(rules) != 1:
            fault = f"{len(rules) or 'no'} automation{'s' if rules else ''} {wanted!r}"
        elif not rules[0].enabled:
            fault, do = f"{wanted!r} is paused", "Enable it in Prefect's pages: Automations."
        elif not rules[0].proactive:
            fault = f"{wanted!r} is reactive: it would act twice on one crash"
        if fault:
            yield Check(name, "wrong", fault, do)
        else:
            yield Check(name, "ok", f"{wanted!r}, after {rules[0].within_s or 0:.0f} s")


def _heartbeat(facts: PrefectFacts) -> Iterator[Check]:
    """Check that flow runs send heartbeats often enough for the automations."""
    within_s = next((rule.within_s for rule in facts.automations or () if rule.name == _ZOMBIES), None)
    jobs = facts.jobs
    if within_s is not None and jobs:
        jobs = [job for job in jobs if TAG in job.tags or not job.deployed]
        if not jobs:
            yield Check("heartbeat", "not checked", "the automations hold for no deployment of the pool")
            return
    beats = {job.name: _seconds(job.env.get(HEARTBEAT)) for job in jobs} or {"this process": facts.own_beat_s}
    yield _judged(beats, within_s)


def _judged(beats: Mapping[str, int | None], within_s: float | None) -> Check:
    """Judge the heartbeats of jobs, in seconds (None: not set), by the time after which a silent run counts as dead."""
    allowed_s = _HEARTBEAT_S if within_s is None else within_s / _BEATS
    slow = {name: beat_s for name, beat_s in beats.items() if beat_s is not None and beat_s > allowed_s}
    unset = [name for name, beat_s in beats.items() if beat_s is None]
    if slow:
        name, beat_s = max(slow.items(), key=lambda item: item[1])
        silent = "" if within_s is None else f", and after {within_s:.0f} s a silent run is taken for dead"
        verdict: Any = "wrong" if within_s is not None and beat_s >= within_s else "warning"
        return Check("heartbeat", verdict, f"{name}: every {beat_s} s{silent}", _SET_HEARTBEAT)
    if unset:
        seen = f"not set for {_some(unset)}: the worker's own counts, {_DEFAULT_HEARTBEAT_S} s by default"
        return Check("heartbeat", "warning" if within_s is None else "wrong", seen, _SET_HEARTBEAT)
    return Check("heartbeat", "ok", f"every {max(beat_s or 0 for beat_s in beats.values())} s")


# ── the work pool ────────────────────────────────────────────────────────────────────────────────────────────────


def _pool(facts: PrefectFacts) -> Iterator[Check]:
    """Check that a worker picks up scheduled runs."""
    pool = facts.pool
    if pool is None:
        yield Check("work pool", "not checked", "the server does not say")
        return
    if pool.type is None:
        do = f"prefect work-pool create {pool.name} --type process, or name yours: --pool NAME"
        yield Check("work pool", "wrong" if facts.asked else "not checked", f"there is no pool {pool.name!r}", do)
        return
    deployed = sum(job.deployed for job in pool.jobs)
    seen = f"{pool.name}, {pool.type}, workers online: {pool.online}, deployments: {deployed}"
    if pool.paused:
        yield Check("work pool", "wrong", f"{seen}; it is paused", f"prefect work-pool resume {pool.name}")
    elif not pool.online and not pool.type.endswith((":push", ":managed")):
        yield Check("work pool", "wrong", seen, f"prefect worker start --pool {pool.name}")
    else:
        yield Check("work pool", "ok", seen)
    yield from (check for judge in _OF_POOL for check in judge(pool, facts))


def _stopping(pool: PoolFacts, facts: PrefectFacts) -> Iterator[Check]:
    """Check that a flow run that gets SIGTERM is scheduled again, which must be configured."""
    if pool.type not in ("process", "docker"):  # A Kubernetes worker requests a reschedule by itself.
        yield Check("preemption", "not checked", f"a pool of the type {pool.type} has its own way")
        return
    jobs = [job for job in pool.jobs if not _is_repeated(job)]
    wrong = [
        job.name
        for job in jobs
        if _COMMAND not in " ".join((job.command or "").split()) or job.env.get(SIGTERM_BEHAVIOR) != "reschedule"
    ]
    if not jobs:
        yield Check("preemption", "not checked", "all flows of the pool run again anyway")
    elif wrong:
        do = f"Set command: {_COMMAND} and env {SIGTERM_BEHAVIOR}=reschedule in the job variables."
        yield Check("preemption", "warning", f"SIGTERM ends a flow run for good: {_some(wrong)}", do)
    else:
        yield Check("preemption", "ok", f"SIGTERM schedules a flow run again: {_some([job.name for job in jobs])}")


def _threads(pool: PoolFacts, facts: PrefectFacts) -> Iterator[Check]:
    """Check that waiting OpenMP threads free their cores, by the environment variable that OpenMP reads."""
    if unset := [job.name for job in pool.jobs if not job.env.get(WAIT_POLICY)]:
        seen = (
            f"{WAIT_POLICY} is not set for {_some(unset)}: threads spin while they wait, and steps may take 5 × as long"
        )
        yield Check("threads", "warning", seen, f"Set {WAIT_POLICY}=passive in the job variables' env.")
    else:
        yield Check("threads", "ok", f"{WAIT_POLICY} is set: {_some([job.name for job in pool.jobs])}")


def _tags(pool: PoolFacts, facts: PrefectFacts) -> Iterator[Check]:
    """Check that the automations apply to the deployments; report nothing without automations or deployments."""
    deployed = [job for job in pool.jobs if job.deployed and not _is_repeated(job)]
    if not deployed or not any(rule.name in (_ZOMBIES, _RESUMES) for rule in facts.automations or ()):
        return
    if without := [job.name for job in deployed if TAG not in job.tags]:
        seen = f"the automations do not hold for {_some(without)}"
        yield Check("tags", "warning", seen, f"Give what trains the tag {TAG}, and deploy it again.")
    else:
        yield Check("tags", "ok", f"the automations hold for {_some([job.name for job in deployed])}")


_OF_SERVER = (_server, _packages, _leases, _automations, _heartbeat, _pool)
_OF_POOL = (_stopping, _threads, _tags)


# ── this host ────────────────────────────────────────────────────────────────────────────────────────────────────


def judge_clock(name: str, ahead_s: float | None, within_s: float, whose: str) -> Check:
    """Judge whether two clocks agree: a process that takes over compares the owner's heartbeat with its own clock.

    `ahead_s` is how far their clock is ahead of ours, with an error of `within_s`, which is subtracted.
    """
    if ahead_s is None:
        return Check(name, "not checked", f"{whose} tells no time")
    certain_s = max(abs(ahead_s) - within_s, 0.0)
    if certain_s < _SKEW_S:
        bound_s = math.ceil(max(abs(ahead_s), within_s, 0.1) * 10) / 10  # Round up, since it is a bound.
        return Check(name, "ok", f"agrees with {whose} to within {bound_s:.12g} s")
    which = "behind" if ahead_s > 0 else "ahead of"
    do = "Set the clocks by NTP: a process that lives could be taken for dead, and a dead one for alive."
    seen = f"this host is {abs(ahead_s):.0f} s {which} {whose}"
    return Check(name, "wrong" if certain_s >= _MOST_SKEW_S else "warning", seen, do)


def judge_disk(unwritable: str | None, free_bytes: int, forecast: Forecast | None) -> Check:
    """Judge whether the next save can be written and has enough space; `unwritable` is a directory of the run."""
    if unwritable is not None:
        do = "Mount it for writing, or give its directories and files to the user who trains."
        return Check("disk", "wrong", f"{unwritable} cannot be written by this user", do)
    seen = f"{gib(free_bytes)} free"
    if forecast is None:
        return Check("disk", "ok", seen)
    seen += f", the next checkpoint needs {gib(forecast.needed_bytes)}"
    do = "Free space: ckpt prune, or a smaller max_num_checkpoints. A save is written before an older one goes."
    if not forecast.fits:
        return Check("disk", "wrong", f"{seen}: the next save fails", do)
    return Check("disk", "warning", seen, do) if forecast.room_for < 2 else Check("disk", "ok", seen)


def judge_last(name: str, results: Sequence[RunCheck], command: str) -> Check:
    """Judge a run by `results` of one kind: its last good check, and then the last one if that was bad."""
    if not results:
        return Check(name, "not checked", "the run never had one", f"{command} DIR")
    seen = "; ".join(check_words(result) for result in reversed(results))
    if results[-1].fault is None:
        return Check(name, "ok", seen)
    return Check(name, "wrong", seen, f"ckpt verify lists what is damaged; then {command} again.")


def judge_memory(directory: str, room: tuple[int, int] | None, needed_bytes: int | None, fits: bool | None) -> Check:
    """Judge whether the next process on this host would find the snapshots of a killed process.

    `room`: its free bytes and its size; None if there is no directory. `needed_bytes`: the size of two snapshots.
    `fits`: whether a run would use the directory.
    """
    if room is None:
        do = "Mount a tmpfs at /dev/shm, or name a memory_dir; without one a restart goes back to storage."
        return Check("memory", "warning", f"no {directory}: snapshots end with their process", do)
    seen = f"{directory}: {gib(room[0])} of {gib(room[1])} free"
    if needed_bytes is None:
        return Check("memory", "ok", seen)
    seen += f", two snapshots of the newest checkpoint's size need {gib(needed_bytes)}"
    if fits:
        return Check("memory", "ok", seen)
    do = "Give it more (a container: --shm-size), or name a memory_dir; without room a restart goes back to storage."
    return Check("memory", "warning", f"{seen}: there is no room, or too little memory", do)


# ── private helpers ──────────────────────────────────────────────────────────────────────────────────────────────


def _is_repeated(job: JobFacts) -> bool:
    return job.deployed and job.name.partition("/")[0] in _REPEATED


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, takewhile(str.isdecimal, version.partition("+")[0].split("."))))


def _seconds(text: str | None) -> int | None:
    return int(text) if text is not None and str(text).isdecimal() else None


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
