"""Nobody is there: whatever dies, a run completes, as if nothing had happened."""

from __future__ import annotations

import logging
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from uuid import UUID

from prefect.client.schemas.objects import State
from prefect.states import AwaitingRetry, Crashed, Suspended

from ckpt_tasks.checkpoint.transfer.comparison import compare_checkpoints
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from tests.e2e.site import Site
from tests.support import processes

_log = logging.getLogger(__name__)

STEPS = 120
HEARTBEAT_S = 90  # three of them are missed
RESUME_S = 20


def check(site: Site, run_key: str) -> None:
    """The run is complete, equal to one that nothing happened to, whole, and was one process's at a time."""
    if site.newest("reference") < STEPS:
        site.until_state(site.train("reference", STEPS), "Completed")
    run, reference = site.run(run_key), site.run("reference")
    newest = run.checkpoints()[0]
    assert newest.step == STEPS
    found = compare_checkpoints(run.history.store, newest, reference.history.store, reference.find(STEPS))
    assert found.equal, found.differences
    assert verify_run_directory(run.history).good
    trained = site.steps(run_key)
    spans: dict[int, list[float]] = {}
    for one in trained:
        spans.setdefault(one.pid, []).append(one.at_s)
    ordered = sorted((times[0], times[-1]) for times in spans.values())
    assert all(before[1] < after[0] for before, after in pairwise(ordered)), "two trained at once"
    assert {one.step for one in trained} == {*range(1, STEPS + 1)}


def engine(site: Site, run: UUID) -> int:
    """Return the process that trains."""
    trained = {one.pid for one in site.steps(site.flow_run(run).parameters["run_key"])}
    return next(pid for pid in reversed(site.engines(run)) if pid in trained)


def start_waiting(site: Site, run_key: str) -> UUID:
    """Start a run that stops within step 50 until it is let go."""
    return site.train(run_key, STEPS, step_s=0.05, what="wait", at=50, marker=str(site.home / f"{run_key}.go"))


def until_waiting(site: Site, run_key: str) -> None:
    """Wait until a run is within step 50."""
    site.until(lambda: len(site.steps(run_key)) >= 49, 1200, f"{run_key} is in step 50")


def let_go(site: Site, run_key: str) -> None:
    """Let a run that waits go on."""
    (site.home / f"{run_key}.go").touch()


def resume_suspended(site: Site, run: UUID) -> None:
    """Resume a run that is suspended; before that it is taken for crashed, as three heartbeats are missed.

    On a busy machine they may have been missed by now.
    """
    site.until(lambda: not site.engines(run), 120, "the suspended run has ended its process")
    assert site.newest("suspended") == 60  # the end of its batch
    with site.client() as client:
        client.set_flow_run_state(run, Crashed())
    site.until_state(run, "Suspended", seconds=400)
    limits = {one["state_details"]["pause_timeout"] for one in site.history(run) if one["name"] == "Suspended"}
    assert len(limits) == 1
    assert None not in limits
    assert site.newest("suspended") == 60
    site.until(lambda: not site.engines(run), 120, "the second process has ended as well")
    with site.client() as client:
        client.resume_flow_run(run)


def resumed_at_once(site: Site, run: UUID) -> bool:
    """Schedule a crashed run again, as the automation does 20 s later; say whether it has ended for good."""
    state = site.state(run)
    if state.is_crashed():
        with site.client() as client:
            client.set_flow_run_state(run, AwaitingRetry())
    return state.is_final() and not state.is_crashed()


def train_what_is_doomed(site: Site) -> State:
    """Train what can never succeed, until that has ended for good; return in which state."""
    run = site.train("doomed", STEPS, what="segfault", at=45)
    site.until(lambda: resumed_at_once(site, run), 1200, "the run that is doomed has ended")
    return site.state(run)


def test_whatever_happens_to_a_process(site: Site) -> None:
    """A process that is killed, ended, out of memory or out of its mind, or a person who pauses: each run completes.

    What can never succeed ends as failed, and says why.
    """
    with ThreadPoolExecutor(1) as beside:
        doomed = beside.submit(train_what_is_doomed, site)
        train_whatever_happens(site)
    ended = doomed.result()
    assert ended.is_failed()
    assert "starts and failures in a row, and no new step was committed" in str(ended.message)
    assert site.newest("doomed") == 40


