"""The experiments that checkpoints in use today fail, on a plain loop: kill, cut, flip, kill during a save."""

from __future__ import annotations

import glob
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckpt_tasks.copying.compare import compare_checkpoints
from ckpt_tasks.reading.reading import open_run
from ckpt_tasks.upkeep.upkeep import verify_run_directory
from tests.support.recording import committed, repeated


def _loop(directory: Path, *options: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.crash.plain_loop", str(directory), str(directory) + ".ids", *options]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert found.returncode == status, found.stdout + found.stderr
    return found


def _assert_equal(one: Path, other: Path) -> None:
    runs = open_run(str(one)), open_run(str(other))
    first, second = (run.find("latest") for run in runs)
    assert first.step == second.step == 60
    assert compare_checkpoints(runs[0].history.store, first, runs[1].history.store, second).differences == ()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train once without a kill."""
    directory = tmp_path_factory.mktemp("plain") / "run"
    _loop(directory)
    return directory


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_in_mid_epoch(uninterrupted: Path, tmp_path: Path) -> None:
    """P22, P73: killed in step 35 and started again, the weights are equal, and no sample is repeated or left out."""
    directory = tmp_path / "run"
    _loop(directory, "--kill-at", "35", status=-signal.SIGKILL)
    assert "restored 30" in _loop(directory).stdout
    _assert_equal(uninterrupted, directory)
    ids = Path(str(directory) + ".ids")
    assert committed(ids) == committed(Path(str(uninterrupted) + ".ids"))
    assert repeated(ids) == 4  # steps 31 to 34, which no checkpoint held


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flip", "cut"])
@pytest.mark.timeout(600)
def test_newest_checkpoint_damaged(damage: str, uninterrupted: Path, tmp_path: Path) -> None:
    """P49: the newest checkpoint cut short, or with one bit flipped, is passed over, said so, and the end is equal."""
    directory = tmp_path / "run"
    _loop(directory, "--kill-at", "35", "--private", status=-signal.SIGKILL)  # with memory, storage is not asked
    (victim,) = directory.glob("checkpoint_000000000030/*/optimizer-*.safetensors")
    data = bytearray(victim.read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    found = _loop(directory)
    assert "restored 20" in found.stdout
    assert "passed over step 30" in found.stderr
    _assert_equal(uninterrupted, directory)


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "ballast_mib"), [(2, 64), (10, 592)], ids=["short", "long"])
@pytest.mark.timeout(1500)
def test_killed_during_saves(kills: int, ballast_mib: int, tmp_path: Path) -> None:
    """P30, P31, P67: killed within saves of a large state, every resume goes on, and nothing is left in the end."""
    directory, chance = tmp_path / "run", random.Random(5)
    options = ["--ballast-mib", str(ballast_mib), "--steps", "30", "--interval", "5"]
    command = [sys.executable, "-m", "tests.crash.plain_loop", str(directory), str(directory) + ".ids", *options]
    for _ in range(kills):
        before = set(glob.glob(f"{directory}/checkpoint_*/e*"))
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            while process.poll() is None and not set(glob.glob(f"{directory}/checkpoint_*/e*")) - before:
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.1 + ballast_mib / 2000))
            process.kill()
            assert process.stderr is not None
            assert b"Error" not in process.stderr.read()
    assert "step 30" in _loop(directory, *options).stdout
    faults = verify_run_directory(open_run(str(directory)).history)
    assert faults.good
    assert faults.orphans == ()
    # A kill within the put of an entry leaves its temporary name, for an hour: until then it may be in use.
    left = list(directory.rglob(".tmp-*"))
    assert {path.parent.name for path in left} <= {"ledger", "heartbeat"}
    for path in left:
        os.utime(path, (0, 0))
    _loop(directory, *options)
    assert not list(directory.rglob(".tmp-*"))
    shutil.rmtree(directory)
