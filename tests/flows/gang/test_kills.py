"""SIGKILL of a rank, all ranks, the fork server or the agent at any moment: the end is that of an undisturbed gang.

Every seed is a run that is killed. All of them, or one of them again::

    python -m pytest -m slow tests/flows/gang/test_kills.py
    python -m pytest -m slow tests/flows/gang/test_kills.py -k "[31]"
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.errors import CkptError
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from tests.support.agents import config_of, left, main, train, trained
from tests.support.children import Child
from tests.support.sweeps import drawn
from tests.support.waiting import until

TOTAL = 24
VICTIMS = ("rank", "rank", "rank 0", "all ranks", "server", "agent", "agent")
PHASES = ("start", "step", "step", "save", "any")
Whole = Callable[[int, str], tuple[int, dict[str, Any], list[str]]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return what a gang that nobody disturbs has trained."""

    @cache
    def train_whole(ranks: int, kind: str) -> tuple[int, dict[str, Any], list[str]]:
        run_dir = tmp_path_factory.mktemp(f"whole-{ranks}-{kind}") / "run"
        assert train(config_of(run_dir), {"kind": kind}, TOTAL, ranks=ranks) == []
        return trained(run_dir, kind=kind)

    return train_whole


def committed(run_dir: Path) -> set[str]:
    """Return the checkpoints that are live, by step and digest."""
    with suppress(CkptError):
        return {f"{one.step} {one.manifest_digest}" for one in open_run(str(run_dir)).checkpoints()}
    return set()


def kill(child: Child, trace: Path, victim: str, ranks: int, draw: Random) -> None:
    """Kill a victim; a rank's process is in a file beside the trace."""
    pids = [int(file.read_text() or 0) for n in range(ranks) if (file := Path(f"{trace}.{n}")).exists()]
    ours = [pid for pid in pids if pid and f"/{child.pid}/" in _line(pid)]
    wanted = {
        "rank": [draw.choice(ours)] if ours else [],
        "rank 0": ours[:1],
        "all ranks": ours,
        "server": [_parent(ours[0])] if ours else [],
        "agent": [child.pid],
    }[victim]
    for pid in wanted:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _line(pid: int) -> str:
    """Return a process and those that it descends from, as a path."""
    line = ""
    while pid > 1:
        line, pid = f"{line}/{pid}", _parent(pid)
    return line + "/"


def is_there(phase: str, trace: Path, run_dir: Path, at: int) -> bool:
    """Return True once a run is where its victim is to be killed."""
    if phase == "start":
        return Path(f"{trace}.0").exists()
    if phase == "save":
        return any(run_dir.glob(f"**/*{at // 4 * 4:08d}*")) or is_there("step", trace, run_dir, at + 4)
    return trace.exists() and trace.read_text().count("\n") >= at


@pytest.mark.slow
@pytest.mark.parametrize("seed", drawn(4, 200))
def test_a_kill_at_any_moment(run_dir: Path, tmp_path: Path, seed: int, whole: Whole) -> None:
    """P1, P73: whoever is killed, whenever: nothing committed is lost, the end is bit-equal, no process is left."""
    draw = Random(seed)
    ranks, kind, mark = 4 if seed % 8 == 7 else 2, draw.choice(["ddp", "fsdp"]), str(run_dir)
    params = {"kind": kind, "trace": str(tmp_path / "trace"), "step_s": 0.01}
    options = {"run": str(run_dir), "mark": mark, "params": params, "total": TOTAL, "ranks": ranks}
    seen: set[str] = set()
    ended = False
    for life in range(12):
        with Child(main, [json.dumps(options)], tmp_path / f"{life}.log") as child:
            for _ in range(draw.randrange(1, 3) if life < 2 else 0):
                phase, victim, at = draw.choice(PHASES), draw.choice(VICTIMS), draw.randrange(1, TOTAL)
                there = child.until(lambda p=phase, a=at: is_there(p, tmp_path / "trace", run_dir, a))  # type: ignore[misc]
                time.sleep(draw.random() * (1.0 if phase == "any" else 0.03))  # any moment is right
                if there and child.alive:
                    kill(child, tmp_path / "trace", victim, ranks, draw)
            ended = child.wait(240) == 0
            seen |= committed(run_dir)
        if ended:
            break
    assert trained(run_dir, kind=kind) == whole(ranks, kind)
    assert seen <= committed(run_dir)
    assert verify_run_directory(open_run(str(run_dir)).history).good
    assert ended
    until(lambda: not left(mark))
