"""Many ranks beside DCP: what training waits for, what is on disk, restores, and another number of ranks.

Ranks are gloo processes of this host. All contenders save and restore one state in one run, in shuffled order, and
every time is that of the slowest rank.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import shutil
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.fsdp import fully_shard

from benchmarks.apart import summary
from benchmarks.peers import OURS
from benchmarks.stall import fsync_all
from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.state.tensors.placements import local_of
from ckpt_tasks.storage.local import LocalStore

__all__ = ["measure"]

_DCP = "DCP save, load"
_DCP_ASYNC = "DCP async_save, cached DefaultStager"
_COPY = "limit: copy to memory"
_LARGE = "FSDP2, 24 weights of 4 MiB, snapshots in memory"
_RESTORES = "restore"
_TITLES = {"waits": "training waits", "durable": "until it is on disk", _RESTORES: _RESTORES}
_PR_SET_PDEATHSIG = 1

_Seconds = dict[str, dict[str, list[float]]]  # what was timed → contender → seconds
_forking = multiprocessing.get_context("forkserver")


def measure(directory: Path, *, tiny: bool, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Time saves and restores of 2 and 4 ranks, FSDP2 with AdamW and the same model replicated (DDP).

    Restores go into live tensors, from a warm page cache; a reshard reads what the other number of ranks has saved.
    Every restored tensor is compared with what was saved, outside of the time. `ratios`: what training waits over one
    memcpy of a rank's share, in all ranks at once; replicated state with 2 ranks over 1; bytes that a host reads of
    files as of a far store, over those that it wants. The few large tensors have the default `memory_dir`, from which
    their restores come; the other rows have none.
    """
    _forking.set_forkserver_preload(["benchmarks.ranks"])
    shutil.rmtree(directory, ignore_errors=True)
    rounds = min(rounds, 5)
    by_gang = {
        ("FSDP2", size): _gang(size, _saves_and_restores, "FSDP2", str(directory), tiny, rounds, source)
        for size, source in ((2, None), (4, 2))
    }
    for size in (2, 4):
        by_gang[_LARGE, size] = _gang(size, _saves_and_restores, _LARGE, str(directory), tiny, rounds, None)
    by_gang |= _in_turn(directory, tiny, rounds)
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for (kind, size), found in by_gang.items():
        rows |= _rows(f"{kind}, {size} {'rank' if size == 1 else 'ranks'}", found["seconds"])
    back = _gang(2, _reshards, "FSDP2", str(directory), tiny, rounds, 4)
    rows |= _rows("FSDP2, 2 ranks", back["seconds"])
    shutil.rmtree(directory)
    return {
        "size_bytes": by_gang["FSDP2", 2]["size_bytes"],
        "rounds": rounds,
        "device": "cpu",
        "rows": rows,
        "ratios": _ratios(by_gang, back),
    }


def _in_turn(directory: Path, tiny: bool, rounds: int) -> dict[tuple[str, int], dict[str, Any]]:
    """Save the replicated state with 1 and 2 ranks in turn: what else the machine does changes within a minute."""
    by_gang: dict[tuple[str, int], dict[str, Any]] = {}
    for turn in range(rounds):
        for size in (1, 2) if turn % 2 == 0 else (2, 1):
            path = directory / f"turn-{turn}"
            found = _gang(size, _saves_and_restores, "replicated", str(path), tiny, 1, None)
            shutil.rmtree(path)
            first = by_gang.setdefault(("replicated", size), found)
            for timed, by_name in found["seconds"].items() if first is not found else ():
                for name, times in by_name.items():
                    first["seconds"][timed][name] += times
    return by_gang


def _rows(title: str, seconds: _Seconds) -> dict[str, dict[str, dict[str, float]]]:
    return {
        f"{title}: {_TITLES.get(timed, timed)}": {name: summary(times) for name, times in by_name.items()}
        for timed, by_name in seconds.items()
    }


