"""The agent on one node of a Ray cluster: an actor that runs the node's ranks."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import ray

from ckpt_tasks.flows.gang.messages import Begin, Message
from ckpt_tasks.flows.gang.processes import Gang
from ckpt_tasks.process import start_thread

POLL_S = 0.2  # An agent answers within this time, whatever event it waits for.
ANSWER_S = 30.0  # A node that does not answer for this long is lost.


class Agent:
    """A node's actor. No lock is needed: one thread calls `tell`, one calls all other methods."""

    def __init__(self, devices: int, threads: int) -> None:
        if not devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Other processes may use the devices: this gang requested none.
        os.environ["OMP_NUM_THREADS"] = str(threads)  # Ray would set the number of the actor's CPUs, not of one rank's.
        start_thread(_end_with, os.getppid(), name="ckpt-raylet")
        self._gang = Gang()
        self._gang.prepare()  # The fork server ends with this thread, the main thread.

    def start(self, begin: Begin) -> tuple[int, list[int]]:
        port = self._gang.start(begin)
        return port, [rank.pid for rank in self._gang.ranks]

    @ray.method(concurrency_group="tell")
    def tell(self, ranks: list[int], message: Message) -> None:
        self._gang.tell([rank for rank in self._gang.ranks if rank.rank in ranks], message)

    def hear(self) -> list[tuple[int, Message | None]]:
        return [(rank.rank, message) for rank, message in self._gang.hear(POLL_S)]

    def look(self, stacks_s: float | None = None) -> list[dict[str, Any]]:
        self._gang.look() if stacks_s is None else self._gang.write_stacks(stacks_s)
        names = ("status", "out_of_memory", "is_stopped", "written", "lost")
        return [{name: getattr(rank, name) for name in names} for rank in self._gang.ranks]

    def await_end(self, timeout_s: float) -> None:
        self._gang.await_end(timeout_s)

    def kill(self) -> None:
        self._gang.kill()
        self._gang.prepare()

    def warm(self) -> None:
        """Return once the fork server has imported torch, so that a start does not wait for this import."""
        self._gang.await_server()

    def answer(self) -> None:
        """Return: the caller then knows that all earlier calls are done."""


def _end_with(raylet: int) -> None:
    """Kill this process when its raylet ends: Ray does not end an actor that was paused while its raylet ended."""
    while os.getppid() == raylet:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
