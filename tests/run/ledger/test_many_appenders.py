"""Many who append to one ledger at a time: nobody gives up, and the owner does not wait for the others."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from ckpt_tasks.errors import FencedError
from ckpt_tasks.format.keys import ledger_name
from ckpt_tasks.format.records import Lease
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.storage.port import WrappedStore
from ckpt_tasks.system import System
from tests.property.disk import Disk
from tests.support.ledgers import ME, commit, made, steps, take
from tests.support.sweeps import quick_first
from tests.support.systems import running_on

REQUEST_S = 0.02


class Far(WrappedStore):
    """Answer after some time, as a server does, and count the requests."""

    def __init__(self, inner: Any):
        super().__init__(inner)
        self.near = False
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def _ask(self, verb: str, *arguments: Any, **options: Any) -> Any:
        time.sleep(REQUEST_S)
        with self._lock:
            self.counts[verb] += 1
            return getattr(self.inner, verb)(*arguments, **options)

    def put_if_absent(self, name: str, body: bytes) -> None:
        self._ask("put_if_absent", name, body)

    def get(self, name: str, max_bytes: int) -> bytes:
        return bytes(self._ask("get", name, max_bytes))

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        return list(self._ask("names", prefix, limit))


class Noting(System):
    """This machine; it notes which threads have waited."""

    def __init__(self) -> None:
        self.waited: set[int] = set()

    def sleep(self, seconds: float) -> None:
        self.waited.add(threading.get_ident())
        super().sleep(seconds)


def leased(history: History, holder: int) -> int:
    lease = Lease(id=f"{holder:016x}", manifest_digest="1@1", holder=str(holder), expires_at=4e9)
    event = {"kind": "lease", "step": 1, "holder": str(holder)}
    return history.append(event, lambda state, n: state.with_lease(lease, 0.0), owner=None).n


@pytest.mark.parametrize("count", [16, pytest.param(120, marks=pytest.mark.slow)])
def test_many_appenders_all_come_through(count: int) -> None:
    """P33: leases by so many at once all stand; the owner, which commits meanwhile, retries without a wait."""
    far, machine = Far(Disk()), Noting()
    history = History(far)
    take(history, ME)
    history.append({"kind": "commit"}, lambda s, n: s.with_checkpoint(made(1, 1), frozenset()), owner=ME)
    commits = 6
    with running_on(machine), ThreadPoolExecutor(count + 1) as threads:
        ready = threading.Barrier(count + 1)

        def lease(holder: int) -> int:
            ready.wait()
            return leased(History(far), holder)

        def own() -> tuple[int, list[int]]:
            ready.wait()
            return threading.get_ident(), [commit(history, step) for step in range(2, 2 + commits)]

        owner = threads.submit(own)
        numbers = [*threads.map(lease, range(count))]
    head, (thread, own_numbers) = History(far).head(), owner.result()
    assert {lease.holder for lease in head.state.leases} == {str(holder) for holder in range(count)}
    assert steps(head) == [1, *range(2, 2 + commits)]
    assert sorted([*numbers, *own_numbers]) == [*range(2, 2 + count + commits)]
    assert thread not in machine.waited


def test_what_is_known_is_not_read_again() -> None:
    """From a store that is far away an entry that was read is known by its name; its owner reads it again."""
    far = Far(Disk())
    history = History(far)
    take(history, ME)
    far.counts.clear()
    for _ in range(3):
        history.head()
    assert far.counts == {"names": 3}
    far.counts.clear()
    commit(history, 5)
    assert far.counts == {"get": 2, "put_if_absent": 1}  # what it knows still stands, and so does what it puts
    commit(History(far), 6)
    assert steps(history.head()) == [5, 6]


@pytest.mark.parametrize("refilled", quick_first([0, 1, 3, 4], 2))
def test_a_store_that_was_emptied_and_filled_again_is_seen(refilled: int) -> None:
    """P33: another ledger, shorter, as long or longer, is not taken for what was read: nothing is appended to it."""
    disk = Disk()
    history = History(Far(disk))
    take(history, ME)
    commit(history, 1)
    commit(history, 2)
    disk.objects.clear()
    for n in range(refilled):
        take(History(Far(disk)), replace(ME, id="f" * 31 + str(n)))
    there = {*disk.objects}
    with pytest.raises(FencedError):
        history.append({"kind": "note", "note": "x"}, lambda state, n: state, owner=ME)
    assert {*disk.objects} == there


def test_damage_above_what_is_known_is_not_written_below() -> None:
    """P51: an owner that has seen a damaged entry above its own writes above it, and spares what it may name."""
    disk = Disk()
    history = History(Far(disk))
    take(history, ME)
    assert commit(history, 1) == 1
    disk.objects[ledger_name(4)] = b"torn"
    assert history.head().damaged == (ledger_name(4),)
    assert commit(history, 2) == 5
    entry, _ = history.read_entry(5)
    assert entry.event["damaged"] == [ledger_name(4)]
    assert entry.state.spared_epochs == ME.epoch + 1


def test_a_look_is_good_for_a_while() -> None:
    """P54: a server is asked again only after so many seconds; a damaged entry is looked at each time."""
    disk = Disk()
    far = Far(disk)
    history = History(far)
    take(history, ME)
    far.counts.clear()
    assert history.head_within(1e9).next_n == 1
    assert far.counts == {}
    assert history.head_within(0.0).next_n == 1
    assert far.counts == {"names": 1}
    disk.objects[ledger_name(1)] = b"torn"
    for _ in range(2):
        assert history.head_within(0.0).damaged == history.head_within(1e9).damaged == (ledger_name(1),)
