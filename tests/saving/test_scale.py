"""The committer of many ranks: parts as they travel, from 100 ranks with 10⁴ regions."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from benchmarks.scale import Simulation, commit, moved
from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.reading.opening import open_checkpoint

RANKS, TENSORS = 100, 100


@pytest.mark.parametrize("axis", [0, 1])
def test_the_parts_of_a_hundred_ranks_are_one_checkpoint(fast_dir: Path, axis: int) -> None:
    """P47: all regions of all ranks are committed in bounded memory, and one that moved by one element is named."""
    made = Simulation(fast_dir / f"{axis}", ranks=RANKS, tensors=TENSORS, axis=axis)
    words = [made.part(rank) for rank in range(RANKS)]
    saving = made.saving()
    key = "model/layers.3.weight"
    with pytest.raises(IntegrityError, match=key):
        commit(made.history, saving, [*words[:40], moved(words[40], key, axis), *words[41:]])
    assert made.history.head().state.live == ()
    tracemalloc.start()
    commit(made.history, saving, words)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    (checkpoint,) = made.history.head().state.live
    opened = open_checkpoint(made.history.store, checkpoint)
    assert len(opened.index) > RANKS * TENSORS
    assert opened.tensors[key] == ("float32", (RANKS, 64) if axis == 0 else (64, RANKS))
    assert len({row.object for row in opened.index.of_tensors({key}).rows}) == RANKS
    assert peak_bytes < 1000 * len(opened.index)  # an object of Python for each region would be more
