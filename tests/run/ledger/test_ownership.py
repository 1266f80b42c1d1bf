"""Who holds a run directory: told from real processes, and what the one that lost it may still do (nothing)."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import OwnedError
from ckpt_tasks.format.records import Owner
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.ownership import Heartbeat, acquire, identify, lives_here, why_free
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.system import process_start
from tests.support.owner_child import OwnerChild
from tests.support.sweeps import quick_first
from tests.support.systems import Hurried, running_on


@pytest.fixture
def child(run_dir: Path) -> Iterator[Callable[..., OwnerChild]]:
    made: list[OwnerChild] = []

    def start(**more: Any) -> OwnerChild:
        made.append(OwnerChild(run_dir, **more))
        return made[-1]

    yield start
    for one in made:
        one.kill()


def mine(root: Path, **more: Any) -> Checkpointer:
    flow_run_id, take_over = more.pop("flow_run_id", None), more.pop("take_over", False)
    config = CheckpointConfig(checkpoint_dir=str(root), **more)
    return Checkpointer(config, flow_run_id=flow_run_id, take_over=take_over)


def everything(root: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(root.rglob("*")) if p.is_file()}


def owner_in(root: Path) -> Owner:
    owner = History(LocalStore(root)).head().state.owner
    assert owner is not None
    return owner


# ── the decision ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def held_by(pid: int) -> Owner:
    """Describe another process of this host as an owner."""
    return replace(identify(None), pid=pid, process_start=process_start(pid) or "", epoch=1)


HIDING: list[dict[str, Any]] = [
    {"host": "elsewhere"},
    {"machine_id": "another machine"},
    {"pid_namespace": "pid:[1]"},  # a container on this host: its process numbers say nothing here
    {"boot_id": "", "pid_namespace": "x"},
    {"boot_id": "before"},  # a host that was started anew, or another one from the same image
    {"boot_id": "", "machine_id": ""},
]


def test_what_can_be_seen_of_an_owner_decides(sleeper: subprocess.Popen[bytes]) -> None:
    """P32, P33: no owner, a release and this process itself free it; a process that lives here and shows life does not.

    A process number that was given away again is told by its start. What cannot be looked at, or cannot be named, holds
    its directory until its heartbeat is older than the timeout.
    """
    me, living = identify(None), held_by(sleeper.pid)
    nameless = replace(me, boot_id="", pid_namespace="")
    cases: list[tuple[Owner | None, Owner, float | None, str | None]] = [
        (None, me, None, "it has had no owner"),
        (replace(me, released=True), me, 0.0, "its owner released it"),
        (me, me, 0.0, "this process holds it already"),
        *((living, me, beat_s, None) for beat_s in (5.0, None)),
        (living, me, 121.0, "no life for 121 s"),
        (living, replace(me, process_start=living.process_start), 5.0, None),  # begun in the same moment
        (replace(living, process_start="12345"), me, 0.0, "is gone"),
        (replace(nameless, process_start="12345"), nameless, 5.0, None),
    ]
    for hiding in HIDING:
        other = replace(me, process_start="12345", **hiding)
        cases += [(other, me, 119.0, None), (other, me, None, None), (other, me, 121.0, "no life")]
    for owner, looking, beat_s, why in cases:
        found = why_free(owner, looking, beat_s, 120.0)
        assert (found is None) if why is None else (found is not None and why in found), (owner, beat_s)
    changes: list[dict[str, Any]] = [{"released": True}, {"process_start": "12345"}, *HIDING]
    others = [me, *(replace(living, **change) for change in changes)]
    assert [owner for owner in (living, *others) if lives_here(owner, me)] == [living]


def test_a_killed_process_is_gone_at_once(sleeper: subprocess.Popen[bytes]) -> None:
    """P33: a process that is gone frees its directory at once, also while it is a zombie that nobody waited for."""
    owner = held_by(sleeper.pid)
    os.kill(sleeper.pid, signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not lives_here(replace(owner, process_start=""), identify(None))
    assert "is gone" in (why_free(owner, identify(None), 0.0, 120.0) or "")
    sleeper.wait()
    assert "is gone" in (why_free(owner, identify(None), 0.0, 120.0) or "")


HIDDEN = """
import sys
from dataclasses import replace
from ckpt_tasks.run.ledger.ownership import identify, why_free

