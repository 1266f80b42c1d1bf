"""A gang of two ranks: what an order costs, how soon a death and a hang are seen, and a kill beside torchrun's."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gang_script import KILL_AT, SAVE_EVERY, STEPS
from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import RankError
from ckpt_tasks.flows.gang.gang_session import GangSession
from ckpt_tasks.flows.gang.processes import Gang
from ckpt_tasks.flows.session.local_session import LocalSession

__all__ = ["measure"]

_PROGRAM = "benchmarks.gang_script:Victim"
_ROOT = Path(__file__).parents[1]
_DEADLINE_S = 5.0
_TORCHRUN = (
    "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 20 -m benchmarks.gang_script {folder}"
)
_RAY_TRAIN = "-m benchmarks.gang_script {folder} ray"


def measure(directory: Path, *, tiny: bool, rounds: int) -> dict[str, Any]:
    """Measure; every kill is of rank 1, by SIGKILL in step 37 of 60, and a save is due every 20 steps.

    `order_s` and `order_alone_s` are an order to two ranks that trains nothing, and the same call in one process.
    `death_s` is from SIGKILL to the moment in which the agent knows of it, `error_s` until all ranks have ended and it
    is raised; `hang_s` is from the deadline after SIGSTOP to that. A kill takes `until_new_step_s` from SIGKILL to the
    first step that was not trained before it; `redone` are steps that were trained twice; `lines` are those that a user
    writes to go on.
    """
    log = logging.getLogger("ckpt_tasks")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return _measured(directory, kills=1 if tiny else min(rounds, 3))
    finally:
        log.setLevel(level)


def _measured(directory: Path, *, kills: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"order_s": _order(directory / "order"), "order_alone_s": _order_alone(directory / "one")}
    figures["hang_s"] = _dies(directory / "hang", "stop")["error_s"] - _DEADLINE_S
    ours, theirs, rays = [], [], []
    for number in range(kills):
        ours.append(_killed(directory / f"gang-{number}"))
        theirs.append(_killed_elsewhere(directory / f"torchrun-{number}", _TORCHRUN))
        rays.append(_killed_elsewhere(directory / f"ray-{number}", _RAY_TRAIN))
    figures |= {name: median(kill.pop(name) for kill in ours) for name in ("death_s", "error_s")}
    script = (_ROOT / "benchmarks" / "gang_script.py").read_text()
    of_torchrun, of_ray = script.count("  # resume\n"), script.count("  # resume in Ray\n")
    for name, found, lines in (("gang", ours, 0), ("torchrun, dcp", theirs, of_torchrun), ("Ray Train", rays, of_ray)):
        figures[name] = {key: median(kill[key] for kill in found) for key in found[0]} | {"lines": lines}
    return figures


def _config(folder: Path) -> CheckpointConfig:
    folder.mkdir(parents=True)
    timeout_s = _DEADLINE_S if folder.name == "hang" else 600.0
    return CheckpointConfig(checkpoint_dir=str(folder / "run"), step_interval=SAVE_EVERY, flush_timeout_s=timeout_s)


def _order(folder: Path) -> float:
    config = _config(folder)
    with GangSession(config, _PROGRAM, {"folder": str(folder)}, ranks=2) as session:
        session.restore()
        return _median_s(lambda: session.run(0))


def _order_alone(folder: Path) -> float:
    with Checkpointer(_config(folder)) as ckpt:
        session = LocalSession(ckpt, "benchmarks.sleeper:Sleeper", {"step_s": 0.0})
        session.restore()
        return _median_s(lambda: session.run(0))


def _median_s(call: Any) -> float:
    times = []
    for _ in range(200):
        began_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_s)
    return median(times)


class _Noticing(Gang):
    """Ranks whose agent keeps the time at which it first ends them: it does so as soon as one has died."""

    ended_s = 0.0

    def kill(self) -> None:
        """End them."""
        self.ended_s = self.ended_s or time.monotonic()
        super().kill()


def _dies(folder: Path, what: str) -> dict[str, float]:
    """Train until rank 1 dies or stops; return the seconds until that is known and raised, then go on to the end."""
    config, engine = _config(folder), _Noticing()
    params = {"folder": str(folder), "what": what}
    with GangSession(config, _PROGRAM, params, ranks=2, engine=engine) as session:
        session.restore()
        with suppress(RankError):
            session.run(STEPS)
        raised_s, killed_s = time.monotonic(), float((folder / "killed").read_text())
        session.discard()
        session.restore()
        session.run(STEPS)
        session.save(STEPS)
    return {"death_s": engine.ended_s - killed_s, "error_s": raised_s - killed_s}


def _killed(folder: Path) -> dict[str, float]:
    return {**_dies(folder, "kill"), **_course(folder)}


def _killed_elsewhere(folder: Path, command: str) -> dict[str, float]:
    folder.mkdir(parents=True)
    words = [sys.executable, *command.format(folder=folder).split()]
    said = folder / "said"
    with said.open("w") as output:  # What Ray starts would keep a pipe open.
        done = subprocess.run(words, cwd=_ROOT, stdout=output, stderr=output, check=False)
    if done.returncode:
        raise RuntimeError(f"{command} failed: {said.read_text()[-2000:]}")
    return _course(folder)


def _course(folder: Path) -> dict[str, float]:
    """Return when the step of the kill was done, and how many steps were trained twice."""
    killed_s = float((folder / "killed").read_text())
    steps = [(float(at), int(step)) for at, step in map(str.split, (folder / "steps").read_text().splitlines())]
    assert steps[-1][1] == STEPS
    return {
        "until_new_step_s": next(at for at, step in steps if step == KILL_AT) - killed_s,
        "redone": len(steps) - STEPS,
    }
