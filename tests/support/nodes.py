"""A Ray cluster on this machine: a head without room for ranks, and nodes of two CPUs with addresses of their own."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from ray.cluster_utils import Cluster

from tests.support.agents import left

_STORE_BYTES = 80 << 20
# A node that says nothing is lost after some 10 s, also on a busy machine.
_HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 5,
}


class Nodes:
    """The nodes 127.0.0.2, 127.0.0.3 and so on, by their last number; what they start has `mark` in its environment."""

    def __init__(self, *numbers: int, mark: str):
        self._mark = mark
        self._environment = pytest.MonkeyPatch()
        self._environment.setenv("RAY_worker_niceness", "0")  # the machine is busy with what is nicer than nothing
        self._environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        self._nodes: dict[int, Any] = {}
        self._numbers = numbers

    def __enter__(self) -> Self:
        ours = signal.getsignal(signal.SIGTERM)
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": _HEALTH}
        self._cluster = Cluster(initialize_head=True, head_node_args={**head, "object_store_memory": _STORE_BYTES})
        for number in self._numbers:
            self.add(number)
        signal.signal(signal.SIGTERM, ours)  # the cluster's own would end this process
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cluster.shutdown()
        self._environment.undo()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def numbers(self) -> set[int]:
        return {*self._nodes}

    def add(self, number: int) -> None:
        """Start a node. Its raylet has the mark, and so has what it starts."""
        with pytest.MonkeyPatch.context() as marked:
            marked.setenv(*self._mark.split("="))
            self._nodes[number] = self._cluster.add_node(
                num_cpus=2, object_store_memory=_STORE_BYTES, node_ip_address=f"127.0.0.{number}"
            )

    def kill(self, number: int) -> None:
        """Kill a node's raylet with SIGKILL."""
        self._cluster.remove_node(self._nodes.pop(number), allow_graceful=False)

    def signal(self, number: int, what: signal.Signals) -> list[int]:
        """Send a signal to every process of a node; return their numbers."""
        [raylet] = self._nodes[number].all_processes["raylet"]
        tree = _descendants(raylet.process.pid)
        for pid in tree:
            with suppress(ProcessLookupError):
                os.kill(pid, what)
        return tree

    def forget(self, number: int) -> None:
        """Count a node no more, which has ended by itself."""
        self.kill(number)

    def ranks(self) -> list[str]:
        """Return the processes of ranks and of their fork servers, on all nodes."""
        return [command for command in left(self._mark.partition("=")[2]) if "fork_server" in command]


def _descendants(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdecimal():
                parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found
