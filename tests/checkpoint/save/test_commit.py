"""What a save is about to write is read first, as a restore reads it: nothing that would be refused is committed.

That holds for sizes, and for the parts of many ranks.
"""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.scale import Simulation, commit, moved
from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.checkpoint.memory.snapshot import ImageSet, plan_snapshot
from ckpt_tasks.checkpoint.save import prepared
from ckpt_tasks.checkpoint.save.parts import RankPart, Saving, digest_image, encode_groups, joined, new_attempt
from ckpt_tasks.checkpoint.save.prepared import prepare_checkpoint
from ckpt_tasks.errors import CkptError, CommitUncertainError, IntegrityError, StateError, UnsupportedStateError
from ckpt_tasks.format import ledger
from ckpt_tasks.format.layout.index import Index
from ckpt_tasks.run.opening import open_checkpoint
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from ckpt_tasks.state.capture import capture
from ckpt_tasks.testing import FaultyStore, MemoryStore, located, settle, under_way
from tests.support.ledgers import owner_of


def parts_of() -> tuple[Saving, RankPart]:
    captured = capture({"x": {"w": torch.zeros(5), "v": torch.zeros(2, 3)}, "seen": [1]})
    plan = plan_snapshot(captured.tensors, captured.frozen)
    images = ImageSet(plan, {name: memoryview(bytearray(size)) for name, size in plan.sizes.items()})
    owner = owner_of(1)
    attempt = new_attempt(1, owner, 1)
    saving = Saving(attempt=attempt, run_key="run", owner=owner, groups=encode_groups(captured), metrics={})
    return saving, joined([digest_image(attempt, image, lambda: False) for image in images.images])


HOLES: dict[str, Callable[[RankPart], RankPart]] = {
    "a region is missing": lambda part: replace(part, index=Index.of(part.index.rows[1:])),
    "a region is there twice": lambda part: replace(part, index=Index.of((part.index.rows[0], *part.index.rows))),
    "an object is missing": lambda part: replace(part, objects=part.objects[1:]),
    "an object ends earlier": lambda part: replace(
        part, objects=tuple(record._replace(size_bytes=record.size_bytes - 1) for record in part.objects)
    ),
    "another rank": lambda part: replace(part, rank=1),
}


@pytest.mark.parametrize("what", HOLES)
def test_what_has_holes_is_refused(what: str) -> None:
    """P47: a save whose parts do not make whole tensors and objects ends before index and manifest are written."""
    saving, part = parts_of()
    with pytest.raises(IntegrityError):
        prepare_checkpoint(saving, [HOLES[what](part)])
    with pytest.raises(CkptError):  # nor what the reader of a manifest would refuse
        prepare_checkpoint(replace(saving, groups={"no group!": {"kind": "plain", "tree": 1}}), [part])


@pytest.mark.parametrize("limit", ["MAX_MANIFEST_BYTES", "MAX_INDEX_BYTES"])
def test_a_checkpoint_that_could_not_be_read_is_not_committed(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """P42, P44: a manifest or index over the limit fails the save: nothing of it is left, nor written over for it."""
    ckpt = Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=str(tmp_path)))
    ckpt.save(1, {"x": "small"})
    (sealed,) = tmp_path.rglob("seal.json")
    monkeypatch.setattr(prepared, limit, 5000)
    names = {f"tensor{n}": float(n) for n in range(2000)}
    state = {"x": names} if limit == "MAX_MANIFEST_BYTES" else tensors(200)
    before = sorted(run_dir.rglob("*"))
    with pytest.raises(UnsupportedStateError, match="more than the 5000"):
        ckpt.save(2, state)
    assert sorted(run_dir.rglob("*")) == before
    assert under_way(ckpt).next_slot != sealed.parent.name  # the only complete snapshot stays
    ckpt.close()
    assert [c.step for c in ckpt.checkpoints()] == [1]


def tensors(count: int) -> dict[str, object]:
    return {"x": {f"tensor{n}": torch.zeros(1) for n in range(count)}}


def test_a_ledger_entry_that_could_not_be_read_is_not_put(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P42: a note that is larger than a reader takes is refused, and the ledger goes on."""
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:
        ckpt.save(1, {"x": 1})
        monkeypatch.setattr(ledger, "MAX_ENTRY_BYTES", 10_000)
        with pytest.raises(StateError, match="more than the 10000 that are read"):
            ckpt.note("failure", text="x" * 20_000)
        assert ckpt.save(2, {"x": 2}).step == 2


RANKS, TENSORS = 50, 100


def test_the_parts_of_many_ranks_are_one_checkpoint(fast_dir: Path) -> None:
    """P47: all regions of all ranks are committed in bounded memory, and one that moved by one element is named."""
    made = Simulation(fast_dir / "run", ranks=RANKS, tensors=TENSORS, axis=1)
    words = [made.part(rank) for rank in range(RANKS)]
    saving = made.saving()
    key = "model/layers.3.weight"
    with pytest.raises(IntegrityError, match=key):
        commit(made.history, saving, [*words[:20], moved(words[20], key, 1), *words[21:]])
    assert made.history.head().state.live == ()
    tracemalloc.start()
    commit(made.history, saving, words)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    (checkpoint,) = made.history.head().state.live
    opened = open_checkpoint(made.history.store, checkpoint)
    assert len(opened.index) > RANKS * TENSORS
    assert opened.tensors[key] == ("float32", (64, RANKS))
    assert len({row.object for row in opened.index.of_tensors({key}).rows}) == RANKS
    assert peak_bytes < 1000 * len(opened.index)  # an object of Python for each region would be more


def test_two_owners_of_one_epoch_write_under_names_of_their_own(run_dir: Path, tmp_path: Path) -> None:
    """P33, MUST 5: where a lost entry makes an epoch come twice, what one owner writes is not what the other names."""
    config = CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=None)
    with Checkpointer(config) as ckpt:
        ckpt.save(1, tensors(1))
    shutil.copytree(run_dir, tmp_path / "other")
    attempts = []
    for place in (run_dir, tmp_path / "other"):
        with Checkpointer(replace(config, checkpoint_dir=str(place))) as ckpt:
            ckpt.restore(tensors(1))
            attempts.append(ckpt.save(2, tensors(1)).attempt)
    epochs, nonces = zip(*(name.split("-") for name in attempts), strict=True)
    assert epochs[0] == epochs[1]
    assert nonces[0] != nonces[1]


def test_what_may_be_committed_is_not_deleted() -> None:
    """P32, MUST 7: the entry lands and its answer is lost, with every read after it: the checkpoint is whole."""
    store = FaultyStore(MemoryStore())
    ckpt = Checkpointer(CheckpointConfig(checkpoint_dir=located(store), memory_dir=None, step_interval=1))
    ckpt.save(1, tensors(1))
    settle(ckpt)
    entry = store.on("unanswered", verb="put_if_absent", name="^ledger/", held=True)
    ckpt.step(2, tensors(1))
    assert entry.reached.wait(30)
    store.on("refused", verb="get names", name="^ledger/")
    entry.until.set()
    with pytest.raises(CommitUncertainError):
        ckpt.wait()
    store.off()
    run = open_run(located(store))
    assert [one.step for one in run.checkpoints()] == [2, 1]
    assert verify_run_directory(run.history).good
    ckpt.close()
