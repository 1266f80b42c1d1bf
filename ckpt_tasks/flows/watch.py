"""Resume crashed flow runs that the automations missed: the deployment `watch/byte-lm`.

An automation acts on events, and events can be lost: a server on SQLite drops some under load, and a server that dies
loses the latest events. This flow reads states, which the server stores.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled, Crashed

from ckpt_tasks.flows.prefect.abandoned import Limits, find_abandoned, start_again


@dataclass(frozen=True, kw_only=True)
class Watched:
    """The names of the flow runs that were resumed, marked as crashed (`dead`), and marked as cancelled."""

    resumed: tuple[str, ...]
    dead: tuple[str, ...]
    cancelled: tuple[str, ...] = ()


@flow(name="watch", flow_run_name="{tag}", persist_result=False)
def watch(
    *,
    tag: str = "ckpt-tasks",
    crashed_s: float = 120.0,
    silent_s: float = 300.0,
    pending_s: float = 3600.0,
    max_runs: int = 100,
) -> Watched:
    """Resume the flow runs with `tag` that crashed at least `crashed_s` seconds and at most a day ago.

    A flow run is resumed until it has started `max_runs` times; if it never began, because the server was too busy, at
    most ten times. A flow run is marked as crashed, and resumed by the next watch, if it runs without a heartbeat for
    `silent_s` seconds, if it waits for a retry in a process that is gone, or if it is pending for `pending_s` seconds
    because its worker died; on a cluster, the start of a process may take long. A flow run whose host died during its
    cancellation is marked as cancelled after `silent_s` seconds.
    """
    log = get_run_logger()
    limits = Limits(crashed_s=crashed_s, silent_s=silent_s, pending_s=pending_s, max_runs=max_runs)
    names: dict[str, list[str]] = {"resume": [], "crash": [], "cancel": []}
    with get_client(sync_client=True) as client:
        for abandoned in [*find_abandoned(client, tag, limits)]:
            run, why = abandoned.run, abandoned.why
            if abandoned.due == "worker" or str(run.id) == flow_run.id:
                continue
            if abandoned.due == "crash":
                client.set_flow_run_state(run.id, Crashed(message=f"{why[0].upper()}{why[1:]}."))
                log.warning("%s is marked as crashed: %s", run.name, why)
            elif abandoned.due == "cancel":
                client.set_flow_run_state(run.id, Cancelled(message=f"{why[0].upper()}{why[1:]}."))
                log.warning("%s is marked as cancelled: %s", run.name, why)
            elif start_again(client, run.id, why):
                log.warning("%s %s and is resumed", run.name, why)
            else:
                log.warning("%s crashed, and the server refuses to resume it: does it have a deployment?", run.name)
                continue
            names[abandoned.due].append(run.name)
    return Watched(resumed=tuple(names["resume"]), dead=tuple(names["crash"]), cancelled=tuple(names["cancel"]))
