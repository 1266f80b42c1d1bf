"""Snapshots in a memory directory outlive their process: the newest that is whole, and the run's, is restored."""

from __future__ import annotations

import itertools
import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import open_run
from ckpt_tasks.checkpoint.memory.cache import SnapshotCache
from ckpt_tasks.checkpoint.memory.memory import MemoryDirectory
from ckpt_tasks.checkpoint.save import rank_saver
from ckpt_tasks.checkpoint.save.parts import digest_image
from ckpt_tasks.errors import StoreError
from ckpt_tasks.format.keys import FORMAT_NAME
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.testing import die, seal, settle, under_way
from tests.crash.lives import SIZE, Fate, Life, end_threads, fated, seals, slots, state_of, step_of
from tests.support.cli_runs import flip
from tests.support.pipelines import Gate, Refusing, committed, gate, give_calls, opened
from tests.support.sweeps import quick_first
from tests.support.syncs import state_of as frozen_state
from tests.support.waiting import until

__all__ = ["fated", "gate"]
pytestmark = pytest.mark.usefixtures("fated")

FATES = [Fate(*fate) for fate in itertools.product(("sealed", "full", "unread"), ("stored", "refused", "stuck"))]
SEQUENCES = [*itertools.product(FATES, repeat=3)]
STUCK, REFUSED = Fate("sealed", "stuck"), Fate("sealed", "refused")
WORST = [
    [Fate("full", "refused"), Fate("unread", "refused"), Fate("full", "stuck")],
    [Fate("full", "stuck"), Fate(), Fate()],
    [Fate("unread", "stuck"), Fate(), Fate()],
]


@pytest.fixture
def lives(run_dir: Path, memory: Path) -> Iterator[Callable[..., Life]]:
    """Return what begins a life on this host; nothing of it goes on after the test."""
    begun: list[Life] = []

    def begin(fates: dict[int, Fate] | None = None, safe: int = 0, **options: Any) -> Life:
        begun.append(Life(run_dir, memory, fates, safe, **options))
        return begun[-1]

    yield begin
    end_threads(begun)


# ── what stays in memory ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "sequences", [WORST, pytest.param(random.Random(1).sample(SEQUENCES, 200), marks=pytest.mark.slow)], ids=len
)
@pytest.mark.parametrize("start", quick_first(["in one process", "restored from memory"]))
def test_what_a_restart_needs_stays_in_memory(fast_dir: Path, start: str, sequences: list[Sequence[Fate]]) -> None:
    """P44: whichever snapshots cannot be sealed, with a store that refuses or is stuck, no step that was safe is lost.

    At every moment memory or storage has the newest step that one of them ever had.
    """
    for number, sequence in enumerate(sequences):
        (place := fast_dir / f"{start} {len(sequences)} {number}").mkdir(mode=0o700)
        (memory := place / "memory").mkdir(mode=0o700)
        lives = [Life(place / "run", memory, {1: REFUSED} | dict(enumerate(sequence, start=2)))]
        lives[0].train(1)
        if start == "restored from memory":  # it saves step 1 again
            lives.append(Life(place / "run", memory, dict(enumerate(sequence, start=1)), lives[0].end()))
            lives[1].settle()
        lives[-1].train(*range(len(lives) + 1, 4))
        last = Life(place / "run", memory, {}, lives[-1].end())
        last.settle()
        assert committed(place / "run")[-1] == last.restored
        last.ckpt.close()
        end_threads(lives)
        shutil.rmtree(place)


def harmed(file: str, how: str) -> Callable[[Path], None]:
    def harm(slot: Path) -> None:
        (path,) = slot.glob(file)
        half = path.stat().st_size // 2
        if how == "gone":
            path.unlink()
        elif how == "cut":
            os.truncate(path, half)
        else:
            flip(path, half)

    return harm


def unseal_all(slot: Path) -> None:
    for path in slot.parent.rglob("seal.json"):
        path.unlink()


