"""What was saved survives a loss of power at any moment, on ext4, with every order of writes that a disk may choose.

Needs root, loop devices and the right to mount; skipped with the reason otherwise. Each experiment also runs with some
fsyncs left out, and must then find a loss: a test that finds none there would prove nothing.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.block_log import BLOCK_BYTES, ROOT, Event, Replay
from tests.support.sweeps import sparse

Experiment = Callable[..., list[dict[str, Any]]]


def _slow(*options: int | str) -> Any:
    return pytest.param(*options, marks=pytest.mark.slow)


def what_is_missing(tmp_path: Path) -> str | None:
    """Say why an ext4 cannot be mounted from a file here; None where it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux: a file system is made and mounted"
    needed = ("unshare", "mkfs.ext4", "debugfs", "mount", "umount")
    if missing := [name for name in needed if shutil.which(name) is None]:
        return f"needs {', '.join(missing)} (util-linux, e2fsprogs)"
    trial = 'truncate -s 8M "$0/d" && mkfs.ext4 -q "$0/d" && mkdir "$0/m" && mount -o loop "$0/d" "$0/m"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", trial, str(tmp_path)]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"an ext4 cannot be mounted here: {tried.stderr.strip()}" if tried.returncode else None


def started(at: Path) -> subprocess.Popen[str]:
    """Start the process that makes the experiments, in a mount namespace of its own."""
    own = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "tests.faults.power_loss", str(at)]
    return subprocess.Popen(own, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: subprocess.Popen[str], **request: Any) -> list[dict[str, Any]]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, f"the process ended with {process.wait(60)}; what it said stands above"
    moments: list[dict[str, Any]] = json.loads(answer)
    return moments


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty directory to mount on; skip where that cannot be."""
    if missing := what_is_missing(tmp_path_factory.mktemp("trial")):
        pytest.skip(missing)
    return tmp_path_factory.mktemp("power")


@pytest.fixture(scope="module")
def experiment(room: Path) -> Iterator[Experiment]:
    """Return what makes an experiment and returns its moments; one process makes them all: it imports torch."""
    processes: list[subprocess.Popen[str]] = []

    def make(**request: Any) -> list[dict[str, Any]]:
        if not processes or processes[-1].poll() is not None:  # an experiment that failed has ended its process
            processes.append(started(room))
        return ask(processes[-1], **request)

    yield make
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def logged(experiment: Experiment) -> Experiment:
    """Return the same for disks that log their writes; skip where there is no FUSE."""
    if not Path("/dev/fuse").exists():
        pytest.skip("needs /dev/fuse: the disk is a file that a process of ours serves")
    return partial(experiment, how="reordered")


def kinds(moments: list[dict[str, Any]]) -> Counter[str]:
    return Counter(kind for moment in moments for kind in {kind for kind, _ in moment["faults"]})


def no_faults(moments: list[dict[str, Any]]) -> bool:
    for moment in moments:
        assert moment["faults"] == [], moment
    return True


# ── power is lost ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("saves", "lives", "more", "seed"), [(2, 1, 2, 1), *sparse(((4, 3, 22, seed) for seed in range(10, 16)), 3)]
)
def test_what_was_saved_survives_a_loss_of_power(
    logged: Experiment, saves: int, lives: int, more: int, seed: int
) -> None:
    """P30, P35: at any write, with any part of what was not flushed: each acknowledged save is there, bit for bit.

    The next save works, also when power is lost once more.
    """
    moments = logged(leaves_out="nothing", saves=saves, lives=lives, moments=more, lies=0, seed=seed)
    assert no_faults(moments)
    assert len(moments) == lives * (3 * saves + more)


# ── the experiments find what they look for ──────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("leaves_out", ["data", _slow("directories"), _slow("ledger")])
def test_without_these_fsyncs_a_save_is_lost(logged: Experiment, leaves_out: str) -> None:
    """Leave out the fsync of directories, of ledger entries or of data: an acknowledged save is gone or torn."""
    moments = logged(leaves_out=leaves_out, saves=2, lives=1, moments=0, lies=0, seed=2)
    found = kinds(moments)
    assert found["lost"] + found["torn"] > 0, moments
    assert found["wrong"] == 0, moments


# ── fsync lies ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_save_that_a_lying_fsync_tore_is_passed_over(logged: Experiment) -> None:
    """P35: fsync did nothing for the last checkpoint's objects: restore says so, and takes the one before it."""
    moments = logged(leaves_out="newest data", saves=3, lives=1, moments=0, lies=0, seed=2)
    assert no_faults([moment for moment in moments if moment["acked"] < 3])
    torn = [moment for moment in moments if moment["acked"] == 3 and moment["faults"]]
    assert {moment["restored"] for moment in torn} == {2}
    assert kinds(torn).keys() == {"torn", "passed over"}, torn


