"""Many ranks: every form of parallelism saves, resumes bit for bit, and goes on in any other form."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tasks.ledger.history import History
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.upkeep.upkeep import verify_checkpoint
from tests.ranks.training import train
from tests.support.gang import run

FORMS = [("ddp", 2), ("fsdp", 2), ("2d", 4)]
MORE_FORMS = [("tp", 2), ("hsdp", 4), ("fsdp", 3), ("ddp", 4), ("2d", 6)]


@pytest.mark.parametrize(
    ("kind", "size"), [*FORMS, *(pytest.param(*form, marks=pytest.mark.slow) for form in MORE_FORMS)]
)
def test_a_training_of_many_ranks_goes_on_bit_for_bit(tmp_path: Path, kind: str, size: int) -> None:
    """P12: parameters, moments and every rank's random stream are those of a training without a break."""
    whole = run(size, train, kind, str(tmp_path / "whole"), 10)
    run(size, train, kind, str(tmp_path / "cut"), 6)
    resumed = run(size, train, kind, str(tmp_path / "cut"), 10)
    assert [rank["start"] for rank in resumed] == [6] * size
    assert [rank["digests"] for rank in resumed] == [rank["digests"] for rank in whole]
    assert [rank["draws"] for rank in resumed] == [rank["draws"][6:] for rank in whole]
    assert not resumed[0]["derived"]


CHAINS = [
    [("fsdp", 2), ("fsdp", 3), ("tp", 2), ("ddp", 1)],
    [("2d", 4), ("ddp", 2)],
]
MORE_CHAINS = [
    [("ddp", 1), ("fsdp", 2)],
    [("fsdp", 2), ("fsdp", 4), ("fsdp", 3), ("ddp", 1), ("hsdp", 4)],
    [("tp", 4), ("hsdp", 4), ("2d", 6), ("tp", 2), ("ddp", 3)],
    [("hsdp", 6), ("2d", 4), ("fsdp", 6), ("ddp", 2)],
]


@pytest.mark.parametrize("chain", [*CHAINS, *(pytest.param(chain, marks=pytest.mark.slow) for chain in MORE_CHAINS)])
def test_another_number_of_ranks_has_the_same_tensors(tmp_path: Path, chain: list[tuple[str, int]]) -> None:
    """P48, P58: sharded along any dimension or replicated, with any number of ranks, the whole is the same."""
    (kind, size), *others = chain
    first = run(size, train, kind, str(tmp_path), 6)[0]
    before = size
    for kind, size in others:
        found = run(size, train, kind, str(tmp_path), 6)
        assert [rank["start"] for rank in found] == [6] * size
        assert all(rank["digests"] == first["digests"] for rank in found)
        assert all(rank["derived"] == (size != before) for rank in found)
        before = size
    history = History(LocalStore(tmp_path))
    for checkpoint in history.head().state.live:
        assert verify_checkpoint(history.store, checkpoint) == []


def test_replicated_bytes_are_written_once(tmp_path: Path) -> None:
    """Two ranks of DistributedDataParallel write what one process writes, each a part of it."""
    sizes = {}
    for size in (1, 2):
        run(size, train, "ddp", str(tmp_path / f"{size}"), 2)
        shards = [*(tmp_path / f"{size}").glob("checkpoint_*/*/*.safetensors")]
        sizes[size] = sum(shard.stat().st_size for shard in shards if not shard.name.startswith("rng"))
        assert len({shard.name.split("-")[1] for shard in shards}) == size
    headers = 64 << 10
    assert sizes[1] - headers < sizes[2] < sizes[1] + headers
