"""A copy that runs while training goes on: of one moment in every bit, or not used."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.overlap import OverlappedCopy
from ckpt_tasks.state.tensors import same_bits
from tests.unit.overlaps import (
    MOMENT,
    OPTIMIZERS,
    Snapshot,
    Training,
    across,
    copying_threads,
    gate_for,
    weight_of,
    write_in_place,
)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_waits_for_the_copy(make: Callable[[Any], Optimizer]) -> None:
    """P1: however an optimizer writes, it writes after the copy, which has every bit of the moment."""
    training = Training(make)
    snapshot = Snapshot(training, held=True)
    training.backward()
    assert not snapshot.gate.opened.is_set()
    snapshot.open_later()
    training.optimizer.step()
    assert snapshot.gate.opened.is_set()
    assert snapshot.copy.wait()
    assert snapshot.is_the_moment()
    changed = {name for name, t in training.tensors().items() if not same_bits(t, snapshot.now[name])}
    assert {"model/across", "model/layers.0.weight"} < changed


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_of_an_optimizer_that_is_not_in_the_state_waits_too(fused: bool) -> None:
    """P1: another optimizer may have the same parameters: it tears nothing, but nobody vouches for such a copy."""
    training = Training()
    other = torch.optim.SGD(training.model.parameters(), lr=0.1, fused=fused)
    snapshot = Snapshot(training, held=True)
    training.backward()
    snapshot.open_later()
    other.step()
    assert snapshot.gate.opened.is_set()
    assert snapshot.is_the_moment()
    assert not snapshot.copy.wait()


def test_a_step_of_somebody_else_settles_nothing() -> None:
    """P1: what another training does in its thread does not say that this one is between two operations."""
    training = Training()
    snapshot = Snapshot(training)
    Training().step()
    assert copying_threads() == []
    write_in_place(training)
    assert not snapshot.copy.wait()


def test_what_a_forward_changes_is_copied_at_once() -> None:
    """P1: buffers have the values of the moment, though a forward has changed them before the copy was over."""
    training = Training()
    snapshot = Snapshot(training, held=True)
    training.backward()
    snapshot.gate.opened.set()
    assert snapshot.copy.wait()
    assert snapshot.is_the_moment()
    after = training.tensors()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert not same_bits(after[f"model/layers.1.{name}"], snapshot.now[f"model/layers.1.{name}"])


def test_only_what_an_optimizer_changes_is_late() -> None:
    """When start() returns, parameters with gradients and what is kept for them are to be copied, and nothing else."""
    snapshot = Snapshot(Training(), held=True)
    done = {name for name, place in snapshot.places.items() if same_bits(place, snapshot.now[name])}
    buffers = {f"model/layers.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert {name for name in done if not name.startswith("rng/")} == {"model/frozen", *buffers}
    snapshot.gate.opened.set()
    assert snapshot.copy.wait()


def test_forms_of_one_memory_are_known_for_what_they_are() -> None:
    """Late is also a parameter that the image holds as bytes or as pairs of numbers; a copy of one is not."""
    stop, half = across(), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    turning = nn.Parameter(torch.ones(3, dtype=torch.complex128))
    live = [half.detach().view(torch.uint8), torch.view_as_real(turning.detach()), half.detach().clone()]
    places, gate = [torch.zeros_like(tensor) for tensor in live], gate_for(stop)
    pairs = [(gate, stop.detach()), *zip(places, live, strict=True)]
    copy = OverlappedCopy(pairs, [torch.optim.SGD([stop, half, turning])])
    copy.start()
    assert [same_bits(place, tensor) for place, tensor in zip(places, live, strict=True)] == [False, False, True]
    gate.opened.set()
    assert copy.wait()
    assert all(same_bits(place, tensor) for place, tensor in zip(places, live, strict=True))


def _is_eager(training: Training, optimizers: Sequence[Optimizer]) -> bool:
    live = [*training.tensors().values()]
    places = [torch.full_like(tensor, 7).contiguous() for tensor in live]
    copy = OverlappedCopy([*zip(places, live, strict=True)], optimizers)
    copy.start()
    now = [tensor.clone() for tensor in live]
    assert copying_threads() == []
    training.step()
    assert copy.wait()
    return all(same_bits(place, tensor) for place, tensor in zip(places, now, strict=True))


def test_without_optimizers_it_is_an_eager_copy() -> None:
    """Everything is copied before start() returns, and nobody waits for anything."""
    assert _is_eager(Training(), [])


def test_an_optimizer_whose_step_is_not_watched_has_no_late_tensors() -> None:
    """Torch calls no hooks for a class that leaves Optimizer.__init__ out, so nothing could wait for the copy."""

    class Outer(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()

    training = Training()
    assert _is_eager(training, [Outer(training.optimizer)])


def test_every_size_is_copied() -> None:
    """Tensors of several pieces, more small ones than go together, empty ones and numbers arrive in every bit."""
    shapes = [(3 << 20,), (5, 7), (0,), (), (2, 0, 3), (1000, 999), *[(3,)] * 2500]
    live = [torch.randn(shape) for shape in shapes] + [torch.randn(300, 700).t(), torch.randn(2, 8, 200, 100)[:, ::2]]
    for tensor in live:
        tensor.requires_grad_()
    optimizer = torch.optim.SGD(live)
    pairs = [(torch.full(tensor.shape, 7.0), tensor.detach()) for tensor in live]
    copy = OverlappedCopy(pairs, [optimizer])
    copy.start()
    assert copy.wait()
    assert all(same_bits(place, tensor) for place, tensor in pairs)


def test_nothing_is_left_behind() -> None:
    """After a snapshot there is no thread, no hook on the optimizer, and nothing that holds the memory it was about."""
    training = Training()
    snapshot = Snapshot(training)
    training.step()
    assert snapshot.copy.wait()
    assert copying_threads() == []
    assert not training.optimizer._optimizer_step_pre_hooks
    live = weakref.ref(training.optimizer.state.pop(weight_of(training))["exp_avg"])
    place = weakref.ref(snapshot.places.pop(MOMENT))
    assert live() is None
    assert place() is None
    copy = weakref.ref(snapshot.copy)
    del snapshot
    assert copy() is None


def test_a_capture_goes_on_beside_it() -> None:
    """P11: while a copy runs the state captures as before, and neither start() nor the check draws a random number."""
    training = Training()
    before, stream = capture({"optimizer": training.optimizer}), torch.get_rng_state()
    snapshot = Snapshot(training, held=True)
    during = capture({"optimizer": training.optimizer})
    assert during.groups["optimizer"] == before.groups["optimizer"]
    assert during.tensors.keys() == before.tensors.keys()
    snapshot.gate.opened.set()
    assert snapshot.copy.wait()
    assert torch.equal(torch.get_rng_state(), stream)


def test_a_hook_of_the_users_comes_after_the_copy() -> None:
    """P1: what a step pre-hook of the user's does to parameters is not in the snapshot and does not spoil it."""
    training = Training()
    training.optimizer.register_step_pre_hook(lambda *_: write_in_place(training))
    snapshot = Snapshot(training, held=True)
    training.backward()
    snapshot.open_later()
    training.optimizer.step()
    assert snapshot.copy.wait()
    assert snapshot.is_the_moment()


