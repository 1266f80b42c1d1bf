"""What pages show of the gangs of one process: a row of texts for each gang, not for each rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ckpt_tasks.gang.engine import RankProcess
from ckpt_tasks.gang.messages import Done

_MOST_ROWS = 50
_MOST_HOSTS = 8
_PLACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')


class GangRows:
    """The rows, newest first; `slowest` is the rank that works the longest, while the others wait for it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, str]] = []

    def began(self, ranks: Sequence[RankProcess], host: str, done: Mapping[int, Done]) -> str:
        """Begin the row of a gang that has restored; return in words where it runs and what it has restored."""
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
        self.rows = [{**row, "slowest rank": "", "ended by": ""}, *self.rows][:_MOST_ROWS]
        return f"{len(ranks)} ranks ({where}), {f'restored from {source}' if source else 'a new run'}"

    def trained(self, done: Mapping[int, Done]) -> None:
        """Name the slowest rank of a batch, with the share of the batch's time in which it worked."""
        slowest = max(done, key=lambda rank: done[rank].busy)
        first = self.rows[0]["steps"].partition(" ")[0]
        share = f"rank {slowest} works {done[slowest].busy:.0%} of the time"
        self.rows[0] |= {"steps": f"{first} to {done[slowest].position:,}", "slowest rank": share}

    def ended(self, error: BaseException) -> None:
        """Record what ended a gang, and in which line of the program."""
        if self.rows and not self.rows[0]["ended by"]:
            places = [*_PLACE.finditer("\n".join(getattr(error, "__notes__", [])))]
            at = f" ({places[-1]['file']}:{places[-1]['line']} in {places[-1]['name']})" if places else ""
            self.rows[0]["ended by"] = f"{error or type(error).__name__}{at}"


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