def train_whatever_happens(site: Site) -> None:
    """Train a run for each thing that can happen to one, all at once."""
    runs = {"reference": site.train("reference", STEPS)}
    for what in ("raise", "segfault", "memory", "terminate"):
        runs[what] = site.train(what, STEPS, what=what, at=45, marker=str(site.home / what))
    waiting = ("killed", "preempted", "evicted", "suspended", "doubled")
    runs |= {name: start_waiting(site, name) for name in waiting}
    runs["retried"] = site.train("retried", STEPS, what="heal", at=15, marker=str(site.home / "retried.go"))
    fails = site.train("fails", STEPS, what="raise", at=15)

    for name in waiting:
        until_waiting(site, name)
    os.kill(engine(site, runs["killed"]), signal.SIGKILL)
    os.kill(site.engines(runs["preempted"])[0], signal.SIGTERM)  # `prefect flow-run execute`, as a container's first
    evicted = site.engines(runs["evicted"])
    os.kill(evicted[0], signal.SIGTERM)
    site.until(lambda: "AwaitingRetry" in site.states(runs["evicted"]), 60, "the evicted run is scheduled again")
    processes.kill(evicted)  # the grace was too short
    with site.client() as client:
        client.set_flow_run_state(runs["suspended"], Suspended(timeout_seconds=600))
    again = site.execute(runs["doubled"])
    other = site.start("train/byte-lm", **{**site.flow_run(runs["suspended"]).parameters, "run_key": "doubled"})
    for name in ("killed", "preempted", "evicted", "suspended"):
        let_go(site, name)
    refused = site.until_state(other, "Failed")
    assert "held by process" in str(refused.message)

    resume_suspended(site, runs["suspended"])

    site.until(lambda: again.poll() is not None, 240, "the second process has seen that the first one lives")
    let_go(site, "doubled")
    gave_up = site.until_state(fails, "Failed", seconds=400)
    assert "injected in step 15" in str(gave_up.message)
    site.until_state(runs["retried"], "Failed", seconds=400)
    let_go(site, "retried")
    site.prefect("flow-run", "retry", str(runs["retried"]))
    site.until(lambda: not site.state(runs["retried"]).is_failed(), 60, "the failed run is scheduled again")
    for name, run in runs.items():
        site.until_state(run, "Completed", seconds=600)
        check(site, name)
    assert again.wait(60) == 0
    assert "Failed" not in site.states(runs["doubled"])
    assert "AwaitingRetry" in site.states(runs["killed"])
    preempted = site.states(runs["preempted"])
    assert preempted[preempted.index("Running") + 1] == "AwaitingRetry"  # no crash, and so not counted as one
    assert site.states(runs["raise"]).count("Running") == 1  # a task's retry was enough
    assert "Resuming" in site.states(runs["suspended"])


def test_the_worker_dies(site: Site) -> None:
    """It is killed, and one engine at once: that one's heartbeat is missed, and the next worker goes on with the run.

    The other run that it leaves behind trains on, and completes in the process that it had.
    """
    runs = {name: start_waiting(site, name) for name in ("abandoned", "left")}
    for name in runs:
        until_waiting(site, name)
    started = {name: engine(site, run) for name, run in runs.items()}
    site.kill(site.worker)
    processes.kill(site.engines(runs["abandoned"]))
    killed_s = time.time()
    for name in runs:
        let_go(site, name)
    site.start_worker()
    for name, run in runs.items():
        site.until_state(run, "Completed", seconds=400)
        check(site, name)
    assert {one.pid for one in site.steps("left")} == {started["left"]}
    first_s = next(one.at_s for one in site.steps("abandoned") if one.pid != started["abandoned"])
    _log.info("worker and engine killed → first new step: %.1f s", first_s - killed_s)
    assert first_s - killed_s < HEARTBEAT_S + RESUME_S + 60  # the machine may be busy


def test_the_worker_is_told_to_end(site: Site) -> None:
    """SIGTERM to a process worker takes its runs along; they are resumed by the next one."""
    run = start_waiting(site, "orphaned")
    until_waiting(site, "orphaned")
    let_go(site, "orphaned")
    site.kill(site.worker, signal.SIGTERM)
    site.start_worker()
    site.until_state(run, "Completed", seconds=400)
    check(site, "orphaned")


def test_the_server_dies(site: Site) -> None:
    """The server is killed in mid-run and started again: training goes on meanwhile, and the run completes."""
    run = site.train("served", STEPS, step_s=0.5)
    site.until_step("served", 30)
    site.kill(site.server)
    before = len(site.steps("served"))
    time.sleep(15)
    assert len(site.steps("served")) > before
    site.start_server()
    site.until_state(run, "Completed", seconds=400)
    check(site, "served")
