"""What Prefect costs: the flow against a bare loop with the same steps and the same saves."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

from prefect.settings import PREFECT_LOGGING_LEVEL, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from benchmarks.sleeper import Sleeper
from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.orchestration.hooks import attempted_task
from flows.train import train

__all__ = ["measure"]

_STEPS_A_BATCH = 20
_BATCHES = 8


def measure(directory: Path, *, batch_s: float, rounds: int) -> dict[str, Any]:
    """Time flow and bare loop in turn, `rounds` times, each over the same batches with one save at the end of each.

    What a flow run costs once (its start, its end) is measured by an empty run and reported apart: at weeks of training
    it is nothing, at eight batches it would hide what a batch costs.
    """
    step_s = batch_s / _STEPS_A_BATCH
    flows, loops, empty = [], [], []
    with prefect_test_harness(), temporary_settings({PREFECT_LOGGING_LEVEL: "WARNING"}):
        attempted_task(_nothing, retries=0, retry_delay_s=0)()  # the first run in a process imports and connects
        for number in range(rounds):
            loops.append(_loop(directory / f"loop-{number}", step_s))
            empty.append(_flow(directory / f"flow-{number}", step_s, batches=0))
            flows.append(_flow(directory / f"flow-{number}", step_s, batches=_BATCHES))
    per_batch = [(flow - start - loop) / _BATCHES for flow, start, loop in zip(flows, empty, loops, strict=True)]
    return {
        "batch_s": batch_s,
        "batches": _BATCHES,
        "per_batch_s": median(per_batch),
        "overhead": median(per_batch) / batch_s,
        "flow_run_s": median(empty),
        "loop_s": loops,
        "flow_s": flows,
    }


def _nothing() -> None:
    return None


def _flow(directory: Path, step_s: float, *, batches: int) -> float:
    started = time.perf_counter()
    train(
        run_key="bench",
        total_steps=batches * _STEPS_A_BATCH,
        checkpoint=CheckpointConfig(checkpoint_dir=str(directory)),
        program="benchmarks.sleeper:Sleeper",
        params={"step_s": step_s},
        batch_steps=_STEPS_A_BATCH,
    )
    return time.perf_counter() - started


def _loop(directory: Path, step_s: float) -> float:
    started = time.perf_counter()
    program = Sleeper(step_s=step_s)
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(directory), run_key="bench")) as ckpt:
        ckpt.restore(program.state)
        ckpt.save(0, program.state)
        for step in range(1, _BATCHES * _STEPS_A_BATCH + 1):
            program.train_step()
            if step % _STEPS_A_BATCH == 0:
                ckpt.save(step, program.state)
            else:
                ckpt.step(step, program.state)
    return time.perf_counter() - started