def test_another_thread_waits_until_training_has_settled() -> None:
    """P1: a thread that writes snapshots is told nothing before training has checked, between two of its operations."""
    training = Training()
    snapshot = Snapshot(training)
    told: list[bool] = []
    writer = threading.Thread(target=lambda: told.append(snapshot.copy.wait()))
    writer.start()
    while copying_threads():
        time.sleep(0.001)
    writer.join(0.1)
    assert writer.is_alive()
    training.step()
    writer.join()
    assert told == [True]


def test_errors_come_out_of_wait() -> None:
    """What goes wrong while copying is raised by wait(), in every thread, and not by the optimizer's step."""
    training = Training()
    snapshot = Snapshot(training, held=True)
    snapshot.gate.broken = MemoryError("no memory")
    snapshot.gate.opened.set()
    training.step()
    for _ in range(2):
        with pytest.raises(MemoryError, match="no memory"):
            snapshot.copy.wait()
    raised: list[BaseException] = []
    writer = threading.Thread(target=lambda: raised.append(_raised(snapshot.copy.wait)))
    writer.start()
    writer.join()
    assert isinstance(raised[0], MemoryError)
    assert copying_threads() == []


def _raised(call: Callable[[], object]) -> BaseException:
    with pytest.raises(MemoryError) as caught:
        call()
    return caught.value


def test_an_interrupt_at_the_barrier_is_not_forgotten() -> None:
    """Ctrl-C while training helps to copy comes out of the step, and the piece that it cost makes the copy no good."""
    one, two = across(), across()
    optimizer = torch.optim.SGD([one, two])
    gates = [gate_for(one), gate_for(two)]
    gates[1].broken = KeyboardInterrupt()
    gates[1].opened.set()
    copy = OverlappedCopy([(gates[0], one.detach()), (gates[1], two.detach())], [optimizer])
    copy.start()
    assert gates[0].reached.wait(60)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    gates[0].opened.set()
    optimizer.step()
    assert not copy.wait()


def test_one_object_takes_one_snapshot() -> None:
    """A second start is refused while the first one runs and afterwards, and nothing is settled before a start."""
    training = Training()
    with pytest.raises(RuntimeError, match="must be started"):
        OverlappedCopy([], []).wait()
    snapshot = Snapshot(training, held=True)
    with pytest.raises(RuntimeError, match="has been started"):
        snapshot.copy.start()
    snapshot.gate.opened.set()
    assert snapshot.copy.wait()
    with pytest.raises(RuntimeError, match="has been started"):
        snapshot.copy.start()


def test_a_start_that_fails_is_never_good() -> None:
    """What could not even be copied at once is not taken for a copy of nothing."""
    copy = OverlappedCopy([(torch.zeros(3), torch.zeros(4))], [])
    with pytest.raises(RuntimeError, match="size"):
        copy.start()
    assert not copy.wait()


def test_two_copies_may_run_at_once() -> None:
    """Each is settled by the same step, and each is of its own moment."""
    training = Training()
    first = Snapshot(training, held=True)
    training.backward()
    second = Snapshot(training)
    first.gate.opened.set()
    training.optimizer.step()
    assert first.copy.wait()
    assert second.copy.wait()
    assert first.is_the_moment()
    assert second.is_the_moment()


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a niceness of its own on Linux only")
def test_training_keeps_its_cores() -> None:
    """The copying thread stands back for training; the thread that trains stays as it was."""
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    snapshot = Snapshot(Training(), held=True)
    (thread,) = copying_threads()
    assert thread.native_id is not None
    assert os.getpriority(os.PRIO_PROCESS, thread.native_id) > before
    snapshot.gate.opened.set()
    assert snapshot.copy.wait()
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
