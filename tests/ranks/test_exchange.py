"""ranks/exchange.py: what a rank hears when the process that holds the c10d store has ended."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ckpt_tasks.errors import StoreError
from ckpt_tasks.ranks.exchange import StoreExchange


def test_a_thread_that_connects_first_after_the_store_has_ended_is_told_at_once() -> None:
    """A thread's first request fails in seconds if the store's process has ended (torchrun killed in a first save)."""
    c10d: Any = dist  # it does not export its stores to a type checker
    server = c10d.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
    client = c10d.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=60))
    exchange = StoreExchange(c10d.PrefixStore("gang", client), 1, 2, "run")
    exchange.post("word", b"seen")
    del server
    failures: list[StoreError] = []

    def ask() -> None:
        try:
            exchange.look("word")
        except StoreError as error:
            failures.append(error)

    began = time.monotonic()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(20)
    assert [str(failure) for failure in failures if "cannot reach each other" in str(failure)], "no answer in 20 s"
    assert time.monotonic() - began < 10