me = identify(None)
owner = replace(me, id="a" * 32, pid=int(sys.argv[1]), process_start=sys.argv[2], epoch=1)
print(why_free(owner, me, 5.0, 120.0))
"""


@pytest.mark.parametrize("hidepid", quick_first(["1", "2"]))
def test_a_living_process_that_is_hidden_holds_it(sleeper: subprocess.Popen[bytes], hidepid: str) -> None:
    """P33: where /proc hides other users' processes, one that lives keeps its directory, one that ended does not."""
    owner = held_by(sleeper.pid)
    hide = f"mount -t proc -o hidepid={hidepid} proc /proc && exec setpriv --reuid 65534 --regid 65534 --clear-groups "
    told = [sys.executable, "-I", "-c", HIDDEN, str(owner.pid), owner.process_start]
    command = ["unshare", "--mount", "sh", "-c", f'{hide} "$@"', "sh", *told]
    if os.getuid() or subprocess.run([*command[:3], "-c", f"{hide} true"], check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a /proc")
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "None\n"
    sleeper.kill()
    sleeper.wait()
    assert "is gone" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


# ── with real processes ──────────────────────────────────────────────────────────────────────────────────────


def test_a_living_owner_is_not_disturbed(run_dir: Path, child: Callable[..., OwnerChild]) -> None:
    """P33: while another process holds the directory, restore and save say who, and write nothing at all."""
    other = child()
    assert other.ask("save 1") == "ok 1"
    before = everything(run_dir)
    ckpt = mine(run_dir)
    for attempt in (lambda: ckpt.restore({"x": 0}), lambda: ckpt.save(9, {"x": 9}), ckpt.acquire):
        with pytest.raises(OwnedError, match=f"process {other.process.pid} on ") as caught:
            attempt()
        assert "take_over" in str(caught.value)
    assert everything(run_dir) == before
    assert other.ask("save 2") == "ok 2"


def test_the_one_that_was_taken_over_is_fenced_and_touches_nothing(
    run_dir: Path, child: Callable[..., OwnerChild]
) -> None:
    """P33: a zombie's next save, note and close change no byte of what is live; it is told to stop each time."""
    other = child()
    assert other.ask("save 1") == "ok 1"
    ckpt = mine(run_dir, take_over=True)
    assert ckpt.restore({"x": 0}) == 1
    ckpt.save(2, {"x": 2})
    before = everything(run_dir)
    for _ in range(2):
        assert other.ask("save 3") == "FencedError"
    assert everything(run_dir) == before
    assert other.ask("close") == "ok"
    assert owner_in(run_dir).epoch == 2
    assert not owner_in(run_dir).released
    assert ckpt.save(4, {"x": 4}).step == 4
    ckpt.close()


def test_a_flow_run_waits_for_who_is_none(run_dir: Path, child: Callable[..., OwnerChild]) -> None:
    """P33: upkeep or a person holds the directory for a moment: a flow run that is resumed then waits, not for ever."""
    other = child(timeout_s=2.0)
    assert other.ask("save 1") == "ok 1"
    ckpt = mine(run_dir, flow_run_id="flow", owner_timeout_s=2.0)
    with pytest.raises(OwnedError, match=f"process {other.process.pid} on "):
        ckpt.restore({"x": 0})
    other.tell("sleep 1")
    other.tell("close")
    assert ckpt.restore({"x": 0}) == 1
    ckpt.close()


class Overtaken(LocalStore):
    """Let another process take the directory between the look at the ledger and the put."""

    overtaken = False

    def put_if_absent(self, name: str, body: bytes) -> None:
        if not self.overtaken and name.startswith("ledger/"):
            self.overtaken = True
            acquire(History(LocalStore(self.root)), identify(None), take_over=True, timeout_s=120.0)
        super().put_if_absent(name, body)


@pytest.mark.parametrize("take_over", [False, True])
def test_who_is_overtaken_while_taking_the_directory_does_not_get_it(run_dir: Path, take_over: bool) -> None:
    """P33: of two that both saw a free directory the second is told that it came too late, and writes no entry."""
    store = Overtaken(run_dir)
    with pytest.raises(OwnedError, match="first"):
        acquire(History(store), identify(None), take_over=take_over, timeout_s=120.0)
    assert store.overtaken
    assert History(LocalStore(run_dir)).head().next_n == 1
    assert owner_in(run_dir).epoch == 1


def test_a_fenced_process_learns_it_from_its_heartbeat(run_dir: Path, child: Callable[..., OwnerChild]) -> None:
    """P33: training stops within a heartbeat, long before its next save is due."""
    other = child(timeout_s=0.4)
    assert other.ask("restore") == "ok 0 1"
    ckpt = mine(run_dir, take_over=True)
    ckpt.restore({"x": 0})
    answer = ""
    for n in range(1, 400):
        answer = other.ask(f"step {n}")
        if answer != "ok":
            break
        time.sleep(0.05)
    assert answer == "FencedError"
    ckpt.close()


@pytest.mark.parametrize("fenced", quick_first([True, False]))
def test_a_heartbeat_that_is_of_no_use_ends_its_thread(run_dir: Path, fenced: bool) -> None:
    """P33: the thread ends when its owner has lost the directory, or when no object refers to the heartbeat."""
    history, before = History(LocalStore(run_dir)), set(threading.enumerate())
    heart = Heartbeat(history, acquire(history, identify(None), take_over=False, timeout_s=120.0), 0.04)
    [thread] = set(threading.enumerate()) - before
    if fenced:
        acquire(history, identify(None), take_over=True, timeout_s=120.0)
    else:
        del heart
    thread.join(60)
    assert not thread.is_alive()


def test_the_same_flow_run_waits_for_its_predecessor(run_dir: Path, child: Callable[..., OwnerChild]) -> None:
    """P69, P75: another attempt of one flow run waits while its predecessor commits, and goes on from that."""
    other = child(flow_run_id="flow-1")
    assert other.ask("save 1") == "ok 1"
    with pytest.raises(OwnedError):
        mine(run_dir, flow_run_id="flow-2").restore({"x": 0})
    for line in ("sleep 1", "save 2", "close"):
        other.tell(line)
    ckpt = mine(run_dir, flow_run_id="flow-1")
    state = {"x": 0}
    assert ckpt.restore(state) == 2
    assert state == {"x": 2}
    assert ckpt.run.head().state.stalled_attempts == 1
    ckpt.close()


def test_a_living_process_of_the_same_flow_run_is_not_fenced(run_dir: Path, child: Callable[..., OwnerChild]) -> None:
    """P69: a flow run that was started twice trains in its first process; the second one waits, and ends."""
    other = child(flow_run_id="flow-1")
    assert other.ask("restore") == "ok 0 1"
    ckpt = mine(run_dir, flow_run_id="flow-1")
    said = f"process {other.process.pid} on .* already executes this flow run"
    with running_on(Hurried(100)), pytest.raises(OwnedError, match=said) as caught:
        ckpt.restore({"x": 0})
    assert caught.value.same_flow_run
    assert other.ask("save 1") == "ok 1"


@pytest.mark.parametrize("beats", [True, False])
def test_elsewhere_a_heartbeat_decides(run_dir: Path, beats: bool) -> None:
    """P69: a process of the same flow run on another host is left alone if it beats, and else taken over."""
    elsewhere = replace(identify("flow-1"), host="elsewhere", machine_id="e", pid=1)
    history = History(LocalStore(run_dir))
    acquire(history, elsewhere, take_over=False, timeout_s=120.0)
    over = threading.Event()

    def live() -> None:
        heart = Heartbeat(history, owner_in(run_dir), 120.0)
        while not over.wait(0.05):
            heart.look()
        heart.stop()

    thread = threading.Thread(target=live if beats else over.set)
    thread.start()
    try:
        with running_on(Hurried(100)):
            if beats:
                with pytest.raises(OwnedError, match="on elsewhere already executes this flow run"):
                    mine(run_dir, flow_run_id="flow-1").acquire()
            else:
                mine(run_dir, flow_run_id="flow-1").acquire()
    finally:
        over.set()
        thread.join()
    assert (owner_in(run_dir).host == "elsewhere") is beats


def test_closing_lets_the_directory_go(run_dir: Path, child: Callable[..., OwnerChild]) -> None:
    """P33, P68: a normal end releases and removes nothing; the same object goes on unless another has gone on since.

    A process that was told to take over does not take the directory back from whoever holds it later.
    """
    ckpt = mine(run_dir, take_over=True)
    for step in (1, 2):
        assert ckpt.save(step, {"x": step}).step == step
        ckpt.close()
        assert owner_in(run_dir).released
    other = child()
    assert other.ask("restore") == "ok 2 2"
    with pytest.raises(OwnedError):
        ckpt.save(3, {"x": 3})
    assert other.ask("save 3") == "ok 3"
    assert [c.step for c in ckpt.checkpoints()] == [3, 2, 1]


def test_of_several_that_take_it_at_once_one_gets_it(run_dir: Path, child: Callable[..., OwnerChild]) -> None:
    """P33: three processes start on a directory whose owner died; exactly one holds it, the others are told."""
    dead, *others = [child() for _ in range(4)]
    assert dead.ask("restore") == "ok 0 1"
    dead.kill()
    for other in others:
        other.tell("restore")
    assert sorted(other.answer().split()[0] for other in others) == ["OwnedError"] * 2 + ["ok"]
