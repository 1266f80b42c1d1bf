"""An agent of a gang in a process of its own, to be killed, stopped and told to end; and what is left of it."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpt_tasks import CheckpointConfig
from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.errors import CkptError
from ckpt_tasks.flows.gang.gang_session import GangSession
from ckpt_tasks.flows.gang.processes import Gang
from tests.support import processes
from tests.support.parallel import Parallel

PARALLEL = "tests.support.parallel:Parallel"
REDUCING = "tests.support.parallel:Reducing"
MARK = "CKPT_TEST_GANG"


class KeptGang(Gang):
    """A gang whose fork server, which imports torch, stays for the next one of this process."""

    def close(self) -> None:
        self.kill()


kept = KeptGang()


def config_of(run_dir: Path, **options: Any) -> CheckpointConfig:
    defaults = {"step_interval": 4, "max_num_checkpoints": None, "flush_timeout_s": 60.0}
    return CheckpointConfig(checkpoint_dir=str(run_dir), **{**defaults, **options})


def train(
    config: CheckpointConfig, params: dict[str, Any], total: int, *, ranks: int = 2, batch: int = 5, tries: int = 9
) -> list[CkptError]:
    """Train in batches, as a flow does, and go on after a failure; return the failures.

    A process with MARK, of which nothing may be left, has a fork server for this training alone.
    """
    failures: list[CkptError] = []
    engine = Gang() if MARK in os.environ else kept
    with GangSession(config, PARALLEL, params, ranks=ranks, flow_run_id="a flow run", engine=engine) as session:
        while not session.clean or session.position < total:
            try:
                session.hold_signals(True)
                if not session.clean:
                    session.restore()
                end = min(session.position - session.position % batch + batch, total)
                if session.position < end:
                    session.run(end)
                    session.save(end)
            except CkptError as error:
                failures.append(error)
                session.discard()
                with suppress(CkptError):
                    session.record_failure(attempt=len(failures), step=session.position, why=str(error))
                if len(failures) == tries:
                    raise
    return failures


def main(arguments: Sequence[str]) -> None:
    """Train as arguments of `train` in JSON say; write a line when it has ended."""
    options = json.loads(arguments[0])
    os.environ |= {MARK: options["mark"], **options.get("environment", {})}
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = {name: options[name] for name in ("ranks", "batch") if name in options}
    config = config_of(Path(options["run"]), **options.get("config", {}))
    failures = train(config, options["params"], options["total"], **given)
    sys.stdout.write(f"ended after {len(failures)} failures\n")


def left(mark: str) -> list[str]:
    """Return the commands of the processes with this mark in their environment."""
    return [*processes.with_variable(f"{MARK}={mark}").values()]


def trained(run_dir: Path, *, kind: str = "ddp") -> tuple[int, dict[str, Any], list[str]]:
    """Return the newest step, its state as one process restores it, and the metrics of every step, all as texts."""
    run = open_run(str(run_dir))
    newest = run.find("latest")
    fresh = Parallel(kind=kind, seed=99)
    run.restore(newest, fresh.state, partial=False)
    weights = {name: value.numpy().tobytes().hex() for name, value in fresh.model.state_dict().items()}
    moments = [str(entry) for entry in fresh.optimizer.state_dict()["state"].values()]
    curve = [f"{step.step} {step.metrics}" for step in run.curve().steps]
    return newest.step, {**weights, "moments": moments, "steps": fresh.state["steps"]}, curve
