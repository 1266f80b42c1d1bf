"""exchange.py: ranks that torchrun restarts get the store of the start before, with all of its words."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckpt_tasks.checkpoint.ranks.connection import Connection
from ckpt_tasks.checkpoint.ranks.exchange import StoreExchange
from tests.support.children import Child

_RANKS = 3


def open_store(port: int, *, holds: bool = False) -> Any:
    made: Any = dist
    return made.TCPStore("127.0.0.1", port, is_master=holds, timeout=timedelta(seconds=60), wait_for_workers=False)


class Dying(Connection):
    """Be killed at a request."""

    requests_left = 0

    def request(self, name: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        Dying.requests_left -= 1
        if Dying.requests_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().request(name, arguments, timeout_s)


def be(arguments: Sequence[str]) -> None:
    """Be a rank of a start: meet the others, look for a word that is posted later, and write down every word."""
    port, start, rank, Dying.requests_left = map(int, arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt_tasks.checkpoint.ranks.exchange.Connection", Dying)
        meet(StoreExchange(open_store(port), rank, _RANKS, "run", 60, shared=True), start, rank)


def meet(exchange: StoreExchange, start: int, rank: int) -> None:
    """Meet the others twice, and write down every word."""
    for topic in ("options", "own"):
        words = exchange.agree(topic, f"{start}/{rank}".encode(), b" ".join, 60)
        seen = exchange.look("grant") if topic == "options" else None
        print(words.decode(), seen, flush=True)  # noqa: T201 (to the test)
    if rank == 0:
        exchange.post("grant", str(start).encode())
    print(exchange.agree("save", f"{start}/{rank}".encode(), b" ".join, 60).decode(), "ended", flush=True)  # noqa: T201
    exchange.drain(60)


def start_again(folder: Path, port: int, start: int, who: int, after: int) -> bool:
    """Start all ranks, one to be killed after some requests; end them as a launcher does. Return whether they ended."""
    own = " ".join(f"{start}/{rank}" for rank in range(_RANKS))
    deaths = [after if rank == who else 0 for rank in range(_RANKS)]
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child(be, [*map(str, (port, start, rank, death))], folder / f"{start}-{rank}"))
            for rank, death in enumerate(deaths)
        ]
        if not children[who].wait():
            assert [child.wait() for child in children] == [0] * _RANKS
    ended = [child.wait() for child in children]  # killed by the end of the block, if not by themselves
    for child in children:
        said, _, failure = child.said().partition("Traceback")
        words = said.splitlines()
        assert words == [f"{own} None", f"{own} None", f"{own} ended"][: len(words)]
        # On a busy machine a rank sees that the killed one has ended, before the launcher ends it.
        assert not failure or (ended[who] and f"StoreError: rank {who} has ended" in failure), failure
        assert len(words) == 3 or any(ended)
    return not any(ended)


@pytest.mark.parametrize("stride", [19, pytest.param(1, marks=pytest.mark.slow)])
def test_no_rank_takes_a_word_of_an_earlier_start(tmp_path: Path, stride: int) -> None:
    """A rank is killed at each of its requests in turn, and all start again with the same store: each start meets.

    What the ranks are told is of their own start alone.
    """
    held = open_store(0, holds=True)
    start = 0
    for who in range(2):
        after, whole = 1, False
        while not whole:
            start += 1
            whole = start_again(tmp_path, held.port, start, who, after)
            after += stride
    assert start_again(tmp_path, held.port, start + 1, 0, 0)
