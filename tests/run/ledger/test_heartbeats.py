"""Signs of life of an owner that cannot be looked at: old, missing, damaged, ahead of our clock, and unreadable."""

from __future__ import annotations

import gc
import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_tasks.errors import FencedError, OwnedError, StoreError
from ckpt_tasks.format.keys import heartbeat_name
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.ownership import Signs
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.system import System, now_iso
from ckpt_tasks.testing import look
from tests.run.ledger.test_ownership import mine, owner_in
from tests.support.calls import FailingReads
from tests.support.sweeps import quick_first
from tests.support.systems import Hurried, running_on


def held_elsewhere(root: Path, flow_run_id: str | None = None) -> Path:
    """Make a run with step 1 that a process of another host holds; return its heartbeat's path."""
    first = mine(root)
    first.save(1, {"x": 1})
    first.close()
    history = History(LocalStore(root))
    far = replace(owner_in(root), host="elsewhere", machine_id="elsewhere", id="c" * 32, epoch=2, released=False)
    far = replace(far, taken_at=now_iso(), flow_run_id=flow_run_id)
    history.append({"kind": "owner"}, lambda state, n: replace(state, owner=far), owner=None)
    return root / heartbeat_name(far.epoch)


def followed(root: Path, timeout_s: float) -> None:
    """Go on from step 1 as a process that finds the owner to be silent."""
    ckpt = mine(root, owner_timeout_s=timeout_s)
    assert ckpt.restore({"x": 0}) == 1
    history = History(LocalStore(root))
    assert "no life" in str(history.read_entry(history.head().next_n - 1)[0].event["because"])
    ckpt.close()


def test_a_silent_owner_of_another_host_is_followed_after_its_timeout(run_dir: Path) -> None:
    """P33: of a host that cannot be looked at only the heartbeat counts: a fresh, a missing, and an old one."""
    beat = held_elsewhere(run_dir)
    for at_s in (time.time() - 60, time.time() + 60, None):
        beat.unlink(missing_ok=True)
        if at_s is not None:
            beat.write_text(json.dumps({"at_s": at_s}))
        signs = Signs(History(LocalStore(run_dir)), 120.0)
        signs.silent_s(owner_in(run_dir))
        assert not signs.watching  # a clock may be a little ahead
        with pytest.raises(OwnedError, match="elsewhere"):
            mine(run_dir).restore({"x": 0})
    beat.write_text(json.dumps({"at_s": time.time() - 121}))
    followed(run_dir, 120.0)
    assert not beat.exists()


UNTIMELY = ["torn", "[" * 4000, '{"at_s": NaN}', "ahead"]


def untimely(kind: str, n: int) -> str:
    """Return a sign of life that says no time, or one that is hours ahead."""
    return json.dumps({"at_s": time.time() + 9e4 + n}) if kind == "ahead" else kind + " " * n


@pytest.mark.parametrize("kind", quick_first(UNTIMELY, 3))
def test_an_owner_whose_clock_cannot_be_used_is_followed_when_nothing_changes(run_dir: Path, kind: str) -> None:
    """P33: a heartbeat that is damaged, or from a clock that is ahead, is watched for the timeout, by this clock."""
    held_elsewhere(run_dir).write_text(untimely(kind, 0))
    followed(run_dir, 0.6)


@pytest.mark.parametrize("kind", quick_first(UNTIMELY, 3))
def test_an_owner_whose_clock_cannot_be_used_and_who_lives_is_not_disturbed(run_dir: Path, kind: str) -> None:
    """P33: what changes lives, whatever it says of the time."""
    beat, later = held_elsewhere(run_dir), iter([untimely(kind, 1)])
    beat.write_text(untimely(kind, 0))

    class Waiting(System):
        def sleep(self, seconds: float) -> None:
            beat.write_text(next(later))

    with running_on(Waiting()), pytest.raises(OwnedError, match="elsewhere"):
        mine(run_dir, owner_timeout_s=300.0).restore({"x": 0})
    assert list(later) == []


