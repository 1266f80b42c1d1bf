"""flows/watch.py: the second line behind the automations goes by states."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Self
from uuid import UUID, uuid4

import pytest
from prefect import flow, tags
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRunPolicy, State
from prefect.states import (
    AwaitingRetry,
    Cancelled,
    Cancelling,
    Completed,
    Crashed,
    Failed,
    Paused,
    Pending,
    Running,
    Scheduled,
    Suspended,
)

from ckpt_tasks.cli.doctor.server_checks import check_flow_runs
from ckpt_tasks.flows.prefect.abandoned import Limits, start_again
from ckpt_tasks.flows.site.site import schedule_again
from ckpt_tasks.flows.watch import watch
from tests.support.waiting import until


@flow
def nothing() -> None:
    """Stand for a flow whose runs are only records here."""


def made(client: SyncPrefectClient, tag: str, *states: object, retries: int = 0) -> UUID:
    """Make a flow run that has been through these states; with `retries`, those that Prefect's rules make of them."""
    deployment = client.create_deployment(client.create_flow(nothing), "nothing")
    run = client.create_flow_run_from_deployment(deployment, tags=[tag])
    if retries:
        client.update_flow_run(run.id, empirical_policy=FlowRunPolicy(retries=retries))
    for state in states:
        client.set_flow_run_state(run.id, state, force=not retries)  # type: ignore[arg-type]
    return run.id


def name_of(client: SyncPrefectClient, run: UUID) -> str:
    return client.read_flow_run(run).name


def state_of(client: SyncPrefectClient, run: UUID) -> str:
    found = client.read_flow_run(run).state
    assert found is not None
    return str(found.name)


def beat(client: SyncPrefectClient, run: UUID) -> None:
    """Let the server have a heartbeat of a flow run; return when it knows of it."""
    resource, now = {"prefect.resource.id": f"prefect.flow-run.{run}"}, datetime.now(UTC)
    event = {"id": str(uuid4()), "event": "prefect.flow-run.heartbeat", "resource": resource, "occurred": str(now)}
    client.request("POST", "/events", json=[event])
    while not client.request("POST", "/events/filter", json={"filter": {"id": {"id": [event["id"]]}}}).json()["events"]:
        time.sleep(0.1)


def test_every_state_that_nobody_works_at(client: SyncPrefectClient) -> None:
    """Each state that a process has left is found and ends as a start that a worker takes; the others are left alone.

    A run that waits for its flow's retry, or for a person since then, is one that no worker takes [3.8.8].
    """
    waits: tuple[State[Any], ...] = (
        Running(),
        Failed(),
    )  # Prefect lets it wait for its retry in the process that failed
    gone: dict[str, tuple[State[Any], ...]] = {
        "Running": (Running(),),
        "Retrying": (Running(name="Retrying"),),
        "Pending": (Pending(),),
        "Crashed": (Running(), Crashed()),
        "AwaitingRetry in its process": waits,
        "AwaitingRetry after a preemption": (*waits, Running(), AwaitingRetry()),
        "Resuming after a retry": (*waits, Running(), Suspended(timeout_seconds=600), Scheduled(name="Resuming")),
    }
    kept: dict[str, tuple[tuple[State[Any], ...], str]] = {
        "Cancelling": ((Running(), Cancelling()), "Cancelled"),
        "Scheduled": ((), "Scheduled"),
        "Paused": ((Running(), Paused(timeout_seconds=600)), "Paused"),
        "Suspended": ((Running(), Suspended(timeout_seconds=600)), "Suspended"),
        "Completed": ((Running(), Completed()), "Completed"),
        "Cancelled": ((Running(), Cancelled()), "Cancelled"),
        "Failed": ((*waits, Running(), Failed()), "Failed"),
    }
    runs = {what: made(client, "ten", *states, retries=1) for what, states in gone.items()}
    others = {what: made(client, "ten", *states, retries=1) for what, (states, _) in kept.items()}
    assert {client.read_flow_run(runs[what]).empirical_policy.retry_type for what in [*gone][4:]} == {"in_process"}
    check = check_flow_runs(client, "ten", Limits(crashed_s=0, silent_s=0, pending_s=0))
    assert check.verdict == "wrong"
    assert check.seen.startswith(f"nobody works at {len(gone) + 2}: ")  # Cancelling; Scheduled, which no worker takes
    for _ in range(2):
        watch(tag="ten", silent_s=0, pending_s=0, crashed_s=0)
    for what, run in runs.items():
        assert state_of(client, run) == "AwaitingRetry", what
        assert client.read_flow_run(run).empirical_policy.retry_type == "reschedule", what
    assert {what: state_of(client, run) for what, run in others.items()} == {k: state for k, (_, state) in kept.items()}
    assert check_flow_runs(client, "ten").verdict == "ok"


