"""Many ranks when something fails: every rank or none, nothing committed is lost, and the error names the rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import Checkpointer
from ckpt_tasks.errors import CkptError, StateMismatchError, StoreError
from ckpt_tasks.ledger.history import History
from ckpt_tasks.ledger.ownership import acquire, identify
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.testing import look
from ckpt_tasks.upkeep.upkeep import orphans, verify_checkpoint
from tests.ranks.training import build, config, digests, train
from tests.support.gang import Gang, report, run


def steps_of(root: Path) -> list[int]:
    """Return the steps of the live checkpoints, oldest first; each of them is good."""
    history = History(LocalStore(root))
    live = history.head().state.live
    assert [fault for checkpoint in live for fault in verify_checkpoint(history.store, checkpoint)] == []
    return [checkpoint.step for checkpoint in live]


def state_of(kind: str, size: int) -> dict[str, Any]:
    model = build(kind, size)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "epoch": 0}


def one_cannot_write(rank: int, size: int, root: str, how: str) -> list[str]:
    """Save three times; at the second one rank 1 fails in some way."""
    errors = []
    state = state_of("fsdp", size)
    with Checkpointer(config(root, flush_timeout_s=3 if how == "is slow" else 60)) as ckpt:
        ckpt.restore(state)
        put = LocalStore.put
        for step in (1, 2, 3):
            if rank == 1 and step == 2:
                if how == "raises":
                    LocalStore.put = _full  # type: ignore[method-assign,assignment]
                else:
                    LocalStore.put = _slow  # type: ignore[method-assign,assignment]
            try:
                ckpt.save(step, state)
            except CkptError as error:
                errors.append(f"{step} {type(error).__name__}: {error}")
            LocalStore.put = put  # type: ignore[method-assign]
            if step == 2 and how == "is slow":
                time.sleep(8)
    return errors


_put = LocalStore.put


def _slow(self: LocalStore, name: str, parts: Any) -> None:
    if not name.startswith("heartbeat"):
        time.sleep(2)
    _put(self, name, parts)


def _full(self: LocalStore, name: str, parts: Any) -> None:
    raise StoreError("no space left on device", key=name)


@pytest.mark.parametrize(
    ("how", "words"),
    [("raises", "rank 1: no space left"), pytest.param("is slow", "rank 1 said nothing", marks=pytest.mark.slow)],
)
def test_a_rank_that_does_not_write_its_part_means_no_checkpoint(tmp_path: Path, how: str, words: str) -> None:
    """P47: step 2 fails in both ranks, with the name of the rank that failed, and step 3 is committed."""
    errors = run(2, one_cannot_write, str(tmp_path), how)
    assert [len(found) for found in errors] == [1, 1]
    assert all(found[0].startswith("2 StoreError") for found in errors)
    assert words in errors[0][0]
    assert steps_of(tmp_path) == [1, 3]
    assert not [*tmp_path.glob("checkpoint_000000000002/*/manifest.json")]


def restore_after_damage(rank: int, size: int, root: str, step: int | None) -> dict[str, Any]:
    state = state_of("fsdp", size)
    before = digests(state["model"], state["optimizer"])
    ckpt = Checkpointer(config(root))
    error = None
    try:
        restored = ckpt.restore(state, step=step)
    except CkptError as failure:
        restored, error = -1, f"{type(failure).__name__}: {failure}"
    skipped = ckpt.last_restore.skipped if ckpt.last_restore else ()
    ckpt.close()
    return {
        "step": restored,
        "error": error,
        "skipped": skipped,
        "same": digests(state["model"], state["optimizer"]) == before,
    }


def test_a_damaged_object_sends_all_ranks_back_together(tmp_path: Path) -> None:
    """P55: one shard of rank 1 is gone: both ranks restore the checkpoint before it, and say why."""
    run(2, train, "fsdp", str(tmp_path), 4)
    assert steps_of(tmp_path) == [2, 4]
    [shard] = (tmp_path / "checkpoint_000000000004").glob("*/optimizer-00001-of-00002-0.safetensors")
    shard.unlink()
    found = run(2, restore_after_damage, str(tmp_path), None)
    assert [rank["step"] for rank in found] == [2, 2]
    assert all(shard.name in str(rank["skipped"]) for rank in found)


@pytest.mark.parametrize("which", [0, pytest.param(None, marks=pytest.mark.slow)])
def test_without_any_one_object_nothing_is_changed_anywhere(tmp_path: Path, which: int | None) -> None:
    """P47: whichever object of the only checkpoint is gone, the error names it and no rank's target changes."""
    run(2, train, "fsdp", str(tmp_path), 2)
    objects = sorted((tmp_path / "checkpoint_000000000002").glob("*/*"))
    assert len(objects) > 6
    for path in objects if which is None else objects[which : which + 1]:
        data = path.read_bytes()
        path.unlink()
        found = run(2, restore_after_damage, str(tmp_path), None)
        assert all(rank["step"] == -1 and rank["same"] for rank in found)
        assert all(path.name in rank["error"] for rank in found)
        path.write_bytes(data)
    assert [rank["step"] for rank in run(2, restore_after_damage, str(tmp_path), None)] == [2, 2]