FILES = ("one-*.safetensors", "index.arrow", "manifest.json", "seal.json")
HARMS: dict[str, Callable[[Path], None]] = {
    "none": lambda slot: None,
    **{f"{how} {file}": harmed(file, how) for how in ("flip", "cut", "gone") for file in FILES},
    "unsealed": unseal_all,
}
# A harm of each file, and none.
QUICK = {("none", "stored"), (f"flip {FILES[0]}", "refused"), ("unsealed", "stuck")}
QUICK |= {(f"flip {file}", "stuck") for file in FILES}


@pytest.mark.parametrize(
    ("harm", "store"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(HARMS, ("stuck", "refused", "stored"))
    ],
)
def test_the_newest_that_is_whole_is_restored(
    lives: Callable[..., Life], memory: Path, caplog: pytest.LogCaptureFixture, harm: str, store: str
) -> None:
    """P28, P31, P44, P49: killed with steps 3 to 5 in memory, stored or not, the next process goes on from the newest.

    Damage in memory costs that snapshot and no other one: the next is taken from memory or storage, and it is said why.
    What was restored is committed, and is the last to be written over.
    """
    life = lives({step: Fate("sealed", store) for step in (3, 4, 5)})
    life.strict = store != "stuck"
    life.train(*range(1, 6))
    life.end()
    there = slots(memory)
    assert sorted(there) == ([3, 5] if store == "stuck" else [4, 5])
    HARMS[harm](there[5])
    expected = 5 if harm == "none" or store == "stored" else 2 if harm == "unsealed" else min(there)
    second = lives({expected: STUCK, expected + 1: STUCK}, expected)
    assert (second.restored, second.from_memory) == (expected, harm == "none" or (harm[0] != "u" and store != "stored"))
    said = any(why.startswith("5 in memory:") for why in second.skipped)
    assert said == (harm not in ("none", "unsealed") and "seal" not in harm), second.skipped
    assert ("is not used" in caplog.text) <= (harm != "unsealed")
    if store == "stored" and second.from_memory:
        assert under_way(second.ckpt).next_slot != there[expected].name
    second.train(expected + 1)
    third = lives(safe=second.end())
    assert third.restored == expected + 1
    third.ckpt.close()
    assert third.ckpt.run.restore(third.ckpt.run.find("latest"), state := state_of(0)).step == expected + 1
    assert step_of(state) == expected + 1
    assert slots(memory) == {}


@pytest.mark.parametrize("store", quick_first(["stored", "refused", "stuck"], 2))
def test_without_a_second_slot_the_first_one_stays_until_a_commit(
    lives: Callable[..., Life], memory: Path, store: str
) -> None:
    """P37, P44: a slot that cannot be made does not cost the snapshot in the other one that storage lacks.

    Later snapshots are private to the process. Once one is committed, the memory directory is empty.
    """
    first = lives({1: REFUSED})
    first.train(1)
    (slot,) = slots(memory).values()
    other = slot.with_name("b" if slot.name == "a" else "a")
    shutil.rmtree(other)
    other.write_bytes(b"")  # no directory of a slot can be made here
    second = lives({step: Fate("sealed", store) for step in (1, 2, 3)}, first.end())
    second.settle()
    assert second.ckpt.restore(state_of(0)) == 1  # in the same process as well
    second.train(2, 3)
    assert [*seals(memory)] == ([] if store == "stored" else [1])
    last = lives(safe=second.end())
    assert last.restored == (3 if store == "stored" else 1)
    last.ckpt.close()


@pytest.mark.parametrize(
    "fates", [[REFUSED, Fate("full"), Fate("full", "stuck"), Fate()], [REFUSED, Fate("full", "refused"), Fate()]]
)
def test_a_sealed_snapshot_holds_nothing_up(lives: Callable[..., Life], fates: list[Fate]) -> None:
    """P43, P44: the only sealed snapshot gives its slot up once a newer step is committed; till then the other one."""
    life = lives(dict(enumerate(fates, start=1)))
    life.train(*range(1, len(fates) + 1))
    assert life.end() == len(fates)


