"""A training in a task that was submitted, which runs in a thread without signals of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_tasks import open_run

FLOW = """
import sys, time
import torch
from prefect import flow, task
from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.flows.prefect.attempts import resumable_task

where, run = sys.argv[1:]
state = {"weights": torch.zeros(1)}

def made():
    return Checkpointer(CheckpointConfig(checkpoint_dir=run, step_interval=10000, memory_dir=None))

def train(ckpt):
    for step in range(1, 2001):
        time.sleep(0.02)
        ckpt.step(step, state)
        print(f"step {step}", flush=True)

def submit(ckpt):
    @resumable_task(ckpt, state)
    def steps():
        train(ckpt)
    steps.submit().result()

@task
def with_its_own():
    with made() as ckpt:
        ckpt.restore(state)
        train(ckpt)

@flow
def main():
    if where == "block in the flow":
        with made() as ckpt:
            submit(ckpt)
    elif where == "block in the task":
        with_its_own.submit().result()
    else:
        submit(made())

main()
"""


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("block in the flow", marks=pytest.mark.slow),
        pytest.param("block in the task", marks=pytest.mark.slow),
        "no block",
    ],
)
def test_sigterm_ends_a_submitted_training_after_its_step(run_dir: Path, server: dict[str, str], where: str) -> None:
    """P13: the step under way is committed, none after it is trained, and the process ends by the signal."""
    command = [sys.executable, "-c", FLOW, where, str(run_dir)]
    with subprocess.Popen(
        command, env=server, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line == "step 5\n":
                process.send_signal(signal.SIGTERM)
    steps = [int(line.split()[1]) for line in said if line.startswith("step ")]
    assert process.returncode == -signal.SIGTERM, "".join(said)
    assert max(one.step for one in open_run(str(run_dir)).checkpoints()) == steps[-1] + 1
    assert steps[-1] < 1000  # it did not train to its end
