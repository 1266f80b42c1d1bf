"""Each kind of fault of `ckpt chaos` happens: what it does to a process, without a training."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from threading import Thread

import pytest

from ckpt_tasks.proving.chaos import FAULTS, Hit, Verdict, Victim
from ckpt_tasks.proving.proof import Proof
from tests.support.waiting import until

# It writes for as long as it can, and says so; it also starts a process of its own.
WRITES = """
import os, subprocess, sys, time
place = os.environ["CKPT_RUN"]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open(place + ".child", "w").write(str(child.pid))
until_s = time.monotonic() + 300  # A test that fails leaves it behind.
with open(place + ".written", "ab", buffering=0) as file:
    while time.monotonic() < until_s:
        try:
            file.write(b".")
        except OSError as error:
            print(error, flush=True)
        time.sleep(0.01)
"""


def state_of(pid: int) -> str:
    """Return the state of a process, of /proc: T is stopped; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class Suffering:
    """A command that suffers one fault in a thread."""

    def __init__(self, place: Path, fault: str, gap_s: float = 0.1):
        self.victim = Victim([sys.executable, "-c", WRITES], place / "run")
        self.place = place
        self.result: tuple[int | None, int] | None = None
        self.victim.restart()
        assert self.victim.process is not None
        self.pid = self.victim.process.pid
        until(lambda: (place / "run.written").exists() and (place / "run.child").read_text())
        self.child = int((place / "run.child").read_text())
        self._thread = Thread(target=self._suffer, args=(fault, gap_s))
        self._thread.start()

    def _suffer(self, fault: str, gap_s: float) -> None:
        self.result = self.victim.suffer(fault, gap_s)

    def faults(self) -> dict[str, float]:
        found: dict[str, float] = json.loads((self.place / "run.faults").read_text())
        return found

    def end(self) -> tuple[int | None, int]:
        self._thread.join(120)
        assert self.result is not None
        self.victim.stop()
        return self.result


@pytest.mark.parametrize(("fault", "status"), [("kill", -9), ("terminate", -15)])
def test_a_fault_that_ends_the_command_ends_all_its_processes(tmp_path: Path, fault: str, status: int) -> None:
    """SIGKILL and SIGTERM reach the command and what it has started."""
    suffering = Suffering(tmp_path, fault)
    assert suffering.end() == (status, 0)
    until(lambda: state_of(suffering.child) in ("", "Z"))


def test_a_pause_stops_all_processes_and_lets_them_go_on(tmp_path: Path) -> None:
    """Both processes are stopped at one time, and neither is afterwards; the command goes on by itself."""
    suffering = Suffering(tmp_path, "pause", gap_s=5.0)
    until(lambda: state_of(suffering.pid) == state_of(suffering.child) == "T")
    until(lambda: "T" not in (state_of(suffering.pid), state_of(suffering.child)))
    assert suffering.end() == (None, 0)


def test_a_disk_is_full_for_a_time(tmp_path: Path) -> None:
    """Every write fails while it lasts, and none afterwards; the limit of each process is what it was."""
    suffering, limit = Suffering(tmp_path, "full disk"), resource.getrlimit(resource.RLIMIT_FSIZE)
    pids = suffering.pid, suffering.child
    until(lambda: all(resource.prlimit(pid, resource.RLIMIT_FSIZE)[0] == 0 for pid in pids))
    until(lambda: suffering.result is not None)
    size_bytes = (tmp_path / "run.written").stat().st_size
    until(lambda: (tmp_path / "run.written").stat().st_size > size_bytes)
    assert all(resource.prlimit(pid, resource.RLIMIT_FSIZE) == limit for pid in pids)
    assert suffering.end() == (None, 0)
    assert "File too large" in str(suffering.victim.failed(1))


@pytest.mark.parametrize(
    ("fault", "name", "means"),
    [
        ("slow store", "delay_s", lambda value: value > 0),
        ("failing store", "failing", lambda value: 0 < value < 1),
        ("clock ahead", "jump_s", lambda value: value > 60),
        ("clock back", "jump_s", lambda value: value < -60),
    ],
)
def test_a_fault_inside_is_told_until_it_has_hit(tmp_path: Path, fault: str, name: str, means: object) -> None:
    """The command's ckpt_tasks reads it from the file; it lasts until a request or a reading of the clock was hit.

    A store is calm again afterwards; a clock that has jumped stays where it is.
    """
    assert callable(means)
    suffering = Suffering(tmp_path, fault, gap_s=0.0)
    until(lambda: means(suffering.faults()[name]))
    assert {key for key, value in suffering.faults().items() if value} == {name}
    with open(tmp_path / "run.faults.hits", "ab") as file:
        file.write(b"..")
    assert suffering.end() == (None, 2)
    assert bool(suffering.faults()[name]) == fault.startswith("clock")


def test_a_verdict_is_good_only_without_a_difference_and_damage() -> None:
    """Damage in the run counts, also where every value is equal."""
    equal = Proof(8, (2,), 5, None)
    hits = tuple(Hit(fault, 1, None) for fault in FAULTS)
    assert Verdict(1, hits, equal, ()).good
    assert not Verdict(1, hits, equal, ("a bit",)).good
