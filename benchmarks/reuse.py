"""A frozen base under a small adapter, saved again and again: who writes again what has not changed?"""

from __future__ import annotations

import os
import random
import shutil
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.apart import summary
from benchmarks.peers import CONTENDERS, OURS, Contender, differing, flat, states
from benchmarks.stall import fsync_all, remove
from benchmarks.states import Trained, build, size_bytes

__all__ = ["measure"]

_NAMES = (OURS, "DCP save", "safetensors save_file", "torch.save")
_RANK = 8


class _Adapted(nn.Module):
    """A model that is not trained any more, and two thin matrices for each of its large ones, which are."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base = base.requires_grad_(False)
        large = [parameter for parameter in base.parameters() if parameter.dim() == 2]
        self.thin = nn.ParameterList(
            nn.Parameter(torch.randn(size, _RANK, device=one.device)) for one in large for size in one.shape
        )


def measure(directory: Path, *, tiny: bool, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Time later saves of every contender in shuffled order, `rounds` times, and weigh what each writes to the disk.

    The state is the model of the other benchmarks, frozen, under an adapter of rank 8 with AdamW, which takes a step
    before every save. `written` is the share of the state's bytes that a save writes, the median over all saves but the
    first; `changing` that of the bytes that an optimizer may change. What was saved last is read back into another
    model and compared, to the bit.
    """
    trained, into = _build(tiny=tiny, seed=0, device=device), _build(tiny=tiny, seed=1, device=device)
    shutil.rmtree(directory, ignore_errors=True)
    times: dict[str, list[float]] = {}
    written: dict[str, list[int]] = {}
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP's, at every call, that nothing is distributed here
        contenders: dict[str, Contender] = {}
        for name in _NAMES:
            (directory / name).mkdir(parents=True)
            contenders[name] = CONTENDERS[name](directory / name, device)
            stack.callback(contenders[name].close)
            _save(contenders[name], trained)  # the first one has everything to write
        for number in range(rounds):
            for name in random.sample(sorted(contenders), len(contenders)):
                _step(trained)
                before = _files(directory / name)
                seconds = _save(contenders[name], trained)
                after = _files(directory / name)
                times.setdefault(name, []).append(seconds)
                written.setdefault(name, []).append(sum(after[file] for file in after.keys() - before.keys()))
                if number == rounds - 1:
                    contenders[name].load(directory / name / "saved", into.state)
                    if odd := differing(flat(states(trained.state)), flat(states(into.state))):
                        raise RuntimeError(f"{name}: {len(odd)} tensors are not what was saved, {odd[0]} for one")
    shutil.rmtree(directory)
    whole = size_bytes(trained)
    frozen = sum(one.nbytes for one in trained.model.parameters() if not one.requires_grad)
    return {
        "size_bytes": whole,
        "rounds": rounds,
        "device": device,
        "changing": 1 - frozen / whole,
        "written": {name: median(sizes) / whole for name, sizes in written.items()},
        "rows": {"later saves of a frozen base and its adapter": {name: summary(s) for name, s in times.items()}},
    }


def _build(*, tiny: bool, seed: int, device: str) -> Trained:
    model = _Adapted(build(tiny=tiny, seed=seed, device=device, stepped=False).model)
    trained = Trained(model, torch.optim.AdamW(model.thin.parameters(), lr=1e-4))
    _step(trained)
    return trained


def _step(trained: Trained) -> None:
    for parameter in trained.model.parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
    trained.optimizer.step()


def _save(contender: Contender, trained: Trained) -> float:
    path = contender.directory / "saved"
    remove(path)
    os.sync()
    started = time.perf_counter()
    contender.save_async(trained.state, path)
    contender.wait()
    if not contender.synced:
        fsync_all(path)
    return time.perf_counter() - started


def _files(directory: Path) -> dict[tuple[str, int, int], int]:
    """Tell every file below a directory, as it is now, with its bytes."""
    found = {}
    for path in directory.rglob("*"):
        if path.is_file():
            status = path.stat()
            found[str(path), status.st_ino, status.st_mtime_ns] = status.st_size
    return found