def test_a_clock_that_is_ahead_does_not_prolong_the_grace(run_dir: Path) -> None:
    """P69: the same flow run takes the directory after its grace, whatever its predecessor's clock says."""
    held_elsewhere(run_dir, "flow").write_text(untimely("ahead", 0))
    ckpt = mine(run_dir, flow_run_id="flow", owner_timeout_s=300.0)
    with running_on(Hurried(100)):
        assert ckpt.restore({"x": 0}) == 1
    history = History(LocalStore(run_dir))
    assert "within its grace" in str(history.read_entry(history.head().next_n - 1)[0].event["because"])
    ckpt.close()


def test_a_heartbeat_that_cannot_be_read_is_no_silence(run_dir: Path) -> None:
    """P33: a disk that does not answer says nothing of the owner, also of one that took the directory long ago."""
    held_elsewhere(run_dir).write_text(json.dumps({"at_s": time.time()}))
    ckpt = mine(run_dir, owner_timeout_s=0.001)
    ckpt.run.history.store = LocalStore(run_dir, calls=FailingReads(1, forever=True, below="/heartbeat/"))
    with pytest.raises(StoreError, match="heartbeat"):
        ckpt.restore({"x": 0})
    assert owner_in(run_dir).host == "elsewhere"


def test_a_heartbeat_that_cannot_read_the_ledger_fences_nobody(run_dir: Path) -> None:
    """P33: reads that fail with EIO again and again leave a healthy owner what it holds."""
    ckpt = mine(run_dir)
    ckpt.save(1, {"x": 1})
    ckpt.run.history.store = LocalStore(run_dir, calls=FailingReads(1, forever=True, below="/ledger/"))
    for _ in range(4):
        look(ckpt)
    ckpt.run.history.store = LocalStore(run_dir)
    look(ckpt)
    assert ckpt.save(2, {"x": 2}).step == 2
    ckpt.close()


def test_a_second_checkpointer_of_a_process_does_not_fence_the_first(run_dir: Path) -> None:
    """P33: what trains in this process is not pushed out by mistake: only when it has closed, is gone, or on demand."""
    first, second = mine(run_dir), mine(run_dir, owner_timeout_s=0.001)
    first.save(1, {"x": 1})
    for attempt in (lambda: second.restore({"x": 0}), lambda: second.save(2, {"x": 2}), second.acquire):
        with pytest.raises(OwnedError, match="another Checkpointer of this process") as caught:
            attempt()
        assert "take_over=True" in str(caught.value)
    assert first.save(2, {"x": 2}).step == 2
    first.close()
    assert second.restore({"x": 0}) == 2
    third = mine(run_dir, take_over=True)
    assert third.restore({"x": 0}) == 2
    with pytest.raises(FencedError):
        second.save(3, {"x": 3})
    del third
    assert mine(run_dir).restore({"x": 0}) == 2


class Slow:
    """An object whose finalizer waits for `until` during a collection, as that of a DataLoader's iterator does."""

    def __init__(self, until: threading.Event, waits: threading.Event) -> None:
        self.myself, self.until, self.waits = self, until, waits

    def __del__(self) -> None:
        self.waits.set()
        self.until.wait(60)


def test_a_checkpointer_that_is_garbage_is_found_while_another_thread_collects(run_dir: Path) -> None:
    """P33: the next Checkpointer of a run waits for a long collection of another thread, and then goes on."""
    until, waits = threading.Event(), threading.Event()
    Slow(until, waits)
    collector = threading.Thread(target=gc.collect)
    collector.start()
    assert waits.wait(60)
    first = mine(run_dir)
    first.save(1, {"x": 1})
    first.myself = first  # type: ignore[attr-defined]  # only the collector can free it
    del first
    threading.Timer(0.5, until.set).start()
    assert mine(run_dir).restore({"x": 0}) == 1
    assert until.is_set()
    collector.join()
