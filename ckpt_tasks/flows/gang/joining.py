"""Connect ranks that a launcher has started, by the c10d store at MASTER_ADDR; keys begin with a name of this start.

torchrun gives restarted ranks the store of the previous start, with all of its values (torch 2.13): without the name, a
rank could connect to ended processes. TORCHELASTIC_RESTART_COUNT does not help: each torchrun agent counts for itself.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from ckpt_tasks.checkpoint.ranks.connection import open_store
from ckpt_tasks.checkpoint.ranks.exchange import StoreExchange
from ckpt_tasks.errors import RankError, StoreError

_JOIN_S = 1800.0  # Rank 0 may start a server first; if rank 0 fails, the launcher ends the other ranks.


def join(rank: int, size: int, local_rank: int, local_size: int, timeout_s: float) -> StoreExchange:
    """Make torch's default process group: NCCL if each rank of a host has a device, else Gloo.

    Returns an exchange of these ranks; each request may take `timeout_s`. Raises RankError if ranks cannot connect.
    """
    backend = take_device(local_rank, local_size)
    try:
        held = _open_store(rank, size)
        name = StoreExchange(held, rank, size, "ckpt-tasks", _JOIN_S, shared=True).name(_JOIN_S)
        store = dist.PrefixStore(name, held)  # type: ignore[attr-defined]  # torch does not export this name
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        return StoreExchange(held, rank, size, f"{name}/orders", timeout_s)
    except (KeyError, RuntimeError, ValueError, StoreError) as error:  # KeyError: a variable is missing.
        raise RankError(
            f"rank {rank} does not reach the others: {error!s:.300}",
            hint="The launcher sets MASTER_ADDR and MASTER_PORT, where rank 0 is to be reached.",
        ) from error


def take_device(local_rank: int, local_size: int) -> str:
    """Use this rank's device if each rank of the host has one; return the backend: NCCL with devices, else Gloo."""
    if torch.cuda.device_count() < local_size:
        return "gloo"
    torch.cuda.set_device(local_rank)
    return "cuda:nccl,cpu:gloo"


def _open_store(rank: int, size: int) -> Any:
    holds = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return open_store(*place, size, holds=holds, join_s=_JOIN_S, multi_tenant=True)
