"""Prefect automations that resume runs unattended: `python -m deployments.automations apply|show|remove`.

They act on the flow runs of every deployment with the tag `ckpt-tasks`. They are identified by name: applying them
again changes only what differs. All are proactive: a reactive automation would act twice on one crash, which both the
runner and the worker report, and would start the flow run twice.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any
from uuid import UUID

from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from rich.console import Console
from rich.table import Table

from ckpt_tasks.flows.prefect.early_stop import RESUMED
from ckpt_tasks.flows.prefect.events import read_all
from ckpt_tasks.flows.site import TAG

PREFIX = "ckpt-tasks: "
_BEATS = 3  # A flow run that misses this many heartbeats counts as dead.
_RESUME_AFTER_S = 20  # Until then others may act on the crash: a worker that retries, or a person.
_GIVEN_UP_AFTER_S = 60  # By then the other automation has resumed the flow run.
# After a crash, _ALIVE means that the flow run continues, _DECIDED that a person or the flow decided otherwise.
_ALIVE = ("AwaitingRetry", "Scheduled", "Late", "Pending", "Running", "Retrying", "Resuming")
_DECIDED = ("Cancelling", "Cancelled", "Completed", "Paused", "Suspended")
_ENDED = ("Failed", "TimedOut")
_SUBJECT = "{{ flow_run.name }}: {{ flow_run.state.name }}"
_BODY = """The flow run {{ flow_run.name }} ended as {{ flow_run.state.name }} and will not be resumed.

{{ flow_run.state.message }}

{{ flow_run|ui_url }}"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An automation's status: "created", "changed", "as it was", "removed", or (if shown) "enabled" or "disabled"."""

    name: str
    status: str


def build_automations(
    *, heartbeat_s: int = 30, max_runs: int = 100, notify: tuple[Block, ...] = ()
) -> list[AutomationCore]:
    """Build the automations that the server should have.

    A flow run that misses three heartbeats, one every `heartbeat_s` seconds, is marked as crashed. A crashed flow run
    is scheduled again, until it has started `max_runs` times. The notification blocks in `notify` report a flow run
    that failed for good or was not resumed.
    """
    built = [_mark_zombies(heartbeat_s), _resume_crashed(max_runs)]
    return [*built, _notify(notify)] if notify else built


def _mark_zombies(heartbeat_s: int) -> AutomationCore:
    silence_s = _BEATS * heartbeat_s
    crash = ChangeFlowRunState(
        name="Crashed",
        state=StateType.CRASHED,
        message=f"No heartbeat for {silence_s} s: its process is gone.",
        force=False,
    )
    return AutomationCore(
        name=f"{PREFIX}zombie flow runs are crashed",
        description=f"No sign of life for {_BEATS} heartbeats: the process is gone, or its host.",
        trigger=_trigger({"prefect.flow-run.heartbeat"}, {"prefect.flow-run.*"}, silence_s),
        actions=[crash],
    )


def _resume_crashed(max_runs: int) -> AutomationCore:
    # A flow run that never began has the count 0; with 0 in this list it would be started for ever.
    counts: dict[str, str | list[str]] = {"prefect.run-count": [str(count) for count in range(1, max_runs)]}
    resume = ChangeFlowRunState(name="AwaitingRetry", state=StateType.SCHEDULED, message=RESUMED, force=False)
    return AutomationCore(
        name=f"{PREFIX}crashed flow runs are resumed",
        description=f"Up to {max_runs} starts in all; the next one resumes from the newest good checkpoint.",
        trigger=_trigger(_named("Crashed"), _named(*_ALIVE, *_DECIDED, *_ENDED), _RESUME_AFTER_S, counts),
        actions=[resume],
    )


def _notify(blocks: tuple[Block, ...]) -> AutomationCore:
    return AutomationCore(
        name=f"{PREFIX}exhausted retries notify",
        description="A run has failed for good, or has crashed and was not resumed.",
        trigger=_trigger(_named("Crashed", "Failed"), _named(*_ALIVE, *_DECIDED), _GIVEN_UP_AFTER_S),
        actions=[
            SendNotification(block_document_id=block._block_document_id, subject=_SUBJECT, body=_BODY)
            for block in blocks
            if block._block_document_id is not None
        ],
    )


