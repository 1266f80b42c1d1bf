"""Copies from CUDA devices without one: the order of streams, and memory that is pinned once and let go in time."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from ckpt_tasks.checkpoint.memory.memory import MemoryDirectory, PrivateMemory, SnapshotMemory, private_root
from ckpt_tasks.checkpoint.memory.snapshot import Image, ImageSet, plan_snapshot
from ckpt_tasks.errors import StateError
from ckpt_tasks.state.tensors.device import Devices
from tests.support.devices import Cuda, Elsewhere, Queue, Still, There, is_all, is_mapped, on, pairs_of, plain, write


@pytest.fixture
def cuda() -> Cuda:
    There.stand_in = Cuda()
    return There.stand_in


# ── the order of streams ─────────────────────────────────────────────────────────────────────────────────────────


COUNT = 3


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("run"), st.integers(0, 3)),
            st.tuples(st.just("write"), st.integers(0, COUNT - 1)),
        ),
        max_size=20,
    )
)
def test_any_order_of_streams_and_writes(actions: list[Any]) -> None:
    """P1: however far each stream has come when something is written, the copy is the state of the call."""
    cuda = There.stand_in = Cuda()
    live = [on(kind, 40) for kind in (There, Elsewhere, There)[:COUNT]]
    pairs = pairs_of(live)
    for number, tensor in enumerate(live):
        write(tensor, 10.0 + number)
    copy = Devices(cuda).start(pairs)
    for value, (action, number) in enumerate(actions, 100):
        if action == "run":
            cuda.streams[number % len(cuda.streams)].step()
        else:
            write(live[number], float(value))
    assert cuda.waited == []
    copy.wait()
    assert [is_all(place, 10.0 + number) for number, (place, _) in enumerate(pairs)] == [True] * COUNT


@pytest.mark.parametrize("order", ["channels_last", "sliced"])
def test_what_is_not_in_order_is_copied_as_well(cuda: Cuda, order: str) -> None:
    """P1: every layout is copied in the order of the streams: what is written after the call is not in the copy."""
    plain_live = torch.arange(240.0).view(2, 4, 5, 6)
    layouts = {
        "channels_last": plain_live.to(memory_format=torch.channels_last),
        "sliced": plain_live[:, ::2, 1:, ::3],
    }
    live = layouts[order].as_subclass(There)
    before, place = plain(live).clone(), torch.zeros(live.shape)
    copy = Devices(cuda).start([(place, live)])
    write(live, 9.0)
    copy.wait()
    assert torch.equal(place, before)


def test_memory_is_held_until_the_device_has_read_it(cuda: Cuda) -> None:
    """P1: whatever training does with its tensors, what the device reads stays; once it has arrived nothing does."""
    live = on(Still, 40)
    memory: Any = StorageWeakRef(live.untyped_storage())  # type: ignore[no-untyped-call]
    copy = Devices(cuda).start(pairs_of([live]))
    del live
    gc.collect()
    assert not memory.expired()
    copy.wait()
    gc.collect()
    assert memory.expired()


def test_a_failed_device_is_told_whenever_it_is_asked(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error at the event is a StateError at every wait, and one of the launch is a StateError there."""

    def refused(*_: object) -> None:
        raise RuntimeError("CUDA error: launch failed")

    copy = Devices(cuda).start(pairs_of([on(There, 5)]))
    cuda.broken = RuntimeError("CUDA error: an illegal memory access was encountered")
    for _ in range(2):
        with pytest.raises(StateError, match="between its device and the host: CUDA error: an illegal"):
            copy.wait()
    monkeypatch.setattr(Queue, "wait_stream", refused)
    with pytest.raises(StateError, match="launch failed"):
        Devices(cuda).start(pairs_of([on(There, 5)]))


# ── pinned memory ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["private", "shared"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> SnapshotMemory:
    return PrivateMemory() if request.param == "private" else MemoryDirectory(private_root(tmp_path), "run")


@pytest.fixture
def images(cuda: Cuda, memory: SnapshotMemory, monkeypatch: pytest.MonkeyPatch) -> list[Image]:
    """Return the images of a state with a tensor on a device in the first one, and none in the second one."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    plan = plan_snapshot({"there/x": on(There, 5000), "here/y": torch.ones(3)})
    made = [*ImageSet(plan, memory.take("a", plan.sizes)).images]
    assert plan.devices == {made[0].name: torch.device("cuda", 0)}
    return made


def pin(devices: Devices, image: Image) -> None:
    devices.pin(image.buffer, image, torch.device("cuda", 0))


def test_memory_is_pinned_whole_and_let_go_while_it_is_mapped(cuda: Cuda, images: list[Image]) -> None:
    """All of an image's memory is registered, for every device, and unregistered before it is unmapped."""
    pin(Devices(cuda), images[0])
    address = torch.frombuffer(images[0].buffer, dtype=torch.uint8).data_ptr()
    ((at, size_bytes, flags, thread),) = cuda.registered
    assert (at, size_bytes, flags) == (address, images[0].layout.size_bytes, 1)
    assert thread is not threading.current_thread()
    assert not thread.is_alive(), "what CUDA keeps as the last error of a thread goes with it"
    assert is_mapped(address, size_bytes)
    images.clear()
    gc.collect()
    assert not is_mapped(address, size_bytes)
    assert (cuda.pinned, cuda.faults) == ({}, [])


def test_memory_is_not_let_go_under_a_copy(cuda: Cuda, images: list[Image]) -> None:
    """Who drops an image while a device is writing to it waits for that, and nobody writes to memory that is gone."""
    devices = Devices(cuda)
    pin(devices, images[0])
    copy = devices.start([(images[0].views["x"], on(There, 5000, value=7.0))])
    assert cuda.copying[0].queue
    del copy
    view = images[0].views["x"]
    images.clear()
    gc.collect()
    assert (cuda.pinned, cuda.faults) == ({}, [])
    assert is_all(view, 7.0)
