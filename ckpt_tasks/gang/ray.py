"""The ranks of a gang on several hosts: on each node a Ray actor runs its ranks, like the agent of one host.

Invariants

1. No rank outlives its actor: it is the agent of `processes.py`, and Ray ends it with its node's raylet and its driver.
2. A node that cannot be reached is lost as a whole: no rank of it is expected any more, and its actor is killed when it
   comes back. Until then the run's ledger fences it: the head takes the run over.
3. Every wait for a node has a time limit.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ckpt_tasks.errors import RankError
from ckpt_tasks.gang.engine import Heard, RankProcess
from ckpt_tasks.gang.messages import Begin, Message
from ckpt_tasks.gang.processes import Gang
from ckpt_tasks.process.processes import start_thread

_POLL_S = 0.2  # An agent answers within this time, whatever it waits for.
_ANSWER_S = 30.0  # A node that is silent for this long is lost.
_START_S = 300.0  # A busy machine imports torch slowly.
_ROOM_S = 60.0
_DOUBT_S = 60.0  # Ray needs up to 30 s to notice a lost node.
_log = logging.getLogger("ckpt_tasks")


class _Agent:
    """A node's actor. One thread calls `tell`, and another thread all other methods, so they need no lock."""

    def __init__(self, devices: int, threads: int) -> None:
        if not devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Devices that were not requested may be in use by others.
        os.environ["OMP_NUM_THREADS"] = str(threads)  # Ray counts an actor's CPUs, not a rank's.
        start_thread(_end_with, os.getppid(), name="ckpt-raylet")
        self._gang = Gang()
        self._gang.prepare()  # The fork server is bound to the thread that starts it: use the main thread.

    def start(self, begin: Begin) -> tuple[int, list[int]]:
        port = self._gang.start(begin)
        return port, [rank.pid for rank in self._gang.ranks]

    @ray.method(concurrency_group="tell")
    def tell(self, ranks: list[int], message: Message) -> None:
        self._gang.tell([rank for rank in self._gang.ranks if rank.rank in ranks], message)

    def hear(self) -> list[tuple[int, Message | None]]:
        return [(rank.rank, message) for rank, message in self._gang.hear(_POLL_S)]

    def look(self, stacks_s: float | None = None) -> list[dict[str, Any]]:
        self._gang.look() if stacks_s is None else self._gang.write_stacks(stacks_s)
        names = ("status", "out_of_memory", "is_stopped", "written")
        return [{name: getattr(rank, name) for name in names} for rank in self._gang.ranks]

    def await_end(self, timeout_s: float) -> None:
        self._gang.await_end(timeout_s)

    def kill(self) -> None:
        self._gang.kill()
        self._gang.prepare()

    def warm(self) -> None:
        """Answer once a start no longer needs to import torch."""
        self._gang.await_server()

    def answer(self) -> None:
        """Answer when all earlier calls are done."""


def _end_with(raylet: int) -> None:
    """End this process with its raylet: if the actor was stopped when the raylet ended, Ray forgets it."""
    while os.getppid() == raylet:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(eq=False)
class _Node:
    id: str
    address: str
    room: int  # The number of ranks that fit on the node.
    agent: Any
    ready: Any  # This reference is ready when the agent has started.
    ranks: list[RankProcess] = field(default_factory=list)
    hearing: Any = None
    lost: str = ""

    @property
    def is_ready(self) -> bool:
        return not self.lost and bool(ray.wait([self.ready], timeout=0)[0])


