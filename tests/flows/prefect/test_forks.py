"""DataLoader workers within a flow's tasks; and random numbers of training are training's alone."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from prefect import flow
from prefect.settings import get_current_settings
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from ckpt_tasks import CheckpointConfig, Checkpointer, resumable_task
from ckpt_tasks.flows.prefect.isolation import is_prefects

ROOT = Path(__file__).parents[3]
# In a process of its own: this one may know already how to keep Prefect out of forks.
LOADING = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from ckpt_tasks.flows.prefect.attempts import attempted_task

def read():
    for _ in range(3):
        loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, num_workers=2)
        print([int(value) for (batch,) in loader for value in batch])

attempted_task(read, retries=0, retry_delay_seconds=0)()
"""


def test_loader_workers_end_well_within_a_task(server: dict[str, str]) -> None:
    """P22: forked workers of a DataLoader can be used in a task, one loader after the other."""
    done = subprocess.run([sys.executable, "-c", LOADING], env=server, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0, 1, 2, 3, 4, 5, 6, 7]"] * 3


def test_hooks_of_prefect_are_known_in_every_shape() -> None:
    """P22: Python 3.11 registers a partial of a service's method at exit, 3.13 a lambda around it; ours are neither."""
    prefects, own = get_current_settings().copy_with_update, str.upper

    def wrapped(function: Callable[..., object]) -> Callable[[], object]:
        return lambda: function("text")

    for wrap in (wrapped, lambda function: partial(function, "text")):
        assert is_prefects(wrap(prefects))
        assert not is_prefects(wrap(own))
        assert not is_prefects(wrap("text".upper))


async def _ping(times: int) -> None:
    async def listen(connection: ServerConnection) -> None:
        await connection.wait_closed()

    async with serve(listen, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with connect(f"ws://127.0.0.1:{port}") as connection:
            for _ in range(times):
                await (await connection.ping())


def _pinged_beside(times: int) -> None:
    thread = threading.Thread(target=asyncio.run, args=(_ping(times),))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.usefixtures("harness")
def test_pings_beside_a_batch_draw_nothing_from_training(run_dir: Path) -> None:
    """P74: a websocket's pings in another thread, as Prefect's events have them, leave Python's stream alone."""
    drawn: list[float] = []
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:

        @resumable_task(ckpt, {"n": 0})
        def batch() -> None:
            random.seed(7)
            _pinged_beside(5)
            drawn.append(random.random())

        flow(batch)()
    assert drawn == [random.Random(7).random()]
