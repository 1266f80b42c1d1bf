"""Who has read a ledger entry looks for the next one: no list is asked for, and nothing that is gone is remembered."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpt_tasks.errors import FencedError
from ckpt_tasks.format.keys import ledger_name
from ckpt_tasks.ledger.history import History, newest_first
from ckpt_tasks.storage.port import WrappedStore
from tests.support.ledgers import commit, owned, steps


@pytest.fixture
def history(tmp_path: Path) -> History:
    return owned(tmp_path / "run")


class Listing(WrappedStore):
    """Count how often the names are asked for."""

    asked = 0

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        self.asked += 1
        return super().names(prefix, limit)


@pytest.fixture
def listing(history: History) -> Listing:
    return Listing(history.store)


def test_a_reader_lists_once(history: History, listing: Listing) -> None:
    """P54: a reader that follows a run asks for the list of entries once, however long the ledger gets."""
    reader = History(listing)
    for step in range(1, 100):
        commit(history, step)
        assert steps(reader.head()) == [*range(1, step + 1)]
        assert reader.head() == History(history.store).head()
    assert commit(reader, 100) == 100
    assert listing.asked == 1


def test_many_entries_at_once_are_found(history: History, listing: Listing) -> None:
    """A reader that was away for many entries finds the newest by the list."""
    reader = History(listing)
    reader.head()
    for step in range(1, 40):
        commit(history, step)
    assert steps(reader.head()) == [*range(1, 40)]
    assert listing.asked == 2


@pytest.mark.parametrize("since", [0, 1, 19, 40])
def test_entries_are_read_down_to_the_one_that_is_named(history: History, since: int) -> None:
    """From the newest to the first or to number `since`, that one too, over any number of lists and reads."""
    newest = max(commit(history, step) for step in range(1, 41))
    assert [entry.n for entry, _ in newest_first(history, since=since)] == [*range(newest, since - 1, -1)]


@pytest.mark.parametrize("lost", ["the next", "all"])
def test_a_reader_remembers_nothing_that_is_gone(history: History, lost: str) -> None:
    """P51: what a process has read before hides no entry that was damaged or removed since then."""
    commit(history, 1)
    reader = History(history.store)
    assert steps(reader.head()) == [1]
    ledger = Path(history.store.url, "ledger")
    if lost == "the next":
        commit(history, 2)
        (Path(history.store.url) / ledger_name(2)).write_text("torn")
        commit(history, 3)  # by the process that knows step 2
    else:
        shutil.rmtree(ledger)
    fresh = History(history.store)
    assert reader.head() == fresh.head()
    assert reader.head().damaged == ()  # a newer good one makes up for the next
    assert steps(reader.head()) == {"the next": [1, 2, 3], "all": []}[lost]
    if lost == "all":
        with pytest.raises(FencedError):
            commit(reader, 4)
