"""Snapshots in the memory of many ranks: each seals its part, and a restart takes the newest that all have sealed."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import Checkpointer
from ckpt_tasks.errors import FencedError, IntegrityError, StateError
from ckpt_tasks.format.records import SEAL_NAME, Seal
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.tensors.copies import Copies
from tests.ranks.test_failures import state_of, steps_of
from tests.ranks.training import build, config, digests, train
from tests.support.cli_runs import flip
from tests.support.gang import Gang, report, run
from tests.support.waiting import until

SIZE = 2


def slots(place: Path, rank: int, size: int = SIZE) -> dict[int, Path]:
    """Return what a rank has sealed in a memory directory or a local one, by step."""
    found = {}
    for seal in place.glob(f"**/*-{rank:05d}-of-{size:05d}/**/{SEAL_NAME}"):
        with suppress(FileNotFoundError, IntegrityError):  # deleted meanwhile, or being written in a local directory
            found[Seal.from_bytes(seal.read_bytes()).checkpoint.step] = seal.parent
    return found


_put = LocalStore.put


def hangs(rank: int, size: int, kind: str, root: str, plan: tuple[dict[str, str | None], int]) -> None:
    """Train; after step 4 the store takes nothing. Report once the last step is sealed on this host, and hang."""
    options, last = plan
    [place] = filter(None, options.values())
    model = build(kind, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    batches = torch.randn(100, 8, 16, generator=torch.Generator().manual_seed(5))
    ckpt = Checkpointer(config(root, **options))

    def never(self: LocalStore, name: str, body: Any) -> None:
        if self.url == root:
            time.sleep(600)
        _put(self, name, body)

    for step in range(ckpt.restore(state) + 1, last + 1):
        torch.rand(())
        model(batches[step]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(step, state)
        if step == 4:
            ckpt.wait()
            LocalStore.put = never  # type: ignore[method-assign]
    until(lambda: last in slots(Path(place), rank, size))
    report("sealed")
    time.sleep(600)


def killed(
    root: Path, place: Path, *, last: int, kind: str = "fsdp", size: int = SIZE, option: str = "memory_dir"
) -> None:
    """Leave steps 2 and 4 committed, and what came after them in the memory of all ranks only, or in a local_dir."""
    place.mkdir(exist_ok=True)
    options = {"memory_dir": None, option: str(place)}
    with Gang(size, hangs, kind, str(root), (options, last)) as gang:
        assert [gang.said(rank)[1] for rank in range(size)] == ["sealed"] * size
        for rank in range(size):
            os.kill(gang.pid(rank), signal.SIGKILL)
    assert steps_of(root)[-1] == 4


def restored(rank: int, size: int, kind: str, root: str, options: dict[str, Any]) -> dict[str, Any]:
    """Restore, save what storage lacks, and end."""
    model = build(kind, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    with Checkpointer(config(root, **options)) as ckpt:
        step = ckpt.restore(state)
        report_ = ckpt.last_restore
        assert report_ is not None
        ckpt.wait()
    return {
        "step": step,
        "source": report_.source,
        "skipped": [[*one] for one in report_.skipped],
        "digests": digests(model, optimizer),
    }


@pytest.mark.parametrize(
    ("kind", "size"), [("fsdp", 2), *(pytest.param(*form, marks=pytest.mark.slow) for form in [("ddp", 2), ("2d", 4)])]
)
def test_a_step_that_all_have_sealed_survives_them(tmp_path: Path, kind: str, size: int) -> None:
    """P55: all ranks are killed before the commit; the restart goes on from memory, bit for bit, and commits it."""
    whole = run(size, train, kind, str(tmp_path / "whole"), (10, {"memory_dir": None}))
    root, memory = tmp_path / "run", tmp_path / "memory"
    killed(root, memory, last=6, kind=kind, size=size)
    resumed = run(size, train, kind, str(root), (10, {"memory_dir": str(memory), "max_num_checkpoints": None}))
    assert [rank["start"] for rank in resumed] == [6] * size
    assert [rank["digests"] for rank in resumed] == [rank["digests"] for rank in whole]
    assert [rank["draws"] for rank in resumed] == [rank["draws"][6:] for rank in whole]
    assert steps_of(root)[:3] == [2, 4, 6]


def test_what_one_rank_lacks_none_restores(tmp_path: Path) -> None:
    """One rank's newest image is older than the other's: both restore the older step, from memory."""
    root, memory = tmp_path / "run", tmp_path / "memory"
    killed(root, memory, last=8)
    assert [sorted(slots(memory, rank)) for rank in range(SIZE)] == [[6, 8]] * SIZE
    (slots(memory, 1)[8] / "seal.json").unlink()
    found = run(SIZE, restored, "fsdp", str(root), {"memory_dir": str(memory)})
    assert [one["step"] for one in found] == [6, 6]
    assert all(one["source"].startswith(str(memory)) for one in found)
    assert steps_of(root)[-1] == 6


def test_a_damaged_image_sends_all_ranks_back(tmp_path: Path) -> None:
    """P55: a byte of one rank's image has changed: all ranks take the step before, and each says why."""
    root, memory = tmp_path / "run", tmp_path / "memory"
    killed(root, memory, last=8)
    [image] = slots(memory, 1)[8].glob("model-*.safetensors")
    flip(image, -5)
    found = run(SIZE, restored, "fsdp", str(root), {"memory_dir": str(memory)})
    assert [one["step"] for one in found] == [6, 6]
    for one in found:
        [[step, why]] = one["skipped"]
        assert step == 8
        assert "in memory" in why
        assert "model/" in why
    assert steps_of(root)[-1] == 6


