"""A process that forks after it used the store: parent and children go on, each over its own connections."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckpt_tasks.storage import objects
from ckpt_tasks.storage.objects import ObjectStore
from ckpt_tasks.storage.port import Store
from ckpt_tasks.storage.s3 import S3Requests
from tests.faults.s3_runs import Place

LATE_S = 30


@pytest.fixture
def store(place: Place) -> ObjectStore:
    """Return a store that this process has used, with ten small objects."""
    found = ObjectStore(place.url, place.server.storage_options)
    for n in range(10):
        found.put(f"samples/{n}", [f"{n}".encode()])
    return found


def in_child(work: Callable[[], object]) -> int:
    """Run something in a forked child and return how that ended: 0, or what killed it."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(LATE_S)
        try:
            work()
        except BaseException:  # noqa: BLE001 (the child must end here, whatever happens)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def use(store: Store, name: str) -> None:
    """Write, read and list, as if nothing had happened."""
    store.put(name, [b"child"])
    assert store.get(name, 10) == b"child"
    assert name in store.names("")


def test_the_parents_connections_live_on(store: ObjectStore) -> None:
    """A child that used the store, or dropped it, closed nothing of the parent's; one that was sent it by pickle works.

    The parent's connections lie idle meanwhile, and each is used again.
    """

    def drop() -> None:
        nonlocal store
        store.put("by/child", [b"x"])
        del store
        gc.collect()

    children: list[Callable[[], object]] = [lambda: use(store, "by/first"), drop]
    for work in children:
        for forks in (True, False):
            with ThreadPoolExecutor(6) as threads:  # several connections
                read = [*threads.map(lambda n: store.get(f"samples/{n}", 10), range(6))]
            assert read == [b"0", b"1", b"2", b"3", b"4", b"5"]
            assert not forks or in_child(work) == 0
    assert pickle.loads(pickle.dumps(store)).names("by/") == ["by/child", "by/first"]


@pytest.mark.slow
def test_a_fork_while_another_thread_opens_the_store(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that was held when the process forked is nobody's in the child: it does not wait for ever."""
    store = ObjectStore(place.url, place.server.storage_options)
    held, done = threading.Event(), threading.Event()

    class Slow(S3Requests):
        def __init__(self, *arguments: Any) -> None:
            if threading.current_thread() is thread:
                held.set()
                done.wait(LATE_S)
            super().__init__(*arguments)

    monkeypatch.setattr(objects, "S3Requests", Slow)
    thread = threading.Thread(target=store.names, args=("",))
    thread.start()
    assert held.wait(LATE_S)
    try:
        assert in_child(lambda: use(store, "by/child")) == 0
    finally:
        done.set()
        thread.join()
