"""Read a ledger backwards; only entries that exist are requested, even if the newest number is absurdly high."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ckpt_tasks.format.keys import LEDGER_PREFIX, parse_ledger_name
from ckpt_tasks.format.ledger import Entry
from ckpt_tasks.ledger.history import History
from ckpt_tasks.process.processes import in_threads

__all__ = ["SYNCED", "newest_first"]

SYNCED = "synced"  # the note that a finished copy of a run leaves in the target's ledger

_FEWEST, _MOST = 4, 64  # entries that are read at once
_LISTED = 16  # names that are listed first; eight times as many in the next list
_THREADS = 8


def newest_first(history: History, *, since: int = 0) -> Iterator[tuple[Entry, str]]:
    """Yield (entry, digest) from the newest entry down to number `since`; skip damaged ones.

    Reads grow from a few entries to many at a time, so that a caller that stops early has read few.
    """
    numbers, batch_size = _numbers(history, since), _FEWEST
    while batch := [*islice(numbers, batch_size)]:
        entries = in_threads(history.good_entry, batch, _THREADS, "ckpt-ledger")
        yield from (entry for entry in entries if entry is not None)
        batch_size = min(2 * batch_size, _MOST)


def _numbers(history: History, since: int) -> Iterator[int]:
    """Yield the numbers of existing entries, newest first."""
    limit, last = _LISTED, -1
    while True:
        names = history.store.names(LEDGER_PREFIX, limit=limit)
        for name in names:
            n = parse_ledger_name(name)
            if n is None or 0 <= last <= n:
                continue  # a foreign name, or listed before
            if n < since:
                return
            last = n
            yield n
        if len(names) < limit:
            return
        limit *= 8
