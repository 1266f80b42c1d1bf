"""The ranks of one host read and verify for each other: every region once, and all of it is there before it is used."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks import Checkpointer
from ckpt_tasks.errors import CkptError
from ckpt_tasks.ledger.history import History
from ckpt_tasks.reading import sharing
from ckpt_tasks.reading.opening import READ_BYTES, open_checkpoint
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.system import host_name
from tests.ranks.training import build, config, digests
from tests.support.gang import Gang, run

NAMELESS, CLOSED = 0, -1  # a host whose ranks have no files for each other, and one where a rank cannot open them
WIDE = 8184  # large beside headers and random streams; 2, 3 and 4 ranks divide it, as tensor parallelism wants
Counted = list[tuple[str, int, int]]  # of an object, from which byte on, how many


def state_of(kind: str, size: int, *, stepped: bool) -> dict[str, Any]:
    model = build(kind, size, WIDE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stepped:
        model(torch.randn(4, 16, generator=torch.Generator().manual_seed(1))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "nothing": torch.empty(0)}


def save(rank: int, size: int, kind: str, root: str, steps: tuple[int, ...] = (1,)) -> dict[str, str]:
    state = state_of(kind, size, stepped=True)
    with Checkpointer(config(root, memory_dir=None)) as ckpt:
        for step in steps:
            ckpt.save(step, state)
    return digests(state["model"], state["optimizer"])


def watch(*, far: bool, on_read: Callable[[], None] = lambda: None) -> Counted:
    """Note what this process reads of shards from now on; perhaps as if the store were far away."""
    count: Counted = []
    read = LocalStore.read

    def counting(self: LocalStore, name: str, begin: int, into: memoryview) -> None:
        if name.endswith(".safetensors"):
            count.append((name, begin, len(into)))
            if begin > 0:
                on_read()
        read(self, name, begin, into)

    LocalStore.read = counting  # type: ignore[method-assign]
    LocalStore.near = not far
    return count


def closed(path: Path, flags: int) -> int:
    raise PermissionError(path)


def restore(rank: int, size: int, kind: str, root: str, how: str = "far", hosts: int = 1) -> dict[str, Any]:  # noqa: PLR0917 (a job)
    """Restore; return the bytes that this rank has read, and digests of all that is there."""
    place = f"{host_name()}/{rank * max(hosts, 1) // size}" if hosts != NAMELESS else ""
    setattr(sharing, "host_name", lambda: place)  # noqa: B010 (it is not exported)
    if hosts == CLOSED and rank == 1:
        setattr(sharing, "open_descriptor", closed)  # noqa: B010 (it is not exported)
    state, count = state_of(kind, size, stepped=how == "near"), watch(far=how == "far")
    with Checkpointer(config(root, memory_dir=None)) as ckpt:
        step = ckpt.restore(state)
    return {
        "step": step,
        "read": sum(size_bytes for _, _, size_bytes in count),
        "digests": digests(state["model"], state["optimizer"]),
    }


def state_bytes(root: Path) -> int:
    """Count what all ranks together want of the newest checkpoint."""
    history = History(LocalStore(root))
    opened = open_checkpoint(history.store, history.head().state.live[-1])
    return sum(row.end - row.begin for row in opened.rows)


WORLDS = [("fsdp", 2, "fsdp", 3), ("tp", 2, "ddp", 3)]
KINDS = ["fsdp", "tp", "ddp"]
MORE_WORLDS = [
    *product(KINDS, (1, 2, 3, 4), KINDS, (1, 2, 3, 4)),
    *product(["2d", "hsdp"], (4,), KINDS, (1, 2, 3, 4)),
    *product(KINDS, (1, 2, 3, 4), ["2d", "hsdp"], (4,)),
]


@pytest.mark.parametrize(("kind", "size", "other", "others"), WORLDS)
def test_a_host_asks_a_far_store_for_every_byte_once(
    tmp_path: Path, kind: str, size: int, other: str, others: int
) -> None:
    """P58: from any number of ranks to any other, a host reads 1.05 times what it wants at most, and it is right."""
    reads_once(tmp_path, kind, size, other, others)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "2d", "hsdp"])
def test_every_world_reads_every_byte_once(tmp_path: Path, kind: str) -> None:
    """P58: the same for all world sizes up to 4, cut along either dimension, along two, and replicated."""
    for one, size, other, others in MORE_WORLDS:
        if one == kind:
            reads_once(tmp_path / f"{size}-{other}-{others}", kind, size, other, others)


def reads_once(root: Path, kind: str, size: int, other: str, others: int) -> None:
    saved = run(size, save, kind, str(root))[0]
    found = run(others, restore, other, str(root))
    assert all(rank["digests"] == saved for rank in found)
    read = sum(rank["read"] for rank in found)
    assert read <= 1.05 * state_bytes(root), (read, state_bytes(root), kind, size, other, others)


def test_a_local_directory_is_verified_once_for_a_host(tmp_path: Path) -> None:
    """Two ranks that hold the same state verify half of it each, and then each reads all of it to its place."""
    saved = run(2, save, "ddp", str(tmp_path))[0]
    found = run(2, restore, "ddp", str(tmp_path), "near")
    assert [rank["digests"] for rank in found] == [saved] * 2
    once = state_bytes(tmp_path)
    assert all(1.4 * once < rank["read"] < 1.6 * once for rank in found)


@pytest.mark.parametrize(
    ("hosts", "times"),
    [(2, 2), pytest.param(NAMELESS, 4, marks=pytest.mark.slow), pytest.param(CLOSED, 4, marks=pytest.mark.slow)],
)
def test_each_host_reads_for_itself(tmp_path: Path, hosts: int, times: int) -> None:
    """Four ranks on two hosts read twice; ranks that cannot see each other's memory read for themselves."""
    saved = run(1, save, "ddp", str(tmp_path))[0]
    found = run(4, restore, "ddp", str(tmp_path), "far", hosts)
    assert [rank["digests"] for rank in found] == [saved] * 4
    once = state_bytes(tmp_path)
    assert times * once * 0.95 < sum(rank["read"] for rank in found) < times * once * 1.05


