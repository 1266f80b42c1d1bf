"""exchange.py: what a rank hears when the process that holds the c10d store has ended, and from strangers."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from ckpt_tasks.checkpoint.ranks.exchange import StoreExchange, Together
from ckpt_tasks.checkpoint.restore.sharing import share_reads
from ckpt_tasks.errors import CkptError, StoreError
from ckpt_tasks.format.layout.index import IndexRow
from ckpt_tasks.format.layout.regions import Box
from ckpt_tasks.process import close_descriptor, open_nameless
from ckpt_tasks.storage.local_fs import write_at
from ckpt_tasks.system import host_name


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

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(40)  # the exchange's own limit is 60 s
    assert [str(failure) for failure in failures if "cannot reach each other" in str(failure)], "no answer"


@contextmanager
def a_gang_with(stranger: Any, rank: int) -> Iterator[StoreExchange]:
    """Yield the exchange of one of two ranks; the other one is what `stranger` does with its own, in a thread."""
    c10d: Any = dist
    server = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    client = c10d.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=60))
    thread = threading.Thread(target=stranger, args=(StoreExchange(client, 1 - rank, 2, "run", 30),), daemon=True)
    thread.start()
    yield StoreExchange(server, rank, 2, "run", 30)
    thread.join(30)


@pytest.mark.parametrize(
    ("listed", "memory"),
    [
        ("list", "../../..{file}"),
        ("../../..{path}", "memory"),
        ("list", "file"),
        ("file", "memory"),
        ("list", None),
        ([], {}),
        ("list", -1),
    ],
)
def test_a_stranger_names_no_file(tmp_path: Path, listed: Any, memory: Any) -> None:
    """An answer that names any file but a rank's memory is refused, the file stays, and the rank reads for itself."""
    rows = [IndexRow("x", "x", "U8", (4,), Box((0,), (4,)), "a", 0, 4, b"0" * 16)]
    file, path = tmp_path / "precious", tmp_path / "list"
    file.write_bytes(b"precious" * 1000)
    path.write_bytes(b'["token", {"a": 1}]\n' + np.array([0, 4], np.int64).tobytes())
    with file.open("r+b") as opened:
        numbers: dict[Any, Any] = {"file": opened.fileno(), "list": open_nameless(), "memory": open_nameless()}
        write_at(numbers["list"], path.read_bytes(), 0)
        names = [
            numbers.get(it, it.format(file=file, path=path)) if isinstance(it, str) else it for it in (listed, memory)
        ]

        def stranger(exchange: StoreExchange) -> None:
            together = Together(exchange, "share", 30)
            together(b"", lambda words: json.dumps([[host_name(), "token", os.getpid(), *names]] * 2).encode())
            together(b"1", lambda words: b"[" + b",".join(words) + b"]")

        with a_gang_with(stranger, rank=1) as exchange:
            assert share_reads(Together(exchange, "share", 30), rows, kept=True) is None
        for name in ("list", "memory"):
            close_descriptor(numbers[name])
    assert file.read_bytes() == b"precious" * 1000


@pytest.mark.parametrize("kind", ["StoreError", "annotations", "__loader__", "", "CkptError"])
def test_a_strangers_error_is_one_of_ours(kind: str) -> None:
    """A rank's failure is raised as an error of ours with data in its attributes, whatever the word names."""

    def stranger(exchange: StoreExchange) -> None:
        said = {"kind": kind, "message": "no", "step": 3, "__class__": "x", "with_traceback": 1, "hint": "Look."}
        exchange.send("run/topic", b"!" + json.dumps(said).encode())

    with a_gang_with(stranger, rank=0) as exchange, pytest.raises(CkptError, match="rank 1: no") as raised:
        exchange.agree("topic", b"", lambda words: b"", 30)
    assert (raised.value.step, raised.value.hint) == (3, "Look.")
    assert callable(raised.value.with_traceback)


@pytest.mark.parametrize("value", [b"", b"\xff\xfe\x00", b"000001\xff\xfe", b"000001!{}", b"000001=\xff"])
def test_a_value_that_no_rank_has_written_is_named(value: bytes) -> None:
    """A foreign program's bytes in the place of a rank's message raise StoreError with the key, whatever they are."""
    c10d: Any = dist
    store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    store.set("run/topic/1", value)
    exchange = StoreExchange(store, 0, 2, "run", 30)
    with (
        pytest.raises(StoreError, match="a value that none of them has written") as raised,
        exchange.meeting("topic", 30) as meeting,
    ):
        meeting.gather(b"", bytes, lambda data: data.decode().encode())
    assert raised.value.key == "run/topic"
