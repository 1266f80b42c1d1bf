"""The store is away, and comes back: nobody has to be there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.types import SecretDict

from ckpt_tasks.flows.prefect.blocks import CheckpointStore
from tests.e2e.site import Site
from tests.servers.process import token
from tests.servers.s3 import S3Server
from tests.support import processes

STEPS = 60


@contextmanager
def silent(server: S3Server) -> Iterator[None]:
    """Let a server take connections and answer none of them."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.fixture
def place(site: Site, ministack: S3Server) -> str:
    """Save a block of a bucket; return the place of a run in it. The bucket stays: evaluations come later."""
    options = ministack.storage_options
    secrets = {name: options.pop(name) for name in ("key", "secret")}
    ministack.client().create_bucket(Bucket=(bucket := f"test-{token()}"))
    with temporary_settings({PREFECT_API_URL: site.api}):
        CheckpointStore(url=f"s3://{bucket}", storage_options=options, secrets=SecretDict(secrets)).save("far")
    return "block://far/{run_key}"


def test_a_store_that_is_away_is_waited_for(site: Site, place: str, ministack: S3Server) -> None:
    """A run dies while the store does not answer: its next start crashes, and it completes once the store is back."""
    go = site.home / "away.go"
    run = site.train("away", STEPS, place=place, what="wait", at=25, marker=str(go))
    site.until(lambda: len(site.steps("away")) >= 24, 240, "the run is in step 25")
    with silent(ministack):
        processes.kill(site.engines(run))
        site.until(lambda: site.states(run).count("Crashed") >= 2, 600, "the next start has crashed")
    go.touch()
    site.until_state(run, "Completed", seconds=400)
    assert {one.step for one in site.steps("away")} == {*range(1, STEPS + 1)}
