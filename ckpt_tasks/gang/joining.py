"""How ranks that a launcher has started meet: in the c10d store at MASTER_ADDR, under a name of this start alone.

torchrun restarts ranks with the store of the start before, which still has all of its words (torch 2.13): a rank would
connect to processes that are gone, and take their words for those of this start. TORCHELASTIC_RESTART_COUNT does not
tell: each agent has its own. So rank 0 draws a name, and each rank takes it only once rank 0 has answered that very
process.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ckpt_tasks.errors import RankError
from ckpt_tasks.system import system

_JOIN_S = 1800.0  # rank 0 may have to start a server first; a launcher ends the others if it fails
_POLL_S = 0.02


def join(rank: int, size: int, local_rank: int, local_size: int) -> None:
    """Make torch's default process group: NCCL if each rank of a host has a device, else Gloo.

    Raises RankError if the ranks do not meet.
    """
    backend = take_device(local_rank, local_size)
    try:
        store = _open_store(rank, size)
        name = meet(store, rank, size)
        dist.init_process_group(backend, store=_named(name, store), rank=rank, world_size=size)
    except (KeyError, RuntimeError, ValueError) as error:  # torch's, and a variable that is not set
        raise RankError(
            f"rank {rank} does not reach the others: {error!s:.300}",
            hint="The launcher sets MASTER_ADDR and MASTER_PORT, where rank 0 is to be reached.",
        ) from error


def take_device(local_rank: int, local_size: int) -> str:
    """Take this rank's device if each rank of the host has one; return torch's backend: NCCL then, else Gloo."""
    if torch.cuda.device_count() < local_size:
        return "gloo"
    torch.cuda.set_device(local_rank)
    return "cuda:nccl,cpu:gloo"


def meet(store: Any, rank: int, size: int) -> str:
    """Return a name in the store that all ranks of this start have, and no earlier start; RuntimeError without them."""
    return _lead(store, size) if rank == 0 else _follow(store, rank)


def _open_store(rank: int, size: int) -> Any:
    holds = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return dist.TCPStore(  # type: ignore[attr-defined]  # torch does not list it
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=holds,
        timeout=timedelta(seconds=_JOIN_S),
        wait_for_workers=False,
        multi_tenant=True,
    )


def _named(name: str, store: Any) -> Any:
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # nor this


def _lead(store: Any, size: int) -> str:
    """Draw a name in rank 0, and answer every process that has taken it."""
    name = f"ckpt-tasks/{system().token_hex(8)}"
    store.set("ckpt-tasks/name", name)
    keys, end_s = [f"{name}/here/{rank}" for rank in range(1, size)], time.monotonic() + _JOIN_S
    while missing := [key for key in keys if not store.check([key])]:
        if time.monotonic() > end_s:
            raise RuntimeError(f"rank {missing[0].rpartition('/')[2]} has not come for {_JOIN_S:.0f} s")
        time.sleep(_POLL_S)
    store.set(f"{name}/all", json.dumps([bytes(store.get(key)).decode() for key in keys]))
    return name


def _follow(store: Any, rank: int) -> str:
    """Take rank 0's name, the last one that it has drawn."""
    me, end_s = system().token_hex(8), time.monotonic() + _JOIN_S
    while time.monotonic() < end_s:
        if store.check(["ckpt-tasks/name"]):
            name = bytes(store.get("ckpt-tasks/name")).decode(errors="replace")
            store.set(f"{name}/here/{rank}", me)
            if store.check([f"{name}/all"]) and _has(bytes(store.get(f"{name}/all")), me):
                return name
        time.sleep(_POLL_S)
    raise RuntimeError(f"rank 0 has not come for {_JOIN_S:.0f} s")


def _has(word: bytes, me: str) -> bool:
    with suppress(ValueError, TypeError):  # not what rank 0 has written
        return me in json.loads(word)
    return False