def _ratios(by_gang: Mapping[tuple[str, int], Mapping[str, Any]], back: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for (kind, size), figures in by_gang.items():
        waits = figures["seconds"]["waits"]
        if size > 1:
            pairs = zip(waits[OURS], waits[_COPY], strict=True)
            found[f"{kind}, {size} ranks: wait / memcpy of a share"] = median(one / copy for one, copy in pairs)
    one, two = by_gang["replicated", 1], by_gang["replicated", 2]
    pairs = zip(*(figures["seconds"]["durable"][OURS] for figures in (two, one)), strict=True)
    found["replicated, 2 ranks / 1: until it is on disk"] = median(ours / alone for ours, alone in pairs)
    found["replicated, 2 ranks / 1: bytes written"] = two["written_bytes"] / one["written_bytes"]
    for title, figures in (("2 → 4", by_gang["FSDP2", 4]), ("4 → 2", back)):
        found[f"FSDP2 {title}: bytes read by a host / wanted"] = figures["read_bytes"] / figures["size_bytes"]
    return found


# ── one gang ─────────────────────────────────────────────────────────────────────────────────────────────────


def _gang(size: int, job: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Run a job in every rank; return what it returns in rank 0. No process is left."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    try:
        for rank in range(size):
            ours, theirs = _forking.Pipe()
            process = _forking.Process(target=_rank, args=(theirs, (rank, size, port), job, arguments), daemon=True)
            process.start()
            started.append((process, ours))
            theirs.close()
        pipe, left = started[0][1], [process.sentinel for process, _ in started]
        while pipe not in (ended := wait([pipe, *left])):
            left = [sentinel for sentinel in left if sentinel not in ended]
            if any(process.exitcode for process, _ in started):
                break  # it has printed why
        found: dict[str, Any] = pipe.recv()
        for process, _ in started:
            process.join()
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    return found


def _rank(
    pipe: Connection, place: tuple[int, int, int], job: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]
) -> None:
    rank, size, port = place
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    found = job(*arguments)
    if rank == 0:
        pipe.send(found)
    dist.barrier()
    dist.destroy_process_group()


class _Trained:
    """A 12-layer transformer, or 24 large layers, and AdamW: 256 or 288 MiB in fp32, the same values on all ranks."""

    def __init__(self, kind: str, *, tiny: bool):
        width, layers = (32, 2) if tiny else (384, 12)
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(layers))
        )
        if kind == _LARGE:
            layers, width = (2, 32) if tiny else (24, 1024)
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        if kind in {"FSDP2", _LARGE}:
            for layer in (*model.children(), model):
                fully_shard(layer)
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.model = nn.parallel.DistributedDataParallel(model) if kind == "replicated" else model
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._first = [_values(tensor, seed) for seed, tensor in enumerate(self.tensors)]

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def tree(self) -> dict[str, Any]:
        """What DCP is given: the same tensors by name."""
        moments = {name: self.optimizer.state[one] for name, one in self.model.named_parameters()}
        return {"model": self.model.state_dict(), "optimizer": moments}

    @property
    def tensors(self) -> list[torch.Tensor]:
        moments = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [*self.model.state_dict().values(), *moments]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @torch.no_grad()
    def set(self, number: int) -> None:
        for tensor, first in zip(self.tensors, self._first, strict=True):
            local_of(tensor).copy_(first).add_(number)

    def check(self, number: int, name: str) -> None:
        for tensor, first in zip(self.tensors, self._first, strict=True):
            if not torch.equal(local_of(tensor).detach(), first + number):
                raise RuntimeError(f"{name} has restored something else than was saved")


def _values(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return this rank's part of a whole tensor of random numbers."""
    values = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=tensor.dtype)
    if local_of(tensor) is tensor:
        return values
    chunks = values.chunk(dist.get_world_size())
    mine = chunks[dist.get_rank()] if dist.get_rank() < len(chunks) else values[:0]
    return mine.clone()


def _saves_and_restores(kind: str, root: str, tiny: bool, rounds: int, source: int | None) -> dict[str, Any]:
    """Save and restore `rounds` times, then restore what another number of ranks has saved."""
    size, directory = dist.get_world_size(), Path(root)
    trained = _Trained(kind, tiny=tiny)
    seconds: _Seconds = {}
    options = {"use_pinned_memory": False, "use_async_staging": False, "use_non_blocking_copy": False}
    stager = DefaultStager(StagingOptions(use_shared_memory=True, **options))
    with _checkpointer(directory, kind, size) as ckpt:
        ckpt.restore(trained.state)
        saves = _saves(trained, ckpt, directory / f"{kind}-{size}", stager)
        for number in range(1, rounds + 4):
            for name in random.Random(number).sample(sorted(saves), len(saves)):
                trained.set(number)
                _settle()
                times = saves[name](number)
                if number > 3:  # the first ones plan, and touch new memory in both slots
                    for timed, value in zip(("waits", "durable"), times, strict=False):
                        seconds.setdefault(timed, {}).setdefault(name, []).append(value)
        _restore(trained, ckpt, _path(directory, kind, size), rounds, seconds.setdefault(_RESTORES, {}))
    stager.close()
    dist.barrier()
    newest = max((directory / f"{kind}-{size}").glob("checkpoint_*"))
    written_bytes = sum(path.stat().st_size for path in newest.rglob("*.safetensors"))
    found = {"seconds": seconds, "size_bytes": trained.size_bytes, "written_bytes": written_bytes}
    if source is not None:
        others = _reshards(kind, root, tiny, rounds, source)
        found["seconds"] = {**seconds, **others["seconds"]}
        found["read_bytes"] = others["read_bytes"]
    return found


