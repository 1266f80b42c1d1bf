"""A gang whose store is slow: a limit on time alone cannot tell that from a hang."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckpt_tasks import CheckpointConfig, open_run
from ckpt_tasks.storage.locations import Location
from tests.servers.s3 import S3Server
from tests.support.agents import train
from tests.support.chaos import Chaos
from tests.support.children import Child
from tests.support.rules import Fault

_TIMEOUT_S, _PUT_S = 6.0, 2.0


def agent(arguments: Sequence[str]) -> None:
    """Train two ranks, one of which is told to end in step 3."""
    url, options, folder = arguments
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    location = Location(url, storage_options=json.loads(options))
    config = CheckpointConfig(checkpoint_dir=location, step_interval=100, flush_timeout_s=_TIMEOUT_S, memory_dir=None)
    params = {"plan": [(3, 1, "term")], "folder": folder, "step_s": 0.2}
    train(config, params, 60, batch=60, tries=1)


@pytest.mark.slow
def test_a_slow_store_that_moves_is_no_hang(
    tmp_path: Path, bucket: str, chaos: Chaos, ministack: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P43: told to end, all ranks commit their step though that takes longer than `flush_timeout_s`."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    rule = chaos.on(Fault(hold_request=_PUT_S), operation="PutObject")
    options = ministack.through(chaos.endpoint).storage_options
    with Child(agent, [f"s3://{bucket}/run", json.dumps(options), str(tmp_path)], tmp_path / "agent.log") as told:
        assert told.wait(300) == -signal.SIGTERM
    assert rule.hits * _PUT_S > 4 * _TIMEOUT_S
    run = open_run(Location(f"s3://{bucket}/run", storage_options=ministack.storage_options))
    assert 3 <= run.find("latest").step < 60
    owner = run.head().state.owner
    assert owner is not None
    assert owner.released
