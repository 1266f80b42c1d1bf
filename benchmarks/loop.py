"""What saving adds to a training loop, all in all: the same steps with a save every few of them, and with none.

It is the one figure in which nothing can hide: what the call takes, what waits at a lock before the state changes, what
threads and processes in the background take from the training's own cores, and what is left to write at the end.
"""

from __future__ import annotations

import gc
import os
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.apart import Report, answer, by_row, collect
from benchmarks.peers import CONTENDERS, OURS, Contender
from benchmarks.stall import remove
from benchmarks.states import Trained, build, size_bytes

__all__ = ["measure"]

BARE = "no saves"
# Those that go on while they write, and the plain one for comparison.
_NAMES = (
    OURS,
    "torch.save",
    "DCP async_save, thread",
    "DCP async_save, process",
    "DCP async_save, cached DefaultStager",
    "DCP async_save, DefaultStager in a thread",
    "torch_checkpointing",
    "torchsnapshot async_take",
    "Orbax, async",
)
_EVERY = 5
_TOKENS = 32  # one sequence of them: a step takes about as long as the model's size allows, 0.3 to 0.5 s on two cores


def measure(directory: Path, *, tiny: bool, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Time the loop with saves and without, `rounds` times for every contender, each time in a new process.

    Every step is a real one of the 12-layer transformer with AdamW (forward, backward, update) on one sequence of 32
    random bytes, the same ones in every loop. Saves follow steps 1, 6, 11, …; the loop ends when the last one is
    complete. One save before the clock starts has paid for what is paid once. Both loops run in each process, in random
    order, and their difference is shared out over the saves. Older checkpoints are removed by ours within the loop, for
    the others after it. Whatever a tool wants waited for before the state changes is waited for at the optimizer's
    step. `absent` says why a contender has no row.
    """
    reports, absent = collect("benchmarks.loop", _NAMES, directory, tiny=tiny, rounds=rounds, device=device)
    steps, saves = _steps(tiny), len(_due(tiny))
    bare = [seconds for report in reports.values() for seconds in report["without"]]
    rows = {"with": f"{steps} training steps, {saves} saves", "added": "training loop: added by each save"}
    return {
        "size_bytes": size_bytes(build(tiny=tiny, device="meta")),
        "rounds": rounds,
        "device": device,
        "step_s": median(bare) / steps,
        "rows": by_row({**reports, BARE: {"with": bare}}, rows, _label),
        "absent": absent,
    }


def _label(name: str, timed: str) -> str:
    return f"{name} (no fsync)" if name in CONTENDERS and not CONTENDERS[name].synced else name


# ── one contender ────────────────────────────────────────────────────────────────────────────────────────────


def _measure(name: str, directory: Path, tiny: bool, device: str) -> Report:
    contender = CONTENDERS[name](directory, device)
    trained = build(tiny=tiny, device=device)
    _loop(trained, None, directory, tiny)
    contender.save_async(trained.state, directory / "first")
    contender.wait()
    remove(directory / "first")
    seconds = {}
    for saving in random.sample([True, False], 2):
        gc.collect()
        os.sync()
        seconds[saving] = _loop(trained, contender if saving else None, directory, tiny)
    contender.close()
    added = (seconds[True] - seconds[False]) / len(_due(tiny))
    return {"with": [seconds[True]], "without": [seconds[False]], "added": [added]}


def _loop(trained: Trained, contender: Contender | None, directory: Path, tiny: bool) -> float:
    device = next(trained.model.parameters()).device
    text = torch.randint(0, 256, (_steps(tiny), _TOKENS + 1), generator=torch.Generator().manual_seed(0)).to(device)
    torch.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for step, line in enumerate(text):
        nn.functional.cross_entropy(_logits(trained.model, line[:-1]), line[1:]).backward()  # type: ignore[no-untyped-call]
        if contender is None:
            trained.optimizer.step()
        else:
            with contender.updating():
                trained.optimizer.step()
        trained.optimizer.zero_grad(set_to_none=True)
        if contender is not None and step in _due(tiny):
            contender.save_async(trained.state, directory / f"step-{step}")
    if contender is not None:
        contender.wait()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    for step in _due(tiny):
        remove(directory / f"step-{step}")
    return seconds


def _logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    assert isinstance(model, nn.ModuleDict)
    hidden: torch.Tensor = model["embed"](tokens[None])
    layers = model["layers"]
    assert isinstance(layers, nn.ModuleList)
    for layer in layers:
        hidden = layer(hidden)
    logits: torch.Tensor = model["head"](hidden)[0]
    return logits


def _steps(tiny: bool) -> int:
    return 6 if tiny else 20


def _due(tiny: bool) -> range:
    return range(0, _steps(tiny), _EVERY)


if __name__ == "__main__":
    answer(_measure)
