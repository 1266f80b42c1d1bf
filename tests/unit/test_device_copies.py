"""Copies from CUDA devices without one: the order of streams, and memory that is pinned once and let go in time."""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from ckpt_tasks.errors import StateError
from ckpt_tasks.state.device import Devices
from ckpt_tasks.state.memory import MemoryDirectory, PrivateMemory, SnapshotMemory, private_root
from ckpt_tasks.state.overlap import OverlappedCopy, _running
from ckpt_tasks.state.snapshot import Image, ImageSet, plan_snapshot
from tests.unit.devices import (
    Cuda,
    Elsewhere,
    Filling,
    Queue,
    Still,
    There,
    is_all,
    is_mapped,
    on,
    pairs_of,
    plain,
    write,
)
from tests.unit.overlaps import across, gate_for


@pytest.fixture
def cuda() -> Cuda:
    There.stand_in = Cuda()
    return There.stand_in


def parameter_on(kind: type[torch.Tensor], *shape: int) -> torch.Tensor:
    return on(kind, *shape).requires_grad_()


def drain(*streams: Queue) -> None:
    """Let streams go on by turns, each as far as it comes."""
    for stream in streams:
        while stream.step():
            pass


# ── the order of streams ─────────────────────────────────────────────────────────────────────────────────────────


def test_an_eager_copy_has_what_was_queued_before_it_and_nothing_later(cuda: Cuda) -> None:
    """P1: the host goes on while nothing has run; kernels queued before the call are in the copy, later ones not."""
    live = [on(There, 5), on(Elsewhere, 7), torch.ones(3)]
    for tensor in live[:2]:
        write(tensor, 2.0)
    copy = OverlappedCopy(pairs := pairs_of(live), [], devices=Devices(cuda))
    copy.start()
    for tensor in live[:2]:
        write(tensor, 3.0)
    live[2].fill_(3.0)
    assert cuda.waited == []
    assert [place[0].item() for place, _ in pairs] == [-1.0, -1.0, 1.0]
    assert copy.wait()
    assert [is_all(place, value) for (place, _), value in zip(pairs, (2.0, 2.0, 1.0), strict=True)] == [True] * 3
    cuda.go_on(lambda: not any(stream.queue for stream in cuda.streams))
    assert [is_all(tensor, 3.0) for tensor in live[:2]] == [True, True]


def test_every_device_copies_on_one_stream_of_its_own(cuda: Cuda) -> None:
    """Two streams for two devices, however many copies; none of them is the one that training uses."""
    devices = Devices(cuda)
    for _ in range(3):
        devices.start(pairs_of([on(There, 5), on(Elsewhere, 7), on(There, 2)])).wait()
    training = [cuda.current_stream(torch.device("cuda", index)) for index in (0, 1)]
    assert len(cuda.streams) == 4
    assert {stream.device for stream in cuda.streams if stream not in training} == {s.device for s in training}


def test_the_device_waits_before_a_step_and_the_host_does_not(cuda: Cuda) -> None:
    """P1: with a copy that has not begun the step returns, and what it queued runs after the copy."""
    parameter = parameter_on(There, 5)
    optimizer = Filling([parameter], {})
    copy = OverlappedCopy(pairs := pairs_of([parameter]), [optimizer], devices=Devices(cuda))
    copy.start()
    optimizer.value = 9.0
    optimizer.step()
    training = cuda.current_stream(torch.device("cuda", 0))
    while training.step():
        pass
    assert (cuda.waited, training.queue[-1] is not None, pairs[0][0][0].item()) == ([], True, -1.0)
    assert plain(parameter)[0] == 1.0
    assert copy.wait()
    assert is_all(pairs[0][0], 1.0)


