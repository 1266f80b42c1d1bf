"""A restore that reads once: damage is found as the bytes arrive, and nothing half restored is trained on."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.checkpoint.restore.restore import restore_newest
from ckpt_tasks.errors import NoGoodCheckpointError, StateError, StoreError
from ckpt_tasks.run.opening import open_checkpoint
from ckpt_tasks.state.tensors.tensors import same_bits
from ckpt_tasks.storage.local import LocalStore
from tests.support.cli_runs import flip

MIB = 1 << 20


class Foreign:
    """An object of a user, with a load_state_dict of its own."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"given": len(self.given)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given.append(state_dict)


def state_of(value: float, **more: Any) -> dict[str, Any]:
    """Return tensors of every way to be read (large, small, a part of a window), a schedule and plain values."""
    model = nn.ParameterDict({f"p{n}": nn.Parameter(torch.full((size,), value)) for n, size in enumerate(SIZES)})
    optimizer = torch.optim.SGD(model.parameters(), lr=value, momentum=0.9)
    for parameter in model.values():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "value": value, **more}


SIZES = (3 * MIB // 4, 10, 200, 5 * MIB // 4)


def flat_of(state: dict[str, Any]) -> list[Any]:
    moments = [one["momentum_buffer"] for one in state["optimizer"].state.values()]
    return [*(one.detach().clone() for one in state["model"].values()), *(one.clone() for one in moments)]


def plain_of(state: dict[str, Any]) -> tuple[Any, ...]:
    return state["value"], state["optimizer"].param_groups[0]["lr"], state["schedule"].state_dict()


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return plain_of(one) == plain_of(other) and all(map(same_bits, flat_of(one), flat_of(other)))


def saved(config: CheckpointConfig, *states: dict[str, Any]) -> None:
    with Checkpointer(config) as ckpt:
        for step, state in enumerate(states, start=1):
            ckpt.save(step, state)


def regions_of(ckpt: Checkpointer, step: int) -> list[tuple[str, int]]:
    """Return a byte in the middle of each region of a checkpoint: (object, offset)."""
    store = ckpt.run.history.store
    rows = open_checkpoint(store, ckpt.run.find(step)).index.rows
    return [(row.object, (row.begin + row.end) // 2) for row in rows]


def test_a_bit_in_any_region_falls_back_and_is_overwritten(run_dir: Path) -> None:
    """P49: whichever region is damaged, what was read before it is overwritten by the older checkpoint, bit for bit."""
    config = CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=None)
    old, new = state_of(1.0), state_of(2.0)
    saved(config, old, new)
    with Checkpointer(config) as ckpt:
        regions = regions_of(ckpt, 2)
        assert len(regions) >= 2 * len(SIZES)
        for name, at in regions:
            flip(run_dir / name, at)
            state = state_of(0.0)
            assert ckpt.restore(state) == 1
            assert ckpt.last_restore is not None
            assert [step for step, _ in ckpt.last_restore.skipped] == [2]
            assert equal(state, old)
            ckpt.step(1, state)
            flip(run_dir / name, at)
            assert ckpt.restore(state) == 2
            assert equal(state, new)


def test_a_bit_in_memory_falls_back_to_storage(run_dir: Path, tmp_path: Path) -> None:
    """P49: a snapshot in memory with a flipped bit is overwritten by the same checkpoint of storage."""
    config = CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=str(tmp_path))
    new = state_of(2.0)
    ckpt = Checkpointer(config)
    ckpt.save(1, state_of(1.0))
    ckpt.save(2, new)
    images = [*tmp_path.glob("ckpt-tasks-*/**/model-*.safetensors")]
    assert images
    for image in images:
        flip(image, -5)
    state = state_of(0.0)
    assert ckpt.restore(state) == 2
    assert ckpt.last_restore is not None
    assert [step for step, _ in ckpt.last_restore.skipped] == [2]
    assert equal(state, new)
    ckpt.close()


@pytest.mark.parametrize("group", ["model", "optimizer"])
def test_without_a_good_one_the_state_may_not_be_trained_on(run_dir: Path, group: str) -> None:
    """P49: the error says that the state is half restored; `step` and `save` raise until a restore succeeds."""
    config = CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=None)
    only, state = state_of(1.0), state_of(0.0)
    saved(config, only)
    with Checkpointer(config) as ckpt:
        ckpt.acquire()
        name, at = next(region for region in regions_of(ckpt, 1) if f"/{group}-" in region[0])
        flip(run_dir / name, at)
        with pytest.raises(NoGoodCheckpointError, match="half restored: restore again") as raised:
            ckpt.restore(state)
        assert "half restored" in str(pickle.loads(pickle.dumps(raised.value)))
        commits = len(ckpt.checkpoints())
        for use in (ckpt.step, ckpt.save):
            with pytest.raises(StateError, match="has changed a part of the state"):
                use(2, state)
        assert len(ckpt.checkpoints()) == commits
        flip(run_dir / name, at)
        assert ckpt.restore(state) == 1
        assert equal(state, only)
        assert ckpt.save(2, state).step == 2


