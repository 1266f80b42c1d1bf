"""Prefect automations that resume runs unattended: `python -m deployments.automations apply|show|remove`.

They hold for the flow runs of every deployment with the tag `ckpt-tasks`, and are known by their names: applying them
again changes what differs, and nothing else. Proactive ones all of them: a reactive one acts twice on one crash, by
the runner and by the worker, and would start the run twice.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from rich.console import Console
from rich.table import Table

from ckpt_tasks.orchestration.doctor import read_automations
from ckpt_tasks.orchestration.early_stop import RESUMED

__all__ = ["PREFIX", "TAG", "Outcome", "apply", "main", "remove", "wanted"]

TAG = "ckpt-tasks"
PREFIX = "ckpt-tasks: "

_BEATS = 3  # so many heartbeats may be missed
_RESUME_AFTER_S = 20  # what sees a crash first may act on it: a worker that retries, a person
_GIVEN_UP_AFTER_S = 60  # the one above has acted by then
# After a crash each of these says that the flow run goes on, or that a person has decided otherwise.
_ALIVE = ("AwaitingRetry", "Scheduled", "Late", "Pending", "Running", "Retrying", "Resuming")
_DECIDED = ("Cancelling", "Cancelled", "Completed", "Paused", "Suspended")
_ENDED = ("Failed", "TimedOut")
_SUBJECT = "{{ flow_run.name }}: {{ flow_run.state.name }}"
_BODY = """The flow run {{ flow_run.name }} ended as {{ flow_run.state.name }} and is not resumed any more.

{{ flow_run.state.message }}

{{ flow_run|ui_url }}"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one automation: "created", "changed", "as it was", "removed" or "not there"."""

    name: str
    what: str