class RayGang:
    """The ranks of a gang on the nodes of a Ray cluster; an `Engine`.

    A rank takes `resources` of its node: one GPU, or one CPU if the cluster has no GPU. A gang has at most `size` and
    at least `least` ranks; nodes that had ranks before come first, so that ranks find their memory.
    """

    def __init__(
        self,
        size: int,
        least: int,
        address: str,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ):
        self._size, self._least, self._address = size, least, address
        self._resources, self._runtime_env = dict(resources or {}), dict(runtime_env or {})
        self._nodes: list[_Node] = []
        self._doubted: dict[str, float] = {}  # When each node was lost.
        self._connected = False

    @property
    def ranks(self) -> list[RankProcess]:
        """The ranks of all nodes, in their order."""
        return [rank for node in self._nodes for rank in node.ranks]

    def prepare(self) -> None:
        """Connect to the cluster, and start an agent on each node with room for ranks."""
        self._connect()
        held = {node.id: node for node in self._nodes}
        for node_id, (address, room) in self._plan().items():
            if node_id in held and (held[node_id].room >= room or held[node_id].ranks):
                continue
            if node_id in held:
                self._give_up(held[node_id])
            self._nodes.append(self._hire(node_id, address, room))

    def has_more(self) -> bool:
        """Return True if a gang that starts now would have more ranks; start agents on nodes with room for ranks."""
        self.prepare()
        room = sum(node.room for node in self._nodes if node.is_ready)
        return min(room, self._size) > len(self.ranks)

    def start(self, begin: Begin) -> int:
        """Start the ranks on the available nodes; return the port on rank 0's node. Raises RankError."""
        self._gather()
        size, port, starting = min(self._size, sum(node.room for node in self._nodes)), 0, []
        first, address = 0, self._nodes[0].address
        for node in self._nodes:
            count = min(node.room, size - first)
            if not count:
                break
            own = replace(begin, size=size, first_rank=first, local_size=count, host=address, port=port)
            node.ranks = [RankProcess(rank, 0, node.address) for rank in range(first, first + count)]
            starting.append((node, node.agent.start.remote(own)))
            if first == 0:  # Rank 0 must listen before the others get its address.
                port = next((port for _, (port, _) in self._answers(starting, _START_S)), 0)
            first += count
        for node, (_, pids) in self._answers(starting, _START_S):
            for rank, pid in zip(node.ranks, pids, strict=True):
                rank.pid = pid
        if lost := [node for node, _ in starting if node.lost]:
            why = f"the node {lost[0].address} is lost: {lost[0].lost}"
            self.kill()
            raise RankError(why)
        return port

    def tell(self, ranks: Sequence[RankProcess], message: Message) -> None:
        """Send a message to some ranks, by way of their nodes; do not wait."""
        for node in self._nodes:
            if numbers := [rank.rank for rank in node.ranks if rank in ranks]:
                node.agent.tell.remote(numbers, message)

    def hear(self, timeout_s: float) -> Heard:
        """Return messages since the last call, and None for each rank that has ended or is on a lost node."""
        working = [node for node in self._nodes if node.ranks]
        for node in working:
            if node.hearing is None and not node.lost:
                node.hearing = node.agent.hear.remote()
        waiting = {node.hearing: node for node in working if node.hearing is not None}
        if waiting and not any(node.lost for node in working):
            ray.wait([*waiting], timeout=timeout_s)
        ready = ray.wait([*waiting], num_returns=len(waiting), timeout=0)[0] if waiting else []
        heard: Heard = []
        for node, said in self._answers([(waiting[answer], answer) for answer in ready], 0):
            numbered = {rank.rank: rank for rank in node.ranks}
            heard += [(numbered[number], message) for number, message in said]
            node.hearing = None
        for node in working:
            for rank in node.ranks if node.lost else []:
                rank.lost = node.lost
                heard.append((rank, None))
        return heard

    def hear_causes(self) -> Heard:
        """Check every node, since ranks fail at once if another one is lost."""
        self._ask("answer", timeout_s=_ANSWER_S)
        return self.hear(_POLL_S)

    def look(self) -> None:
        """Check the ranks of every node."""
        self._look(None, _ANSWER_S)

    def write_stacks(self, timeout_s: float) -> None:
        """Have every node write the stacks of its ranks."""
        self._look(timeout_s, timeout_s + _ANSWER_S)

    def _look(self, stacks_s: float | None, timeout_s: float) -> None:
        for node, states in self._ask("look", stacks_s, timeout_s=timeout_s):
            for rank, state in zip(node.ranks, states, strict=True):
                vars(rank).update(state)

    def await_end(self, timeout_s: float) -> None:
        """Wait until every reachable rank has ended by itself."""
        self._ask("await_end", timeout_s, timeout_s=timeout_s + _ANSWER_S)

    def kill(self) -> None:
        """Kill the ranks of every reachable node; give the other nodes up."""
        self._ask("kill", timeout_s=_ANSWER_S)
        for node in self._nodes:
            node.ranks, node.hearing = [], None
        self._give_up_lost()

    def close(self) -> None:
        """End everything, including the connection if this object has made it."""
        if not ray.is_initialized():
            return
        self.kill()
        for node in [*self._nodes]:
            self._give_up(node)
        if self._connected:
            ray.shutdown()
            self._connected = False

    def _connect(self) -> None:
        if not ray.is_initialized():
            in_main = threading.current_thread() is threading.main_thread()
            ours = signal.getsignal(signal.SIGTERM)
            host, _, port = self._address.rpartition(":")
            try:
                if port.isdecimal() and "/" not in host:  # Ray itself would try to reach a missing head for minutes.
                    socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
                ray.init(address=self._address, configure_logging=False, runtime_env=self._runtime_env or None)
            except (OSError, RuntimeError, ValueError) as error:
                raise RankError(f"no Ray cluster answers at {self._address}: {error}") from error
            if in_main:
                signal.signal(signal.SIGTERM, ours)  # Ray's handler would end this process before the ranks commit.
            self._connected = True
        if not self._resources:
            self._resources = {"GPU" if ray.cluster_resources().get("GPU") else "CPU": 1}

    def _plan(self) -> dict[str, tuple[str, int]]:
        """Return for each node its address and number of ranks; nodes with an agent come first."""
        held = {node.id: node.room for node in self._nodes if not node.lost}
        free, now_s, rooms = available_resources_per_node(), time.monotonic(), {}
        for each in ray.nodes():
            node_id = each["NodeID"]
            if not each["Alive"] or now_s - self._doubted.get(node_id, -_DOUBT_S) < _DOUBT_S:
                continue
            all_of_it, left = (self._count(of) for of in (each["Resources"], free.get(node_id, {})))
            # For a moment the cluster may count as free what an agent has just taken.
            rooms[node_id] = (each["NodeManagerAddress"], min(all_of_it, held.get(node_id, 0) + left))
        order = [*held, *sorted(rooms.keys() - held.keys(), key=lambda node_id: (-rooms[node_id][1], rooms[node_id]))]
        plan, left_over = {}, self._size
        for node_id in order:
            address, room = rooms.get(node_id, ("", 0))
            if taken := min(room, left_over):
                plan[node_id] = (address, taken)
                left_over -= taken
        return plan

    def _count(self, resources: Mapping[str, float]) -> int:
        return min(int(resources.get(name, 0) // amount) for name, amount in self._resources.items())

    def _hire(self, node_id: str, address: str, room: int) -> _Node:
        whole = {name: amount * room for name, amount in self._resources.items()}
        cpus, devices = whole.pop("CPU", 0), whole.pop("GPU", 0)
        remote: Any = ray.remote(concurrency_groups={"tell": 1})  # type: ignore[call-overload]  # it lacks this one
        actor = remote(_Agent).options(
            num_cpus=cpus,
            num_gpus=devices,
            resources=whole,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        agent = actor.remote(int(devices), max(1, int(self._resources.get("CPU", 1))))
        return _Node(node_id, address, room, agent, agent.warm.remote())

    def _gather(self) -> None:
        """Wait until there are agents for as many ranks as fit, at least for `least`."""
        end_s = time.monotonic() + _ROOM_S
        while True:
            self.prepare()
            [*self._answers([(node, node.ready) for node in self._nodes], _START_S)]
            self._give_up_lost()
            room = sum(node.room for node in self._nodes)
            if room >= self._least:
                return
            if time.monotonic() > end_s:
                needs = " and ".join(f"{amount:g} {name}" for name, amount in self._resources.items())
                raise RankError(
                    f"the Ray cluster has room for {room} of at least {self._least} ranks, of {needs} each",
                    hint="Add nodes, or end what else uses them; `ray status` shows what is free.",
                )
            time.sleep(_POLL_S)

    def _give_up(self, node: _Node) -> None:
        self._nodes.remove(node)
        with suppress(RayError):
            ray.kill(node.agent)

    def _give_up_lost(self) -> None:
        for node in [node for node in self._nodes if node.lost]:
            self._doubted[node.id] = time.monotonic()
            self._give_up(node)

    def _ask(self, method: str, *arguments: Any, timeout_s: float) -> list[tuple[_Node, Any]]:
        """Call a method of every agent that has ranks; return the answers of those that are not lost."""
        asking = [node for node in self._nodes if node.ranks and not node.lost]
        return [*self._answers([(node, getattr(node.agent, method).remote(*arguments)) for node in asking], timeout_s)]

    def _answers(self, asked: Sequence[tuple[_Node, Any]], timeout_s: float) -> Iterator[tuple[_Node, Any]]:
        """Yield the answers of nodes; a node is lost if its agent has ended, fails or does not answer in time."""
        end_s = time.monotonic() + timeout_s
        for node, answer in asked:
            try:
                yield node, ray.get(answer, timeout=max(0.0, end_s - time.monotonic()))
            except GetTimeoutError:
                node.lost = f"it has not answered for {timeout_s:.0f} s"
            except RayTaskError as error:
                node.lost = f"its agent has failed: {error.cause}"
            except RayError as error:
                node.lost = str(error).partition("\n")[0]