def one_differs(rank: int, size: int, root: str) -> tuple[str, bool]:
    state = state_of("fsdp", size)
    if rank == 1:
        state["extra"] = 1
    before = digests(state["model"], state["optimizer"])
    ckpt = Checkpointer(config(root))
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore(state)
    ckpt.close()
    return str(caught.value), digests(state["model"], state["optimizer"]) == before


def test_a_target_that_fits_one_rank_only_is_left_alone_in_all(tmp_path: Path) -> None:
    """One rank's state has a group more: both ranks raise, with its name, and both are as they were."""
    run(2, train, "fsdp", str(tmp_path), 2)
    for message, same in run(2, one_differs, str(tmp_path)):
        assert "extra" in message
        assert "rank 1" in message
        assert same


def until_signal(rank: int, size: int, root: str, options: dict[str, Any]) -> None:
    state = state_of("ddp", size)
    with Checkpointer(config(root, step_interval=1_000_000, **options)) as ckpt:
        ckpt.restore(state)
        for step in range(1, 100_000):
            torch.distributed.all_reduce(torch.ones(1))
            ckpt.step(step, state)
            if step in (1, 50):
                report(step)
            time.sleep(0.002)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_signal_to_one_rank_ends_all_at_one_step(tmp_path: Path, rank: int) -> None:
    """SIGTERM reaches one rank: both save the same step, commit it, and end by SIGTERM."""
    with Gang(2, until_signal, str(tmp_path), {}) as gang:
        assert [gang.said(n)[1] for n in (0, 1)] == [1, 1]
        os.kill(gang.pid(rank), signal.SIGTERM)
        assert gang.end(60) == [-signal.SIGTERM] * 2
    [step] = steps_of(tmp_path)
    assert step > 1


def test_a_save_by_the_clock_falls_on_one_step(tmp_path: Path) -> None:
    """Seconds pass differently in each rank; what is saved by them is whole."""
    with Gang(2, until_signal, str(tmp_path), {"save_interval_secs": 0.1}) as gang:
        for n in (0, 1):
            assert [gang.said(n)[1], gang.said(n)[1]] == [1, 50]
        os.kill(gang.pid(0), signal.SIGTERM)
        assert gang.end(60) == [-signal.SIGTERM] * 2
    assert len(steps_of(tmp_path)) > 1


def keeps_saving(rank: int, size: int, root: str) -> str:
    state = state_of("fsdp", size)
    ckpt = Checkpointer(config(root, owner_timeout_s=30))
    ckpt.save(1, state)
    report("saved")
    for step in range(2, 10_000):
        try:
            ckpt.save(step, state)
        except CkptError as error:
            return type(error).__name__
        time.sleep(0.01)
    return "never"


def takes_over(rank: int, size: int, root: str) -> int:
    state = state_of("fsdp", size)
    ckpt = Checkpointer(config(root), take_over=True)
    step = ckpt.restore(state)
    ckpt.save(20_000, state)
    ckpt.close()
    return step


