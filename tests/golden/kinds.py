"""The values of the golden run of version 3, in a module of their own: their classes have one name wherever it runs."""

from __future__ import annotations

from collections import defaultdict, deque
from datetime import datetime
from enum import Enum, Flag
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
    """Return a value for every entry that version 3 has and version 1 lacks; `k` is in each."""
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