@pytest.mark.slow
def test_what_crashed_is_resumed_some_times(client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crashed run is scheduled again; one that ended well, has no deployment, or started too often, is not.

    One that crashed before it began (a busy server refused its submission) is scheduled again, ten times. However many
    there are, each is looked at: a server gives them page by page. What crashed more than a day ago is left alone.
    """
    monkeypatch.setattr("ckpt_tasks.flows.prefect.abandoned._PAGE", 2)
    crashed = [made(client, "one", Running(), Crashed()) for _ in range(3)]
    once = made(client, "one", Crashed())
    often = made(client, "one", Running(), Crashed(), Running(), Crashed())
    hopeless = made(client, "one", *[Crashed(), AwaitingRetry()] * 10, Crashed())
    done = made(client, "one", Running(), Completed())
    foreign = made(client, "another", Running(), Crashed())
    alone = client.create_flow_run(nothing, tags=["one"]).id
    client.set_flow_run_state(alone, Running(), force=True)
    client.set_flow_run_state(alone, Crashed(), force=True)
    assert client.read_flow_run(once).run_count == client.read_flow_run(hopeless).run_count == 0
    assert watch(tag="one", crashed_s=3600).resumed == ()
    with monkeypatch.context() as patch:
        patch.setattr("ckpt_tasks.flows.prefect.abandoned.datetime", later(timedelta(hours=25)))
        assert watch(tag="one", crashed_s=0).resumed == ()
    found = {*watch(tag="one", crashed_s=0, max_runs=2).resumed}
    assert found == {name_of(client, run) for run in (*crashed, once)}
    assert watch(tag="one", crashed_s=0, max_runs=3).resumed == (name_of(client, often),)
    left = [state_of(client, run) for run in (hopeless, done, foreign, alone)]
    assert left == ["Crashed", "Completed", "Crashed", "Crashed"]
    assert {state_of(client, run) for run in (*crashed, once, often)} == {"AwaitingRetry"}


def later(by: timedelta) -> type[datetime]:
    """Return a clock that is ahead."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + by

    return Clock


def test_who_waits_for_ever_is_dead(client: SyncPrefectClient) -> None:
    """A run whose worker died before its process began is pending for ever, and crashes nowhere: it is marked."""
    run = made(client, "six", Pending())
    assert watch(tag="six").dead == ()
    assert watch(tag="six", pending_s=0, crashed_s=3600).dead == (name_of(client, run),)
    assert state_of(client, run) == "Crashed"
    assert watch(tag="six", crashed_s=0).resumed == (name_of(client, run),)


@pytest.mark.slow
def test_who_is_silent_is_dead(client: SyncPrefectClient) -> None:
    """Without a heartbeat for so long a run is marked as crashed, or as cancelled where it was being cancelled.

    One that beats, or began just now, is not; what was cancelled is not resumed.
    """
    ends: dict[str, tuple[Any, ...]] = {"Crashed": (Running(),), "Cancelled": (Running(), Cancelling())}
    silent = {end: made(client, "three", *states) for end, states in ends.items()}
    beating = {end: made(client, "three", *states) for end, states in ends.items()}
    first = watch(tag="three", silent_s=300)
    assert (first.dead, first.cancelled) == ((), ())

    def all_marked() -> bool:  # once they have been so for twenty seconds: a busy machine sends late
        for run in beating.values():
            beat(client, run)
        watch(tag="three", silent_s=20, crashed_s=3600)
        return {end: state_of(client, run) for end, run in silent.items()} == {end: end for end in ends}

    until(all_marked, 180)
    assert {state_of(client, run) for run in beating.values()} == {"Running", "Cancelling"}
    resumed = watch(tag="three", silent_s=300, crashed_s=0).resumed
    assert resumed == (name_of(client, silent["Crashed"]),)


def test_it_does_not_mark_itself(client: SyncPrefectClient) -> None:
    """The watch is a flow run as well: where it has the tag that it looks for, it goes on."""
    other = made(client, "nine", Running())
    with tags("nine"):
        assert watch(tag="nine", silent_s=0).dead == (name_of(client, other),)


@pytest.mark.slow
def test_a_clock_that_goes_back_an_hour(client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor says that the next look of `watch` is an hour away, until its schedule is planned again.

    What began "in an hour" and is silent counts as silent, not as new.
    """
    deployment = client.create_deployment(client.create_flow(watch), "back")
    hour = timedelta(hours=1)
    late = client.create_flow_run_from_deployment(deployment, state=Scheduled(scheduled_time=datetime.now(UTC) + hour))
    check = check_flow_runs(client, "back")
    assert check.verdict == "warning"
    assert check.seen in {f"`watch` looks at them in {n} minutes: was the server's clock set back?" for n in (59, 60)}
    assert "ckpt up" in check.do
    soon = client.create_flow_run_from_deployment(deployment, state=Scheduled())
    assert check_flow_runs(client, "back").verdict == "ok"

    silent = made(client, "back", Running())
    assert check_flow_runs(client, "back").verdict == "ok"
    with monkeypatch.context() as patch:
        patch.setattr("ckpt_tasks.flows.prefect.abandoned.datetime", later(-hour))
        check = check_flow_runs(client, "back")
    assert (check.verdict, name_of(client, silent) in check.seen) == ("wrong", True)
    for run in (late.id, soon.id, silent):
        client.delete_flow_run(run)


@pytest.mark.slow
def test_down_counts_each_flow_run_that_goes_on(client: SyncPrefectClient) -> None:
    """Those that their supervisor has scheduled count as those that `ckpt down` schedules; what has ended does not."""
    gone_on: list[tuple[object, ...]] = [(AwaitingRetry(),), (Running(), Crashed()), (Running(),), (Pending(),)]
    ended: list[tuple[object, ...]] = [(Running(), Completed()), (Running(), Cancelled()), (Running(), Failed())]
    runs = [made(client, "counted", *states) for states in (*gone_on, *ended)]
    assert [schedule_again(client, run) for run in runs] == [True] * len(gone_on) + [False] * len(ended)


@pytest.mark.slow
def test_who_was_ended_is_marked_before_it_waits(client: SyncPrefectClient) -> None:
    """`ckpt down` ends a process that once waited for its flow's retry: crashed first, so that a worker takes it."""
    run = made(client, "down", Running(), Failed(), Running(), retries=1)
    assert client.read_flow_run(run).empirical_policy.retry_type == "in_process"
    assert start_again(client, run, "Its site was taken down.")
    assert state_of(client, run) == "AwaitingRetry"
    assert client.read_flow_run(run).empirical_policy.retry_type == "reschedule"
