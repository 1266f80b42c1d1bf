"""The agent on one node of a Ray cluster: an actor that runs the node's ranks, and keeps copies of a peer's memory.

Hosts exchange bytes as the return values of actor calls, so Ray moves them over its existing ports and connections.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Collection
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from ckpt_tasks.errors import CkptError, StoreError
from ckpt_tasks.gang.messages import Begin, Message, read_config
from ckpt_tasks.gang.processes import Gang
from ckpt_tasks.process.processes import start_thread
from ckpt_tasks.snapshot.peers import HostMemory, Offer, Piece
from ckpt_tasks.system import system

POLL_S = 0.2  # An agent answers within this time, whatever event it waits for.
ANSWER_S = 30.0  # A node that does not answer for this long is lost.
COPY_S = 300.0  # Ranks start without a peer's memory if copying it takes longer.
_LOOK_S = 0.5  # Ask a peer this often whether it has sealed a newer snapshot.
# After each block, wait three times as long as the block took, so copies use at most a quarter of a network and a core.
_REST = 3.0
_STOP_S = 30.0
_log = logging.getLogger("ckpt_tasks")


class Agent:
    """A node's actor. No lock is needed: one thread calls `tell`, one serves peers, one calls all other methods."""

    def __init__(self, devices: int, threads: int) -> None:
        if not devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Other processes may use the devices: this gang requested none.
        os.environ["OMP_NUM_THREADS"] = str(threads)  # Ray would set the number of the actor's CPUs, not of one rank's.
        start_thread(_end_with, os.getppid(), name="ckpt-raylet")
        self._gang = Gang()
        self._gang.prepare()  # The fork server ends with this thread, the main thread.
        self._memory: HostMemory | None = None
        self._copying: threading.Thread | None = None
        self._stopping = threading.Event()

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
        own = [rank.rank for rank in self._gang.ranks]
        self._gang.kill()
        if self._copying is not None:
            self._stopping.set()
            self._copying.join(_STOP_S)
            self._copying = None
            if self._memory is not None:
                self._memory.release(own)
        self._gang.prepare()

    def warm(self) -> None:
        """Return once the fork server has imported torch, so that a start does not wait for this import."""
        self._gang.await_server()

    def answer(self) -> None:
        """Return: the caller then knows that all earlier calls are done."""

    def copy(self, begin: Begin, offers: list[Offer], agent: Any, host: str) -> None:
        """Copy from a peer the parts that this node's ranks will restore when they start, until the peer is lost."""
        try:
            peer = _Peer(agent, host, begin, threading.Event(), rest=0.0, longest_s=COPY_S)
            for offer, why in self._memory_of(begin).copy_each(offers, peer, peer.check):
                _log.debug("%s has not given its memory of rank %d: %s", host, offer.rank, why)
        except (RayError, CkptError, OSError, _StoppedError) as error:
            _log.debug("%s has not given its memory: %s", host, error)

    def follow(self, begin: Begin, ranks: list[int], agent: Any, host: str) -> None:
        """Copy the snapshots that these ranks of a peer seal, in the background of training, until `kill`."""
        self._stopping = threading.Event()
        peer = _Peer(agent, host, begin, self._stopping, rest=_REST)
        own = [rank.rank for rank in self._gang.ranks]
        self._copying = start_thread(self._follow, begin, own, ranks, peer, name="ckpt-peer")

    def _follow(self, begin: Begin, own: list[int], ranks: list[int], peer: _Peer) -> None:
        system().lower_priority()
        before: set[str] | None = None
        while not self._stopping.wait(_LOOK_S):
            try:
                if before is None:
                    before = {offer.attempt for offer in peer.offers(ranks)}
                if self._memory_of(begin).follow(peer, ranks, peer.check, own=own, before=before):
                    _log.debug("Memory of %s is copied", peer.host)
            except (RayActorError, _StoppedError):
                return
            except (RayError, CkptError, OSError) as error:
                _log.debug("Memory of %s is not copied: %s", peer.host, error)

    @ray.method(concurrency_group="peers")
    def offers(self, begin: Begin, ranks: list[int]) -> list[Offer]:
        try:
            return self._memory_of(begin).offers(ranks)
        except (CkptError, OSError) as error:  # The run may not exist yet.
            _log.debug("There is no memory for a peer: %s", error)
            return []

    @ray.method(concurrency_group="peers")
    def read(self, begin: Begin, offer: Offer, pieces: list[Piece]) -> list[bytes] | None:
        system().lower_priority()
        return self._memory_of(begin).read(offer, pieces)

    def _memory_of(self, begin: Begin) -> HostMemory:
        """Return this host's memory of the run; raises CkptError before the run exists."""
        if self._memory is None or self._memory.size != begin.size:
            self._memory = HostMemory(read_config(begin.config), begin.size)
        return self._memory


class _StoppedError(Exception):
    """Raised to end a copy when the agent stops it."""


class _Peer:
    """The memory of another node, a `Source` that its agent serves."""

    def __init__(
        self,
        agent: Any,
        host: str,
        begin: Begin,
        stopping: threading.Event,
        *,
        rest: float,
        longest_s: float = math.inf,
    ):
        self.host = host
        self._agent = agent
        self._begin = begin
        self._stopping = stopping
        self._rest = rest
        self._end_s = time.monotonic() + longest_s

    def check(self) -> None:
        if self._stopping.is_set() or time.monotonic() > self._end_s:
            raise _StoppedError

    def offers(self, ranks: Collection[int]) -> list[Offer]:
        offered: list[Offer] = self._answer(self._agent.offers.remote(self._begin, [*ranks]))
        return offered

    def read(self, offer: Offer, pieces: list[Piece]) -> list[bytes] | None:
        began_s = time.monotonic()
        data: list[bytes] | None = self._answer(self._agent.read.remote(self._begin, offer, pieces))
        self._stopping.wait((time.monotonic() - began_s) * self._rest)
        return data

    def _answer(self, asked: Any) -> Any:
        end_s = time.monotonic() + ANSWER_S
        while not ray.wait([asked], timeout=POLL_S)[0]:
            self.check()
            if time.monotonic() > end_s:
                raise StoreError(f"{self.host} says nothing")
        return ray.get(asked)


def _end_with(raylet: int) -> None:
    """Kill this process when its raylet ends: Ray does not end an actor that was paused while its raylet ended."""
    while os.getppid() == raylet:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
