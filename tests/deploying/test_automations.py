"""deployments/automations.py against a real server: what the automation that resumes must leave alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.states import Cancelled, Crashed, Running

from ckpt_tasks.deploying import TAG, automations


@flow
def nothing() -> None:
    """Stand for a flow whose runs are only records here."""


@pytest.fixture
def resuming(client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the server resume what crashed, after 10 seconds (the least that it allows) in the place of 20."""
    monkeypatch.setattr(automations, "_RESUME_AFTER_S", 10)
    automations.apply(automations.build_automations())
    time.sleep(3)  # the server looks for new automations every now and then
    yield
    automations.remove()


@pytest.mark.slow
@pytest.mark.usefixtures("resuming")
def test_who_is_cancelled_after_a_crash_stays_so(client: SyncPrefectClient) -> None:
    """A person who cancels a crashed run before it is resumed has the last word; one that is left alone is resumed."""
    deployment = client.create_deployment(client.create_flow(nothing), "cancelled-after-a-crash")
    runs = [client.create_flow_run_from_deployment(deployment, tags=[TAG]).id for _ in range(2)]
    cancelled, crashed = runs
    for run in runs:
        client.set_flow_run_state(run, Running(), force=True)
        client.set_flow_run_state(run, Crashed(), force=True)
    client.set_flow_run_state(cancelled, Cancelled(), force=True)
    until_state(client, crashed, "AwaitingRetry")
    time.sleep(6)  # whatever was late with the other one has come by now
    assert [state.name for state in client.read_flow_run_states(cancelled)][-2:] == ["Crashed", "Cancelled"]


def until_state(client: SyncPrefectClient, run: UUID, name: str) -> None:
    deadline_s = time.monotonic() + 120
    while (state := client.read_flow_run(run).state) is None or state.name != name:
        assert time.monotonic() < deadline_s, f"{run} is {state}, not {name}"
        time.sleep(0.5)