def _saves(
    trained: _Trained, ckpt: Checkpointer, directory: Path, stager: DefaultStager
) -> dict[str, Callable[[int], list[float]]]:
    """Return the ways to save, each with the seconds that training waits, and those until all is on disk."""
    own = torch.cat([local_of(tensor).detach().reshape(-1) for tensor in trained.tensors])
    if isinstance(trained.model, nn.parallel.DistributedDataParallel):
        own = own[: len(own) // dist.get_world_size()]  # the part that this rank saves
    into = torch.zeros_like(own)
    path, asynchronous = directory.with_name(f"{directory.name}-{_DCP}"), directory.with_name(f"{directory.name}-async")

    def dcp_save(number: int) -> list[float]:
        _clear(path)
        return _timed(lambda: save(trained.tree, checkpoint_id=path), lambda: fsync_all(path))

    def dcp_async_save(number: int) -> list[float]:
        _clear(asynchronous)
        pending: list[Any] = []

        def end() -> None:
            pending[0].result()
            fsync_all(asynchronous)

        begin = partial(async_save, checkpoint_id=asynchronous, async_stager=stager)
        return _timed(lambda: pending.append(begin(trained.tree)), end)

    return {
        OURS: lambda number: _timed(lambda: ckpt.step(number, trained.state), ckpt.wait),
        _DCP: dcp_save,
        _DCP_ASYNC: dcp_async_save,
        _COPY: lambda number: _timed(lambda: into.copy_(own), lambda: None)[:1],
    }


def _reshards(kind: str, root: str, tiny: bool, rounds: int, source: int) -> dict[str, Any]:
    """Restore what another number of ranks has saved; count what this host reads where bytes are dear."""
    directory, trained = Path(root), _Trained(kind, tiny=tiny)
    seconds: _Seconds = {f"restore what {source} ranks saved": {}}
    with _checkpointer(directory, kind, source) as ckpt:
        for by_name in seconds.values():
            _restore(trained, ckpt, _path(directory, kind, source), rounds, by_name)
        with _counted() as count:
            ckpt.restore(trained.state)
    read_bytes = torch.tensor(float(count[0]))
    dist.all_reduce(read_bytes)
    return {"seconds": seconds, "size_bytes": trained.size_bytes, "read_bytes": float(read_bytes)}


def _path(directory: Path, kind: str, size: int) -> Path:
    """Return where DCP's save puts the state of so many ranks."""
    return directory / f"{kind}-{size}-{_DCP}"


def _checkpointer(directory: Path, kind: str, size: int) -> Checkpointer:
    config = CheckpointConfig(checkpoint_dir=str(directory / f"{kind}-{size}"), run_key="bench", step_interval=1)
    return Checkpointer(config if kind == _LARGE else replace(config, memory_dir=None))


def _restore(trained: _Trained, ckpt: Checkpointer, path: Path, rounds: int, by_name: dict[str, list[float]]) -> None:
    restores = {
        OURS: lambda: ckpt.restore(trained.state),
        _DCP: lambda: load(trained.tree, checkpoint_id=path),
    }
    number = ckpt.restore(trained.state)
    for count in range(rounds + 1):
        for name in random.Random(count).sample(sorted(restores), len(restores)):
            trained.set(-1)
            _settle()
            [value, _] = _timed(restores[name], lambda: None)
            trained.check(number, name)
            if count:
                by_name.setdefault(name, []).append(value)


def _timed(begin: Callable[[], object], end: Callable[[], object]) -> list[float]:
    """Return the seconds until the slowest rank has begun, and until it has ended."""
    dist.barrier()
    times = [time.perf_counter()]
    for part in (begin, end):
        part()
        times.append(time.perf_counter())
    found = torch.tensor([now - times[0] for now in times[1:]], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    seconds: list[float] = found.tolist()
    return seconds


def _settle() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()


def _clear(path: Path) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Count the bytes that this rank reads of objects, as if its store were far away."""
    count, read = [0], LocalStore.read

    def counting(store: LocalStore, name: str, begin: int, into: memoryview) -> None:
        count[0] += len(into)
        read(store, name, begin, into)

    LocalStore.near, LocalStore.read = False, counting  # type: ignore[method-assign,assignment]
    try:
        yield count
    finally:
        LocalStore.near, LocalStore.read = True, read  # type: ignore[method-assign]