def differs(rank: int, size: int, root: str, options: dict[str, Any], how: tuple[str, str]) -> None:
    """Save step 1, let rank 1 differ, and save step 2; hang once it is refused, or sealed before it can be."""
    what, moment = how
    [place] = filter(None, options.values())
    model = build("plain", size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    ckpt = Checkpointer(config(root, **options))
    ckpt.save(1, state)
    if rank == 1 and what == "value":
        state["epoch"] = 1
    elif rank == 1:
        for parameter in model.parameters():
            parameter.data.mul_(3)
    if moment == "refused":
        with pytest.raises(StateError, match="rank 1 and rank 0 have different values"):
            ckpt.save(2, state)
        assert 2 not in slots(Path(place), rank, size)
    else:
        LocalStore.put = lambda *of: time.sleep(600)  # type: ignore[method-assign]
        ckpt.step(2, state)
        until(lambda: 2 in slots(Path(place), rank, size))
    report("done")
    time.sleep(600)


@pytest.mark.parametrize(
    ("what", "moment", "option"),
    [
        ("weight", "refused", "memory_dir"),
        ("value", "sealed", "memory_dir"),
        *(
            pytest.param(*form, marks=pytest.mark.slow)
            for form in [
                ("value", "refused", "memory_dir"),
                ("weight", "sealed", "memory_dir"),
                ("weight", "refused", "local_dir"),
            ]
        ),
    ],
)
def test_a_snapshot_of_ranks_that_differ_is_never_restored(tmp_path: Path, what: str, moment: str, option: str) -> None:
    """P55: ranks differ in step 2, and are killed: all restore step 1, whether its save was refused before or not."""
    root, place = tmp_path / "run", tmp_path / "place"
    place.mkdir()
    options = {"memory_dir": None, option: str(place)}
    with Gang(SIZE, differs, str(root), options, (what, moment)) as gang:
        assert [gang.said(rank)[1] for rank in range(SIZE)] == ["done"] * SIZE
        for rank in range(SIZE):
            os.kill(gang.pid(rank), signal.SIGKILL)
    found = run(SIZE, restored, "plain", str(root), options)
    assert [one["step"] for one in found] == [1, 1]
    assert found[0]["digests"] == found[1]["digests"]
    assert steps_of(root) == [1]


def test_memory_of_a_line_that_was_left_is_ignored(tmp_path: Path) -> None:
    """Others have committed since the snapshot was taken: it is not part of the run any more."""
    root, memory = tmp_path / "run", tmp_path / "memory"
    killed(root, memory, last=6)
    on = run(SIZE, train, "fsdp", str(root), (5, {"memory_dir": None, "step_interval": 1}))
    assert [one["start"] for one in on] == [4, 4]
    found = run(SIZE, restored, "fsdp", str(root), {"memory_dir": str(memory)})
    assert [one["step"] for one in found] == [5, 5]
    assert [one["digests"] for one in found] == [one["digests"] for one in on]


@pytest.mark.slow
def test_another_number_of_ranks_takes_the_commit(tmp_path: Path) -> None:
    """Two ranks' memory is not three ranks': they restore the newest commit, and free it once they train."""
    root, memory = tmp_path / "run", tmp_path / "memory"
    killed(root, memory, last=6)
    found = run(3, train, "fsdp", str(root), (6, {"memory_dir": str(memory)}))
    assert [one["start"] for one in found] == [4] * 3
    assert not slots(memory, 0)
    assert not slots(memory, 1)
    assert steps_of(root)[-1] == 6


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_copy_that_all_have_in_a_local_directory_is_restored(tmp_path: Path, kind: str) -> None:
    """A step that all ranks have made durable on their host goes on from there, and reaches the store."""
    root, local = tmp_path / "run", tmp_path / "local"
    killed(root, local, last=6, kind=kind, option="local_dir")
    options = {"memory_dir": None, "local_dir": str(local)}
    found = run(SIZE, restored, kind, str(root), options)
    assert [one["step"] for one in found] == [6, 6]
    assert all(one["source"].startswith(str(local)) for one in found)
    assert steps_of(root)[-1] == 6
    for rank in range(SIZE):
        assert [*slots(local, rank)] == [6]
    assert [one["digests"] for one in run(SIZE, restored, kind, str(root), {"memory_dir": None})] == [
        one["digests"] for one in found
    ]


def is_fenced(rank: int, size: int, root: str, memory: str) -> str:
    """Save until the run is another gang's: the error leaves the block, which keeps what may be restored."""
    state = state_of("fsdp", size)
    try:
        with Checkpointer(config(root, memory_dir=memory, owner_timeout_s=30)) as ckpt:
            ckpt.save(1, state)
            report("saved")
            for step in range(2, 10_000):
                ckpt.save(step, state)
                time.sleep(0.02)
    except FencedError as error:
        return type(error).__name__
    return "never"


def takes_over(rank: int, size: int, root: str) -> None:
    ckpt = Checkpointer(config(root, memory_dir=None), take_over=True)
    ckpt.restore(state_of("fsdp", size))
    ckpt.close()


def test_a_fenced_gang_leaves_no_memory(tmp_path: Path) -> None:
    """What a gang took after it had lost the run is not part of it: no rank leaves a sealed snapshot."""
    root, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    with Gang(SIZE, is_fenced, str(root), str(memory)) as gang:
        assert [gang.said(rank)[1] for rank in range(SIZE)] == ["saved"] * SIZE
        run(SIZE, takes_over, str(root))
        assert gang.results() == ["FencedError"] * SIZE
    assert [slots(memory, rank) for rank in range(SIZE)] == [{}, {}]


def restored_apart(rank: int, size: int, kind: str, root: str, hosts: list[str]) -> dict[str, Any]:
    return restored(rank, size, kind, root, {"memory_dir": hosts[rank]})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_replicas_on_another_host_send_all_back_to_the_commit(tmp_path: Path, kind: str) -> None:
    """Each rank finds its own part only, which lacks the replicas that the other wrote: both take the newest commit."""
    root, memory = tmp_path / "run", tmp_path / "memory"
    killed(root, memory, last=6, kind=kind)
    other = tmp_path / "other"
    [away] = memory.glob("*/*-00001-of-00002")
    there = other / away.relative_to(memory)
    there.parent.mkdir(parents=True)
    there.parent.chmod(0o700)
    away.rename(there)
    found = run(SIZE, restored_apart, kind, str(root), [str(memory), str(other)])
    assert [one["step"] for one in found] == [4, 4]
    assert all(one["source"].startswith(str(root)) for one in found)
    assert all(step == 6 and "in memory" in why for one in found for step, why in one["skipped"][:1])


def copies_late(rank: int, size: int, root: str, memory: str) -> bool:
    """Go back to a snapshot in memory; rank 1 copies only once rank 0 trains on, or waits for it in vain."""
    state = state_of("ddp", size)
    with Checkpointer(config(root, memory_dir=memory, step_interval=1)) as ckpt:
        ckpt.save(1, state)
        saved = digests(state["model"], state["optimizer"])
        trains_on, write = Path(root).with_name("trains_on"), Copies.write

        def late(self: Copies) -> None:
            with suppress(AssertionError):
                until(trains_on.exists, 3)
            write(self)

        fill(state, 7)
        if rank == 1:
            Copies.write = late  # type: ignore[method-assign]
        assert ckpt.restore(state) == 1
        assert ckpt.last_restore is not None
        assert ckpt.last_restore.source.startswith(memory)
        found = digests(state["model"], state["optimizer"])
        for step in (2, 3):  # in the other slot, and in the one that was restored
            fill(state, step)
            ckpt.step(step, state)
        trains_on.touch()
    return found == saved


@torch.no_grad()
def fill(state: dict[str, Any], value: float) -> None:
    for parameter in state["model"].parameters():
        parameter.fill_(value)


def test_no_rank_fills_a_slot_from_which_another_one_copies(tmp_path: Path) -> None:
    """P55: a rank that is done with a restore from memory trains on once all have copied what lies in its slot."""
    (tmp_path / "memory").mkdir()
    assert run(SIZE, copies_late, str(tmp_path / "run"), str(tmp_path / "memory")) == [True, True]
