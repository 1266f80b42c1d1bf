"""Describe in words how the processes of ranks have ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ckpt_tasks.gang.engine import RankProcess

_MOST_ROWS = 32
_MOST_NAMED = 3


def endings_of(ranks: Sequence[RankProcess]) -> str:
    """Describe how ranks have ended: lost nodes with all their ranks first, then rank by rank."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for rank in ranks:
        if rank.lost:
            nodes.setdefault((rank.host, rank.lost), []).append(str(rank.rank))
    lost = [f"the node {host} of rank {', '.join(numbers)} is lost: {why}" for (host, why), numbers in nodes.items()]
    return _some([*lost, *(_ending_of(rank) for rank in ranks if not rank.lost)])


def _ending_of(rank: RankProcess) -> str:
    """Describe how a rank has ended: by a signal (and whether the kernel had a reason), or by itself."""
    why = ": the memory of its cgroup was exhausted" if rank.out_of_memory else ""
    return f"rank {rank.rank} {_ending(rank)}{why}"


def _ending(rank: RankProcess) -> str:
    if rank.lost:
        return f"on the lost node {rank.host}"
    if rank.status is None:
        return "is stopped" if rank.is_stopped else "runs"
    if rank.status >= 0:
        return f"ended by itself with exit status {rank.status}, in the middle of its work"
    try:
        return f"was killed by {signal.Signals(-rank.status).name}"
    except ValueError:
        return f"was killed by signal {-rank.status}"


def table_of(ranks: Sequence[RankProcess]) -> str:
    """Return a table of the ranks before the agent ends them; many similar ranks are shown by the first rows."""
    rows = [f"{rank.rank:4}  {rank.pid:7}  {rank.step:9}  {_ending(rank)}" for rank in ranks[:_MOST_ROWS]]
    more = [f"and {len(ranks) - _MOST_ROWS} more"] if len(ranks) > _MOST_ROWS else []
    return "\n".join(["rank  process  last step", *rows, *more])


def _some(words: Sequence[str]) -> str:
    """Join the texts about several ranks."""
    return "; ".join(
        [*words[:_MOST_NAMED], *([f"{len(words) - _MOST_NAMED} more"] if len(words) > _MOST_NAMED else [])]
    )


def oom_kills() -> int:
    """Return how many processes of this cgroup the kernel has killed for lack of memory; 0 if unknown."""
    with suppress(OSError, ValueError):
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
        # The path as the host names it, or as it is within a container.
        for place in (f"/sys/fs/cgroup{own}", "/sys/fs/cgroup"):
            events = Path(place, "memory.events")
            if events.exists():
                return int(dict(line.split() for line in events.read_text().splitlines()).get("oom_kill", "0"))
    return 0
