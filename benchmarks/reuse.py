"""A frozen base under a small adapter, saved again and again: who writes again what has not changed?"""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.apart import summary
from benchmarks.states import Trained, build, size_bytes
from benchmarks.together import check_same, durable_save_s, opened

__all__ = ["measure"]

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
    times: dict[str, list[float]] = {}
    written: dict[str, list[int]] = {}
    with opened(directory, device) as contenders:
        for name, contender in contenders.items():
            durable_save_s(contender, trained, directory / name / "saved")  # the first one has everything to write
        for number in range(rounds):
            for name in random.sample(sorted(contenders), len(contenders)):
                trained.step()
                path, before = directory / name / "saved", _files(directory / name)
                times.setdefault(name, []).append(durable_save_s(contenders[name], trained, path))
                after = _files(directory / name)
                written.setdefault(name, []).append(sum(after[file] for file in after.keys() - before.keys()))
                if number == rounds - 1:
                    contenders[name].load(path, into.state)
                    check_same(name, trained, into)
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
    trained.step()
    return trained


def _files(directory: Path) -> dict[tuple[str, int, int], int]:
    """Tell every file below a directory, as it is now, with its bytes."""
    found = {}
    for path in directory.rglob("*"):
        if path.is_file():
            status = path.stat()
            found[str(path), status.st_ino, status.st_mtime_ns] = status.st_size
    return found