def wanted(*, heartbeat_s: int = 30, max_runs: int = 100, notify: tuple[Block, ...] = ()) -> list[AutomationCore]:
    """Return the automations that should be there.

    A flow run that has shown no life for three heartbeats of `heartbeat_s` seconds is marked as crashed, and a crashed
    one is scheduled again, up to `max_runs` starts in all. What failed for good, or was not resumed, is told to the
    blocks in `notify`.
    """
    runs: dict[str, str | list[str]] = {"prefect.resource.id": "prefect.flow-run.*"}
    ours = {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"}
    shared: dict[str, Any] = {"match_related": ours, "for_each": {"prefect.resource.id"}, "threshold": 1}
    zombies = AutomationCore(
        name=f"{PREFIX}zombie flow runs are crashed",
        description=f"No sign of life for {_BEATS} heartbeats: the process is gone, or its host.",
        trigger=EventTrigger(
            match=runs,
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            posture=Posture.Proactive,
            within=timedelta(seconds=_BEATS * heartbeat_s),
            **shared,
        ),
        actions=[
            ChangeFlowRunState(
                name="Crashed",
                state=StateType.CRASHED,
                message=f"No heartbeat for {_BEATS * heartbeat_s} s: its process is gone.",
                force=False,
            )
        ],
    )
    crashed = AutomationCore(
        name=f"{PREFIX}crashed flow runs are resumed",
        description=f"Up to {max_runs} starts in all; the next one goes on from the newest good checkpoint.",
        trigger=EventTrigger(
            # A run that never began has the count 0, and would be started for ever.
            match={**runs, "prefect.run-count": [str(count) for count in range(1, max_runs)]},
            after=_named("Crashed"),
            expect=_named(*_ALIVE, *_DECIDED, *_ENDED),
            posture=Posture.Proactive,
            within=timedelta(seconds=_RESUME_AFTER_S),
            **shared,
        ),
        actions=[
            ChangeFlowRunState(
                name="AwaitingRetry",
                state=StateType.SCHEDULED,
                message=RESUMED,
                force=False,
            )
        ],
    )
    if not notify:
        return [zombies, crashed]
    notification = AutomationCore(
        name=f"{PREFIX}exhausted retries notify",
        description="A run has failed for good, or has crashed and was not resumed.",
        trigger=EventTrigger(
            match=runs,
            after=_named("Crashed", "Failed"),
            expect=_named(*_ALIVE, *_DECIDED),
            posture=Posture.Proactive,
            within=timedelta(seconds=_GIVEN_UP_AFTER_S),
            **shared,
        ),
        actions=[
            SendNotification(block_document_id=block._block_document_id, subject=_SUBJECT, body=_BODY)
            for block in notify
            if block._block_document_id is not None
        ],
    )
    return [zombies, crashed, notification]


def _named(*states: str) -> set[str]:
    return {f"prefect.flow-run.{state}" for state in states}


def apply(automations: Sequence[AutomationCore]) -> list[Outcome]:
    """Make the server's automations of ours these: create, change or remove what differs; by name, so idempotent."""
    outcomes = []
    with get_client(sync_client=True) as client:
        there = _ours(client)
        for one in automations:
            found = there.pop(one.name, [])
            for double in found[1:]:
                client.delete_automation(_id(double))
            if not found:
                client.create_automation(one)
                outcomes.append(Outcome(name=one.name, what="created"))
            elif _essence(found[0]) != _essence(one):
                client.update_automation(_id(found[0]), one)
                outcomes.append(Outcome(name=one.name, what="changed"))
            else:
                outcomes.append(Outcome(name=one.name, what="as it was"))
        outcomes += _delete(client, there)
    return outcomes


def remove() -> list[Outcome]:
    """Remove every automation of ours."""
    with get_client(sync_client=True) as client:
        return _delete(client, _ours(client))


def main(arguments: Sequence[str] | None = None) -> int:
    """Apply, show or remove them from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deployments.automations", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    applying = verbs.add_parser("apply", help="create them, or change what differs")
    applying.add_argument("--heartbeat-s", type=int, default=30, help="the pool's heartbeat (default: %(default)s)")
    applying.add_argument("--max-runs", type=int, default=100, help="starts of one flow run (default: %(default)s)")
    applying.add_argument(
        "--notify",
        action="append",
        default=[],
        metavar="TYPE/NAME",
        help="a notification block to tell, again for more",
    )
    verbs.add_parser("show", help="list those that are there")
    verbs.add_parser("remove", help="remove all of them")
    options = parser.parse_args(arguments)
    if options.verb == "apply":
        blocks = tuple(_load(name) for name in options.notify)
        _print(apply(wanted(heartbeat_s=options.heartbeat_s, max_runs=options.max_runs, notify=blocks)))
        return 0
    if options.verb == "remove":
        _print(remove())
        return 0
    with get_client(sync_client=True) as client:
        found = [one for many in _ours(client).values() for one in many]
    _print([Outcome(name=one.name, what="enabled" if one.enabled else "disabled") for one in found])
    return 0 if found and all(one.enabled for one in found) else 1


def _load(name: str) -> Block:
    found = Block.load(name)
    assert isinstance(found, Block)  # outside of an event loop
    return found


def _ours(client: SyncPrefectClient) -> dict[str, list[Automation]]:
    there: dict[str, list[Automation]] = {}
    for one in read_automations(client):
        if one.name.startswith(PREFIX):
            there.setdefault(one.name, []).append(one)
    return there


def _delete(client: SyncPrefectClient, there: Mapping[str, Sequence[Automation]]) -> list[Outcome]:
    for many in there.values():
        for one in many:
            client.delete_automation(_id(one))
    return [Outcome(name=name, what="removed") for name in there]


def _essence(automation: AutomationCore) -> dict[str, Any]:
    """Return what an automation does, without what the server adds to it."""
    trigger = automation.trigger.model_dump(mode="json")
    dumped = automation.model_dump(mode="json", include={"name", "description", "enabled", "actions"})
    return {**dumped, "trigger": {key: _sorted(value) for key, value in trigger.items() if key != "id"}}


def _sorted(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def _id(automation: Automation) -> UUID:
    return automation.id


def _print(outcomes: Sequence[Outcome]) -> None:
    table = Table("automation", "state")
    for one in outcomes:
        table.add_row(one.name, one.what)
    Console().print(table if outcomes else "There are no automations of ckpt-tasks.")


if __name__ == "__main__":
    raise SystemExit(main())
