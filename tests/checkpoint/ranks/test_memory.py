"""Snapshots in the memory of many ranks: each seals its part, and a restart takes the newest that all have sealed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ckpt_tasks import Checkpointer
from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.records import SEAL_NAME, Seal
from ckpt_tasks.state.tensors.copies import Copies
from ckpt_tasks.storage.local import LocalStore
from tests.checkpoint.ranks.training import attempt, config, digests, put, state_of, steps_of, takes_over, train
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


def hangs(rank: int, size: int, kind: str, root: str, plan: tuple[dict[str, str | None], int]) -> None:
    """Train; after step 4 the store takes nothing. Report once the last step is sealed on this host, and hang."""
    options, last = plan
    [place] = filter(None, options.values())
    state = state_of(kind, size)
    batches = torch.randn(100, 8, 16, generator=torch.Generator().manual_seed(5))
    ckpt = Checkpointer(config(root, **options))

    def never(self: LocalStore, name: str, body: Any) -> None:
        if self.url == root:
            time.sleep(600)
        put(self, name, body)

    for step in range(ckpt.restore(state) + 1, last + 1):
        torch.rand(())
        state["model"](batches[step]).pow(2).mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        ckpt.step(step, state)
        if step == 4:
            ckpt.wait()
            LocalStore.put = never  # type: ignore[method-assign]
    until(lambda: last in slots(Path(place), rank, size))
    report("sealed")
    time.sleep(600)


def killed(
    root: Path, place: Path, last: int, *, kind: str = "fsdp", size: int = SIZE, option: str = "memory_dir"
) -> None:
    """Leave steps 2 and 4 committed, and what came after them in the memory of all ranks only, or in a local_dir."""
    place.mkdir(exist_ok=True)
    with Gang(size, hangs, kind, str(root), ({"memory_dir": None, option: str(place)}, last)) as gang:
        assert [gang.said(rank)[1] for rank in range(size)] == ["sealed"] * size
        for rank in range(size):
            gang.send(rank, signal.SIGKILL)
    assert steps_of(root)[-1] == 4


def restored(rank: int, size: int, kind: str, root: str, on: tuple[str, list[str]]) -> dict[str, Any]:
    """Restore, save what storage lacks, and end."""
    state, (option, places) = state_of(kind, size), on
    with Checkpointer(config(root, **{"memory_dir": None, option: places[rank]})) as ckpt:
        step = ckpt.restore(state)
        report_ = ckpt.last_restore
        assert report_ is not None
        ckpt.wait()
    source, skipped = report_.source, [[*one] for one in report_.skipped]
    held = digests(state["model"], state["optimizer"])
    return {"step": step, "source": source, "skipped": skipped, "digests": held}


@pytest.mark.parametrize(
    ("kind", "size"), [("fsdp", 2), *(pytest.param(*form, marks=pytest.mark.slow) for form in [("ddp", 2), ("2d", 4)])]
)
def test_a_step_that_all_have_sealed_survives_them(tmp_path: Path, kind: str, size: int) -> None:
    """P55: all ranks are killed before the commit; the restart goes on from memory, bit for bit, and commits it."""
    whole = run(size, train, kind, str(tmp_path / "whole"), (10, {"memory_dir": None}))
    root, memory = tmp_path / "run", tmp_path / "memory"
    killed(root, memory, 6, kind=kind, size=size)
    resumed = run(size, train, kind, str(root), (10, {"memory_dir": str(memory), "max_num_checkpoints": None}))
    assert [rank["start"] for rank in resumed] == [6] * size
    assert [rank["digests"] for rank in resumed] == [rank["digests"] for rank in whole]
    assert [rank["draws"] for rank in resumed] == [rank["draws"][6:] for rank in whole]
    assert steps_of(root)[:3] == [2, 4, 6]


def unseal(root: Path, place: Path) -> None:
    """Let rank 1's newest image be older than the other's."""
    (slots(place, 1)[8] / SEAL_NAME).unlink()


def damage(root: Path, place: Path) -> None:
    [image] = slots(place, 1)[8].glob("model-*.safetensors")
    flip(image, -5)


def train_elsewhere(root: Path, place: Path) -> None:
    on = run(SIZE, train, "fsdp", str(root), (5, {"memory_dir": None, "step_interval": 1}))
    assert [one["start"] for one in on] == [4, 4]


def move(root: Path, place: Path) -> None:
    """Let rank 1 be on another host, with its part alone: it lacks the replicas that the other rank has written."""
    [away] = place.glob("*/*-00001-of-00002")
    there = place.with_name("other") / away.relative_to(place)
    there.parent.mkdir(parents=True)
    there.parent.chmod(0o700)
    away.rename(there)


class Fate(NamedTuple):
    """What happens after all ranks were killed with steps 6 to `last` on their host, what is restored then, and why."""

    happens: Callable[[Path, Path], None]
    step: int
    kept: bool = True  # Whether it comes from the host.
    why: str = ""
    kind: str = "fsdp"
    option: str = "memory_dir"
    last: int = 8


FATES = {
    "none": Fate(lambda root, place: None, 6, kind="ddp", option="local_dir", last=6),
    "not sealed in one": Fate(unseal, 6),
    "damaged in one": Fate(damage, 6, why="in memory.*model/"),
    "a line that was left": Fate(train_elsewhere, 5, kept=False),
    "another host": Fate(move, 4, kept=False, why="in memory"),
    "none, sharded": Fate(lambda root, place: None, 6, option="local_dir", last=6),
    "another host, replicated": Fate(move, 4, kept=False, why="in memory", kind="ddp"),
}
SLOW = ("none", "not sealed in one", "another host", "none, sharded", "another host, replicated")


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.slow if one in SLOW else ()) for one in FATES])
def test_all_restore_one_step_or_the_commit(tmp_path: Path, name: str) -> None:
    """P55, P71: what one rank lacks, or has damaged, none restores, and each says why; then that step is committed.

    Memory of a line that was left is no part of the run. A copy in a local directory counts as memory does.
    """
    fate = FATES[name]
    root, place = tmp_path / "run", tmp_path / "place"
    killed(root, place, fate.last, kind=fate.kind, option=fate.option)
    assert [max(slots(place, rank)) for rank in range(SIZE)] == [fate.last] * SIZE
    fate.happens(root, place)
    places = [str(place), str(place if fate.happens is not move else place.with_name("other"))]
    found = run(SIZE, restored, fate.kind, str(root), (fate.option, places))
    for one in found:
        assert one["step"] == fate.step
        assert one["source"].startswith(places[0] if fate.kept else str(root))
        assert not fate.why or one["skipped"][0][0] == fate.last
        assert all(word in str(one["skipped"]) for word in fate.why.split(".*"))
    assert steps_of(root)[-1] == fate.step
    assert [one["digests"] for one in found] == [found[0]["digests"]] * SIZE


@pytest.mark.slow
def test_another_number_of_ranks_takes_the_commit(tmp_path: Path) -> None:
    """Two ranks' memory is not three ranks': they restore the newest commit, and free it once they train."""
    root, memory = tmp_path / "run", tmp_path / "memory"
    killed(root, memory, 6)
    found = run(3, train, "fsdp", str(root), (6, {"memory_dir": str(memory)}))
    assert [one["start"] for one in found] == [4] * 3
    assert slots(memory, 0) == slots(memory, 1) == {}
    assert steps_of(root)[-1] == 6


def differs(rank: int, size: int, root: str, place: str, how: tuple[str, str, str]) -> None:
    """Save step 1, let rank 1 differ, and save step 2; hang once it is refused, or sealed before it can be."""
    what, moment, option = how
    state = state_of("plain", size)
    ckpt = Checkpointer(config(root, **{"memory_dir": None, option: place}))
    ckpt.save(1, state)
    if rank == 1 and what == "value":
        state["epoch"] = 1
    elif rank == 1:
        fill(state, 3)
    if moment == "refused":
        name, words = attempt(ckpt.save, 2, state)
        assert (name, "rank 1 and rank 0 have different values" in words) == ("StateError", True)
        assert 2 not in slots(Path(place), rank, size)
    else:
        LocalStore.put = lambda *of: time.sleep(600)  # type: ignore[method-assign]
        ckpt.step(2, state)
        until(lambda: 2 in slots(Path(place), rank, size))
    report("done")
    time.sleep(600)


@pytest.mark.parametrize(
    "how",
    [
        ("weight", "refused", "memory_dir"),
        pytest.param(("value", "sealed", "memory_dir"), marks=pytest.mark.slow),
        pytest.param(("weight", "sealed", "memory_dir"), marks=pytest.mark.slow),
        pytest.param(("weight", "refused", "local_dir"), marks=pytest.mark.slow),
    ],
)
def test_a_snapshot_of_ranks_that_differ_is_never_restored(tmp_path: Path, how: tuple[str, str, str]) -> None:
    """P55: ranks differ in step 2, and are killed: all restore step 1, whether its save was refused before or not."""
    root, place = tmp_path / "run", tmp_path / "place"
    place.mkdir()
    with Gang(SIZE, differs, str(root), str(place), how) as gang:
        assert [gang.said(rank)[1] for rank in range(SIZE)] == ["done"] * SIZE
        for rank in range(SIZE):
            gang.send(rank, signal.SIGKILL)
    found = run(SIZE, restored, "plain", str(root), (how[2], [str(place)] * SIZE))
    assert [one["step"] for one in found] == [1, 1]
    assert found[0]["digests"] == found[1]["digests"]
    assert steps_of(root) == [1]


def is_fenced(rank: int, size: int, root: str, memory: str) -> str:
    """Save until the run is another gang's: the error leaves the block, which keeps what may be restored."""
    state, said = state_of("fsdp", size), ""
    with suppress(ZeroDivisionError), Checkpointer(config(root, memory_dir=memory, owner_timeout_s=30)) as ckpt:
        for step in range(1, 10_000):
            said, _ = attempt(ckpt.save, step, state)
            if said != "None":
                raise ZeroDivisionError
            if step == 1:
                report("saved")
            time.sleep(0.02)
    return said


def test_a_gang_is_fenced_as_a_whole_and_leaves_no_memory(tmp_path: Path) -> None:
    """P33, P67: the gang that took over commits; every rank of the other one is fenced, and no sealed snapshot stays.

    What it took after it had lost the run is not part of it.
    """
    root, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    with Gang(SIZE, is_fenced, str(root), str(memory)) as gang:
        assert [gang.said(rank)[1] for rank in range(SIZE)] == ["saved"] * SIZE
        steps = run(SIZE, takes_over, str(root))
        assert steps[0] == steps[1] > 0
        assert gang.results() == ["FencedError"] * SIZE
    assert max(steps_of(root)) == 20_000
    assert [slots(memory, rank) for rank in range(SIZE)] == [{}, {}]


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
