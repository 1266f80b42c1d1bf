"""What a newcomer meets in the first minutes: true numbers, a page that is live, a first training, long lists.

`python -m benchmarks.first_minutes` prints one table. It starts servers of its own, on free ports and in a directory of
its own, and takes some four minutes on two quiet cores.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.ledger import some_checkpoint
from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.storage.local import LocalStore
from tests.servers.process import free_port

__all__ = ["main"]

_CKPT = str(Path(sys.executable).with_name("ckpt"))
_LISTED = 1_000, 10_000
_STEP_S, _LONG_S, _LONG_EVERY, _STEPS = 0.05, 0.55, 10, 300
_RATE_HZ, _LIVE_S = 5.0, 60.0
_LIVE = f"""
import sys, time
from ckpt_tasks import CheckpointConfig, Checkpointer
with Checkpointer(CheckpointConfig(checkpoint_dir=sys.argv[1], step_interval=10**6)) as ckpt:
    for step in range(ckpt.restore({{"n": 0}}) + 1, 10**6):
        time.sleep({1 / _RATE_HZ})
        ckpt.step(step, {{"n": step}}, metrics={{"loss": 1 / step}})
        open(sys.argv[2], "w").write(str(step))
"""


def main() -> None:
    """Measure all and print it."""
    table = Table("what", "measured", "to reach", title="the first minutes", title_justify="left")
    with tempfile.TemporaryDirectory(prefix="first-minutes-") as place:
        for measure in (_numbers, _live, _training, _lists):
            for row in measure(Path(place)):
                table.add_row(*row)
    Console().print(table)


def _numbers(place: Path) -> Iterator[tuple[str, str, str]]:
    """Compare a report's useful time with the sum of the steps, of uneven steps and of quick ones."""
    for name, steps in (("every tenth step is long", _STEPS), ("10,000 quick steps", 10_000)):
        run, weight, true_s, began_s = place / name.replace(" ", "-"), torch.zeros(8), 0.0, time.monotonic()
        with Checkpointer(CheckpointConfig(checkpoint_dir=str(run), step_interval=steps // 6)) as ckpt:
            ckpt.restore({"weight": weight})
            for step in range(1, steps + 1):
                step_s = time.monotonic()
                if steps == _STEPS:
                    time.sleep(_LONG_S if step % _LONG_EVERY == 0 else _STEP_S)
                weight += 1
                true_s += time.monotonic() - step_s
                ckpt.step(step, {"weight": weight})
        wall_s = time.monotonic() - began_s
        seconds = _json("report", str(run), "--out", str(run.with_suffix(".html")))["seconds"]
        found = ", ".join(f"{share} {took_s:.2f}" for share, took_s in seconds.items() if took_s > 0.005)
        yield f"report, {name}: s", found, f"useful {true_s:.2f} of {wall_s:.2f}"


def _live(place: Path) -> Iterator[tuple[str, str, str]]:
    """Follow a run that logs each step and commits none: how many seconds the page and /metrics are behind."""
    run, said, port = place / "served" / "run", place / "step", free_port()
    said.write_text("0")
    behind: dict[str, list[float]] = {"page": [], "/metrics": []}
    with (
        _process(sys.executable, "-c", _LIVE, str(run), str(said)),
        _process(_CKPT, "serve", str(run.parent), "--port", str(port)),
    ):
        end_s = time.monotonic() + _LIVE_S
        while time.monotonic() < end_s:
            time.sleep(0.5)
            step = int(said.read_text() or 0)
            if step < _RATE_HZ * 10:
                continue  # The server and the run begin.
            about = json.loads(_get(port, "/api/runs"))["rows"][0]
            lines = _get(port, "/metrics").decode().splitlines()
            shown = next((line for line in lines if line.startswith("ckpt_live_step{")), "0 0")
            behind["page"].append((step - (about["live_step"] or 0)) / _RATE_HZ)
            behind["/metrics"].append((step - float(shown.rsplit(maxsplit=1)[1])) / _RATE_HZ)
    for name, seconds in behind.items():
        yield f"{name} behind a run of 5 steps a second: s", f"at most {max(seconds):.1f}", "3"


def _training(place: Path) -> Iterator[tuple[str, str, str]]:
    """Make a project, train it, and start a site: with a clock."""
    home = {"PREFECT_HOME": str(place / "prefect"), "CKPT_HOME": str(place / "home"), "HOME": str(place)}
    began_s = time.monotonic()
    subprocess.run([_CKPT, "init", "tiny"], cwd=place, check=True, capture_output=True)
    yield "ckpt init: s", f"{time.monotonic() - began_s:.1f}", ""
    began_s = time.monotonic()
    command = [_CKPT, "train", "training:Training", "--run-key", "tiny", "--steps", "20000", "--step-interval", "1000"]
    first_s = None
    with _process(*command, cwd=place / "tiny", env=home, ends=True) as training:
        while training.poll() is None:
            time.sleep(0.05)
            if first_s is None and [*place.glob("tiny/runs/**/steps/*"), *place.glob("tiny/runs/**/live/*")]:
                first_s = time.monotonic() - began_s
    yield "ckpt train, first step: s", f"{first_s or float('nan'):.1f}", "8"
    yield "ckpt train, 20,000 steps, whole: s", f"{time.monotonic() - began_s:.1f}, exit {training.returncode}", ""
    began_s = time.monotonic()
    done = subprocess.run(
        [_CKPT, "up"], check=False, cwd=place / "tiny", env={**os.environ, **home}, capture_output=True, text=True
    )
    yield "ckpt up: s", f"{time.monotonic() - began_s:.1f}, exit {done.returncode}", "40"
    subprocess.run([_CKPT, "down"], cwd=place / "tiny", env={**os.environ, **home}, check=False, capture_output=True)


def _lists(place: Path) -> Iterator[tuple[str, str, str]]:
    """List runs of many checkpoints."""
    for commits, most in zip(_LISTED, ("0.1", "0.5"), strict=True):
        run = place / f"listed-{commits}"
        history, live = History(LocalStore(run)), tuple(replace(some_checkpoint(n), n=0) for n in range(1, commits + 1))
        history.create("listed")
        history.append({"kind": "note", "note": "many"}, partial(_with, live), owner=None)
        took, bare = (min(_took_s(*command) for _ in range(5)) for command in (("ls", str(run)), ("-h",)))
        yield f"ckpt ls of {commits:,} checkpoints, above `ckpt -h`: s", f"{took - bare:.2f}, whole {took:.2f}", most


def _with(live: tuple[Checkpoint, ...], state: State, n: int) -> State:
    return replace(state, live=live)


def _took_s(*arguments: str) -> float:
    began_s = time.monotonic()
    subprocess.run([_CKPT, *arguments], check=True, capture_output=True)
    return time.monotonic() - began_s


def _json(*arguments: str) -> Any:
    return json.loads(subprocess.run([_CKPT, *arguments, "--json"], check=True, capture_output=True).stdout)


def _get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return answer.read()  # type: ignore[no-any-return]


@contextmanager
def _process(*command: str, env: dict[str, str] | None = None, ends: bool = False, **options: Any) -> Iterator[Any]:
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet, env={**os.environ, **(env or {})}, **options) as one:
        try:
            yield one
        finally:
            if not ends or one.poll() is None:
                one.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
