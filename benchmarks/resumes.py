"""What a resume costs after its restore: the first save, and the code that torch.compile builds again.

`python -m benchmarks.resumes CONTENDER DIRECTORY [--tiny]` is the process that resumes. It dies by SIGKILL, so that the
next one finds what a killed training leaves behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.apart import summary
from benchmarks.peers import OURS
from benchmarks.states import build, size_bytes
from ckpt_tasks import CheckpointConfig, Checkpointer

__all__ = ["measure"]

_SAVES = "saves"
_COLD, _WARM = "nothing kept", "limit: the cache directory as it was left"
_COMPILED = [OURS, _COLD, _WARM]
_SAVES_EACH = 5


def measure(directory: Path, *, tiny: bool, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Kill and resume `rounds` times: what each save waits, and how long a compiled program takes to its first step.

    Training goes on for a second before each save. A compiled program's time begins with its process; torch's
    precompiled headers, which lie outside of its cache, are there for all contenders. The first round of each
    contender leaves what the next ones find, and is not counted.
    """
    shutil.rmtree(directory, ignore_errors=True)
    waits: dict[str, list[float]] = {"first save": [], "second save": [], "later saves": []}
    steps: dict[str, list[float]] = {name: [] for name in _COMPILED}
    for number in range(rounds + 1):
        first, second, *later = _start(_SAVES, directory, tiny, device)["waits"]
        for name in random.sample(_COMPILED, len(_COMPILED)):
            born = time.time()
            stepped_at = _start(name, directory, tiny, device)["stepped_at"]
            if number:
                steps[name].append(stepped_at - born)
        if number:
            for name, times in zip(waits, ([first], [second], later), strict=True):
                waits[name] += times
    shutil.rmtree(directory)
    rows = {"a save after a resume: training waits": waits, "kill -9, then start to first step, compiled": steps}
    cells = {row: {name: summary(times) for name, times in found.items()} for row, found in rows.items()}
    medians = {name: cell["median_s"] for row in cells.values() for name, cell in row.items()}
    return {
        "size_bytes": size_bytes(build(tiny=tiny)),
        "rounds": rounds,
        "device": device,
        "rows": cells,
        "ratios": {
            "first save after a resume / later ones": medians["first save"] / medians["later saves"],
            "compiled, first step: ours / a warm cache": medians[OURS] / medians[_WARM],
        },
    }


def _start(contender: str, directory: Path, tiny: bool, device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.resumes", contender, str(directory), "--device", device]
    env = dict(os.environ)
    if contender in {_COLD, _WARM}:
        cache = directory / ("kept" if contender == _WARM else tempfile.mktemp(dir=directory))
        env["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [*command, *(["--tiny"] if tiny else [])], capture_output=True, text=True, check=False, env=env
    )
    if done.returncode != -signal.SIGKILL:
        raise RuntimeError(f"{contender} ended with status {done.returncode}:\n{done.stderr}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def _saves(directory: Path, tiny: bool, device: str) -> dict[str, Any]:
    """Resume the state of the other benchmarks; return what each save waits, a second of training before each."""
    trained, waits = build(tiny=tiny, seed=1, device=device), []
    ckpt = Checkpointer(CheckpointConfig(checkpoint_dir=str(directory / _SAVES), run_key="bench", step_interval=1))
    step = ckpt.restore(trained.state) or 0
    for number in range(step + 1, step + 1 + _SAVES_EACH):
        began = time.perf_counter()
        while time.perf_counter() - began < (0.1 if tiny else 1):
            trained.step()
        began = time.perf_counter()
        ckpt.step(number, trained.state)
        waits.append(time.perf_counter() - began)
    ckpt.wait()
    return {"waits": waits}


def _compiled(contender: str, directory: Path, tiny: bool, device: str) -> dict[str, Any]:
    """Take the first step of a compiled program, ours after a restore; then save, so that the next one finds it."""
    torch.manual_seed(1)
    width, layers = (8, 1) if tiny else (128, 6)
    layer = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True)
    model = (nn.Linear(width, width) if tiny else nn.TransformerEncoder(layer, layers)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    compiled, ckpt, step = torch.compile(model), None, 0
    if contender == OURS:
        where = str(directory / "compiled")
        ckpt = Checkpointer(CheckpointConfig(checkpoint_dir=where, run_key="bench", compile_cache=True))
        step = ckpt.restore(state) or 0
    compiled(torch.rand(4, 16, width, device=device)).sum().backward()
    optimizer.step()
    if device != "cpu":
        torch.cuda.synchronize()
    stepped_at = time.time()
    if ckpt is not None:
        ckpt.save(step + 1, state)
        ckpt.wait()
        _await_pack(directory / "compiled")
    return {"stepped_at": stepped_at}


def _await_pack(run: Path) -> None:
    """Wait until the code is kept; a thread does it after the commit."""
    while not [*run.glob("compiled/*")]:
        time.sleep(0.05)


def main() -> None:
    """Be the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=[_SAVES, *_COMPILED])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    common = options.directory, options.tiny, options.device
    report = _saves(*common) if options.contender == _SAVES else _compiled(options.contender, *common)
    sys.stdout.write(f"{json.dumps(report)}\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
