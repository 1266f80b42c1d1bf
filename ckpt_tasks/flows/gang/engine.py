"""The interface of an engine, which runs the ranks of a gang for its session; `processes.py` is one host's engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ckpt_tasks.flows.gang.messages import Begin, Message


@dataclass(eq=False)
class RankProcess:
    """A rank's process: its last `step`, its exit `status` (None: unknown), and its condition at the last check.

    `host` is the address of the rank's node ("": the agent's node); `lost` says why the agent cannot reach this node
    any more, or why all ranks of it have ended; `written` are the stacks that the rank has written.
    """

    rank: int
    pid: int
    host: str = ""
    step: int = 0
    status: int | None = None
    lost: str = ""
    out_of_memory: bool = False
    is_stopped: bool = False
    written: str = ""


Heard = list[tuple[RankProcess, Message | None]]


class Engine(Protocol):
    """Starts and ends the processes of one gang at a time, and exchanges messages with them."""

    @property
    def ranks(self) -> Sequence[RankProcess]:
        """The processes of the gang, by rank; empty if no gang runs."""

    def prepare(self) -> None:
        """Begin the slow part of a start; do not wait for its end."""

    def start(self, begin: Begin) -> int:
        """Start the ranks, send each a Begin, and return the port where ranks connect to rank 0. Raises RankError."""

    def has_more(self) -> bool:
        """Return True if a new gang would have more ranks than this gang; begin to prepare the new ranks."""

    def keep_to(self, ranks: int | None) -> bool:
        """Start exactly so many ranks from now on; return False if the engine cannot, or if it does so already."""

    def has_room(self) -> bool:
        """Return False while the ranks that it must keep to have no room; log that now and then."""

    def tell(self, ranks: Sequence[RankProcess], message: Message) -> None:
        """Send a message to some ranks; only `hear` shows which ranks have ended."""

    def hear(self, timeout_s: float) -> Heard:
        """Return messages since the last call, and None for each rank that has ended; wait at most `timeout_s`."""

    def hear_causes(self) -> Heard:
        """Return messages that may explain why ranks have just failed, such as the end of other ranks."""

    def look(self) -> None:
        """Update the `ranks`: how they have ended, which are stopped, and which stacks they have written."""

    def write_stacks(self, timeout_s: float) -> None:
        """Have every running rank write the stacks of its threads; wait for them, at most `timeout_s`."""

    def await_end(self, timeout_s: float) -> None:
        """Wait until every rank has ended by itself, at most `timeout_s`."""

    def kill(self) -> None:
        """Kill every rank; return when all reachable ranks have ended."""

    def close(self) -> None:
        """Kill the ranks, and the processes that `prepare` has started."""
