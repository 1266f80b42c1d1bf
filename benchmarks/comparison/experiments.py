"""What becomes of a training with each tool: killed, killed while it saves, its files cut or flipped, two writers.

`python -m benchmarks.comparison.experiments` makes all experiments, writes results.json and prints the table. Metaflow,
Orbax and torch_checkpointing have an environment of their own (`make peers`); without it what results.json has of them
stays.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.json"
PEERS = ROOT / ".venv/peers/bin/python"
STEPS, PATIENCE_S = 40, 900
QUIET_S = 5  # No file of a save changes for so long: the save is done.
KILLS, SAVING_MIB, STALL_MIB = 3, 256, 512


@dataclass(frozen=True)
class Tool:
    """A way to save, with the distribution that it comes from."""

    name: str
    job: str
    package: str
    python: Path = Path(sys.executable)
    arguments: tuple[str, ...] = ()
    apart: bool = False  # two runs of it never write to one place

    @property
    def installed(self) -> bool:
        """Whether its environment is there."""
        return self.python.exists()

    def version(self) -> str:
        """Return which version is installed."""
        ask = f"from importlib.metadata import version; print(version({self.package!r}))"
        return subprocess.run([self.python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()


TOOLS = [
    Tool("ckpt-tasks", "ours_job.py", "ckpt-tasks"),
    Tool("torch.save", "torch_save_job.py", "torch"),
    Tool("torch_checkpointing", "torch_checkpointing_job.py", "torch_checkpointing", PEERS),
    Tool("Lightning", "lightning_job.py", "lightning"),
    Tool("Hugging Face Trainer", "huggingface_job.py", "transformers"),
    Tool("Orbax (JAX)", "orbax_job.py", "orbax-checkpoint", PEERS),
    Tool("Metaflow", "metaflow_job.py", "metaflow", PEERS, ("--no-pylint", "run"), apart=True),
]


class Training:
    """A job in a process group of its own, that ends with this object."""

    def __init__(self, tool: Tool, directory: Path, **settings: object):
        directory.mkdir(exist_ok=True)
        self.log = directory.with_name(f"{directory.name}-{time.monotonic_ns()}.log")
        self.mark = f"CKPT_COMPARISON={self.log}"
        chosen = {name: str(value) for name, value in settings.items()}
        own = {"CKPT_COMPARISON": str(self.log), "DIRECTORY": str(directory), "PYTHONPATH": str(ROOT)}
        command = [str(tool.python), str(HERE / tool.job), *tool.arguments]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **own, **chosen},
                cwd=directory.parent, start_new_session=True,
            )  # fmt: skip

    def said(self) -> str:
        """Return what it has printed."""
        return self.log.read_text(errors="replace")

    def found(self, word: str) -> list[str]:
        """Return what stands behind a word at the start of its lines; some tools put words of their own before."""
        return re.findall(rf"(?:^|[\]) ]){word} ([0-9a-f][0-9a-f. ]*)$", self.said(), re.MULTILINE)

    def until(self, done: Callable[[], bool]) -> None:
        """Wait, and not for more than it needs."""
        deadline = time.monotonic() + PATIENCE_S
        while not done() and self.process.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(self.said()[-4000:])
            time.sleep(0.002)

    def end(self) -> Training:
        """Wait for its end, and leave no process of it behind."""
        self.until(lambda: False)
        self.kill()
        return self

    def kill(self) -> None:
        """Send SIGKILL to every process of it, whatever session they are in; to the first at once."""
        self.process.kill()
        while found := [pid for pid in _pids() if self.mark in _environment(pid)]:
            for pid in found:
                _send_kill(pid)
            time.sleep(0.05)
        self.process.wait()

    @property
    def begun(self) -> int:
        """The step that it went on from."""
        return int(self.found("from")[-1]) if self.found("from") else -1

    @property
    def digest(self) -> str:
        """What it has ended with; nothing if it has not."""
        return self.found("end")[-1] if self.process.returncode == 0 and self.found("end") else ""

    def error(self) -> str:
        """Return the last line that names an error."""
        lines = re.findall(
            r"[\w.]*\w(?:Error|Exception)\b.*", self.said()
        )  # without the words that some tools put before
        return re.sub(r"/\S*/", "…/", lines[-1])[:160] if lines else f"status {self.process.returncode}"


def _pids() -> list[int]:
    return [int(place.name) for place in Path("/proc").glob("[0-9]*")]


def _environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().replace(b"\0", b"\n").decode(errors="replace")
    except OSError:  # it is gone, or another user's
        return ""


def _send_kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def newest_file(directory: Path, mib: int = 16) -> Path:
    """Return the newest file that is large enough to hold the weights."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > mib << 19]
    return max(files, key=lambda path: path.stat().st_mtime_ns)