def fenced_between_saves(rank: int, size: int, root: str, call: str) -> str:
    state = state_of("fsdp", size)
    ckpt = Checkpointer(config(root, flush_timeout_s=60))
    ckpt.save(1, state)
    if rank == 0:
        acquire(History(LocalStore(root)), identify(None), take_over=True, timeout_s=30)
        look(ckpt)
    try:
        getattr(ckpt, call)(2, state)
        ckpt.wait()
    except CkptError as error:
        return type(error).__name__
    return "saved"


@pytest.mark.parametrize("call", ["save", pytest.param("step", marks=pytest.mark.slow)])
def test_what_the_heartbeat_of_one_rank_sees_is_raised_in_all(tmp_path: Path, call: str) -> None:
    """Rank 0's heartbeat sees another owner between two saves: the next save raises FencedError in all."""
    assert run(2, fenced_between_saves, str(tmp_path), call) == ["FencedError", "FencedError"]
    assert steps_of(tmp_path) == [1]


def fenced_while_it_commits(rank: int, size: int, root: str) -> str:
    state = state_of("fsdp", size)
    ckpt = Checkpointer(config(root, flush_timeout_s=60))
    ckpt.save(1, state)
    sizes = LocalStore.sizes

    def swept(store: LocalStore, names: Sequence[str]) -> list[int]:
        LocalStore.sizes = sizes  # type: ignore[method-assign]
        other = History(LocalStore(root))
        acquire(other, identify(None), take_over=True, timeout_s=30)
        for name in orphans(store, other.head().state):
            store.delete(name)
        return sizes(store, names)

    if rank == 0:
        LocalStore.sizes = swept  # type: ignore[method-assign,assignment]
    try:
        ckpt.save(2, state)
    except CkptError as error:
        return type(error).__name__
    return "saved"


def test_a_sweep_by_another_owner_is_a_fence_in_all(tmp_path: Path) -> None:
    """Another owner sweeps what all ranks have written, before rank 0 commits it: FencedError in all."""
    assert run(2, fenced_while_it_commits, str(tmp_path)) == ["FencedError", "FencedError"]
    assert steps_of(tmp_path) == [1]


def test_two_gangs_on_one_directory_are_fenced_as_a_whole(tmp_path: Path) -> None:
    """The gang that took over commits; every rank of the other one is fenced."""
    with Gang(2, keeps_saving, str(tmp_path)) as first:
        assert [first.said(n)[1] for n in (0, 1)] == ["saved", "saved"]
        steps = run(2, takes_over, str(tmp_path))
        assert steps[0] == steps[1] > 0
        assert first.results() == ["FencedError", "FencedError"]
    assert max(steps_of(tmp_path)) == 20_000


def one_is_killed(rank: int, size: int, root: str, how: str) -> None:
    """Save every step. Rank 1 dies in mid-step, or hangs as on another host, and the others fail in it."""
    state = state_of("ddp", size)
    with Checkpointer(config(root, step_interval=1, flush_timeout_s=600)) as ckpt:
        ckpt.restore(state)
        for step in range(1, 4):
            ckpt.step(step, state)
        ckpt.wait()
        if rank == 1:
            report("ready")
            signal.pause()
        ckpt.step(4, state)  # rank 1 never hands its part in
        report("ready")
        if how == "killed":
            torch.distributed.all_reduce(torch.ones(1))
        raise RuntimeError("a step fails")


@pytest.mark.parametrize("how", ["killed", "told"])
def test_the_end_of_a_rank_ends_the_wait_for_it(tmp_path: Path, how: str) -> None:
    """Rank 1 is killed in mid-step: the others end in seconds, not after the timeout; so they do if told by SIGTERM."""
    with Gang(3, one_is_killed, str(tmp_path), how) as gang:
        assert [gang.said(n) for n in range(3)] == [("report", "ready")] * 3
        ended = {1: signal.SIGKILL} if how == "killed" else {0: signal.SIGTERM, 2: signal.SIGTERM}
        for n, number in ended.items():
            gang.send(n, number)
        for n in (0, 2):
            gang.processes[n].join(120)
            assert gang.processes[n].exitcode == (1 if how == "killed" else -signal.SIGTERM)
            if how == "killed":
                assert "The last snapshot could not be saved either: rank 1 has ended" in gang.said(n)[1]
    assert steps_of(tmp_path)[-1] == 3