def test_foreign_code_is_given_a_checkpoint_that_is_known_to_be_good(run_dir: Path) -> None:
    """A load_state_dict of the user's runs once, after every byte is verified; damage leaves the state as it was."""
    config = CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=None)
    saved(config, state_of(1.0, own=Foreign()), state_of(2.0, own=Foreign()))
    with Checkpointer(config) as ckpt:
        ckpt.acquire()
        damage = [next(one for one in regions_of(ckpt, step) if "/model-" in one[0]) for step in (1, 2)]
        for name, at in damage:
            flip(run_dir / name, at)
        own, before = Foreign(), state_of(0.0)
        state = state_of(0.0, own=own)
        with pytest.raises(NoGoodCheckpointError, match="target is untouched"):
            ckpt.restore(state)
        assert (own.given, equal(state, before)) == ([], True)
        flip(run_dir / damage[1][0], damage[1][1])
        assert ckpt.restore(state, step=2) == 2
        assert len(own.given) == 1


class Counting(LocalStore):
    """A store that counts the bytes that are read of tensors, and ends in the read that is the `nth`."""

    count = read_bytes = 0
    nth: int | None = None

    def read(self, name: str, begin: int, into: memoryview) -> None:
        self.count += 1
        if self.count == self.nth:
            raise StoreError("the store is gone")
        self.read_bytes += into.nbytes
        super().read(name, begin, into)


def test_every_byte_is_read_once(run_dir: Path) -> None:
    """A restore into live tensors reads as many bytes as the state has, and the headers of its files."""
    config = CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=None)
    saved(config, state_of(1.0))
    store, state = Counting(str(run_dir)), state_of(0.0)
    _, report, _ = restore_newest(store, Checkpointer(config).checkpoints(), state)
    assert report.size_bytes <= store.read_bytes <= 1.02 * report.size_bytes + 10_000
    assert equal(state, state_of(1.0))


def test_a_store_that_fails_within_a_restore_is_raised_and_the_note_says_whether_the_state_changed(
    run_dir: Path,
) -> None:
    """P33: a store that does not answer is no damage: no older checkpoint is tried; each read in turn fails."""
    config = CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=None)
    saved(config, state_of(1.0), state_of(2.0))
    checkpoints = Checkpointer(config).checkpoints()
    store, fresh = Counting(str(run_dir)), state_of(0.0)
    restore_newest(store, checkpoints, fresh)
    reads, changed = store.count, []
    for nth in range(1, reads + 1):
        store.count, store.nth, state, wrote = 0, nth, state_of(0.0), list[int]()
        with pytest.raises(StoreError, match="the store is gone") as raised:
            restore_newest(store, checkpoints, state, writing=partial(wrote.append, nth))
        noted = any("half restored" in note for note in getattr(raised.value, "__notes__", ()))
        assert noted == bool(wrote)
        assert wrote or equal(state, state_of(0.0))
        changed += wrote
    assert 0 < len(changed) < reads