def paused_at(tool: Tool, directory: Path, step: int, **settings: object) -> Training:
    """Train until a step has ended, and saves in the background of training have too; there it waits."""
    training = Training(tool, directory, PAUSE_AT=step, **settings)
    training.until(lambda: len(training.found("step")) >= step)
    before, since = _sizes(directory), time.monotonic()
    while time.monotonic() < since + QUIET_S:
        time.sleep(0.5)
        if (now := _sizes(directory)) != before:
            before, since = now, time.monotonic()
    return training


def gone_on(tool: Tool, directory: Path, whole: str, **settings: object) -> dict[str, Any]:
    """Start again, and say how that went."""
    after = Training(tool, directory, **settings).end()
    if not after.digest:
        return {"outcome": "error", "error": after.error()}
    same = "same bits" if after.digest == whole else "other numbers"
    return {"outcome": "anew" if after.begun == 0 else same, "from": after.begun}


def cut(directory: Path) -> None:
    """Cut the newest file in half."""
    file = newest_file(directory)
    os.truncate(file, file.stat().st_size // 2)


def flip(directory: Path) -> None:
    """Flip one bit in the middle of the newest file."""
    with newest_file(directory).open("r+b") as file:
        middle = file.seek(0, os.SEEK_END) // 2
        file.seek(middle)
        (byte,) = file.read(1)
        file.seek(middle)
        file.write(bytes([byte ^ 1]))


def killed_while_saving(tool: Tool, place: Path) -> dict[str, Any]:
    """Kill a while after a file of the third save has begun to grow, each time a little later."""
    settings = {"BALLAST_MIB": SAVING_MIB}
    whole = Training(tool, place / "whole-large", **settings).end().digest
    shutil.rmtree(place / "whole-large")
    found = []
    for kill in range(KILLS):
        directory = place / f"saving-{kill}"
        training = paused_at(tool, directory, 12, **settings)
        before = _sizes(directory)
        directory.with_suffix(".go").touch()
        training.until(lambda: _sizes(directory) != before)  # noqa: B023
        time.sleep(0.08 * kill)
        training.kill()
        found.append(gone_on(tool, directory, whole, **settings))
        shutil.rmtree(directory)
    bad = [one for one in found if one["outcome"] in {"error", "anew"}]
    return {"outcome": f"{len(bad)} of {KILLS} lost" if bad else "continues", "kills": found}


def _sizes(directory: Path) -> dict[Path, tuple[int, int]]:
    found = {}
    for path in directory.rglob("*"):
        try:
            if path.is_file():
                found[path] = (path.stat().st_size, path.stat().st_mtime_ns)
        except FileNotFoundError:
            continue
    return {path: facts for path, facts in found.items() if facts[0] > 1 << 20}  # not a heartbeat or a log


def two_writers(tool: Tool, place: Path) -> dict[str, Any]:
    """Start two trainings in one directory at once."""
    both = [Training(tool, place / "two", SEED=seed, STEP_S=0.5) for seed in (0, 1)]
    ended = [one.end() for one in both]
    refused = [one for one in ended if not one.digest]
    outcome = {0: "neither is told", 1: "one is refused", 2: "both fail"}[len(refused)]
    if tool.apart and not refused:
        outcome = "each has its own"
    return {"outcome": outcome, "errors": [one.error() for one in refused]}


def stall(tool: Tool, place: Path) -> dict[str, Any]:
    """Measure how much longer a step takes when a large state is saved with it."""
    training = Training(tool, place / "stall", BALLAST_MIB=STALL_MIB, STEP_S=0.4).end()
    assert training.digest, training.said()[-4000:]
    steps = [(int(n), float(s)) for n, _, s in (line.partition(" ") for line in training.found("step"))]
    # The first saves make room (memory, files); from the third on it is as it stays. Other work only adds to a time.
    saving = [seconds for step, seconds in steps if step % 5 == 0 and 15 <= step < STEPS]
    plain = [seconds for step, seconds in steps if step % 5 and step > 15]
    return {"outcome": round(min(saving) - min(plain), 2), "saves": saving}


def examined(tool: Tool, place: Path) -> dict[str, Any]:
    """Make every experiment with a tool."""
    whole = Training(tool, place / "whole").end().digest
    found: dict[str, Any] = {"version": tool.version()}
    for name, damage in {"killed": None, "cut": cut, "flipped": flip}.items():
        paused_at(tool, directory := place / name, 33).kill()
        if damage is not None:
            damage(directory)
        found[name] = gone_on(tool, directory, whole)
        shutil.rmtree(directory)
    return found | {
        "saving": killed_while_saving(tool, place),
        "writers": two_writers(tool, place),
        "stall": stall(tool, place),
    }


def main(names: list[str]) -> None:
    """Examine the tools named, or all."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for tool in TOOLS:
        if tool.installed and (not names or tool.name in names):
            with TemporaryDirectory(prefix="ckpt-comparison-") as place:
                results[tool.name] = examined(tool, Path(place))
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
