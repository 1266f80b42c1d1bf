"""`ckpt serve` over many long runs: how soon its table is there and whole, and how much memory it holds.

`python -m benchmarks.serve DIRECTORY` makes the runs first, if the directory is not there. The ledgers of a few are
written by the product's own code, entry by entry; the others are hard links to these, each with a format.json of its
own: 400 runs of 3,000 commits are more than two million names.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import MANIFEST_NAME, Attempt, attempt_prefix, evaluation_name, ledger_name, steps_name
from ckpt_tasks.format.layout.steps import StepMetrics, write_steps
from ckpt_tasks.format.ledger import Entry, State
from ckpt_tasks.format.live import cut, write_segment
from ckpt_tasks.format.records import Checkpoint, Evaluation, Owner
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.storage.local import LocalStore

_STEPS, _EVERY_S = 10, 60.0  # Steps and seconds between two commits.
_WRITTEN = 4
_OPENED = 24  # Runs whose curves are read, one after the other.
_BEGAN_S = 1_780_000_000.0


def make_root(root: Path, *, runs: int, commits: int, live: int | None = 3) -> None:
    """Write a few runs of so many commits, which keep `live` checkpoints (None: all), and link the others to them."""
    written = [root / f"run-{n:03}" for n in range(min(_WRITTEN, runs))]
    for seed, place in enumerate(written):
        _Writer(place, seed, live).write(commits)
    for n in range(len(written), runs):
        source, target = written[n % len(written)], root / f"run-{n:03}"
        for folder, _, names in os.walk(source):
            below = target / Path(folder).relative_to(source)
            below.mkdir(parents=True, exist_ok=True)
            for name in names:
                if name != "format.json":
                    os.link(Path(folder, name), below / name)
        History(LocalStore(target)).create(target.name)


class _Writer:
    """Write one run's ledger, past the store, which would fsync each entry."""

    def __init__(self, place: Path, seed: int, live: int | None):
        History(LocalStore(place)).create(place.name)
        self._place, self._live, self._seed = place, live, seed
        self._chance, self._at_s = random.Random(seed), _BEGAN_S + 86_400 * seed
        self._entry: Entry | None = None
        self._segments: set[str] = set()
        for folder in ("ledger", "steps", "live"):
            (place / folder).mkdir(exist_ok=True)

    def write(self, commits: int) -> None:
        """Write an owner, commits with the metrics of their steps, some evaluations, two deaths and a release."""
        rate = 10 ** -(2 + self._seed / 2)
        params = {"lr": rate, "seed": self._seed, "model": {"width": 64, "name": "tiny"}}
        self._own(1, "it has had no owner")
        self._put({"kind": "note", "note": "program"}, replace(self._state, params=params, program="tiny:Program"))
        for n in range(1, commits + 1):
            if n in (commits // 3, commits // 2):
                self._at_s += 30 * _EVERY_S
                self._own(2 if n < commits // 2 else 3, "its owner, process 7 on this host, is gone")
            self._commit(n, rate, spike=n == commits * 3 // 4)
            if n % max(1, commits // 10) == 0:
                self._evaluate()
        owner = self._state.owner
        assert owner is not None
        self._put({"kind": "release", "step": commits * _STEPS}, self._state.released())

    @property
    def _state(self) -> State:
        return self._entry.state if self._entry else State()

    def _own(self, epoch: int, why: str) -> None:
        owner = Owner(
            epoch=epoch, id=f"{epoch:032x}", flow_run_id=None, host=f"gpu-{self._seed}", machine_id="m", boot_id="b",
            pid_namespace="n", pid=7, process_start="1", taken_at=_iso(self._at_s),
        )  # fmt: skip
        self._put({"kind": "owner", "because": why}, self._state.with_owner(owner, "loss", "min"))

    def _commit(self, n: int, rate: float, *, spike: bool) -> None:
        before = self._state.live[-1] if self._state.live else None
        self._at_s += _EVERY_S
        attempt = Attempt(n * _STEPS, 1, f"{n:016x}")
        steps = []
        for step in range((n - 1) * _STEPS + 1, n * _STEPS + 1):
            loss = 4 / (1 + step * rate) + self._chance.gauss(0, 0.05) + 8 * (spike and step % _STEPS == 5)
            metrics = {"loss": loss, "lr": rate * min(1.0, step / 100), "grad_norm": math.exp(self._chance.gauss(0, 1))}
            steps.append(StepMetrics(step, self._at_s - (n * _STEPS - step) * _EVERY_S / _STEPS, metrics))
        table = write_steps(steps)
        (self._place / steps_name(attempt)).write_bytes(table)
        made = Checkpoint(
            step=n * _STEPS, attempt=attempt.name, manifest=attempt_prefix(attempt) + MANIFEST_NAME,
            manifest_digest=digest_hex(f"{self._seed} {n}".encode()), parent=before.manifest_digest if before else None,
            n=self._n, metrics=steps[-1].metrics, size_bytes=1 << 30, objects=5, saved_at=_iso(self._at_s),
            cost_s=0.5,
        )  # fmt: skip
        event = {"kind": "commit", "step": made.step, "steps": [steps_name(attempt), digest_hex(table)]}
        event |= {"stall_s": 0.5, "flush_s": 2.0, "step_s": 0.9 * _EVERY_S / _STEPS}
        state = self._state
        if self._live is not None:
            gone = state.live[: len(state.live) + 1 - self._live]
            state = state.retire(frozenset(one.manifest_digest for one in gone), (), frozenset())
        self._put(event, state.with_checkpoint(made, frozenset()))

    def _evaluate(self) -> None:
        newest = self._state.live[-1]
        measured = Evaluation(
            manifest_digest=newest.manifest_digest, step=newest.step, suite="quick",
            metrics={"loss": newest.metrics["loss"] * 1.1}, table=evaluation_name(newest.step, "quick", "0" * 16),
            table_digest="f" * 32, evaluated_at=_iso(self._at_s),
        )  # fmt: skip
        self._put({"kind": "evaluation", "suite": "quick", "step": newest.step}, self._state.with_evaluation(measured))

    @property
    def _n(self) -> int:
        return self._entry.n + 1 if self._entry else 0

    def _put(self, event: Mapping[str, Any], state: State) -> None:
        segments = cut(state.live, self._entry.segments if self._entry else ())
        for segment in segments:
            if segment.digest not in self._segments:
                (self._place / segment.name).write_bytes(write_segment(segment.checkpoints))
        self._segments = {segment.digest for segment in segments}
        epoch = self._state.owner.epoch if self._state.owner else 0
        self._entry = Entry(
            n=self._n, epoch=epoch, nonce=f"{self._n:032x}", previous=None, at=_iso(self._at_s), event=event,
            state=state, segments=segments,
        )  # fmt: skip
        (self._place / ledger_name(self._entry.n)).write_bytes(self._entry.to_bytes()[0])


def _iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")


def measure(root: Path, opened: int = _OPENED) -> dict[str, float]:
    """Start the server afresh; return when it had its first rows and all, its CPU, and memory with `opened` runs.

    CPU is that of the server, in seconds; a busy machine changes it less than the wall time.
    """
    began_s = time.perf_counter()
    command = [sys.executable, "-m", "ckpt_tasks", "serve", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split(" at ")[1].split()[0]
            figures, rows = {"listens_s": time.perf_counter() - began_s}, _ask(f"{url}api/runs")
            while not rows["complete"]:
                if rows["runs"]:
                    figures.setdefault("first_rows_s", time.perf_counter() - began_s)
                time.sleep(0.05)
                rows = _ask(f"{url}api/runs?since={1 << 60}")
            figures |= {"all_rows_s": time.perf_counter() - began_s, "cpu_of_all_rows_s": _cpu_s(server.pid)}
            rows = _ask(f"{url}api/runs")["rows"]
            while rows[0]["checkpoints"] is None or rows[-1]["checkpoints"] is None:
                time.sleep(0.5)
                rows = _ask(f"{url}api/runs")["rows"]
            began_s, figures["cpu_of_counting_s"] = time.perf_counter(), _cpu_s(server.pid)
            _ask(f"{url}metrics", str)
            figures["metrics_s"] = time.perf_counter() - began_s
            _ask(f"{url}metrics", str)  # The first scrape reads on for a while.
            cpu_s = _cpu_s(server.pid)
            for run in rows[:opened]:
                _ask(f"{url}api/curves?run={run['name']}&metrics=%5B%22loss%22%5D")
                _ask(f"{url}api/run?run={run['name']}")
            figures["cpu_of_opening_a_run_s"] = (_cpu_s(server.pid) - cpu_s) / max(1, opened)
            peak = next(line for line in Path(f"/proc/{server.pid}/status").read_text().splitlines() if "VmHWM" in line)
            return figures | {"peak_mib": int(peak.split()[1]) / 1024}
        finally:
            server.kill()


def _ask(url: str, read: Callable[[str], Any] = json.loads) -> Any:
    with urllib.request.urlopen(url) as answer:
        return read(answer.read().decode())


def _cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--commits", type=int, default=3_000)
    parser.add_argument("--live", type=int, default=3, help="checkpoints that a run keeps; 0: all")
    given = parser.parse_args()
    if not given.directory.exists():
        make_root(given.directory, runs=given.runs, commits=given.commits, live=given.live or None)
    for name, value in measure(given.directory).items():
        print(f"{name:24} {value:8.2f}")
