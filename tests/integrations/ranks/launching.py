"""Start a job's ranks as torchrun does. A step's 12 samples are divided among them, whatever their number."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes

from ckpt_tasks.errors import ConfigError
from tests.support.legs import Leg

SAMPLES, IN_A_STEP, RANKS = 66, 12, 2  # 6 steps in an epoch, the last one of 6 samples


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest(model: Any, optimizer: Any) -> str:
    """Return a digest of a model and the moments of its optimizer, equal for any number of ranks."""
    seen = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        held = optimizer.state.get(p, {})
        for tensor in (p, *(held[key] for key in sorted(held))):
            seen.update(name.removeprefix("module.").encode() + whole(tensor.detach()).numpy().tobytes())
    return seen.hexdigest()


@contextmanager
def refusing(leg: Leg) -> Iterator[None]:
    """Record a ConfigError of the block."""
    try:
        yield
    except ConfigError as error:
        leg.record("refused", 0, str(error))


def launched(leg: Leg, job: Callable[[Leg, int], None]) -> None:
    """Start two ranks, or as many as `then` has for the second leg and the following ones; the last rank is killed.

    Its launcher ends the others.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    starts = leg.folder / "starts"
    starts.mkdir(exist_ok=True)
    number = len([*starts.iterdir()])
    (starts / str(number)).touch()
    sizes = [RANKS, *leg.options.get("then", [])] if leg.folder.name == "killed" else [RANKS]
    size = sizes[min(number, len(sizes) - 1)]
    with leg.ranks_end():
        arguments = leg, job, port, size
        context = start_processes(_rank, arguments, size, join=False, start_method="fork")  # type: ignore[no-untyped-call]
        while not context.join(grace_period=2):  # a rank that waits for the killed one does not end at SIGTERM
            pass


def _rank(rank: int, leg: Leg, job: Callable[[Leg, int], None], port: int, size: int) -> None:
    own = {"WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    os.environ |= {name: str(value) for name, value in (own | where).items()}
    leg.label = f" of rank {rank}" if rank else ""
    if rank != size - 1:
        leg.spare(settles=True)
    job(leg, size)