@pytest.mark.parametrize(("lies", "moments"), [_slow(20, 2), _slow(40, 45), _slow(160, 45)])
def test_a_lying_disk_gives_an_older_save_or_an_error(logged: Experiment, lies: int, moments: int) -> None:
    """P35: the last flushes did nothing: a save is restored bit for bit, an older one if need be, or it is an error."""
    left = logged(leaves_out="nothing", saves=3, lives=1, moments=moments, lies=lies, seed=3)
    found = kinds(left)
    assert found["wrong"] == found["stuck"] == 0, left
    assert min(found["lost"], found["torn"], found["passed over"] + found["refused"]) > 0, left


@pytest.mark.slow
def test_a_file_that_the_file_system_found_damaged_is_passed_over(experiment: Experiment) -> None:
    """A file of the newest checkpoint has a damaged inode: restore says so, and takes the one before it."""
    for moment in experiment(how="inodes"):
        assert moment["restored"] == 1, moment
        assert {kind for kind, _ in moment["faults"]} == {"torn", "passed over"}, moment


# ── the disks that are looked at ─────────────────────────────────────────────────────────────────────────────────


def blocks(disk: bytearray) -> str:
    return disk[::BLOCK_BYTES].decode()


def logged_blocks(*what: str) -> list[Event]:
    """Make events: "2x" writes x to block 2, "2xy" also y to block 3, and "" is a flush."""
    events = []
    for n, one in enumerate(what):
        data = b"".join(letter.encode() * BLOCK_BYTES for letter in one[1:])
        events.append(Event(int(one[0]) * BLOCK_BYTES, memoryview(data), n) if one else Event(0, None, n))
    return events


def test_what_was_flushed_is_there_and_of_the_rest_any_part() -> None:
    """Every disk that can be left is found, and no other: writes before the last flush, and any part of those after.

    With a flush that did nothing, what was written before it may be missing as well.
    """
    base, events = b"-" * 4 * BLOCK_BYTES, logged_blocks("0a", "1b", "", "2c", "0de")
    choose = random.Random(0)

    def left(moment: int, keep: Any) -> set[str]:
        return {blocks(Replay(base, events).disk(moment, keep, choose)) for _ in range(100)}

    assert left(0, "all") == {"----"}
    assert left(2, "all") == {"ab--"}
    assert left(2, "none") == {"----"}
    assert left(2, "writes") == {"----", "a---", "-b--", "ab--"}
    assert left(3, "none") == {"ab--"}
    assert left(5, "none") == {"ab--"}
    assert left(5, "all") == {"dec-"}
    assert left(5, "writes") == {"ab--", "abc-", "de--", "dec-"}
    assert left(5, "blocks") == {"ab--", "abc-", "db--", "dbc-", "ae--", "aec-", "de--", "dec-"}
    for lies, expected in enumerate(["ab--", "----"]):
        assert blocks(Replay(base, events, lies=lies).disk(4, "none", choose)) == expected
