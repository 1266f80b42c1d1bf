"""What `ckpt doctor` concludes from plain facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt_tasks.cli.doctor.checks import (
    AutomationFacts,
    Check,
    JobFacts,
    PoolFacts,
    PrefectFacts,
    judge_clock,
    judge_disk,
    judge_memory,
    judge_prefect,
)
from ckpt_tasks.format.policy.space import Forecast

ZOMBIES = AutomationFacts(name="ckpt-tasks: zombie flow runs are crashed", within_s=90)
RESUMES = AutomationFacts(name="ckpt-tasks: crashed flow runs are resumed", within_s=20)
ENV = {
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR": "reschedule",
    "OMP_WAIT_POLICY": "passive",
}
JOB = JobFacts(name="train/lm", command="prefect flow-run execute", env=ENV, tags=("ckpt-tasks",))
POOL = PoolFacts(name="p", type="process", online=1, jobs=(JOB,))
GOOD = PrefectFacts(
    url="http://h/api",
    client_version="3.8.8",
    fastapi_version="0.150.0",
    sqlalchemy_version="2.0.58",
    version="3.8.8",
    settings={"server": {"concurrency": {"lease_storage": "prefect.server.concurrency.lease_storage.filesystem"}}},
    automations=(ZOMBIES, RESUMES),
    ahead_s=0.2,
    within_s=0.5,
    pool=POOL,
    asked=True,
    own_beat_s=180,
)
GIB = 1 << 30
SEEN = {
    "server": "http://h/api, version 3.8.8; this client has 3.8.8",
    "fastapi": "0.150.0 is installed here",
    "sqlalchemy": "2.0.58 is installed here",
    "lease storage": "filesystem",
    "zombies": "'ckpt-tasks: zombie flow runs are crashed', after 90 s",
    "resuming": "'ckpt-tasks: crashed flow runs are resumed', after 20 s",
    "heartbeat": "every 30 s",
    "work pool": "p, process, workers online: 1, deployments: 1",
    "preemption": "SIGTERM schedules a flow run again: train/lm",
    "threads": "OMP_WAIT_POLICY is set: train/lm",
    "clock": "agrees with the server to within 1 s",
    "tags": "the automations hold for train/lm",
}


def verdict(check: Check) -> str:
    assert check.seen
    assert check.do or check.verdict in ("ok", "not checked")  # whoever is told that it is wrong is told what to do
    return check.verdict


def judged(facts: PrefectFacts, *jobs: JobFacts, **pool: Any) -> dict[str, str]:
    """Return the verdict of each check, with other jobs of the pool, or other facts of it."""
    assert facts.pool is not None
    facts = replace(facts, pool=replace(facts.pool, jobs=jobs or facts.pool.jobs, **pool))
    return {check.name: verdict(check) for check in judge_prefect(facts)}


def test_where_all_is_well_nothing_is_said_to_be_done() -> None:
    """Every check of a server, a pool and a host as docs/OPERATING.md wants them is ok, and says what was seen."""
    checks = [*judge_prefect(GOOD), judge_clock("clock", 0.2, 1.0, "the server")]
    assert {(check.verdict, check.do) for check in checks} == {("ok", "")}
    assert {check.name: check.seen for check in checks} == SEEN


def lease(storage: Any) -> dict[str, Any]:
    return {"settings": {"server": {"concurrency": storage}}}


def beating(seconds: str) -> JobFacts:
    return replace(JOB, name=f"train/{seconds}", env={**ENV, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": seconds})


MEMORY = lease({"lease_storage": "prefect.server.concurrency.lease_storage.memory"})
OFF = {"settings": {"server": {"services": {"triggers": {"enabled": False}}}}}
UNTAGGED = replace(JOB, name="x/y", tags=())
CASES: list[tuple[str, str, dict[str, Any], tuple[JobFacts, ...], dict[str, Any]]] = [
    # the check, its verdict, and what differs from GOOD: the server's facts, jobs of the pool, facts of the pool
    ("server", "warning", {"url": None}, (), {}),
    ("server", "wrong", {"failure": "Connection refused"}, (), {}),
    ("server", "ok", {"version": "3.9.1"}, (), {}),
    ("server", "warning", {"version": "3.7.9"}, (), {}),
    ("server", "wrong", {"version": "2.20.1"}, (), {}),
    ("server", "wrong", {"version": "<html>"}, (), {}),
    # A server of 3.8.8 runs with fastapi up to 0.150 and sqlalchemy up to 2.0; where one runs already, what is
    # installed here counts less.
    ("fastapi", "ok", {"fastapi_version": "0.150.9", "url": None}, (), {}),
    ("fastapi", "warning", {"fastapi_version": "0.151.0", "url": None}, (), {}),
    ("fastapi", "wrong", {"fastapi_version": "0.152.0", "url": None}, (), {}),
    ("fastapi", "warning", {"fastapi_version": "1.0"}, (), {}),
    ("fastapi", "not checked", {"fastapi_version": "dev"}, (), {}),
    ("fastapi", "ok", {"fastapi_version": "0.165.0", "client_version": "3.9.1", "url": None}, (), {}),
    ("sqlalchemy", "ok", {"sqlalchemy_version": "2.0.99", "url": None}, (), {}),
    ("sqlalchemy", "wrong", {"sqlalchemy_version": "2.1.0", "url": None}, (), {}),
    ("sqlalchemy", "warning", {"sqlalchemy_version": "2.1.0"}, (), {}),
    ("sqlalchemy", "ok", {"sqlalchemy_version": "2.1.9", "client_version": "3.9.1", "url": None}, (), {}),
    ("lease storage", "warning", MEMORY, (), {}),
    ("lease storage", "wrong", MEMORY, (replace(JOB, limit=1),), {}),
    ("lease storage", "not checked", {"settings": None}, (), {}),
    ("lease storage", "not checked", lease([]), (), {}),
    # Missing, paused, doubled and reactive automations are wrong; those of others are nobody's business.
    ("automations", "not checked", {"automations": None}, (), {}),
    ("automations", "wrong", OFF, (), {}),
    ("zombies", "wrong", {"automations": ()}, (), {}),
    ("resuming", "wrong", {"automations": (ZOMBIES,)}, (), {}),
    ("zombies", "wrong", {"automations": (replace(ZOMBIES, enabled=False), RESUMES)}, (), {}),
    ("resuming", "wrong", {"automations": (ZOMBIES, replace(RESUMES, proactive=False))}, (), {}),
    ("resuming", "wrong", {"automations": (ZOMBIES, RESUMES, RESUMES)}, (), {}),
    ("zombies", "ok", {"automations": (ZOMBIES, AutomationFacts(name="another", enabled=False))}, (), {}),
    ("work pool", "wrong", {}, (), {"type": None}),
    ("work pool", "not checked", {"asked": False}, (), {"type": None}),
    ("work pool", "wrong", {}, (), {"paused": True}),
    ("work pool", "wrong", {}, (), {"online": 0}),
    ("work pool", "ok", {}, (), {"online": 0, "type": "ecs:push"}),
    # Only `prefect flow-run execute` with its variable schedules again what is told to end.
    ("preemption", "warning", {}, (replace(JOB, command="python -m prefect.engine"),), {}),
    ("preemption", "warning", {}, (replace(JOB, command=None),), {}),
    ("preemption", "warning", {}, (replace(JOB, env={**ENV, "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR": "die"}),), {}),
    ("preemption", "ok", {}, (replace(JOB, command="nice  prefect  flow-run  execute"),), {}),
    ("preemption", "not checked", {}, (), {"type": "kubernetes"}),
    # The slowest heartbeat counts; without deployments, those of the pool do, which has no tags.
    ("heartbeat", "wrong", {}, (beating("60"), beating("90")), {}),
    ("heartbeat", "ok", {}, (replace(JOB, tags=(), deployed=False),), {}),
    ("tags", "warning", {}, (JOB, UNTAGGED), {}),
    ("threads", "warning", {}, (JOB, replace(JOB, name="x/y", env={})), {}),
]


@pytest.mark.parametrize(("check", "expected", "facts", "jobs", "pool"), CASES)
def test_what_is_not_as_it_should_be(
    check: str, expected: str, facts: dict[str, Any], jobs: tuple[JobFacts, ...], pool: dict[str, Any]
) -> None:
    """One fact that differs from a good site decides its check, and what is wrong has something to do."""
    found = judged(replace(GOOD, **facts), *jobs, **pool)
    assert found[check] == expected


@pytest.mark.parametrize(
    ("beat", "within_s", "tagged", "expected"),
    [
        ("30", 90, True, "ok"),
        ("60", None, True, "warning"),
        ("60", 90, True, "warning"),
        ("90", 90, True, "wrong"),
        ("60", 180, True, "ok"),
        (None, 90, True, "wrong"),
        (None, None, True, "warning"),
        ("nonsense", 90, True, "wrong"),
        (None, 90, False, "not checked"),
    ],
)
def test_heartbeat(beat: str | None, within_s: float | None, tagged: bool, expected: str) -> None:
    """Three heartbeats must fit into the time after which a silent run is taken for dead, or healthy ones end."""
    automations = () if within_s is None else (replace(ZOMBIES, within_s=within_s), RESUMES)
    job = replace(JOB, env={"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": beat}, tags=("ckpt-tasks",) if tagged else ())
    facts = replace(GOOD, automations=automations, pool=replace(POOL, jobs=(job,)))
    check = next(check for check in judge_prefect(facts) if check.name == "heartbeat")
    assert verdict(check) == expected
    assert ("every " in check.seen) == (beat in ("30", "60", "90", "180"))
    assert f"every {beat} s" in check.seen or "every " not in check.seen


def test_flows_that_run_again_anyway() -> None:
    """The next run of an evaluation, an upkeep or a watch does what one left: it needs no tag and no rescheduling."""
    loose = tuple(replace(JOB, name=f"{flow}/x", command=None, tags=()) for flow in ("evaluate", "upkeep", "watch"))
    found = judged(GOOD, JOB, *loose)
    assert (found["preemption"], found["tags"]) == ("ok", "ok")
    found = judged(GOOD, *loose)
    assert (found["preemption"], "tags" in found) == ("not checked", False)


@pytest.mark.parametrize(
    ("unwritable", "free", "needed", "expected"),
    [
        (None, 4 * GIB, 2 * GIB, "ok"),
        (None, 3 * GIB, 2 * GIB, "warning"),
        (None, 1 * GIB, 2 * GIB, "wrong"),
        (None, 0, None, "ok"),
        ("/run/ledger", 4 * GIB, 2 * GIB, "wrong"),
    ],
)
def test_the_disk(unwritable: str | None, free: int, needed: int | None, expected: str) -> None:
    """A run that cannot be written, and a disk without room for one more checkpoint, are wrong."""
    coming = Forecast(most=4, grows=False, own_bytes=needed, needed_bytes=needed, free_bytes=free) if needed else None
    assert verdict(judge_disk(unwritable, free, coming)) == expected


@given(ahead_s=st.floats(-60, 60), within_s=st.floats(0, 60))
@example(ahead_s=-2.5, within_s=0.5)
@example(ahead_s=0.2, within_s=0.5)
@example(ahead_s=30.5, within_s=0.5)
@example(ahead_s=1e9, within_s=0.5)
def test_clocks(ahead_s: float, within_s: float) -> None:
    """From 2 s on a warning, from 30 s on wrong, in either direction; what is uncertain is not counted."""
    certain_s = abs(ahead_s) - within_s
    expected = "wrong" if certain_s >= 30 else "warning" if certain_s >= 2 else "ok"
    check = judge_clock("clock", ahead_s, within_s, "the server")
    assert verdict(check) == expected
    if expected == "ok":  # what is said is a bound, and not 0 s for half a second
        assert float(check.seen.split()[-2]) >= max(abs(ahead_s), within_s)
    else:
        assert (" behind " in check.seen) == (ahead_s > 0)
    assert verdict(judge_clock("clock", None, 0, "it")) == "not checked"


def test_memory() -> None:
    """Without a place that outlives the process, or without room in it, a warning: it costs time, not data."""
    cases = [((GIB, GIB), None, None), ((GIB, GIB), GIB, True), ((GIB, GIB), 2 * GIB, False), (None, None, None)]
    found = [verdict(judge_memory("/dev/shm", *case)) for case in cases]
    assert found == ["ok", "ok", "warning", "warning"]
