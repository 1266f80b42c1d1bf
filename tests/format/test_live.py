"""Many live checkpoints: what an entry says of them, what a commit costs, and what would not be read is not written."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.errors import StateError
from ckpt_tasks.format.keys import ledger_name
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.live import MAX_INLINE_CHECKPOINTS, cut, joined_segments, read_live, read_segment, write_segment
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.storage.local import LocalStore
from tests.support.ledgers import ME, made, owned, steps

NONE = frozenset[str]()


@pytest.fixture
def history(run_dir: Path) -> History:
    return owned(run_dir)


def grown(run_dir: Path, count: int) -> History:
    """Make a run with so many live checkpoints, as if each had been committed."""
    history = owned(run_dir)
    for _ in range(2):
        history.append({"kind": "note"}, lambda state, n: state, owner=ME)
    last = history.head().entry
    assert last is not None
    high = replace(last, n=count + 10, nonce="f" * 32)  # numbers from which so many commits could have come
    history.store.put_if_absent(ledger_name(high.n), high.to_bytes()[0])
    history = History(LocalStore(run_dir))
    live = tuple(made(step, step, f"{step - 1}@{step - 1}", metrics={"loss": 0.5}) for step in range(count))
    history.append({"kind": "note"}, lambda state, n: replace(state, live=live), owner=ME)
    return history


def lists(history: History) -> dict[str, int]:
    """Return the objects with parts of the list, and their sizes."""
    return {path.name: path.stat().st_size for path in Path(history.store.url).glob("live/*.json")}


@pytest.mark.parametrize("count", [MAX_INLINE_CHECKPOINTS, MAX_INLINE_CHECKPOINTS + 1, 1000])
def test_a_long_list_is_read_back_whole(run_dir: Path, count: int) -> None:
    """A list that is too long for an entry lies beside the ledger, but for its end; later entries name it."""
    history = grown(run_dir, count)
    for known in (history, History(LocalStore(run_dir))):
        assert steps(known.head()) == list(range(count))
    before = lists(history)
    history.append({"kind": "note"}, lambda state, n: state, owner=ME)
    assert lists(history) == before
    assert len(before) == (max(0, count - 64) // 64 if count > MAX_INLINE_CHECKPOINTS else 0)


def test_any_changes_are_read_back(run_dir: Path) -> None:
    """P57: over commits, retirements anywhere and fall-backs the list stays itself, and its segments stay few."""
    dice = random.Random(7)
    live: tuple[Checkpoint, ...] = tuple(made(n, n, f"{n - 1}@{n - 1}") for n in range(300))
    segments = cut(live, ())
    state, n = State(live=live), 300
    for _ in range(60):
        for _ in range(dice.randrange(20)):
            back = dice.random() < 0.03
            parent = dice.choice(state.live[-200:]) if back else state.live[-1]
            state, n = state.with_checkpoint(made(n, n, parent.manifest_digest), NONE), n + 1
        gone = dice.sample(state.live[:-1], min(len(state.live) - 1, dice.choice([0, 3, 12, 40])))
        state = state.retire(frozenset(c.manifest_digest for c in gone), (), NONE)
        segments = cut(state.live, segments)
        inside = joined_segments(segments, ())
        assert inside == state.live[: len(inside)]
        assert all(read_segment(write_segment(s.checkpoints), digest=s.digest, name="x") for s in segments[:3])
        assert len(state.live) - len(inside) <= MAX_INLINE_CHECKPOINTS
        assert len(segments) <= len(state.live) // 32 + 2


@pytest.mark.parametrize("harm", ["delete", "flip"])
def test_a_damaged_segment_makes_its_entry_damaged(run_dir: Path, harm: str) -> None:
    """P49: an entry of which a segment is gone or changed counts as damaged, and the one before it is taken."""
    history = grown(run_dir, 300)
    path = min(Path(history.store.url).glob("live/*.json"))
    if harm == "delete":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().replace(b"7", b"8"))
    head = History(LocalStore(run_dir)).head()
    assert (head.state.live, head.damaged) == ((), (ledger_name(head.next_n - 1),))


# ── what would not be read ───────────────────────────────────────────────────────────────────────────────────

REFUSED: dict[str, dict[str, Any]] = {
    "seconds": {"cost_s": 2e9},
    "size": {"size_bytes": 1 << 63},
    "objects": {"objects": -1},
    "epochs": {"epochs": float("nan")},
    "a text": {"saved_at": None},
    "a later entry": {"n": 10**6},
    "another manifest": {"attempt": "e000002-0000000000000000"},
    "a foreign object": {"reuses": ("evals/x",)},
}


def adding(*checkpoints: Checkpoint) -> Callable[[State, int], State]:
    return lambda state, n: replace(state, live=(*state.live, *checkpoints))


# A commit adds one checkpoint, the newest.
@pytest.mark.parametrize(("kind", "count"), [("note", 0), ("note", 128), ("note", 192), ("commit", 0), ("commit", 128)])
def test_what_no_reader_takes_is_not_committed(run_dir: Path, count: int, kind: str) -> None:
    """P47: what a reader would refuse is refused before the commit, in the entry and in a segment; all stays as is."""
    history = grown(run_dir, count)
    before = history.head()
    after = tuple(made(count + k, before.next_n) for k in range(1, 64 if count == 192 else 1))
    for fields in REFUSED.values():
        wrong = replace(made(count, before.next_n), **fields)
        with pytest.raises(StateError, match="could not be read back"):
            history.append({"kind": kind}, adding(wrong, *after), owner=ME)
    fresh = History(LocalStore(run_dir)).head()
    assert (fresh.state, fresh.next_n, fresh.damaged) == (before.state, before.next_n, ())


@pytest.mark.parametrize("digests", [["0" * 32, "0" * 32], ["../../x"], ["a/b"], [3], [None]])
def test_segments_that_nobody_named(digests: list[Any]) -> None:
    """P49: one segment many times over, or a name that leads elsewhere, is not a list of ours."""
    with pytest.raises(ValueError, match=r"segment|str"):
        read_live({"segments": digests, "tail": []})
