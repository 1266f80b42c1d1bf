"""Random streams: each goes on with the very next number, and nothing of ours draws one."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableSampler
from ckpt_tasks.errors import IntegrityError, StateMismatchError, UnsupportedStateError
from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.kinds.group_parts import GroupState
from ckpt_tasks.state.restoring import plan_restore
from tests.support.roundtrip import assert_same, restore, save


def draw() -> list[Any]:
    """Draw from every stream of the process, two ways where a stream keeps a half-used pair."""
    return [
        random.random(),
        random.gauss(),
        np.random.rand(),  # noqa: NPY002
        np.random.randn(),  # noqa: NPY002
        torch.rand(2).tolist(),
        torch.randn(1).item(),
    ]


@pytest.mark.parametrize("before", [0, 1, 2, 700])
def test_the_streams_of_the_process_go_on(before: int) -> None:
    """P74: Python, NumPy and torch give the numbers they would have given, also in the middle of a Gaussian pair.

    They are set last, after an object that draws while it takes its state back; their numbers are tensors.
    """
    for _ in range(before):
        draw()
    saved = save({"drawing": Drawing()})
    expected = [draw() for _ in range(3)]
    restore(saved, {"drawing": Drawing()})
    assert [draw() for _ in range(3)] == expected
    assert saved.stored["rng/python/numbers"] == ("uint32", (625,))
    assert len(saved.manifest) < 2000


class Drawing:
    """A stateful whose methods draw from every stream of the process."""

    def __init__(self) -> None:
        self.drawn: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        self.drawn = draw()
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = draw()


def test_a_capture_draws_nothing() -> None:
    """P11: after a capture, a comparison and a partial restore each stream is where it was, even if an object draws."""
    state: dict[str, Any] = {"model": nn.Linear(2, 2), "drawing": Drawing()}
    state["model"](torch.ones(1, 2)).sum().backward()
    before, grads = save({}), [(p.grad, p.grad.clone()) for p in state["model"].parameters()]
    saved = save(state)
    plan_restore(state, saved.groups, saved.stored)
    restore(saved, {"drawing": Drawing()}, partial=True)
    assert state["drawing"].drawn
    after = save({})
    assert after.manifest == before.manifest
    assert_same(after.tensors, before.tensors)
    for parameter, (grad, values) in zip(state["model"].parameters(), grads, strict=True):
        assert parameter.grad is grad
        assert torch.equal(grad, values)
    assert state["model"].training


def _drawn(stop: threading.Event, drawn: dict[str, list[Any]]) -> None:
    while not stop.is_set():
        drawn["python"].append(random.getrandbits(64))
        drawn["numpy"].append(np.random.bytes(8))  # noqa: NPY002
        drawn["torch"].append(torch.empty((), dtype=torch.int64).random_().item())


def test_no_number_is_drawn_twice_while_saves_and_restores_run(run_dir: Path) -> None:
    """P11: threads of the program draw on from every stream; a save or a restore of a part rewinds none of them."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "sampler": ResumableSampler(100, 10, seed=1),
        "generator": torch.Generator(),
        "history": [1.0, torch.zeros(3)],
    }
    saved = save(state)
    stop, threads = threading.Event(), []
    drawn: list[dict[str, list[Any]]] = [{"python": [], "numpy": [], "torch": []} for _ in range(2)]
    for each in drawn:
        threads.append(threading.Thread(target=_drawn, args=(stop, each)))
        threads[-1].start()
    try:
        for _ in range(50):
            capture(state)
            restore(saved, state, partial=True)
        with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), step_interval=1, memory_dir=None)) as ckpt:
            for step in range(1, 11):
                ckpt.step(step, state)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for name in ("python", "numpy", "torch"):
        numbers = [number for each in drawn for number in each[name]]
        assert len(numbers) > 100
        assert len(numbers) == len(set(numbers)), f"{name}: {len(numbers) - len(set(numbers))} drawn twice"


def test_without_streams_in_the_checkpoint_a_full_restore_is_refused() -> None:
    """P74: missing random streams are an error, unless they are not asked for."""
    saved = save({"n": 0}, rng=False)
    with pytest.raises(StateMismatchError) as caught:
        restore(saved, {"n": 1})
    assert caught.value.missing == ("rng",)
    restore(saved, {"n": 1}, rng=False)


