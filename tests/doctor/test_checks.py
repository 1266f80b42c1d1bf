"""What `ckpt doctor` concludes from plain facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt_tasks.doctor.checks import (
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
from ckpt_tasks.policy.space import Forecast

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


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"url": None}, "warning"),
        ({"failure": "Connection refused"}, "wrong"),
        ({"version": "3.9.1"}, "ok"),
        ({"version": "3.7.9"}, "warning"),
        ({"version": "2.20.1"}, "wrong"),
        ({"version": "<html>"}, "wrong"),
    ],
)
def test_the_server(facts: dict[str, Any], expected: str) -> None:
    """None, one that does not answer, an older one and one of another age; nothing is judged without an answer."""
    found = judged(replace(GOOD, **facts))
    assert found["server"] == expected
    assert (len(found) == 2) == ("version" not in facts)


@pytest.mark.parametrize(
    ("version", "there", "expected"),
    [
        ("0.139.0", False, "ok"),
        ("0.150.9", False, "ok"),
        ("0.151.0", False, "warning"),
        ("0.152.0", False, "wrong"),
        ("0.155.1", False, "wrong"),
        ("1.0", False, "wrong"),
        ("1.0", True, "warning"),
        (None, True, "not checked"),
        ("dev", True, "not checked"),
    ],
)
def test_fastapi(version: str | None, there: bool, expected: str) -> None:
    """A server of 3.8.8 runs with fastapi up to 0.150; where one runs already, what is installed here counts less."""
    facts = replace(GOOD, fastapi_version=version, url="http://h/api" if there else None)
    assert judged(facts)["fastapi"] == expected


def test_leases_in_the_servers_memory() -> None:
    """A warning, and wrong where a deployment has a limit; a server that does not say is not judged."""
    storage = {"lease_storage": "prefect.server.concurrency.lease_storage.memory"}
    memory = replace(GOOD, settings={"server": {"concurrency": storage}})
    assert judged(memory)["lease storage"] == "warning"
    assert judged(memory, replace(JOB, limit=1))["lease storage"] == "wrong"
    silent: list[Any] = [None, {}, {"server": None}, {"server": {"concurrency": []}}]
    for settings in silent:
        assert judged(replace(GOOD, settings=settings))["lease storage"] == "not checked"


@pytest.mark.parametrize(
    ("automations", "expected"),
    [
        (None, ["not checked"]),
        ((), ["wrong", "wrong"]),
        ((ZOMBIES,), ["ok", "wrong"]),
        ((replace(ZOMBIES, enabled=False), RESUMES), ["wrong", "ok"]),
        ((ZOMBIES, replace(RESUMES, proactive=False)), ["ok", "wrong"]),
        ((ZOMBIES, RESUMES, RESUMES), ["ok", "wrong"]),
        ((ZOMBIES, RESUMES, AutomationFacts(name="another", enabled=False)), ["ok", "ok"]),
    ],
)
def test_automations(automations: tuple[AutomationFacts, ...] | None, expected: list[str]) -> None:
    """Missing, paused, doubled and reactive ones are wrong; those of others are nobody's business."""
    names = ("automations",) if automations is None else ("zombies", "resuming")
    facts = replace(GOOD, automations=automations)
    assert [judged(facts)[name] for name in names] == expected
    off = replace(facts, settings={"server": {"services": {"triggers": {"enabled": False}}}})
    assert judged(off)["automations"] == ("not checked" if automations is None else "wrong")


@pytest.mark.parametrize(
    ("beat", "within_s", "tagged", "expected"),
    [
        ("30", 90, True, "ok"),
        ("30", None, True, "ok"),
        ("60", None, True, "warning"),
        ("60", 90, True, "warning"),
        ("90", 90, True, "wrong"),
        ("180", 90, True, "wrong"),
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


@pytest.mark.parametrize(
    ("changed", "asked", "expected"),
    [
        ({}, True, "ok"),
        ({"type": None}, True, "wrong"),
        ({"type": None}, False, "not checked"),
        ({"paused": True}, True, "wrong"),
        ({"online": 0}, True, "wrong"),
        ({"online": 0, "type": "ecs:push"}, True, "ok"),
    ],
)
def test_the_pool(changed: dict[str, Any], asked: bool, expected: str) -> None:
    """One that is not there, that is paused, that has no worker; and where none was named, none is missed."""
    found = judged(replace(GOOD, asked=asked), **changed)
    assert found["work pool"] == expected
    assert ("threads" in found) == ("type" not in changed or changed["type"] is not None)
    assert {check.name: check.verdict for check in judge_prefect(replace(GOOD, pool=None))}[
        "work pool"
    ] == "not checked"


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (JOB, "ok"),
        (replace(JOB, command="python -m prefect.engine"), "warning"),
        (replace(JOB, command=None), "warning"),
        (replace(JOB, env={**ENV, "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR": "die"}), "warning"),
        (replace(JOB, command="nice  prefect  flow-run  execute"), "ok"),
    ],
)
def test_preemption(job: JobFacts, expected: str) -> None:
    """Only `prefect flow-run execute` with its variable schedules again what is told to end."""
    assert judged(GOOD, job)["preemption"] == expected
    assert judged(GOOD, job, type="kubernetes")["preemption"] == "not checked"


def test_flows_that_run_again_anyway() -> None:
    """The next run of an evaluation, an upkeep or a watch does what one left: it needs no tag and no rescheduling."""
    loose = tuple(replace(JOB, name=f"{flow}/x", command=None, tags=()) for flow in ("evaluate", "upkeep", "watch"))
    found = judged(GOOD, JOB, *loose)
    assert (found["preemption"], found["tags"]) == ("ok", "ok")
    found = judged(GOOD, *loose)
    assert (found["preemption"], "tags" in found) == ("not checked", False)


def test_tags_and_threads() -> None:
    """Automations hold for deployments with their tag, and jobs say how OpenMP's threads wait; others are named."""
    assert judged(GOOD, JOB, replace(JOB, name="x/y", tags=()))["tags"] == "warning"
    assert "tags" not in judged(replace(GOOD, automations=()))
    assert "tags" not in judged(GOOD, replace(JOB, deployed=False))
    facts = replace(GOOD, pool=replace(POOL, jobs=(JOB, replace(JOB, name="x/y", env={}))))
    check = next(check for check in judge_prefect(facts) if check.name == "threads")
    assert (verdict(check), "x/y" in check.seen, JOB.name in check.seen) == ("warning", True, False)


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
