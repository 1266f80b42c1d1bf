"""Trainings on a CUDA device, killed and gone on bit for bit. Skipped where there is none."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import open_run
from ckpt_tasks.cli.proving.proof import prove_resume
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from tests.support.cli_runs import ckpt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEPS = 40
KILLS = 3


def start(run_dir: Path, memory_dir: Path | None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.crash.device_training", str(run_dir), "--steps", str(STEPS)]
    kept = [] if memory_dir is None else ["--memory-dir", str(memory_dir)]
    return subprocess.Popen([*command, *kept], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def lines(child: subprocess.Popen[str], count: int) -> list[str]:
    """Read some lines of what a child prints; all that are left where it ends before."""
    assert child.stdout is not None
    return [line for line in (child.stdout.readline().strip() for _ in range(count)) if line]


def trained(run_dir: Path, memory_dir: Path | None) -> tuple[list[str], dict[str, Any]]:
    """Train to the end; return what was printed on the way, and what the state was then."""
    with start(run_dir, memory_dir) as child:
        said = lines(child, STEPS + 9)
        assert child.wait() == 0, said
    return said[:-1], json.loads(said[-1])


@pytest.mark.parametrize("kept", [True, False], ids=["memory", "storage"])
def test_a_training_on_a_device_killed_thrice_ends_as_if_nothing_had_happened(
    run_dir: Path, memory: Path, kept: bool
) -> None:
    """P1, P16, P74: weights, moments, scale, averages, place in the data and streams are those of an unbroken run."""
    chance, memory_dir = random.Random(5), memory if kept else None
    _, expected = trained(run_dir.parent / "unbroken", None)
    sources = []
    for kill in range(KILLS):
        with start(run_dir, memory_dir) as child:
            said = lines(child, 1 + 9 + kill)  # so that it goes on, and dies a good way before the end
            time.sleep(chance.uniform(0, 0.01))
            child.send_signal(signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL
            sources.append(said[0])
    said, ended = trained(run_dir, memory_dir)
    sources.append(said[0])
    assert {name for name in expected if ended[name] != expected[name]} == set(), sources
    assert sources[0] == "restored 0 from nothing"
    assert not sources[-1].startswith("restored 0 ")
    if kept:
        assert str(memory) in sources[-1]
    assert verify_run_directory(open_run(str(run_dir)).history).good


def test_the_example_program_is_proved_on_a_device() -> None:
    """P74: `ckpt verify-resume` finds every step of the byte-level model equal, and it was trained on the device."""
    small = {"d_model": 64, "n_layers": 2, "n_heads": 2, "max_bytes": 1 << 18, "dropout": 0.1}
    proof = prove_resume("ckpt_tasks.flows.programs.byte_lm:ByteLM", small, steps=8)
    assert proof.good, proof.difference
    assert prove_resume("ckpt_tasks.flows.programs.byte_lm:ByteLM", {**small, "device": "cpu"}, steps=8).good


def test_ranks_under_torchrun_go_on_with_nccl(tmp_path: Path) -> None:
    """P74: the FSDP2 example with one rank on the device, ended halfway and begun again, is the unbroken one."""

    def train(name: str, steps: int) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        program = ["-m", "ckpt_tasks.flows.programs.fsdp_lm", "--step-interval", "5", "--steps", str(steps)]
        done = subprocess.run(
            [*torchrun, *program, "--checkpoint-dir", str(tmp_path / name)],
            capture_output=True, text=True, timeout=300, check=False, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    train("unbroken", 20)
    for steps in (8, 13, 20):
        train("broken", steps)
    compared = ckpt(
        "diff", f"{tmp_path / 'unbroken'}@20", f"{tmp_path / 'broken'}@20", "--ignore", "rng"
    )  # Python's is not seeded
    assert compared.status == 0, compared.out