def test_a_stream_of_an_absent_device_is_refused_by_name() -> None:
    """P74: the stream of a CUDA device that is not here is an error that names it, before anything is set."""
    saved = save({"n": 1})
    tree = {**saved.groups["rng"].tree, "cuda:7": saved.groups["rng"].tree["torch"]}
    draw()
    before, state = save({}), {"n": 2}
    with pytest.raises(StateMismatchError, match="no device cuda:7") as caught:
        plan_restore(state, {**saved.groups, "rng": GroupState("rng", tree)}, saved.stored)
    assert caught.value.unexpected == ("rng/cuda:7 (this process has no device cuda:7)",)
    assert_same(save({}).tensors, before.tensors)


def test_a_stream_that_makes_no_sense_is_damage_and_sets_nothing() -> None:
    """P49, P74: a state that a generator does not take is found on a scratch one; streams and values are untouched."""
    saved = save({"n": 1})
    saved.tensors["rng/torch"].zero_()
    draw()
    before, state = save({}), {"n": 2}
    with pytest.raises(IntegrityError) as caught:
        restore(saved, state)
    assert caught.value.key == "rng/torch"
    assert state == {"n": 2}
    assert_same(save({}).tensors, before.tensors)


GENERATORS: dict[str, Any] = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda g: torch.randn(3, generator=g).tolist()),
    "random": (random.Random, lambda g: [g.random(), g.gauss()]),
    "RandomState": (np.random.RandomState, lambda g: g.randn(3).tolist()),
    **{
        kind.__name__: (
            lambda seed, kind=kind: np.random.Generator(kind(seed)),
            lambda g: [*g.normal(size=3).tolist(), int(g.integers(9, dtype=np.int32))],
        )
        for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
    },
    "bits": (np.random.PCG64, lambda g: [int(g.random_raw()) for _ in range(3)]),
    "children": (np.random.default_rng, lambda g: [child.random() for child in g.spawn(2)]),
    "children of bits": (np.random.PCG64, lambda g: [child.random_raw() for child in g.spawn(2)]),
    "seeds": (np.random.SeedSequence, lambda g: [child.generate_state(1)[0] for child in g.spawn(2)]),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_of_the_users_goes_on(name: str) -> None:
    """P74: torch.Generator, every bit generator of NumPy and random.Random go on, each in the object that it is."""
    make, take = GENERATORS[name]
    one, other = make(1), make(2)
    take(one)
    saved = save({"it": one})
    expected = [take(one) for _ in range(3)]
    state = {"it": other}
    restore(saved, state)
    assert state["it"] is other
    assert [take(other) for _ in range(3)] == expected
    restore(saved, state)  # also back from later draws and children
    assert [take(other) for _ in range(3)] == expected


def test_generators_of_one_seed_share_its_children_after_a_restore() -> None:
    """P74: a SeedSequence in the state, or only in two generators, is restored in place: no child comes twice."""

    def make() -> tuple[Any, dict[str, Any]]:
        seeds = np.random.SeedSequence(5)
        return seeds, {"one": np.random.default_rng(seeds), "more": [np.random.default_rng(seeds), 1]}

    (seeds, state), (fresh_seeds, fresh) = make(), make()
    state["one"].spawn(2)
    state["more"][0].spawn(1)
    restore(save(state), fresh)
    assert fresh_seeds.n_children_spawned == seeds.n_children_spawned == 3
    assert fresh["more"][0].spawn(1)[0].random() == state["one"].spawn(1)[0].random()


@pytest.mark.parametrize("here", ["torch", "random", "RandomState", "MT19937"])
def test_a_generator_of_another_kind_is_refused(here: str) -> None:
    """P74: the state of one kind of generator is not given to another."""
    saved = save({"it": np.random.Generator(np.random.PCG64(1))})
    with pytest.raises(StateMismatchError) as caught:
        restore(saved, {"it": GENERATORS[here][0](0)})
    assert caught.value.different[0].endswith("numpy.random.Generator of PCG64 in the checkpoint)")


def test_a_generator_without_a_state_is_refused() -> None:
    """P7: SystemRandom cannot be resumed, and says so when planning."""
    with pytest.raises(UnsupportedStateError, match="SystemRandom") as caught:
        capture({"it": random.SystemRandom()})
    assert caught.value.key == "it"
