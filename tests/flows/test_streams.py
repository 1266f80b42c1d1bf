"""Random numbers of training are training's alone, whatever runs in threads beside it."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path

import pytest
from prefect import flow
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from ckpt_tasks import CheckpointConfig, Checkpointer, resumable_task


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