def restore_with_a_slow_reader(rank: int, size: int, root: str) -> dict[str, str]:
    watch(far=True, on_read=lambda: time.sleep(0.5 * rank))
    state = state_of("fsdp", size, stepped=False)  # its moments are made anew, before anything is confirmed
    with Checkpointer(config(root, memory_dir=None)) as ckpt:
        ckpt.restore(state)
    return digests(state["model"], state["optimizer"])


def test_nothing_is_used_before_it_has_been_read(tmp_path: Path) -> None:
    """A rank that is done waits for what the others of its host read for it."""
    saved = run(1, save, "ddp", str(tmp_path))[0]
    assert run(2, restore_with_a_slow_reader, str(tmp_path)) == [saved] * 2


def restore_while_one_dies(rank: int, size: int, root: str) -> tuple[str, float, bool, list[str]]:
    watch(far=True, on_read=(lambda: os.kill(os.getpid(), signal.SIGKILL)) if rank else lambda: None)
    state = state_of("ddp", size, stepped=False)
    model = state["model"].module  # what is restored is compared without a collective: the other rank is dead
    before = digests(model, state["optimizer"])
    ckpt = Checkpointer(config(root, memory_dir=None, flush_timeout_s=3))
    started = time.monotonic()
    with pytest.raises(CkptError) as caught:
        ckpt.restore(state)
    said = f"{type(caught.value).__name__}: {caught.value}"
    seconds = time.monotonic() - started
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:ckpt-tasks" in line]
    opened = [link for number in os.listdir("/proc/self/fd") if "memfd:ckpt-tasks" in (link := target_of(number))]
    return said, seconds, digests(model, state["optimizer"]) == before, maps + opened


def target_of(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:  # the directory that was just read
        return ""


def test_a_rank_that_dies_while_the_others_wait_for_its_share(tmp_path: Path) -> None:
    """The others raise within the deadline and are as they were; nothing is left in shared memory."""
    run(2, save, "ddp", str(tmp_path))
    with Gang(2, restore_while_one_dies, str(tmp_path)) as gang:
        kind, (said, seconds, same, left) = gang.said(0)
    assert kind == "result"
    assert "StoreError: rank 1 has ended" in said
    assert seconds < 30
    assert same
    assert left == []


def restore_what_is_damaged(rank: int, size: int, root: str, far: bool, step: int | None) -> tuple[int, str, bool]:
    LocalStore.near = not far
    state = state_of("fsdp", size, stepped=True)
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


@pytest.mark.parametrize(("how", "far"), [("lost", True), ("changed", False)])
def test_a_damaged_object_is_named_by_tensor_and_range(tmp_path: Path, how: str, far: bool) -> None:
    """P47: whatever object is damaged, all ranks are told which tensor, and are untouched; then all take the older."""
    damaged(tmp_path, how, far=far, every=7)


@pytest.mark.slow
@pytest.mark.parametrize("far", [True, False])
@pytest.mark.parametrize("how", ["lost", "changed"])
def test_every_damaged_object_is_named_by_tensor_and_range(tmp_path: Path, how: str, far: bool) -> None:
    """P47: the same for each object in turn."""
    damaged(tmp_path, how, far=far, every=1)


def damaged(root: Path, how: str, *, far: bool, every: int) -> None:
    run(2, save, "fsdp", str(root), (1, 2))
    shards = sorted((root / "checkpoint_000000000002").glob("*/*.safetensors"))
    assert len(shards) > 3
    for path in shards[1::every]:
        data = path.read_bytes()
        path.unlink() if how == "lost" else path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        for restored, said, same in run(2, restore_what_is_damaged, str(root), far, 2):
            assert (restored, same) == (0, True)
            assert path.name in said
            assert re.search(r"\b(model|optimizer|rng|nothing)/\S+", said), said
            assert re.search(r"bytes \d+–\d+", said), said
        for restored, said, same in run(2, restore_what_is_damaged, str(root), far, None):
            assert (restored, same) == (1, False)
            assert path.name in said
        path.write_bytes(data)


@st.composite
def wants(draw: st.DrawFn) -> list[dict[str, np.ndarray[Any, np.dtype[np.int64]]]]:
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
def test_every_region_has_one_reader_that_wants_it(ranks: list[dict[str, np.ndarray[Any, np.dtype[np.int64]]]]) -> None:
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
