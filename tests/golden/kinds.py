"""Values with parts of the golden runs, in a module of their own: their classes have one name anywhere."""

from __future__ import annotations

from collections import defaultdict, deque
from datetime import datetime
from enum import Enum, Flag
from importlib import import_module
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import torch


class Phase(Enum):
    """An Enum, as programs have them."""

    WARM = 1
    COLD = 2


class Rights(Flag):
    """A Flag."""

    READ = 1
    RUN = 2


class Point(NamedTuple):
    """A named tuple."""

    n: int
    at: torch.Tensor


def kinds_at(k: int) -> dict[str, Any]:
    """Return a value for every kind that has parts; `k` is in each."""
    return {
        "named": [Point(k, torch.full((2,), float(k)))],
        "enum": {Phase.WARM: [Phase(k), Rights.READ | Rights.RUN]},
        "array": [np.array(["a", "b" * k]), np.array([(k, 0.5)], [("n", "<i2"), ("x", "<f4")])],
        "sparse": [
            torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, k]), (2,), check_invariants=True),
            (torch.eye(2) * k).to_sparse_csr(),
        ],
        "quantized": torch.quantize_per_tensor(torch.tensor([0.0, 0.5 * k]), 0.5, 1, torch.quint8),
        "seeds": deque([np.random.SeedSequence(k, spawn_key=(1,), n_children_spawned=k)]),
        "texts": [np.str_("a" * k), Path("a") / str(k), PureWindowsPath("b")],
        "times": [np.datetime64(k, "s"), np.timedelta64(k, "D"), datetime(2024, 10, 27, k, fold=1)],  # noqa: DTZ001
        "more": [range(k), bytearray(b"a" * k), defaultdict(list, {k: [1]})],
    }


OF_TORCHAO = ("4bit", "8bit", "fp8")


def wrapped(bits: str, k: int) -> Any:
    """Return a tensor of few bits, as an optimizer of torchao keeps its moments; `k` is in it."""
    module = import_module(f"torchao.optim.subclass_{bits}")
    (kind,) = (one for name, one in vars(module).items() if name.startswith("OptimState"))
    made = kind.zeros((4, 256), **({} if bits == "fp8" else {"signed": True}))
    return made.copy_(torch.arange(1024.0).reshape(4, 256) * k)


def flattened(tensor: Any) -> tuple[type, list[Any], list[Any]]:
    """Return all that such a tensor is made of."""
    names, context = tensor.__tensor_flatten__()
    return type(tensor), [getattr(tensor, name).tolist() for name in names], [*context]
