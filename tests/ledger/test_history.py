"""The ledger in use: every outcome of a put, entries that are damaged or foreign, long lists, and whose run it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.errors import CheckpointNotFoundError, FencedError, FormatVersionError, IntegrityError, RunMismatchError
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.keys import FORMAT_NAME, ledger_name
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.records import Owner
from ckpt_tasks.ledger.history import History
from ckpt_tasks.storage.local import LocalStore
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


def test_a_change_of_mind_writes_nothing(history: History) -> None:
    """An error while the next state is made leaves the ledger as it was."""

    def refuse(state: State, n: int) -> State:
        raise IntegrityError("no")

    with pytest.raises(IntegrityError):
        history.append({"kind": "note"}, refuse, owner=ME)
    assert history.head().next_n == 1


@pytest.mark.parametrize("owner", [OTHER, owner_of(1, id="b" * 32)])
def test_only_the_owner_commits(history: History, owner: Owner) -> None:
    """P33: another epoch, or another process with the same epoch, is fenced before it writes anything."""
    before = sorted(Path(history.store.url).rglob("*"))
    with pytest.raises(FencedError):
        commit(history, 5, owner=owner)
    assert sorted(Path(history.store.url).rglob("*")) == before


# ── damage ───────────────────────────────────────────────────────────────────────────────────────────────────


def damage(history: History, n: int, kind: str) -> None:
    path = Path(history.store.url, ledger_name(n))
    data = path.read_bytes()
    match kind:
        case "flip":
            path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
        case "cut":
            path.write_bytes(data[:-10])
        case "zero":
            path.write_bytes(bytes(len(data)))
        case "other":
            path.write_bytes(Path(history.store.url, ledger_name(n - 1)).read_bytes())
        case "empty":
            path.write_bytes(b"")


@pytest.mark.parametrize("kind", ["flip", "cut", "zero", "other", "empty"])
def test_a_damaged_newest_entry_is_passed_over_and_named(history: History, kind: str) -> None:
    """P35, P49: the newest good entry counts, what was passed over is named, and its number is not used again."""
    for step in (1, 2, 3):
        commit(history, step)
    damage(history, 2, kind)
    assert steps(history.head()) == [1, 2, 3]
    damage(history, 3, kind)
    other = History(LocalStore(history.store.url))  # it has not read them before
    head = other.head()
    assert steps(head) == [1]
    assert head.damaged == (ledger_name(3), ledger_name(2))
    assert commit(other, 4) == 4
    assert steps(other.head()) == [1, 4]
    assert other.head().state.spared_epochs == 3  # the owner's, and of each damaged entry's that may have been one


@pytest.mark.parametrize("kind", ["flip", "cut", "zero", "other", "empty"])
def test_who_has_read_a_newest_entry_goes_on_from_it_when_it_is_damaged(history: History, kind: str) -> None:
    """P35, P49: what an owner has written or read is not lost by a damaged entry: its next one holds it again."""
    for step in (1, 2, 3):
        commit(history, step)
    damage(history, 2, kind)
    damage(history, 3, kind)
    assert (steps(history.head()), history.head().damaged) == ([1, 2, 3], ())
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


@pytest.mark.parametrize("times", range(1, 10))
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


def test_a_directory_is_one_runs(history: History) -> None:
    """The first run's key stays; another one is refused, and a reader without a key learns it."""
    history.create("mine")
    history.create("yours")
    assert history.check(None) == history.check("mine") == "mine"
    with pytest.raises(RunMismatchError, match="'mine'"):
        history.check("yours")


def test_a_directory_without_a_run_says_so(tmp_path: Path) -> None:
    """A wrong directory is CheckpointNotFoundError, not an empty run."""
    with pytest.raises(CheckpointNotFoundError, match="there is no run at"):
        History(LocalStore(tmp_path / "nothing")).check(None)


@pytest.mark.parametrize("data", [b"", b"null", b"[1]", b"{}", b"\0" * 99, b"[" * 9999, b"x" * (2 << 20)])
def test_a_damaged_format_file_is_no_other_run(history: History, data: bytes) -> None:
    """P49: a damaged format.json is told from a missing one and from another run's."""
    history.create("mine")
    Path(history.store.url, FORMAT_NAME).write_bytes(data)
    assert history.check("mine") is None


def sealed(body: dict[str, Any]) -> bytes:
    return canonical_json({**body, "digest": digest_hex(canonical_json(body))})


@pytest.mark.parametrize(
    "body", [{}, {"version": None}, {"version": 1}, {"run_key": "mine"}, {"version": 0, "run_key": "m"}]
)
def test_a_format_file_that_nobody_wrote_is_damage(history: History, body: dict[str, Any]) -> None:
    """P49: missing fields are damage, even where the digest fits."""
    history.create("mine")
    Path(history.store.url, FORMAT_NAME).write_bytes(sealed(body))
    assert history.check("mine") is None


def test_a_newer_run_directory_is_refused(history: History) -> None:
    """P59: the directory of a newer version says so before anything else is read."""
    history.create("mine")
    Path(history.store.url, FORMAT_NAME).write_bytes(sealed({"version": 2, "run_key": "mine"}))
    with pytest.raises(FormatVersionError):
        history.check(None)
