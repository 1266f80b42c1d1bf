"""Restores of many ranks: all ranks take one checkpoint or none, and a host reads and verifies every region once."""

from __future__ import annotations

import os
import re
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt_tasks import Checkpointer
from ckpt_tasks.checkpoint import agreement
from ckpt_tasks.checkpoint.ranks.exchange import find_exchange
from ckpt_tasks.checkpoint.restore import sharing
from ckpt_tasks.errors import CkptError
from ckpt_tasks.run.opening import READ_BYTES
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.system import host_name
from tests.checkpoint.ranks.training import (
    WIDE,
    attempt,
    config,
    digests,
    state_bytes,
    state_of,
    stepped,
    steps_of,
    watch,
)
from tests.support.gang import Gang, run
from tests.support.sweeps import quick_first

NAMELESS, CLOSED = 0, -1  # a host whose ranks have no files for each other, and one where a rank cannot open them


def save(rank: int, size: int, kind: str, root: str, steps: tuple[int, ...] = (1,)) -> dict[str, str]:
    state = stepped(kind, size)
    with Checkpointer(config(root, memory_dir=None)) as ckpt:
        for step in steps:
            ckpt.save(step, state)
    return digests(state["model"], state["optimizer"])


# ── ranks that do not fit ────────────────────────────────────────────────────────────────────────────────────────────


