"""Overlapped capture against eager capture: what a training loop pays for a copy of its state every few steps."""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.states import Trained, build, size_bytes
from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.copying import copy_tensors
from ckpt_tasks.state.overlap import OverlappedCopy
from ckpt_tasks.state.snapshot import tensor_at

__all__ = ["measure"]

_Pairs = list[tuple[torch.Tensor, torch.Tensor]]
_Begin = Callable[[], "OverlappedCopy | None"]


def measure(*, tiny: bool, rounds: int, tokens: int = 256, save_every: int = 1) -> dict[str, Any]:
    """Time `save_every` steps of training after a copy of each kind, in shuffled order, `rounds` times.

    Returns seconds: a step without copies, and for each kind of capture what a copy adds in all (differences within a
    round: median and quartiles, for a step itself varies by more than that), how long the call blocks, and the share of
    copies that were good. Only the copies differ: the state is captured, and the image is there, beforehand. On a CPU
    the figures depend on how threads wait for each other: compare OMP_WAIT_POLICY=passive with the default.
    """
    trained = build(tiny=tiny)
    inputs = torch.randint(0, 256, (max(1, tokens // 64), 64))
    pairs = _image(trained)
    begins: dict[str, _Begin] = {
        "none": lambda: None,
        "eager": lambda: _eager(pairs),
        "overlapped": lambda: _overlapped(pairs, trained.optimizer),
    }
    samples: dict[str, list[_Sample]] = {name: [] for name in begins}
    for begin in (*begins.values(), *begins.values()):
        _sample(begin, trained, inputs, save_every)  # the first ones touch memory for the first time
    for _ in range(rounds):
        for name in random.sample(sorted(begins), len(begins)):
            samples[name].append(_sample(begins[name], trained, inputs, save_every))
    bare = [sample.total_s for sample in samples.pop("none")]
    return {
        "size_bytes": size_bytes(trained),
        "rounds": rounds,
        "save_every": save_every,
        "step_s": median(bare) / save_every,
        "captures": {
            name: {
                **_adds([sample.total_s - without for sample, without in zip(found, bare, strict=True)]),
                "call_s": median(sample.call_s for sample in found),
                "call_max_s": max(sample.call_s for sample in found),
                "good": sum(sample.good for sample in found) / rounds,
            }
            for name, found in samples.items()
        },
    }


def _adds(differences: list[float]) -> dict[str, float]:
    ordered = sorted(differences)
    low, high = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
    return {"adds_s": median(ordered), "adds_low_s": low, "adds_high_s": high}


@dataclass
class _Sample:
    total_s: float
    call_s: float
    good: bool


def _sample(begin: _Begin, trained: Trained, inputs: torch.Tensor, steps: int) -> _Sample:
    started = time.perf_counter()
    copy = begin()
    called = time.perf_counter()
    for _ in range(steps):
        _forward_and_backward(trained, inputs)
        trained.optimizer.step()
    good = copy is None or copy.wait()
    return _Sample(time.perf_counter() - started, called - started, good)


def _forward_and_backward(trained: Trained, inputs: torch.Tensor) -> None:
    trained.optimizer.zero_grad(set_to_none=True)
    model: Any = trained.model
    hidden = model["embed"](inputs)
    for layer in model["layers"]:
        hidden = layer(hidden)
    nn.functional.cross_entropy(model["head"](hidden).flatten(0, 1), inputs.flatten()).backward()  # type: ignore[no-untyped-call]


def _image(trained: Trained) -> _Pairs:
    live = capture(trained.state).tensors.values()
    buffer = mmap.mmap(-1, sum(tensor.nbytes + 64 for tensor in live))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    pairs, end = [], 0
    for tensor in live:
        pairs.append((tensor_at(buffer, str(tensor.dtype).removeprefix("torch."), tensor.shape, end), tensor))
        end += tensor.nbytes + -tensor.nbytes % 64
    return pairs


def _eager(pairs: _Pairs) -> None:
    copy_tensors([place for place, _ in pairs], [live for _, live in pairs])


def _overlapped(pairs: _Pairs, optimizer: torch.optim.Optimizer) -> OverlappedCopy:
    copy = OverlappedCopy(pairs, [optimizer])
    copy.start()
    return copy
