"""Writes beside an overlapped copy: found, whatever makes them, or the copy is of one moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ckpt_tasks.state.overlap import OverlappedCopy
from tests.unit.overlaps import (
    MOMENT,
    WEIGHT,
    Pair,
    Snapshot,
    Training,
    across,
    copying_threads,
    gate_for,
    weight_of,
    write_in_place,
)


@torch.no_grad()
def _row(training: Training) -> None:
    weight_of(training)[0].zero_()


@torch.no_grad()
def _foreach(training: Training) -> None:
    torch._foreach_mul_([weight_of(training)], 2.0)


@torch.no_grad()
def _out(training: Training) -> None:
    weight = weight_of(training)
    torch.add(weight.detach().clone(), 1, out=weight)


@torch.inference_mode()
def _inference(training: Training) -> None:
    weight_of(training).copy_(torch.zeros(200, 200))


def _detached(training: Training) -> None:
    weight_of(training).detach().view(-1)[3] = 5


def _reloaded(training: Training) -> None:
    training.model.load_state_dict(training.model.state_dict())


def _by_data(training: Training) -> None:
    weight_of(training).data.clamp_(-0.001, 0.001)


def _by_numpy(training: Training) -> None:
    weight_of(training).detach().numpy()[:] = 1


def _by_hand(training: Training) -> None:
    with torch.no_grad():
        torch._fused_sgd_(
            [weight_of(training).detach()],
            [torch.ones(200, 200)],
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=0.1,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


def _moment(training: Training) -> None:
    training.optimizer.state[weight_of(training)]["exp_avg"].mul_(2)


COUNTED = {
    "in place": write_in_place,
    "a row": _row,
    "foreach": _foreach,
    "out=": _out,
    "inference mode": _inference,
    "detached": _detached,
    "load_state_dict": _reloaded,
    "a moment": _moment,
}
SPOTTED = {"by .data": _by_data, "by NumPy": _by_numpy, "a fused kernel by hand": _by_hand}


@pytest.mark.parametrize("copied", [False, True], ids=["before it is copied", "after it is copied"])
@pytest.mark.parametrize("write", (COUNTED | SPOTTED).values(), ids=COUNTED | SPOTTED)
def test_a_write_between_steps_is_found(write: Callable[[Training], None], copied: bool) -> None:
    """P1: a parameter or a moment that changes before the copy has been checked condemns the snapshot, and is named."""
    training = Training()
    snapshot = Snapshot(training, held=not copied)
    while copied and copying_threads():
        time.sleep(0.001)
    write(training)
    snapshot.gate.opened.set()
    assert not snapshot.copy.wait()
    named = MOMENT if write is _moment else WEIGHT
    assert named in snapshot.moved
    assert snapshot.moved == {named} or write is _reloaded
    assert not snapshot.copy.settle()


def test_a_write_that_is_taken_back_is_found() -> None:
    """P1: weights that are quantised through .data for a forward and put back before the step show in the copy."""
    training = Training()
    snapshot = Snapshot(training, held=True)
    kept = weight_of(training).detach().clone()
    weight_of(training).data.sign_()
    snapshot.gate.opened.set()
    while copying_threads():
        time.sleep(0.001)
    weight_of(training).data.copy_(kept)
    training.optimizer.step()
    assert not snapshot.copy.wait()
    assert snapshot.moved == {WEIGHT}


@pytest.mark.parametrize("write", SPOTTED.values(), ids=SPOTTED)
def test_what_no_counter_sees(write: Callable[[Training], None]) -> None:
    """The ways to write that are documented as not counted are still not counted: then this text is to be rewritten."""
    training = Training()
    before = weight_of(training)._version
    write(training)
    assert weight_of(training)._version == before


def test_what_is_replaced_is_copied_as_it_was() -> None:
    """Assigning to a parameter's .data, or dropping state, leaves the old memory as it is; the copy holds on to it."""
    training = Training()
    snapshot = Snapshot(training, held=True)
    weight_of(training).data = torch.zeros(200, 200)
    training.optimizer.state.clear()
    snapshot.gate.opened.set()
    assert snapshot.copy.wait()
    assert snapshot.is_the_moment()