def misfit(rank: int, size: int, root: str, how: str) -> tuple[str, str, bool]:
    """Restore, or save, in ranks that have not the same; say what is raised, and whether the target is as it was."""
    state = state_of("fsdp", size, WIDE)
    before = digests(state["model"], state["optimizer"])
    options: dict[str, Any] = {"flush_timeout_s": 3} if how == "Checkpointers" else {}
    directory = root
    if how == "groups" and rank == 1:
        state["extra"] = 1
    elif how == "options":
        options["step_interval"] = 2 + rank
    elif how == "directories":
        Path(root, str(rank)).mkdir()
        os.chdir(f"{root}/{rank}")
        directory = "run"
    elif how == "meshes":
        meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        state["cut"] = {"value": distribute_tensor(torch.zeros(8), meshes[rank // 2], [Shard(0)])}
    made = [Checkpointer(config(directory, **options)) for _ in range(1 + (how == "Checkpointers" and rank))]
    ckpt = made[-1]
    call = ckpt.restore if how in ("groups", "options") else lambda state: ckpt.save(1, state)
    said = attempt(call, state)
    ckpt.close()
    return *said, digests(state["model"], state["optimizer"]) == before


MISFITS = {
    "groups": ("StateMismatchError", "rank 1: .*not in the checkpoint: extra"),
    "options": ("ConfigError", "rank 1 and rank 0 have different values of step_interval"),
    "directories": ("", "rank 1: this rank does not find the run that rank 0 has taken. Give all ranks one directory"),
    "meshes": ("", "cut/value: its regions leave a hole, overlap.*cut a tensor over one mesh"),
    "Checkpointers": ("", "made another number of Checkpointers"),
}


@pytest.mark.parametrize("how", quick_first(MISFITS, 3))
def test_a_mistake_of_one_rank_is_named_in_all(tmp_path: Path, how: str) -> None:
    """P50, P58: every rank is told what the ranks have not in common; no target is changed, nothing is committed."""
    kind, words = MISFITS[how]
    before = []
    if how in ("groups", "options"):
        run(2, save, "fsdp", str(tmp_path))
        before = [1]
    for name, said, same in run(4 if how == "meshes" else 2, misfit, str(tmp_path), how):
        assert re.search(words, said, re.DOTALL), said
        assert same
        assert kind in ("", name)
    assert how == "directories" or steps_of(tmp_path) == before


def some_restore(rank: int, size: int, root: str, who: int) -> list[tuple[str, str]]:
    state = state_of("ddp", size)
    # On a slow machine c10d's own store answers late: that is no silent rank.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "find_exchange", lambda group, timeout_s: find_exchange(group, 60))
        ckpt = Checkpointer(config(root, flush_timeout_s=1, owner_timeout_s=1))
    said = [attempt(ckpt.restore, state)] if rank == who else []
    torch.distributed.barrier()
    ckpt.close()
    with Checkpointer(config(root)) as again:
        said.append(attempt(again.save, 1, state))
    return said


@pytest.mark.slow
@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_restore_that_one_rank_alone_calls_does_not_hang(tmp_path: Path, who: int) -> None:
    """The rank that calls it raises StoreError with the silent rank's name, and does not hold the directory."""
    found = run(2, some_restore, str(tmp_path), who)
    kind, words = found[who][0]
    assert kind == "StoreError"
    assert f"rank {1 - who} said nothing" in words
    assert [said[-1] for said in found] == [("None", "")] * 2
    assert steps_of(tmp_path) == [1]


# ── damage ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def restore_damaged(rank: int, size: int, root: str, far: bool) -> list[tuple[int, str, bool]]:
    """Restore the damaged step by its number, and then whichever is good."""
    LocalStore.near = not far
    return [restore_of(root, size, step) for step in (2, None)]


def restore_of(root: str, size: int, step: int | None) -> tuple[int, str, bool]:
    state = stepped("fsdp", size)
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(7.0)
    before = digests(state["model"], state["optimizer"])
    ckpt = Checkpointer(config(root, memory_dir=None))
    restored = 0
    try:
        restored = ckpt.restore(state, step=step)
        assert ckpt.last_restore is not None
        said = str(ckpt.last_restore.skipped)
    except CkptError as error:
        said = str(error)
    ckpt.close()
    return restored, said, digests(state["model"], state["optimizer"]) == before


@pytest.mark.parametrize(
    ("how", "far", "every"),
    [
        pytest.param("lost", True, 3, marks=pytest.mark.slow),
        ("changed", False, 4),
        *(pytest.param(how, far, 1, marks=pytest.mark.slow) for how in ("lost", "changed") for far in (True, False)),
    ],
)
def test_a_damaged_object_sends_all_ranks_back_together(tmp_path: Path, how: str, far: bool, every: int) -> None:
    """P47, P55: whatever object is lost or changed, every rank is told which, of a shard the tensor and the range too.

    Asked for that step no rank's target changes, or the error says that it is half restored; else all restore the
    checkpoint before it.
    """
    run(2, save, "fsdp", str(tmp_path), (1, 2))
    objects = sorted((tmp_path / "checkpoint_000000000002").glob("*/*"))
    assert len(objects) >= 6
    for path in objects[1::every]:
        data = path.read_bytes()
        path.unlink() if how == "lost" else path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        for found in run(2, restore_damaged, str(tmp_path), far):
            assert [restored for restored, _, _ in found] == [0, 1], path
            for restored, said, same in found:
                assert same == (not restored and "half restored" not in said), path
                assert path.name in said
                if path.suffix == ".safetensors":
                    assert re.search(r"\b(model|optimizer|rng)/\S+", said), said
                    assert re.search(r"bytes \d+–\d+", said), said
        path.write_bytes(data)


# ── the ranks of one host read for each other ────────────────────────────────────────────────────────────────────────


def closed(path: Path, flags: int) -> int:
    raise PermissionError(path)


def restore(rank: int, size: int, root: str, hosts: int, far: bool) -> tuple[int, dict[str, str]]:
    """Restore; return the bytes that this rank has read, and digests of all that is there.

    Of many hosts each has ranks of its own. A rank that is slow comes last to what it reads for the others.
    """
    place = f"{host_name()}/{rank * max(hosts, 1) // size}" if hosts != NAMELESS else ""
    setattr(sharing, "host_name", lambda: place)  # noqa: B010 (it is not exported)
    if hosts == CLOSED and rank == 1:
        setattr(sharing, "open_descriptor", closed)  # noqa: B010 (it is not exported)
    state = state_of("ddp", size, WIDE) if far else stepped("ddp", size)
    count = watch(far=far, on_read=lambda: time.sleep(0.2 * rank * far))
    with Checkpointer(config(root, memory_dir=None)) as ckpt:
        assert ckpt.restore(state) == 1
    return sum(count), digests(state["model"], state["optimizer"])


@pytest.mark.parametrize(
    ("size", "hosts", "far", "times"),
    [
        (4, 2, True, 2),
        (2, 1, False, 2),
        pytest.param(4, NAMELESS, True, 4, marks=pytest.mark.slow),
        pytest.param(4, CLOSED, True, 4, marks=pytest.mark.slow),
    ],
)
def test_each_host_reads_for_itself(tmp_path: Path, size: int, hosts: int, far: bool, times: int) -> None:
    """P58: four ranks on two hosts read twice; ranks that cannot see each other's memory read for themselves.

    In a local directory each rank reads all of it to its place, once. Nothing is used before
    it has been read, also by a slow rank.
    """
    saved = run(1, save, "ddp", str(tmp_path))[0]
    found = run(size, restore, str(tmp_path), hosts, far)
    assert [held for _, held in found] == [saved] * size
    assert times * 0.95 < sum(read for read, _ in found) / state_bytes(tmp_path) < times * 1.05


def restore_while_one_dies(rank: int, size: int, root: str) -> tuple[tuple[str, str], bool, list[str]]:
    watch(far=True, on_read=(lambda: os.kill(os.getpid(), signal.SIGKILL)) if rank else lambda: None)
    state = state_of("ddp", size, WIDE)
    model = state["model"].module  # what is restored is compared without a collective: the other rank is dead
    before = digests(model, state["optimizer"])
    ckpt = Checkpointer(config(root, memory_dir=None, flush_timeout_s=3))
    said = attempt(ckpt.restore, state)
    opened = [target_of(number) for number in os.listdir("/proc/self/fd")]
    left = [line for line in (*opened, *Path("/proc/self/maps").read_text().splitlines()) if "memfd:ckpt-tasks" in line]
    return said, digests(model, state["optimizer"]) == before, left


def target_of(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:  # the directory that was just read
        return ""


def test_a_rank_that_dies_while_the_others_wait_for_its_share(tmp_path: Path) -> None:
    """The others raise, as one of them has ended, and are as they were; nothing is left in shared memory."""
    run(2, save, "ddp", str(tmp_path))
    with Gang(2, restore_while_one_dies, str(tmp_path)) as gang:
        kind, (said, same, left) = gang.said(0)
    assert (kind, said[0], same, left) == ("result", "StoreError", True, [])
    assert "rank 1 has ended" in said[1]


Spans = dict[str, np.ndarray[Any, np.dtype[np.int64]]]


@st.composite
def wants(draw: st.DrawFn) -> list[Spans]:
    regions = {
        name: [(n * READ_BYTES // 2, n * READ_BYTES // 2 + draw(st.integers(1, 100))) for n in range(6)]
        for name in ("a", "b", "c")
    }
    ranks = []
    for _ in range(draw(st.integers(1, 5))):
        spans = {name: [one for one in here if draw(st.booleans())] for name, here in regions.items()}
        ranks.append({name: np.array(here, np.int64) for name, here in spans.items() if here})
    return ranks


@given(wants())
def test_every_region_has_one_reader_that_wants_it(ranks: list[Spans]) -> None:
    """Whatever the ranks of a host want, each region is read by one of those that want it, to a place of its own."""
    readers, size_bytes = sharing.divide(ranks)
    wanted = {(name, int(begin)): int(end) for spans in ranks for name in spans for begin, end in spans[name]}
    assert {(name, begin) for name, found in readers.items() for begin in found.by_begin} == wanted.keys()
    for name, found in readers.items():
        for begin, place in found.by_begin.items():
            assert begin in ranks[place][name][:, 0]
            assert 0 <= found.shift + begin < found.shift + wanted[name, begin] <= size_bytes
    places = sorted((readers[name].shift + begin, readers[name].shift + end) for (name, begin), end in wanted.items())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