def test_a_step_on_another_stream_waits_as_well(cuda: Cuda) -> None:
    """P1: until the copy has arrived, every step waits for it, also after the one that settled it."""
    one, two = parameter_on(There, 5), parameter_on(There, 5)
    first, second = Filling([one], {}), Filling([two], {})
    copy = OverlappedCopy(pairs := pairs_of([one, two]), [first, second], devices=Devices(cuda))
    copy.start()
    first.step()
    other = Queue(cuda, torch.device("cuda", 0))
    with cuda.stream(other):
        second.step()
    while other.step():
        pass
    assert plain(two)[0] == 1.0
    assert copy.wait()
    assert is_all(pairs[1][0], 1.0)
    assert copy not in _running


COUNT = 3


@given(
    st.lists(
        st.one_of(
            st.just("step"),
            st.just("buffer"),
            st.tuples(st.just("run"), st.integers(0, 3)),
            st.tuples(st.just("write"), st.integers(0, COUNT - 1), st.booleans()),
        ),
        max_size=20,
    )
)
def test_any_order_of_streams_and_writes(actions: list[Any]) -> None:
    """P1: however far each stream has come when what is written, the copy is of one moment, or it is not used."""
    cuda = There.stand_in = Cuda()
    parameters = [parameter_on(kind, 40) for kind in (There, Elsewhere, There)[:COUNT]]
    host, buffer = torch.ones(40, requires_grad=True), on(There, 3)
    optimizer = Filling(parameters, {})
    other = torch.optim.SGD([host])
    pairs = pairs_of([buffer, host, *parameters])
    for number, parameter in enumerate(parameters):
        write(parameter, 10.0 + number)
    copy = OverlappedCopy(pairs, [optimizer, other], devices=Devices(cuda))
    copy.start()
    torn = settled = False
    value = 100.0
    for action in actions:
        value += 1
        if action == "step":
            optimizer.value, settled = value, True
            optimizer.step()
        elif action == "buffer":
            write(buffer, value)
        elif action[0] == "run":
            cuda.streams[action[1] % len(cuda.streams)].step()
        else:
            torn |= not settled
            write(parameters[action[1]], value, counted=action[2])
    assert cuda.waited == []
    assert copy.wait() != torn
    if not torn:
        values = [1.0, 1.0, *(10.0 + number for number in range(COUNT))]
        assert [is_all(place, one) for (place, _), one in zip(pairs, values, strict=True)] == [True] * len(pairs)


@pytest.mark.parametrize("size", [1, 40, 1 << 16])
def test_what_a_replayed_graph_writes_is_found(cuda: Cuda, size: int) -> None:
    """P1: a kernel that calls no hook and moves no counter condemns the snapshot, however small the tensor."""
    parameters = [parameter_on(There, size), parameter_on(There, 40)]
    copy = OverlappedCopy(pairs_of(parameters), [Filling(parameters, {})], devices=Devices(cuda))
    copy.start()
    write(parameters[0], 5.0, counted=False)
    assert not copy.wait()
    assert copy.moved == {0}


def test_a_write_that_is_taken_back_shows_in_the_copy(cuda: Cuda) -> None:
    """P1: written when the copy ran and put back before the check: the copy differs from both."""
    parameter = parameter_on(There, 40)
    copy = OverlappedCopy(pairs := pairs_of([parameter]), [Filling([parameter], {})], devices=Devices(cuda))
    copy.start()
    training = cuda.current_stream(torch.device("cuda", 0))
    write(parameter, 5.0, counted=False)
    drain(training, *cuda.copying, training, *cuda.copying)
    assert pairs[0][0][0] == 5.0
    write(parameter, 1.0, counted=False)
    assert not copy.wait()
    assert copy.moved == {0}


def test_memory_is_held_until_the_device_has_read_it(cuda: Cuda) -> None:
    """P1: whatever training does with its tensors, what the device reads stays; once it has arrived nothing does."""
    live = on(Still, 40)
    memory: Any = StorageWeakRef(live.untyped_storage())  # type: ignore[no-untyped-call]
    parameter = on(Still, 40).requires_grad_()
    late: Any = StorageWeakRef(parameter.untyped_storage())  # type: ignore[no-untyped-call]
    copy = OverlappedCopy(pairs_of([live, parameter]), [torch.optim.SGD([parameter])], devices=Devices(cuda))
    copy.start()
    assert copy in _running
    del live, parameter
    copy._optimizers = ()
    gc.collect()
    assert not memory.expired()
    assert not late.expired()
    copy.wait()
    assert memory.expired()
    assert late.expired()
    assert copy not in _running


