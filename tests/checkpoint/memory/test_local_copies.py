"""A local directory beside an object store: what lands there, what is read from there, and what is not."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.extensions.local_copies import LocalCopies
from ckpt_tasks.errors import ConfigError, StoreError
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.storage.objects import ObjectStore
from tests.support.cli_runs import flip


@pytest.fixture
def url() -> Iterator[str]:
    place = f"memory://copies/{secrets.token_hex(8)}"
    yield place
    fsspec.filesystem("memory").rm(place, recursive=True)


def config(url: str, local_dir: Path, **options: Any) -> CheckpointConfig:
    return CheckpointConfig(
        checkpoint_dir=url, run_key="run", local_dir=str(local_dir), **{"memory_dir": None, **options}
    )


def state(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(300, 300)
    torch.nn.init.constant_(model.weight, value)
    return {"model": model}


def unsent(url: str, local_dir: Path, step: int) -> None:
    """Commit step 1, and save a step of which the store never gets what is large."""

    def fail(self: ObjectStore, name: str, body: Any) -> None:
        raise StoreError("the network is away", key=name)

    with Checkpointer(config(url, local_dir)) as ckpt:
        ckpt.save(1, state(1.0))
    ckpt = Checkpointer(config(url, local_dir))
    ckpt.restore(state(0.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectStore, "put", fail)
        with pytest.raises(StoreError, match="network is away"):
            ckpt.save(step, state(float(step)))
    assert [c.step for c in ckpt.checkpoints()] == [1]
    ckpt.close()


def test_a_checkpoint_is_read_from_the_local_directory(url: str, tmp_path: Path) -> None:
    """A restore takes the copy on this host, and takes the store's where the copy is gone or damaged."""
    with Checkpointer(config(url, tmp_path)) as ckpt:
        ckpt.save(5, state(5.0))
    for damage in (None, "changed", "gone"):
        (model,) = tmp_path.rglob("model-*")
        if damage == "changed":
            flip(model, -8)
        if damage == "gone":
            model.unlink()
        target = state(0.0)
        with Checkpointer(config(url, tmp_path)) as ckpt:
            assert ckpt.restore(target) == 5
            report = ckpt.last_restore
        assert report is not None
        assert report.source.startswith(url if damage else str(tmp_path))
        assert len(report.skipped) == (1 if damage else 0)
        assert torch.equal(target["model"].weight, state(5.0)["model"].weight)


def test_what_the_store_lacks_is_restored_and_sent(url: str, tmp_path: Path) -> None:
    """P72: a checkpoint that never reached the store is restored by the next process on this host, and committed."""
    unsent(url, tmp_path, 2)
    target = state(0.0)
    with Checkpointer(config(url, tmp_path)) as again:
        assert again.restore(target) == 2
        assert torch.equal(target["model"].weight, state(2.0)["model"].weight)
        again.wait()
        assert [c.step for c in again.checkpoints()] == [2, 1]
    with Checkpointer(config(url, tmp_path / "another host")) as elsewhere:
        assert elsewhere.restore(state(0.0)) == 2


def test_a_copy_of_a_line_that_was_left_is_not_used(url: str, tmp_path: Path) -> None:
    """P71: once another host has committed, a copy that the store never got is history; the ledger is the truth."""
    unsent(url, tmp_path / "a", 9)
    with Checkpointer(config(url, tmp_path / "b")) as other:
        assert other.restore(state(0.0)) == 1
        other.save(2, state(2.0))
    with Checkpointer(config(url, tmp_path / "a")) as ckpt:
        assert ckpt.restore(state(0.0)) == 2


def test_the_directory_of_another_run_is_refused(url: str, tmp_path: Path) -> None:
    """Two runs with one local directory would delete each other's copies: the second is refused, and is released."""
    with Checkpointer(config(url, tmp_path)) as ckpt:
        ckpt.save(1, state(1.0))
    second = Checkpointer(config(f"{url}-2", tmp_path))
    with pytest.raises(ConfigError, match="another run"):
        second.save(1, state(1.0))
    owner = second.run.head().state.owner
    assert owner is not None
    assert owner.released  # at once, not when the block ends


def test_a_full_disk_costs_the_copy_and_not_the_checkpoint(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P37: where the local disk refuses, the checkpoint is committed all the same, and the log says what is missing."""
    ckpt = Checkpointer(config(url, tmp_path))
    ckpt.save(1, state(1.0))

    def full(copies: LocalCopies, *arguments: Any) -> None:
        raise StoreError("No space left on device")

    monkeypatch.setattr(LocalCopies, "write", full)
    assert ckpt.save(2, state(2.0)).step == 2
    assert "no copy in the local directory" in caplog.text
    ckpt.close()