def _trigger(
    after: set[str], expect: set[str], within_s: int, match: Mapping[str, str | list[str]] = MappingProxyType({})
) -> EventTrigger:
    """Return a trigger for flow runs with our tag: event `after` came, but `expect` did not within `within_s`."""
    ours: dict[str, Any] = {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"}
    return EventTrigger(
        match={"prefect.resource.id": "prefect.flow-run.*", **match},
        match_related=ours,
        for_each={"prefect.resource.id"},
        threshold=1,
        after=after,
        expect=expect,
        posture=Posture.Proactive,
        within=timedelta(seconds=within_s),
    )


def _named(*states: str) -> set[str]:
    return {f"prefect.flow-run.{state}" for state in states}


def apply(automations: Sequence[AutomationCore]) -> list[Outcome]:
    """Create, change or remove automations by name until the server has exactly these; return all outcomes."""
    outcomes = []
    with get_client(sync_client=True) as client:
        existing = _ours(client)
        for automation in automations:
            same_name = existing.pop(automation.name, [])
            for duplicate in same_name[1:]:
                client.delete_automation(_id(duplicate))
            if not same_name:
                client.create_automation(automation)
                status = "created"
            elif _essence(same_name[0]) != _essence(automation):
                client.update_automation(_id(same_name[0]), automation)
                status = "changed"
            else:
                status = "as it was"
            outcomes.append(Outcome(name=automation.name, status=status))
        outcomes += _delete(client, existing)
    return outcomes


def remove() -> list[Outcome]:
    """Remove all automations of this project."""
    with get_client(sync_client=True) as client:
        return _delete(client, _ours(client))


def main(arguments: Sequence[str] | None = None) -> int:
    """Apply, show or remove the automations from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deployments.automations", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    applying = verbs.add_parser("apply", help="create the automations, or change what differs")
    applying.add_argument(
        "--heartbeat-s", type=int, default=30, help="heartbeat interval of the jobs (default: %(default)s)"
    )
    applying.add_argument(
        "--max-runs", type=int, default=100, help="most starts of one flow run (default: %(default)s)"
    )
    applying.add_argument(
        "--notify",
        action="append",
        default=[],
        metavar="TYPE/NAME",
        help="notification block for flow runs that are given up; may be repeated",
    )
    verbs.add_parser("show", help="list them; status 1 if there is none, or one is disabled")
    verbs.add_parser("remove", help="remove all of them")
    options = parser.parse_args(arguments)
    if options.verb == "apply":
        blocks = tuple(_load(name) for name in options.notify)
        _print(apply(build_automations(heartbeat_s=options.heartbeat_s, max_runs=options.max_runs, notify=blocks)))
        return 0
    if options.verb == "remove":
        _print(remove())
        return 0
    with get_client(sync_client=True) as client:
        listed = [automation for same_name in _ours(client).values() for automation in same_name]
    _print([Outcome(name=each.name, status="enabled" if each.enabled else "disabled") for each in listed])
    return 0 if listed and all(automation.enabled for automation in listed) else 1


def _load(name: str) -> Block:
    block = Block.load(name)
    assert isinstance(block, Block)  # Without an event loop, load returns the block.
    return block


def _ours(client: SyncPrefectClient) -> dict[str, list[Automation]]:
    ours: dict[str, list[Automation]] = {}
    for automation in read_all(client.read_automations):
        if automation.name.startswith(PREFIX):
            ours.setdefault(automation.name, []).append(automation)
    return ours


def _delete(client: SyncPrefectClient, by_name: Mapping[str, Sequence[Automation]]) -> list[Outcome]:
    for same_name in by_name.values():
        for automation in same_name:
            client.delete_automation(_id(automation))
    return [Outcome(name=name, status="removed") for name in by_name]


def _essence(automation: AutomationCore) -> dict[str, Any]:
    """Return an automation's fields without those that the server adds."""
    trigger = automation.trigger.model_dump(mode="json")
    dumped = automation.model_dump(mode="json", include={"name", "description", "enabled", "actions"})
    return {**dumped, "trigger": {key: _sorted(value) for key, value in trigger.items() if key != "id"}}


def _sorted(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def _id(automation: Automation) -> UUID:
    return automation.id


def _print(outcomes: Sequence[Outcome]) -> None:
    table = Table("automation", "state")
    for outcome in outcomes:
        table.add_row(outcome.name, outcome.status)
    Console().print(table if outcomes else "There are no automations of ckpt-tasks.")
