"""Ranks of one training: processes that share a gloo group, forked from one that has imported torch."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.servers.process import free_port
from tests.support.interpreters import Process

# Without this option, which torch 2.6 does not have, rank 0 sends its values to the others.
_LOCALLY: dict[str, Any] = {"src_data_rank": None} if "src_data_rank" in signature(distribute_tensor).parameters else {}


def distributed(tensor: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> DTensor:
    """Cut a tensor that every rank has, and keep this rank's part."""
    return distribute_tensor(tensor, mesh, placements, **_LOCALLY)


class Gang:
    """Run `job(rank, size, *arguments)` in every rank. As a context manager it leaves no process behind."""

    def __init__(self, size: int, job: Callable[..., Any], *arguments: Any, output: Path | None = None):
        port = free_port()
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = Pipe()
            log = output.with_name(f"{output.name}.{rank}") if output else None
            process = Process(_run, (theirs, (rank, size, port), job, arguments, log))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for process in self.processes:
            process.join()

    def kill(self) -> None:
        """Kill every rank, as a launcher does where one has died."""
        for process in self.processes:
            process.kill()

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pid(rank), number)

    def said(self, rank: int, timeout_s: float = 120) -> Any:
        """Return the next thing that a rank reports; EOFError where it has ended."""
        assert self._pipes[rank].poll(timeout_s), f"rank {rank} reports nothing"
        return self._pipes[rank].recv()

    def follow(self, timeout_s: float = 120) -> Iterator[tuple[int, Any]]:
        """Yield what the ranks report, with the rank, and None where one ends, until all have ended."""
        open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while open_pipes:
            ready = wait([*open_pipes], timeout_s)
            assert ready, f"ranks {[*open_pipes.values()]} neither report nor end"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    yield open_pipes[pipe], pipe.recv()
                except (EOFError, ConnectionResetError):
                    yield open_pipes.pop(pipe), None

    def results(self, timeout_s: float = 120) -> list[Any]:
        """Return what the job returned in every rank."""
        results = []
        for rank in range(len(self.processes)):
            kind, value = self.said(rank, timeout_s)
            while kind == "report":
                kind, value = self.said(rank, timeout_s)
            assert kind == "result", f"rank {rank}: {value}"
            results.append(value)
        return results

    def end(self, timeout_s: float = 120) -> list[int | None]:
        """Wait until every process has ended; return the exit statuses."""
        for process in self.processes:
            process.join(timeout_s)
        return [process.exitcode for process in self.processes]


def run(size: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what a job returns in every rank, once all of them have ended by themselves."""
    with Gang(size, job, *arguments) as gang:
        results = gang.results()
        assert gang.end() == [0] * size
        return results


_pipe: Connection | None = None


def report(value: Any) -> None:
    """Tell the test something, from within a job."""
    assert _pipe is not None
    _pipe.send(("report", value))


def _run(
    pipe: Connection,
    place: tuple[int, int, int],
    job: Callable[..., Any],
    arguments: tuple[Any, ...],
    log: Path | None,
) -> None:
    global _pipe
    _pipe = pipe
    rank, size, port = place
    if log is not None:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        pipe.send(("result", job(rank, size, *arguments)))
    except Exception:  # noqa: BLE001 (the test reads it)
        pipe.send(("error", traceback.format_exc()))
        sys.exit(1)
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
