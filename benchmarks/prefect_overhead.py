"""What Prefect costs: the flow against a bare loop with the same steps and the same saves."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from prefect.settings import PREFECT_LOGGING_LEVEL, PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from benchmarks.sleeper import Sleeper
from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.flows.prefect.attempts import attempted_task
from ckpt_tasks.flows.train import train

__all__ = ["measure"]


class _Cut(NamedTuple):
    """How a run is cut into batches."""

    batches: int
    steps: int
    batch_s: float


_LONG, _SHORT = _Cut(8, 20, 2.0), _Cut(300, 1, 0.05)


def measure(directory: Path, *, tiny: bool, rounds: int) -> dict[str, Any]:
    """Time flow and bare loop in turn over the same batches with one save at the end of each.

    Long batches as training has them, `rounds` times, and many short ones in one flow run, twice at most. What a flow
    run costs once (its start, its end) is measured by an empty run and taken off: at weeks of training it is nothing,
    at eight batches it would hide what a batch costs. The server shares the cores.
    """
    cuts = {"long": (_LONG, min(rounds, 5)), "short": (_SHORT, min(rounds, 2))}
    if tiny:
        cuts = {"long": (_Cut(2, 5, 0.05), 1), "short": (_Cut(5, 1, 0.01), 1)}
    quiet = {PREFECT_LOGGING_LEVEL: "WARNING", PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW: "ignore"}
    with prefect_test_harness(server_startup_timeout=120), temporary_settings(quiet):
        attempted_task(_nothing, retries=0, retry_delay_seconds=0)()  # the first run in a process imports and connects
        return {name: _compare(directory / name, cut, repeated) for name, (cut, repeated) in cuts.items()}


def _compare(directory: Path, cut: _Cut, rounds: int) -> dict[str, Any]:
    flows, loops, empty = [], [], []
    for number in range(rounds):
        loops.append(_loop(directory / f"loop-{number}", cut))
        empty.append(_flow(directory / f"flow-{number}", cut._replace(batches=0)))
        flows.append(_flow(directory / f"flow-{number}", cut))
    per_batch = [(flow - start - loop) / cut.batches for flow, start, loop in zip(flows, empty, loops, strict=True)]
    return {
        "batch_s": cut.batch_s,
        "batches": cut.batches,
        "per_batch_s": median(per_batch),
        "overhead": median(per_batch) / cut.batch_s,
        "flow_run_s": median(empty),
        "loop_s": loops,
        "flow_s": flows,
    }


def _nothing() -> None:
    return None


def _flow(directory: Path, cut: _Cut) -> float:
    started = time.perf_counter()
    train(
        run_key="bench",
        total_steps=cut.batches * cut.steps,
        checkpoint=CheckpointConfig(checkpoint_dir=str(directory)),
        program="benchmarks.sleeper:Sleeper",
        params={"step_s": cut.batch_s / cut.steps},
        batch_steps=cut.steps,
    )
    return time.perf_counter() - started


def _loop(directory: Path, cut: _Cut) -> float:
    started = time.perf_counter()
    program = Sleeper(step_s=cut.batch_s / cut.steps)
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(directory), run_key="bench")) as ckpt:
        ckpt.restore(program.state)
        ckpt.save(0, program.state)
        for step in range(1, cut.batches * cut.steps + 1):
            program.train_step()
            if step % cut.steps == 0:
                ckpt.save(step, program.state)
            else:
                ckpt.step(step, program.state)
    return time.perf_counter() - started
