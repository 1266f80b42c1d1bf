"""deployments/automations.py against a real server: made once, changed where they differ, and heard of at the end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from prefect import flow
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Crashed, Running

from ckpt_tasks.flows.site import TAG
from tests.e2e.site import Site


@contextmanager
def listening() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Listen for notifications; give the address, and the list of what was sent there."""
    told: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", told
    finally:
        server.shutdown()
        server.server_close()


def names(site: Site) -> list[str]:
    with site.client() as client:
        return sorted(one.name for one in client.read_automations() if one.name.startswith("ckpt-tasks: "))


def test_they_are_made_once_and_told_of_the_end(site: Site) -> None:
    """Applied again nothing changes, with another number one does; a run that fails for ever is told to the block."""
    ours = ["ckpt-tasks: crashed flow runs are resumed", "ckpt-tasks: zombie flow runs are crashed"]
    again = site.python("-m", "deployments.automations", "apply")
    assert (again.count("as it was"), names(site)) == (2, ours)
    changed = site.python("-m", "deployments.automations", "apply", "--heartbeat-s", "60")
    assert (changed.count("as it was"), changed.count("changed"), names(site)) == (1, 1, ours)
    with listening() as (address, told):
        with temporary_settings({PREFECT_API_URL: site.api}):
            body = {"subject": "{{subject}}", "body": "{{body}}"}
            block = CustomWebhookNotificationBlock.model_validate(
                {"name": "ops", "url": address, "method": "POST", "json_data": body}
            )
            block.save("ops", overwrite=True)
        applied = site.python(
            "-m", "deployments.automations", "apply", "--notify", f"{block.get_block_type_slug()}/ops"
        )
        assert applied.count("created") == 1
        failed = site.train("hopeless", 20, what="raise", at=5)
        site.until_state(failed, "Failed")
        message = site.until(lambda: told, 180, "the notification arrives")[0]
        assert message["subject"] == f"{site.flow_run(failed).name}: Failed"
        assert "injected in step 5" in message["body"]
    taken_back = site.python("-m", "deployments.automations", "apply")
    assert (taken_back.count("removed"), names(site)) == (1, ours)
    assert site.python("-m", "deployments.automations", "show").count("enabled") == 2


def test_who_is_cancelled_after_a_crash_stays_so(site: Site) -> None:
    """A person who cancels a crashed run before it is resumed has the last word; one that is left alone is resumed."""
    with site.client() as client:
        deployment = client.create_deployment(client.create_flow(nothing), "cancelled-after-a-crash")
        cancelled, crashed = (client.create_flow_run_from_deployment(deployment, tags=[TAG]).id for _ in range(2))
        for run in (cancelled, crashed):
            client.set_flow_run_state(run, Running(), force=True)
            client.set_flow_run_state(run, Crashed(), force=True)
        client.set_flow_run_state(cancelled, Cancelled(), force=True)
    site.until(lambda: "AwaitingRetry" in site.states(crashed), 120, "the crashed run is resumed")
    time.sleep(6)  # whatever was late with the other one has come by now
    assert site.states(cancelled)[-2:] == ["Crashed", "Cancelled"]


@flow
def nothing() -> None:
    """Stand for a flow whose runs are only records here."""
