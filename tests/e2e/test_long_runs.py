"""Weeks in one flow run: three thousand batches leave memory, the server and the page as they were."""

from __future__ import annotations

import logging
import time
from typing import Any
from uuid import UUID

import httpx

from tests.e2e.site import Site

_log = logging.getLogger(__name__)

BATCHES = 3000
FLAT_BYTES = 50 << 20
PAUSE_S = 0.15


def test_three_thousand_batches(site: Site) -> None:
    """P45: memory stays flat, and the flow run's page opens."""
    # Without a pause there are more batches in a second than the server takes events of, and these wait in memory.
    run = site.train("long", BATCHES, step_interval=1, batch_steps=1, step_s=PAUSE_S)
    site.until_state(run, "Completed", seconds=1800)
    trained = site.steps("long")
    assert len(trained) == BATCHES
    first, last = trained[300], trained[-1]
    _log.info("memory after 300 batches %.0f MiB, at the end %.0f MiB", first.rss_bytes / 2**20, last.rss_bytes / 2**20)
    assert last.rss_bytes - first.rss_bytes < FLAT_BYTES
    caught_up_s = time.monotonic()
    page = site.until(lambda: task_runs(site, run), 600, "the server has caught up with the events of the run")
    _log.info("the server answered %.0f s after the run had ended", time.monotonic() - caught_up_s)
    assert len(page) == 200
    graph_s = time.monotonic()
    assert httpx.get(f"{site.api}/flow_runs/{run}/graph-v2", timeout=60).status_code == 200
    assert time.monotonic() - graph_s < 10


def task_runs(site: Site, flow_run: UUID) -> list[Any] | None:
    """Return the first page of a run's task runs; None where the server has too much to write to its database yet."""
    wanted = {"flow_runs": {"id": {"any_": [str(flow_run)]}}, "limit": 200}
    try:
        answer = httpx.post(f"{site.api}/task_runs/filter", json=wanted, timeout=60)
    except httpx.ReadTimeout:
        return None
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # what Prefect makes of a locked SQLite
        return None
    answer.raise_for_status()
    page: list[Any] = answer.json()
    return page
