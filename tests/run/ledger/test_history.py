"""The ledger in use: every outcome of a put, entries that are damaged or foreign, long lists, and whose run it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.errors import CheckpointNotFoundError, FencedError, FormatVersionError, RunMismatchError
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.keys import FORMAT_NAME, ledger_name
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.records import Owner
from ckpt_tasks.run.ledger.history import History, newest_first
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import WrappedStore
from tests.support.ledgers import ME, OTHER, commit, owned, owner_of, resealed, steps

Change = Callable[[State, int], State]


@pytest.fixture
def history(tmp_path: Path) -> History:
    return owned(tmp_path / "run")


def test_entries_are_numbered_without_gaps_and_chained(history: History) -> None:
    """Each entry has the next number and names the digest of the one before it."""
    for step in (1, 2, 3):
        assert commit(history, step) == step
    for n in (1, 2, 3):
        entry, _ = history.read_entry(n)
        assert entry.previous == history.read_entry(n - 1)[1]
    assert steps(history.head()) == [1, 2, 3]


def test_number_ten_comes_after_nine(history: History) -> None:
    """P51: the newest of many entries is found by number, whatever else lies in the directory."""
    ledger = Path(history.store.url, "ledger")
    for name in ("0", "00000000000000000000-notes", "1e3", "007", "a", ".DS_Store", "Z" * 30, *map(str, range(20, 40))):
        (ledger / name).write_text("foreign")
    for step in range(1, 25):
        commit(history, step)
    assert steps(history.head()) == list(range(1, 25))
    assert history.head().damaged == ()


# ── outcomes of a put ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("owner", [OTHER, owner_of(1, id="b" * 32)])
def test_only_the_owner_commits(history: History, owner: Owner) -> None:
    """P33: another epoch, or another process with it, is fenced before it writes; so is a change that raises."""
    before = sorted(Path(history.store.url).rglob("*"))
    with pytest.raises(ZeroDivisionError):
        history.append({"kind": "note"}, lambda state, n: 1 // 0, owner=ME)  # type: ignore[arg-type, return-value]
    with pytest.raises(FencedError):
        commit(history, 5, owner=owner)
    assert sorted(Path(history.store.url).rglob("*")) == before


def damage(history: History, n: int, kind: str) -> None:
    path = Path(history.store.url, ledger_name(n))
    data = path.read_bytes()
    harmed = {
        "flip": data[:50] + bytes([data[50] ^ 1]) + data[51:],
        "cut": data[:-10],
        "zero": bytes(len(data)),
        "other": Path(history.store.url, ledger_name(n - 1)).read_bytes(),
        "empty": b"",
    }
    path.write_bytes(harmed[kind])


# ── damage ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["flip", "cut", "zero", "other", "empty"])
def test_a_damaged_newest_entry_is_passed_over_and_named(history: History, kind: str) -> None:
    """P35, P49: the newest good entry counts, what was passed over is named, and its number is not used again.

    Who has written or read what is damaged since goes on from it.
    """
    for step in (1, 2, 3):
        commit(history, step)
    damage(history, 2, kind)
    assert steps(history.head()) == [1, 2, 3]
    damage(history, 3, kind)
    assert (steps(history.head()), history.head().damaged) == ([1, 2, 3], ())
    head = History(LocalStore(history.store.url)).head()
    assert steps(head) == [1]
    assert head.damaged == (ledger_name(3), ledger_name(2))
    assert commit(history, 4) == 4
    assert steps(History(LocalStore(history.store.url)).head()) == [1, 2, 3, 4]


class WrongBytes(LocalStore):
    """Answer the first `times` reads of what is put with other bytes, as a bad cable does."""

    times = 0
    last = ""

    def put_if_absent(self, name: str, body: bytes) -> None:
        super().put_if_absent(name, body)
        self.last = name

    def get(self, name: str, max_bytes: int) -> bytes:
        data = super().get(name, max_bytes)
        if name == self.last and self.times > 0:
            self.times -= 1
            return data[:-9] + b"x" + data[-8:]
        return data


@pytest.mark.parametrize("times", [1, 3, 4, 9])
def test_an_entry_that_is_read_back_with_wrong_bytes_is_committed_once(history: History, times: int) -> None:
    """P32: however often the bytes that come back are wrong, the checkpoint is live once, and readers see it once."""
    commit(history, 1)
    store = WrongBytes(history.store.url)
    store.times = times
    commit(History(store), 5)
    assert steps(History(LocalStore(history.store.url)).head()) == [1, 5]
    if times <= 3:
        assert history.head().next_n == 3


def test_when_more_are_damaged_than_are_looked_at_first_the_good_one_is_found(history: History) -> None:
    """P49: also below twenty damaged entries."""
    for step in range(1, 25):
        commit(history, step)
    for n in range(3, 25):
        damage(history, n, "zero")
    head = History(LocalStore(history.store.url)).head()
    assert steps(head) == [1, 2]
    assert len(head.damaged) == 22
    assert head.next_n == 25


def test_a_newer_entry_is_never_passed_over(history: History) -> None:
    """P59: an entry of a newer version stops the reader; it does not fall back to what was before."""
    commit(history, 1)
    path = Path(history.store.url, ledger_name(1))
    path.write_bytes(resealed(path.read_bytes(), lambda body: body.update(version=99)))
    with pytest.raises(FormatVersionError):
        history.head()
    with pytest.raises(FormatVersionError):
        commit(history, 2)


# ── whose run it is ──────────────────────────────────────────────────────────────────────────────────────────


def sealed(body: dict[str, Any]) -> bytes:
    return canonical_json({**body, "digest": digest_hex(canonical_json(body))})


NOT_OURS = [b"", b"null", b"[1]", b"{}", b"\0" * 99, b"[" * 9999, b"x" * (2 << 20)]
NOT_OURS += [sealed(body) for body in ({}, {"version": None}, {"version": 1}, {"version": 0, "run_key": "m"})]


def test_a_directory_is_one_runs(history: History, tmp_path: Path) -> None:
    """P49, P59: another run's key is refused; damage is told from a missing run, another run and a newer version."""
    history.create("mine")
    history.create("yours")
    assert history.check(None) == history.check("mine") == "mine"
    with pytest.raises(RunMismatchError, match="'mine'"):
        history.check("yours")
    with pytest.raises(CheckpointNotFoundError, match="there is no run at"):
        History(LocalStore(tmp_path / "nothing")).check(None)
    file = Path(history.store.url, FORMAT_NAME)
    for data in NOT_OURS:
        file.write_bytes(data)
        assert history.check("mine") is None
    file.write_bytes(sealed({"version": 2, "run_key": "mine"}))
    with pytest.raises(FormatVersionError):
        history.check(None)


# ── followed ─────────────────────────────────────────────────────────────────────────────────────────────────


class Listing(WrappedStore):
    """Count how often the names are asked for."""

    asked = 0

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        self.asked += 1
        return super().names(prefix, limit)


def test_a_reader_lists_once(history: History) -> None:
    """P54: a reader that follows a run asks for the list of entries once; one that was away for many, once more."""
    listing = Listing(history.store)
    reader = History(listing)
    for step in range(1, 40):
        commit(history, step)
        assert steps(reader.head()) == [*range(1, step + 1)]
        assert reader.head() == History(history.store).head()
    assert commit(reader, 40) == 40
    assert listing.asked == 1
    for step in range(41, 80):
        commit(history, step)
    assert steps(reader.head()) == [*range(1, 80)]
    assert listing.asked == 2


@pytest.mark.parametrize("since", [0, 19, 40])
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
