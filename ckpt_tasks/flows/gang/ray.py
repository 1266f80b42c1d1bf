"""The ranks of a gang on several hosts: on each node a Ray actor runs the node's ranks, as an agent does on one host.

Invariants

1. No rank outlives its node's actor, which is its agent (`processes.py`). The actor ends when its raylet or its driver
   ends.
2. If a node cannot be reached, all of its ranks are lost: the gang does not wait for them, and Ray kills the actor when
   the node comes back. Until then the ledger fences these ranks, because the session takes the run over.
3. Every wait for a node has a time limit.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ckpt_tasks.errors import RankError
from ckpt_tasks.flows.gang.engine import Heard, RankProcess
from ckpt_tasks.flows.gang.messages import Begin, Message
from ckpt_tasks.flows.gang.ray_agent import ANSWER_S, POLL_S, Agent

_START_S = 300.0  # A busy machine imports torch slowly.
_ROOM_S = 60.0
_DOUBT_S = 60.0  # Do not use a lost node for this time: Ray needs up to 30 s to notice that a node is lost.
_TELL_S = 300.0
_WAITS = "RAY_gcs_server_port_wait_time_s"  # How often ray.init asks a head that does not answer, for 40 s each time.
_log = logging.getLogger("ckpt_tasks")


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

    A rank takes `resources` of its node (default: one GPU, or one CPU if the cluster has no GPU). A gang has `least` to
    `size` ranks. It uses first the nodes that had ranks before, where ranks find their snapshots in memory.
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
        self._doubted: dict[str, float] = {}  # The time at which each node was lost.
        self._connected = False
        self._kept = False  # True if another number of ranks cannot restore the run.
        self._told_s = -math.inf

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
        """Start agents on nodes with room; return True if a new gang would have more ranks than this gang."""
        self.prepare()
        room = sum(node.room for node in self._nodes if node.is_ready)
        return min(room, self._size) > len(self.ranks)

    def keep_to(self, ranks: int | None) -> bool:
        """Start exactly so many ranks from now on; return False if that is outside `least` to `size`, or no change."""
        if ranks is None or not self._least <= ranks <= self._size or self._least == self._size:
            return False
        self._least = self._size = ranks
        self._kept = True
        return True

    def has_room(self) -> bool:
        """Return False while the ranks that the gang must keep to have no room; log that every five minutes."""
        if not self._kept:
            return True  # `start` waits for room, and gives up.
        self.prepare()
        [*self._answers([(node, node.ready) for node in self._nodes if node.is_ready], ANSWER_S)]
        self._give_up_lost()
        room = sum(node.room for node in self._nodes if node.is_ready)
        if room < self._least and time.monotonic() - self._told_s > _TELL_S:
            self._told_s = time.monotonic()
            _log.warning("The Ray cluster has room for %d of %d ranks: training waits for more.", room, self._least)
        return room >= self._least

    def start(self, begin: Begin) -> int:
        """Start the ranks on the available nodes; return the port on rank 0's node. Raises RankError."""
        self._gather()
        size, port, starting = min(self._size, sum(node.room for node in self._nodes)), 0, []
        first, address = 0, self._nodes[0].address
        begin = replace(begin, size=size, host=address)
        for node in self._nodes:
            count = min(node.room, size - first)
            node.ranks = [RankProcess(rank, 0, node.address) for rank in range(first, first + count)]
            first += count
        for node in (node for node in self._nodes if node.ranks):
            first = node.ranks[0].rank
            own = replace(begin, first_rank=first, local_size=len(node.ranks), port=port)
            starting.append((node, node.agent.start.remote(own)))
            if first == 0:  # Rank 0 must listen before the other ranks get its address.
                port = next((port for _, (port, _) in self._answers(starting, _START_S)), 0)
        for node, (_, pids) in self._answers(starting, _START_S):
            for rank, pid in zip(node.ranks, pids, strict=True):
                rank.pid = pid
        if lost := [node for node, _ in starting if node.lost]:
            why = f"the node {lost[0].address} is lost: {lost[0].lost}"
            self.kill()
            raise RankError(why)
        return port

    def tell(self, ranks: Sequence[RankProcess], message: Message) -> None:
        """Send a message to some ranks through their nodes' agents; do not wait."""
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
        """Check every node, then return messages: a lost node makes ranks of other nodes fail at once."""
        self._ask("answer", timeout_s=ANSWER_S)
        return self.hear(POLL_S)

    def look(self) -> None:
        """Check the ranks of every node."""
        self._look(None, ANSWER_S)

    def write_stacks(self, timeout_s: float) -> None:
        """Have every node write the stacks of its ranks."""
        self._look(timeout_s, timeout_s + ANSWER_S)

    def _look(self, stacks_s: float | None, timeout_s: float) -> None:
        for node, states in self._ask("look", stacks_s, timeout_s=timeout_s):
            for rank, state in zip(node.ranks, states, strict=True):
                vars(rank).update(state)

    def await_end(self, timeout_s: float) -> None:
        """Wait until every reachable rank has ended by itself."""
        self._ask("await_end", timeout_s, timeout_s=timeout_s + ANSWER_S)

    def kill(self) -> None:
        """Kill the ranks of every reachable node; drop the other nodes."""
        self._ask("kill", timeout_s=ANSWER_S)
        for node in self._nodes:
            node.ranks, node.hearing = [], None
        self._give_up_lost()

    def close(self) -> None:
        """End the ranks and the agents; close the connection to the cluster if this object has made it."""
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
                if port.isdecimal() and "/" not in host:  # ray.init would wait for a missing head node for minutes.
                    socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
                with _asking_once():
                    ray.init(address=self._address, configure_logging=False, runtime_env=self._runtime_env or None)
            except (OSError, RuntimeError, ValueError) as error:
                raise RankError(f"no Ray cluster answers at {self._address}: {error}") from error
            if in_main:
                signal.signal(signal.SIGTERM, ours)  # Ray's handler would end this process before the ranks commit.
            self._connected = True
        if not self._resources:
            self._resources = {"GPU" if ray.cluster_resources().get("GPU") else "CPU": 1}

    def _plan(self) -> dict[str, tuple[str, int]]:
        """Return the address and the number of ranks for each node, by node id; nodes with an agent come first."""
        held = {node.id: node.room for node in self._nodes if not node.lost}
        free, now_s, rooms = available_resources_per_node(), time.monotonic(), {}
        for each in ray.nodes():
            node_id = each["NodeID"]
            if not each["Alive"] or now_s - self._doubted.get(node_id, -_DOUBT_S) < _DOUBT_S:
                continue
            all_of_it, left = (self._count(of) for of in (each["Resources"], free.get(node_id, {})))
            # For a moment the cluster may count resources as free that an agent has just taken.
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
        remote: Any = ray.remote(concurrency_groups={"tell": 1})
        actor = remote(Agent).options(
            num_cpus=cpus,
            num_gpus=devices,
            resources=whole,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        agent = actor.remote(int(devices), max(1, int(self._resources.get("CPU", 1))))
        return _Node(node_id, address, room, agent, agent.warm.remote())

    def _gather(self) -> None:
        """Wait until agents have started on nodes that together have room for at least `least` ranks."""
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
            time.sleep(POLL_S)

    def _give_up(self, node: _Node) -> None:
        self._nodes.remove(node)
        with suppress(RayError):
            ray.kill(node.agent)

    def _give_up_lost(self) -> None:
        for node in [node for node in self._nodes if node.lost]:
            self._doubted[node.id] = time.monotonic()
            self._give_up(node)

    def _ask(self, method: str, *arguments: Any, timeout_s: float) -> list[tuple[_Node, Any]]:
        """Call a method of the agent of every node that has ranks; return the answers of nodes that are not lost."""
        asking = [node for node in self._nodes if node.ranks and not node.lost]
        return [*self._answers([(node, getattr(node.agent, method).remote(*arguments)) for node in asking], timeout_s)]

    def _answers(self, asked: Sequence[tuple[_Node, Any]], timeout_s: float) -> Iterator[tuple[_Node, Any]]:
        """Yield the answers of nodes; mark a node as lost if its agent has ended, fails or does not answer in time."""
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


@contextmanager
def _asking_once() -> Iterator[None]:
    """Let ray.init ask a head that listens and does not answer for less than a minute, not for a quarter of an hour."""
    ours = _WAITS not in os.environ
    os.environ.setdefault(_WAITS, "1")
    try:
        yield
    finally:
        if ours:
            del os.environ[_WAITS]