def test_a_slot_that_is_not_used_any_more_loses_its_seal_when_it_changes(tmp_path: Path) -> None:
    """P31: images that private memory shares with a memory directory are never sealed while they change."""
    (tmp_path / "run").mkdir()
    store = LocalStore(tmp_path / "run")
    store.put(FORMAT_NAME, [b"{}"])
    cache = SnapshotCache(store, tmp_path)
    cache.open("key")
    cache.take("a", {"x": 1})
    assert isinstance(cache.memory, MemoryDirectory)
    cache.memory.seal("a", {}, b"seal")
    (cache.memory.path / "b").write_bytes(b"")
    cache.take("b", {"x": 1})
    assert [*tmp_path.rglob("seal.json")]
    cache.unseal("a")
    assert not [*tmp_path.rglob("seal.json")]
    cache.close(keep=False)


def test_the_last_snapshot_is_whole_in_memory_before_a_close_says_that_storage_lacks_it(
    lives: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P44, P72: where the store refuses at once, the end of the block waits until memory has the step, and keeps it."""

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.1)
        return digest_image(*arguments)

    monkeypatch.setattr(rank_saver, "digest_image", slowly)
    life = lives({3: REFUSED}, on_flush_failure="raise")
    life.train(1, 2)
    life.ckpt.step(3, state_of(3))
    with pytest.raises(StoreError):
        life.ckpt.close()
    last = lives(safe=3)
    assert (last.restored, last.from_memory) == (3, True)


# ── what belongs to the run ──────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_on_its_way_may_land_after_a_snapshot_was_sealed(lives: Callable[..., Life], run_dir: Path) -> None:
    """P71: step 3 is sealed while step 2 is written; step 2 lands; killed then, the run goes on from 3, not from 2."""
    life = lives({2: Fate("sealed", "late"), 3: STUCK})
    life.train(1)
    for step in (2, 3):
        life.ckpt.step(step, state_of(step))
    seal(life.ckpt)
    life.calls.late.set()
    until(lambda: committed(run_dir) == [1, 2])
    life.end()
    last = lives()
    assert (last.restored, last.from_memory) == (3, True)


def test_a_new_structure_does_not_forget_what_is_on_its_way(run_dir: Path, memory: Path, gate: Gate) -> None:
    """P44: a snapshot of another structure, taken while the store is stuck, may follow what lands after all."""
    ckpt = opened(run_dir, gate, memory_dir=str(memory), on_flush_failure="warn", flush_timeout_s=0.5)
    ckpt.acquire()
    ckpt.step(1, state_of(1))
    assert gate.reached.wait(30)
    until(lambda: under_way(ckpt).stuck)
    seal(ckpt)
    before = seals(memory)[1]
    ckpt.step(2, state_of(2, 2 * SIZE))
    seal(ckpt)
    assert seals(memory)[2].in_flight == before.checkpoint.manifest
    gate.opened.set()
    until(lambda: not under_way(ckpt).stuck)
    ckpt.close()


def test_memory_of_a_line_that_was_left_is_no_part_of_the_run(
    lives: Callable[..., Life], run_dir: Path, memory: Path, tmp_path: Path
) -> None:
    """P66, P71: another host has committed since; a directory was begun again under its path; another run dies here.

    What lies in memory is restored by none of them but the other run, which has slots of its own.
    """
    life = lives({3: STUCK, 4: STUCK})
    life.train(*range(1, 5))
    life.end()
    (tmp_path / "elsewhere").mkdir()
    other = Life(tmp_path / "other", memory, {3: STUCK, 4: STUCK})
    other.train(*range(1, 5))
    other.end()
    assert len({slot.parent for slot in memory.glob("*/*/?")}) == 2
    with opened(run_dir, memory_dir=str(tmp_path / "elsewhere")) as away:
        assert away.restore(state_of(0)) == 2
        away.save(3, state_of(3))
    here = lives()
    assert (here.restored, here.from_memory) == (3, False)
    here.end()
    shutil.rmtree(run_dir)
    assert lives().restored == 0
    again = Life(tmp_path / "other", memory)
    assert again.restored == 4
    end_threads([other, again])


def test_a_restore_from_memory_verifies_nothing_on_storage(
    lives: Callable[..., Life], run_dir: Path, memory: Path
) -> None:
    """P60: a checkpoint that was read from memory alone, with a bit flipped on storage, does not push the good one out.

    The memory is gone at the next start: the older checkpoint must be there.
    """
    life = lives()
    life.train(1, 2, 3)
    life.end()
    (shard,) = run_dir.glob("checkpoint_000000000003/*/one-*.safetensors")
    flip(shard, shard.stat().st_size - 1)
    second = lives(max_num_checkpoints=1)
    assert second.from_memory
    second.ckpt.prune()
    assert [note["step"] for note in open_run(str(run_dir)).notes() if note["note"] == "damaged"] == [3]
    second.end()
    shutil.rmtree(memory)
    memory.mkdir(mode=0o700)
    last = lives()
    assert (last.restored, [why.partition(" ")[0] for why in last.skipped]) == (2, ["3"])


@pytest.mark.parametrize("lost", [False, True], ids=["committed", "one more in memory"])
def test_a_snapshot_is_its_checkpoint_though_that_reuses_an_object(
    run_dir: Path, memory: Path, caplog: pytest.LogCaptureFixture, lost: bool
) -> None:
    """P44: memory has the whole of a step of which storage has a part under an older name; the run goes on from it."""
    ckpt = opened(run_dir, memory_dir=str(memory), on_flush_failure="warn")
    ckpt.save(1, frozen_state(1))
    reused = ckpt.save(2, frozen_state(2))
    assert reused.reuses
    seal(ckpt)
    assert seals(memory)[2].checkpoint.manifest_digest != reused.manifest_digest
    if lost:
        give_calls(ckpt, Refusing())
        ckpt.step(3, frozen_state(3))
        settle(ckpt)
    die(ckpt)
    with opened(run_dir, memory_dir=str(memory)) as ckpt, caplog.at_level(logging.INFO, "ckpt_tasks"):
        state = frozen_state(0)
        assert ckpt.restore(state) == state["seen"][0] == 2 + lost
        assert state["model"]["adapter"][0].item() == 2.0 + lost
        assert f"Restored step {2 + lost} from memory" in caplog.text
        assert ckpt.save(4, frozen_state(4)).reuses
    chain = {c.manifest_digest: c.parent for c in ckpt.checkpoints()}
    assert [*chain.values()] == [*[*chain][1:], None]  # each one follows the one before it


# ── what is let go ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_memory_is_cleaned_but_for_what_storage_lacks(lives: Callable[..., Life], run_dir: Path, memory: Path) -> None:
    """P67: a prune from outside clears what storage covers and leaves the rest; so does the end of a block in error."""
    (stored := lives()).train(1, 2)
    stored.end()
    (pruner := lives()).ckpt.prune()
    pruner.ckpt.close()
    assert slots(memory) == {}
    (lacking := lives({3: REFUSED})).train(3)
    lacking.end()
    with opened(run_dir, memory_dir=str(memory)) as ckpt:
        ckpt.acquire()
        ckpt.prune()
    assert 3 in slots(memory)
    with suppress(ZeroDivisionError), (failing := lives(safe=3)).ckpt:
        raise ZeroDivisionError
    assert failing.restored == 3
    assert 3 in slots(memory)
    lives(safe=3).ckpt.close()
    assert [*memory.rglob("*-00000*")] == []


def test_a_second_process_keeps_its_snapshots_to_itself(
    lives: Callable[..., Life], run_dir: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """P33: while one process holds the slots another one, which took the run over, uses its own memory and says so."""
    monkeypatch.setattr("ckpt_tasks.checkpoint.memory.cache.default_directory", lambda size_bytes: memory)
    (first := lives(memory_dir="auto")).train(1)
    with opened(run_dir, memory_dir="auto", take_over=True) as second:
        assert second.restore(state_of(0)) == 1
        assert "of this process holds" in caplog.text
    first.end()
