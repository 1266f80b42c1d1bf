"""The main job, killed anywhere and started again until it is done."""

from __future__ import annotations

import glob
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.recording import committed

_STEPS = 40
_SMALL = {"d_model": 32, "n_layers": 2, "n_heads": 2, "context": 32, "batch_size": 4, "max_bytes": 1 << 20}


def _command(directory: Path, log: Path, *, pause_s: float) -> list[str]:
    params = json.dumps({**_SMALL, "log": str(log), "pause_s": pause_s, "dropout": 0.1})
    return [
        *(sys.executable, "-m", "flows.train", "--program", "tests.support.recording:Recording", "--params", params),
        *("--run-key", "killed", "--checkpoint-dir", str(directory), "--steps", str(_STEPS)),
        *("--step-interval", "3", "--batch-steps", "10", "--seed", "3"),
    ]


def _kill_somewhere(process: subprocess.Popen[bytes], directory: Path, chance: random.Random) -> None:
    """Send SIGKILL at a random moment, or, every other time, the moment a save has begun to write."""
    if chance.random() < 0.5:
        deadline = time.monotonic() + chance.uniform(1.0, 9.0)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
    else:
        before, wanted = _attempts(directory), chance.randint(1, 6)
        while process.poll() is None and len(_attempts(directory) - before) < wanted:
            time.sleep(0.0005)
        time.sleep(chance.uniform(0, 0.02))
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()


def _attempts(directory: Path) -> set[str]:
    # By names alone: a directory may be pruned between being seen and being looked into.
    return set(glob.glob(f"{directory}/checkpoint_*/e*"))


def _run_until_done(command: list[str], environment: dict[str, str], directory: Path, *, kills: int, seed: int) -> int:
    chance = random.Random(seed)
    for killed in range(kills + 3):
        output = directory.parent / "output.log"
        with output.open("wb") as file:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
            if killed < kills:
                _kill_somewhere(process, directory, chance)
            status = process.wait(240)
        if status == 0:
            return killed
        assert status == -signal.SIGKILL, output.read_text()[-4000:]
    raise AssertionError("the job did not end")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_killed_runs_end_as_if_nothing_had_happened(server: dict[str, str], tmp_path: Path) -> None:
    """Killed at random moments and within saves, the final state is the uninterrupted run's, and so are all samples.

    Bit for bit, by `ckpt diff`; the ids that committed steps saw have no gap and no repeat (P22, P30, P32, P67, P73,
    P75). A run is killed until it is done, and runs are made until there were as many kills as asked for.
    """
    environment = {**server, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    plain, torn = tmp_path / "plain" / "run", tmp_path / "torn" / "run"
    plain.parent.mkdir()
    _run_until_done(_command(plain, plain.parent / "ids", pause_s=0), environment, plain, kills=0, seed=0)
    killed, kills = 0, 30
    while killed < kills:
        torn.parent.mkdir()
        command = _command(torn, torn.parent / "ids", pause_s=0.1)
        killed += _run_until_done(command, environment, torn, kills=kills - killed, seed=kills + killed)
        assert _ckpt("diff", plain, torn) == 0
        assert _ckpt("verify", torn) == 0
        assert committed(torn.parent / "ids") == committed(plain.parent / "ids")
        assert len(committed(torn.parent / "ids")) == _STEPS
        shutil.rmtree(torn.parent)


def _ckpt(verb: str, *directories: Path) -> int:
    command = [str(Path(sys.executable).with_name("ckpt")), verb, *map(str, directories)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.stdout.write(found.stdout + found.stderr)  # pytest shows it where the test fails
    return found.returncode
