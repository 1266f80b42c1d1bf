"""snapshot/snapshot.py: which plan fits which state, and that all of a state arrives in its images."""

from __future__ import annotations

import torch

from ckpt_tasks.snapshot.device import Devices
from ckpt_tasks.snapshot.memory import PrivateMemory
from ckpt_tasks.snapshot.snapshot import ImageSet, plan_snapshot, storable


def test_a_plan_fits_no_part_of_its_structure() -> None:
    """A state that lost or gained its last tensor, or froze one, is planned again."""
    state = {f"model/{name}": torch.ones(3) for name in "abc"}
    plan = plan_snapshot(state)
    assert plan.fits({**state}, frozenset())
    assert not plan.fits({name: state[name] for name in ("model/a", "model/b")}, frozenset())
    assert not plan.fits({**state, "model/d": torch.ones(3)}, frozenset())
    assert not plan.fits(state, frozenset({"model/c"}))


def test_all_of_a_large_state_arrives() -> None:
    """Threads share the copies of a large state: every byte is there, of large, small and transposed tensors."""
    torch.manual_seed(0)
    state = {
        "model/large": torch.randn(11_000_003),
        "model/other": torch.randn(300_001),
        "model/transposed": torch.randn(1_000, 2_000).t(),
        "model/nothing": torch.empty(0),
        "model/half": torch.randn(1_000_001).to(torch.bfloat16),
        "model/rare": torch.randn(1_000_001).to(torch.float8_e4m3fn),
        **{f"model/small{number}": torch.randn(number + 1) for number in range(50)},
    }
    plan = plan_snapshot(state)
    images = ImageSet(plan, PrivateMemory().take("a", plan.sizes))
    assert images.fill(state, Devices()) is None  # nothing is under way
    places = {f"{image.group}/{name}": view for image in images.images for name, view in image.views.items()}
    assert places.keys() == state.keys()
    for name, live in state.items():
        assert torch.equal(places[name], storable(live)), name