def test_what_is_not_in_order_is_copied_at_once(cuda: Cuda) -> None:
    """P1: a transposed parameter has no middle to look at, so the stream of training waits for it."""
    live = torch.arange(12.0).view(3, 4).as_subclass(There).t().requires_grad_()
    place = torch.zeros(4, 3)
    copy = OverlappedCopy([(place, live.detach())], [Filling([live], {})], devices=Devices(cuda))
    copy.start()
    assert copy not in _running
    write(live, 9.0)
    assert copy.wait()
    assert torch.equal(place, torch.arange(12.0).view(3, 4).t())


def test_a_failed_device_is_told_whenever_it_is_asked(cuda: Cuda) -> None:
    """An error at the event is a StateError in every thread and at every wait; training's step is not disturbed."""
    parameter = parameter_on(There, 5)
    optimizer = Filling([parameter], {})
    copy = OverlappedCopy(pairs_of([parameter]), [optimizer], devices=Devices(cuda))
    copy.start()
    optimizer.step()
    cuda.broken = RuntimeError("CUDA error: an illegal memory access was encountered")
    for _ in range(2):
        with pytest.raises(StateError, match="copied from its device: CUDA error: an illegal"):
            copy.wait()
    assert copy not in _running


def test_who_is_told_of_an_error_may_touch_the_image(cuda: Cuda) -> None:
    """P1: also where the host's half has failed, wait() ends when no device writes any more."""
    stop, parameter = across(), parameter_on(There, 5)
    optimizer, gate = torch.optim.SGD([stop, parameter]), gate_for(stop)
    gate.broken = MemoryError("no memory")
    gate.opened.set()
    pairs = [(gate, stop.detach()), *pairs_of([parameter])]
    copy = OverlappedCopy(pairs, [optimizer], devices=Devices(cuda))
    copy.start()
    with pytest.raises(MemoryError, match="no memory"):
        copy.wait()
    assert is_all(pairs[1][0], 1.0)
    assert copy not in _running


@pytest.mark.parametrize("refused", ["wait_stream", "wait_event"])
def test_a_failure_while_training_settles_comes_out_of_wait(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """What a device refuses within a step is told by wait(), and such a copy is never good."""
    parameter = parameter_on(There, 5)
    optimizer = Filling([parameter], {})
    copy = OverlappedCopy(pairs_of([parameter]), [optimizer], devices=Devices(cuda))
    copy.start()
    with monkeypatch.context() as patched:
        patched.setattr(Queue, refused, _refused)
        optimizer.step()
    with pytest.raises(StateError, match="launch failed"):
        copy.wait()
    assert not copy._good


def test_a_device_that_takes_no_copy_is_told_at_once(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in start() is a StateError there, and such a copy is never good."""
    monkeypatch.setattr(Queue, "wait_stream", _refused)
    copy = OverlappedCopy(pairs_of([on(There, 5)]), [], devices=Devices(cuda))
    with pytest.raises(StateError, match="launch failed"):
        copy.start()
    assert not copy.wait()


def _refused(*_: object) -> None:
    raise RuntimeError("CUDA error: launch failed")


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


def test_memory_that_cannot_be_pinned_is_said_once(
    cuda: Cuda, images: list[Image], caplog: pytest.LogCaptureFixture
) -> None:
    """One warning says what it costs; copies are as right as before, and nothing is unregistered that was not."""
    cuda.code = 2
    devices = Devices(cuda)
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        for image in images:
            pin(devices, image)
    (record,) = caplog.records
    assert "cannot be pinned (cudaHostRegister: error 2)" in record.message
    assert "training waits for it" in record.message
    devices.start([(images[0].views["x"], on(There, 5000, value=7.0))]).wait()
    assert is_all(images[0].views["x"], 7.0)
    images.clear()
    gc.collect()
    assert len(caplog.records) == 1
