"""snapshot/snapshot.py: which plan fits which state, and that all of a state arrives in its images."""

from __future__ import annotations

import torch

from ckpt_tasks.snapshot.snapshot import plan_snapshot


def test_a_plan_fits_no_part_of_its_structure() -> None:
    """A state that lost or gained its last tensor, froze one, or has another part of one, is planned again."""
    state = {f"model/{name}": torch.ones(3) for name in "abc"}
    plan = plan_snapshot(state)
    assert plan.fits({**state}, frozenset(), {})
    assert not plan.fits({name: state[name] for name in ("model/a", "model/b")}, frozenset(), {})
    assert not plan.fits({**state, "model/d": torch.ones(3)}, frozenset(), {})
    assert not plan.fits(state, frozenset({"model/c"}), {})
    assert not plan.fits(state, frozenset(), {"model/c": ((6,), (3,))})