@pytest.mark.parametrize("name", ["exp_avg", "step"])
def test_a_moment_with_other_memory_is_found(name: str) -> None:
    """P1: assigning to the .data of what the optimizer keeps replaces the very tensor that is being copied."""
    training = Training()
    snapshot = Snapshot(training, held=True)
    kept = training.optimizer.state[weight_of(training)][name]
    kept.data = torch.zeros_like(kept)
    snapshot.gate.opened.set()
    assert not snapshot.copy.wait()
    assert snapshot.moved == {f"optimizer/model/layers.0.weight/{name}"}


def test_memory_that_is_being_copied_is_not_freed() -> None:
    """Whoever assigns to .data drops the memory that the thread reads; it stays until the copy is settled."""
    training = Training()
    snapshot = Snapshot(training, held=True)
    kept = training.optimizer.state[weight_of(training)]["exp_avg"]
    memory: Any = StorageWeakRef(kept.untyped_storage())  # type: ignore[no-untyped-call]
    kept.data = torch.zeros_like(kept)
    assert not memory.expired()
    snapshot.gate.opened.set()
    assert not snapshot.copy.wait()
    assert memory.expired()


def test_memory_with_two_counters_is_watched_by_both() -> None:
    """P1: a tensor made from .data has a counter of its own; an operation on the optimizer's is found all the same."""
    parameter, place = nn.Parameter(torch.randn(8)), torch.zeros(8)
    optimizer = torch.optim.SGD([parameter])
    copy = OverlappedCopy([(place, parameter.data)], [optimizer])
    copy.start()
    parameter.detach().add_(1)
    assert not copy.wait()
    assert copy.moved == {0}


def test_what_moves_between_steps_is_copied_at_once_the_next_time() -> None:
    """P1: a forward that rewrites a parameter spoils one snapshot; told so, the next one is good."""
    training = Training()
    training.model.layers[0].register_forward_pre_hook(lambda *_: write_in_place(training))
    first = Snapshot(training)
    training.step()
    assert not first.copy.wait()
    assert first.moved == {WEIGHT}
    second = Snapshot(training, at_once=[*first.moved])
    training.step()
    assert second.copy.wait()
    assert second.is_the_moment()


COUNT = 4
WRITES: list[Callable[[nn.Parameter], object]] = [
    lambda p: p.detach().add_(1),
    lambda p: p.detach()[0].mul_(3),
    lambda p: torch._foreach_add_([p.detach()], 1.0),
    lambda p: p.detach().copy_(p.detach().clone()),
    lambda p: p.data.add_(1),
]


@given(
    st.lists(
        st.one_of(
            st.just("open"),
            st.just("step"),
            st.just("buffer"),
            st.tuples(st.integers(0, COUNT - 1), st.sampled_from(WRITES)),
        ),
        max_size=2 * COUNT,
    )
)
def test_any_order_of_copies_and_writes(actions: list[Any]) -> None:
    """P1: whenever what is written, between which copies, the result is the moment of start(), or it is not used."""
    parameters = [nn.Parameter(torch.randn(100, 250)) for _ in range(COUNT)]
    stops = [across() for _ in range(COUNT)]
    gates = [gate_for(stop) for stop in stops]
    optimizer = torch.optim.SGD([*parameters, *stops], lr=0.1, fused=True)
    for parameter in (*parameters, *stops):
        parameter.grad = torch.ones_like(parameter)
    buffer = torch.zeros(10)
    pairs: list[Pair] = [(torch.ones(10), buffer)]
    for number in range(COUNT):
        pairs += [(gates[number], stops[number].detach())]
        pairs += [(torch.empty(100, 250), parameters[number].detach())]
    now = [live.clone() for _, live in pairs]
    copy = OverlappedCopy(pairs, [optimizer])
    copy.start()
    closed, torn, settled = [*gates], False, False
    assert closed[0].reached.wait(60)
    for action in actions:
        if action == "open" and closed:
            closed.pop(0).opened.set()
            while copying_threads() and not (closed and closed[0].reached.is_set()):
                time.sleep(0.0001)
        elif action == "step":
            for gate in closed:
                gate.opened.set()
            closed.clear()
            optimizer.step()
            settled = True
        elif action == "buffer":
            buffer.add_(1)
        elif isinstance(action, tuple):
            torn |= not settled
            action[1](parameters[action[0]])
    for gate in closed:
        gate.opened.set()
    good = copy.wait()
    assert good != torn
    if good:
        assert all(torch.equal(place, tensor) for (place, _), tensor in zip(pairs, now, strict=True))
