"""What a reader would refuse for its size is refused before it is committed, not when it is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import StateError, UnsupportedStateError
from ckpt_tasks.format import ledger
from ckpt_tasks.reading import opening


@pytest.mark.parametrize("limit", ["MAX_MANIFEST_BYTES", "MAX_INDEX_BYTES"])
def test_a_checkpoint_that_could_not_be_read_is_not_committed(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """P42, P44: a manifest or index over the limit fails the save: nothing of it is left, nor written over for it."""
    ckpt = Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=str(tmp_path)))
    ckpt.save(1, {"x": "small"})
    (sealed,) = tmp_path.rglob("seal.json")
    monkeypatch.setattr(opening, limit, 5000)
    names = {f"tensor{n}": float(n) for n in range(2000)}
    state = {"x": names} if limit == "MAX_MANIFEST_BYTES" else tensors(200)
    before = sorted(run_dir.rglob("*"))
    with pytest.raises(UnsupportedStateError, match="more than the 5000"):
        ckpt.save(2, state)
    assert sorted(run_dir.rglob("*")) == before
    assert ckpt._saver._pipeline.next_slot() != sealed.parent.name  # the only complete snapshot stays
    ckpt.close()
    assert [c.step for c in ckpt.checkpoints()] == [1]


def tensors(count: int) -> dict[str, object]:
    import torch

    return {"x": {f"tensor{n}": torch.zeros(1) for n in range(count)}}


def test_a_ledger_entry_that_could_not_be_read_is_not_put(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P42: a note that is larger than a reader takes is refused, and the ledger goes on."""
    ckpt = Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir)))
    ckpt.save(1, {"x": 1})
    monkeypatch.setattr(ledger, "MAX_ENTRY_BYTES", 10_000)
    with pytest.raises(StateError, match="more than the 10000 that are read"):
        ckpt.note("failure", text="x" * 20_000)
    assert ckpt.save(2, {"x": 2}).step == 2
    ckpt.close()
