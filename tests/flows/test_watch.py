"""flows/watch.py: the second line behind the automations goes by states."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any
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

from ckpt_tasks.doctor.server import check_flow_runs
from ckpt_tasks.flows.watch import watch
from ckpt_tasks.orchestration.abandoned import Limits, start_again


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


def test_what_crashed_is_resumed_once(client: SyncPrefectClient) -> None:
    """A crashed run is scheduled again; one that ended well, or has no deployment, is not."""
    crashed = made(client, "one", Running(), Crashed())
    done = made(client, "one", Running(), Completed())
    foreign = made(client, "another", Running(), Crashed())
    alone = client.create_flow_run(nothing, tags=["one"]).id
    client.set_flow_run_state(alone, Running(), force=True)
    client.set_flow_run_state(alone, Crashed(), force=True)
    assert watch(tag="one", crashed_s=3600).resumed == ()
    assert watch(tag="one", crashed_s=0).resumed == (name_of(client, crashed),)
    assert [state_of(client, one) for one in (crashed, done, foreign, alone)] == [
        "AwaitingRetry",
        "Completed",
        "Crashed",
        "Crashed",
    ]
    assert watch(tag="one", crashed_s=0).resumed == ()


def test_there_is_an_end_to_it(client: SyncPrefectClient) -> None:
    """A run that has been started as often as is allowed is not resumed."""
    made(client, "two", Running(), Crashed(), Running(), Crashed())
    assert watch(tag="two", crashed_s=0, max_runs=2).resumed == ()
    assert len(watch(tag="two", crashed_s=0, max_runs=3).resumed) == 1


def test_what_never_began_is_resumed_some_times(client: SyncPrefectClient) -> None:
    """A run that crashed before it began (a busy server refused its submission) is scheduled again, ten times."""
    once = made(client, "four", Crashed())
    hopeless = made(client, "four", *[Crashed(), AwaitingRetry()] * 10, Crashed())
    assert client.read_flow_run(once).run_count == client.read_flow_run(hopeless).run_count == 0
    assert watch(tag="four", crashed_s=0).resumed == (name_of(client, once),)
    assert (state_of(client, once), state_of(client, hopeless)) == ("AwaitingRetry", "Crashed")


def test_all_are_looked_at(client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many have crashed, each is looked at: a server gives them page by page."""
    monkeypatch.setattr("ckpt_tasks.orchestration.abandoned._PAGE", 2)
    crashed = {name_of(client, made(client, "five", Running(), Crashed())) for _ in range(5)}
    assert set(watch(tag="five", crashed_s=0).resumed) == crashed


def test_who_waits_for_ever_is_dead(client: SyncPrefectClient) -> None:
    """A run whose worker died before its process began is pending for ever, and crashes nowhere: it is marked."""
    run = made(client, "six", Pending())
    assert watch(tag="six").dead == ()
    assert watch(tag="six", pending_s=0, crashed_s=3600).dead == (name_of(client, run),)
    assert state_of(client, run) == "Crashed"
    assert watch(tag="six", crashed_s=0).resumed == (name_of(client, run),)


@pytest.mark.slow
def test_who_was_to_be_cancelled_and_is_gone_is_cancelled(client: SyncPrefectClient) -> None:
    """A run whose host died while it was being cancelled is marked as cancelled, and is not resumed."""
    run = made(client, "seven", Running(), Cancelling())
    beating = made(client, "seven", Running(), Cancelling())
    assert watch(tag="seven").cancelled == ()
    gone = watch(tag="seven", silent_s=300)
    while not gone.cancelled:  # once they have been so for six seconds
        beat(client, beating)
        gone = watch(tag="seven", silent_s=6, crashed_s=0)
    assert gone.cancelled == (name_of(client, run),)
    assert (gone.resumed, gone.dead) == ((), ())
    assert (state_of(client, run), state_of(client, beating)) == ("Cancelled", "Cancelling")
    assert watch(tag="seven", crashed_s=0).resumed == ()


@pytest.mark.slow
def test_who_is_silent_is_dead(client: SyncPrefectClient) -> None:
    """A running one is marked as crashed without a heartbeat for so long; one that beats, or began just now, is not."""
    silent = made(client, "three", Running())
    beating = made(client, "three", Running())
    assert watch(tag="three", silent_s=300).dead == ()
    until = time.monotonic() + 60
    dead: tuple[str, ...] = ()
    while not dead:  # once it has been running for six seconds
        assert time.monotonic() < until
        beat(client, beating)
        dead = watch(tag="three", silent_s=6, crashed_s=3600).dead
    assert dead == (name_of(client, silent),)
    assert (state_of(client, silent), state_of(client, beating)) == ("Crashed", "Running")
    while name_of(client, beating) not in dead:
        assert time.monotonic() < until
        dead = watch(tag="three", silent_s=3, crashed_s=3600).dead
    assert state_of(client, beating) == "Crashed"


def test_what_crashed_days_ago_is_left_alone(client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that crashed more than a day ago is not resumed."""

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Tomorrow:
            return super().now(tz) + timedelta(hours=25)

    run = made(client, "eight", Running(), Crashed())
    with monkeypatch.context() as patch:
        patch.setattr("ckpt_tasks.orchestration.abandoned.datetime", Tomorrow)
        assert watch(tag="eight", crashed_s=0).resumed == ()
    assert watch(tag="eight", crashed_s=0).resumed == (name_of(client, run),)


def test_it_does_not_mark_itself(client: SyncPrefectClient) -> None:
    """The watch is a flow run as well: where it has the tag that it looks for, it goes on."""
    other = made(client, "nine", Running())
    with tags("nine"):
        assert watch(tag="nine", silent_s=0).dead == (name_of(client, other),)


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

    class Back(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Back:
            return super().now(tz) - hour

    silent = made(client, "back", Running())
    assert check_flow_runs(client, "back").verdict == "ok"
    with monkeypatch.context() as patch:
        patch.setattr("ckpt_tasks.orchestration.abandoned.datetime", Back)
        check = check_flow_runs(client, "back")
    assert (check.verdict, name_of(client, silent) in check.seen) == ("wrong", True)
    for run in (late.id, soon.id, silent):
        client.delete_flow_run(run)


def test_who_was_ended_is_marked_before_it_waits(client: SyncPrefectClient) -> None:
    """`ckpt down` ends a process that once waited for its flow's retry: crashed first, so that a worker takes it."""
    run = made(client, "down", Running(), Failed(), Running(), retries=1)
    assert client.read_flow_run(run).empirical_policy.retry_type == "in_process"
    assert start_again(client, run, "Its site was taken down.")
    assert state_of(client, run) == "AwaitingRetry"
    assert client.read_flow_run(run).empirical_policy.retry_type == "reschedule"
