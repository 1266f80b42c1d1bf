"""Texts about a gang for people: how its ranks have ended, and its row in the table of gangs."""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ckpt_tasks.errors import RankError
from ckpt_tasks.flows.gang.engine import RankProcess
from ckpt_tasks.flows.gang.messages import Done

_log = logging.getLogger("ckpt_tasks")
_MOST_ROWS = 32
_MOST_NAMED = 3
_MAIN = ("flows/gang/rank.py", "_serve")  # This frame marks the main thread of a rank.
_OF_COLLECTIVES = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/", "/ckpt_tasks/checkpoint/ranks/")
_PLACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\S+)')


def endings_of(ranks: Sequence[RankProcess]) -> str:
    """Describe how ranks have ended: lost nodes with all their ranks first, then rank by rank."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for rank in ranks:
        if rank.lost:
            nodes.setdefault((rank.host, rank.lost), []).append(str(rank.rank))
    lost = [
        f"{f'the node {host} of ' if host else ''}rank {', '.join(numbers)} is lost: {why}"
        for (host, why), numbers in nodes.items()
    ]
    return _some([*lost, *(_ending_of(rank) for rank in ranks if not rank.lost)])


def _ending_of(rank: RankProcess) -> str:
    """Describe how a rank has ended: by itself, or by a signal, perhaps because its cgroup had no memory left."""
    why = ": the memory of its cgroup was exhausted" if rank.out_of_memory else ""
    return f"rank {rank.rank} {_ending(rank)}{why}"


def _ending(rank: RankProcess) -> str:
    if rank.lost:
        return f"on the lost node {rank.host}" if rank.host else "ended with its fork server"
    if rank.status is None:
        return "is stopped" if rank.is_stopped else "runs"
    if rank.status >= 0:
        return f"ended by itself with exit status {rank.status}, in the middle of its work"
    try:
        return f"was killed by {signal.Signals(-rank.status).name}"
    except ValueError:
        return f"was killed by signal {-rank.status}"


def waits_for_others(stacks: str) -> bool:
    """Return True if the main thread of a rank, by its stacks, waits for other ranks: in a collective or a backward."""
    for thread in stacks.split("(most recent call first):")[1:]:
        frames = _PLACE.findall(thread)
        if any(file.endswith(_MAIN[0]) and name == _MAIN[1] for file, _, name in frames):
            return any(part in frames[0][0] for part in _OF_COLLECTIVES)
    return False


def hung(ranks: Sequence[RankProcess], silent: Sequence[int], silent_s: float, step: int) -> RankError:
    """Log the stacks that the running ranks have written, and return the error for a hang of the `silent` ranks."""
    for rank in ranks:
        if not rank.is_stopped:
            _log.warning("The stacks of rank %d:\n%s", rank.rank, rank.written or "it wrote none")
    error = RankError(
        f"{hung_words(ranks, silent)}: no step for {silent_s:.0f} s",
        step=step,
        hint="The log has the stacks. If a step may take as long, raise flush_timeout_s.",
    )
    error.add_note(table_of(ranks))
    return error


def hung_words(ranks: Sequence[RankProcess], silent: Sequence[int]) -> str:
    """Say which ranks hang, after their stacks are written: stopped ones, or those that do not wait for others."""
    stopped = [rank.rank for rank in ranks if rank.is_stopped]
    waiting = [rank.rank for rank in ranks if not rank.is_stopped and waits_for_others(rank.written)]
    busy = [rank.rank for rank in ranks if rank.rank not in waiting]
    if stopped:
        return f"rank {_list(stopped)} is stopped (SIGSTOP, or a debugger)"
    if not busy:
        return f"rank {_list(waiting)} waits for the others, in a collective that not all of them have begun"
    hung = f"rank {_list(busy if waiting else silent)} makes no progress"
    return f"{hung}, and rank {_list(waiting)} waits for it in a collective" if waiting else hung


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def table_of(ranks: Sequence[RankProcess]) -> str:
    """Return a table of the ranks before the agent ends them; of many ranks, show the first 32."""
    rows = [f"{rank.rank:4}  {rank.pid:7}  {rank.step:9}  {_ending(rank)}" for rank in ranks[:_MOST_ROWS]]
    more = [f"and {len(ranks) - _MOST_ROWS} more"] if len(ranks) > _MOST_ROWS else []
    return "\n".join(["rank  process  last step", *rows, *more])


def _some(words: Sequence[str]) -> str:
    """Join texts; of more than three, join only the first three and the number of the others."""
    return "; ".join(
        [*words[:_MOST_NAMED], *([f"{len(words) - _MOST_NAMED} more"] if len(words) > _MOST_NAMED else [])]
    )


def oom_kills() -> int:
    """Return how many processes of this cgroup the kernel has killed for lack of memory; 0 if unknown."""
    with suppress(OSError, ValueError):
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
        # The first path is right on a host, the second one within a container.
        for place in (f"/sys/fs/cgroup{own}", "/sys/fs/cgroup"):
            events = Path(place, "memory.events")
            if events.exists():
                return int(dict(line.split() for line in events.read_text().splitlines()).get("oom_kill", "0"))
    return 0


_MOST_GANGS = 50
_MOST_HOSTS = 8


class GangRows:
    """The rows of a table of gangs, newest first. The slowest rank computes longest; the other ranks wait for it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, str]] = []

    def began(self, ranks: Sequence[RankProcess], host: str, done: Mapping[int, Done]) -> str:
        """Add the row of a gang that has restored; return a text: where the gang runs, and what it has restored."""
        hosts: dict[str, list[int]] = {}
        for rank in ranks:
            hosts.setdefault(rank.host or host, []).append(rank.rank)
        named = [f"{name}: {_span(numbers)}" for name, numbers in hosts.items()]
        more = [f"and {len(named) - _MOST_HOSTS} more"] if len(named) > _MOST_HOSTS else []
        sources = {name: done[numbers[0]].source for name, numbers in hosts.items()}
        each = [done[0].source] if len(set(sources.values())) == 1 else [f"{n}: {s}" for n, s in sources.items()]
        where, source = ", ".join([*named[:_MOST_HOSTS], *more]), ", ".join(each[:_MOST_HOSTS])
        at = f"{done[0].position:,}"
        row = {"steps": at, "ranks": str(len(ranks)), "hosts": where, "restored from": source}
        self.rows = [{**row, "slowest rank": "", "ended by": ""}, *self.rows][:_MOST_GANGS]
        return f"{len(ranks)} ranks ({where}), {f'restored from {source}' if source else 'a new run'}"

    def trained(self, done: Mapping[int, Done]) -> None:
        """Record the slowest rank of a batch, with the share of the batch's time in which this rank computed."""
        slowest = max(done, key=lambda rank: done[rank].busy)
        first = self.rows[0]["steps"].partition(" ")[0]
        share = f"rank {slowest} works {done[slowest].busy:.0%} of the time"
        self.rows[0] |= {"steps": f"{first} to {done[slowest].position:,}", "slowest rank": share}

    def ended(self, error: BaseException, step: int) -> None:
        """Record what ended a gang, after which step, and in which line of the program."""
        if self.rows and not self.rows[0]["ended by"]:
            first = self.rows[0]["steps"].partition(" ")[0]
            self.rows[0]["steps"] = first if first == f"{step:,}" else f"{first} to {step:,}"
            places = [*_PLACE.finditer("\n".join(getattr(error, "__notes__", [])))]
            at = f" ({places[-1]['file']}:{places[-1]['line']} in {places[-1]['name']})" if places else ""
            self.rows[0]["ended by"] = f"{error or type(error).__name__}{at}"


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
