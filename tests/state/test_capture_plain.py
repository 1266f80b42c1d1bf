"""Plain values: restored into the objects that the program holds, and only where they fit."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt_tasks.errors import FormatVersionError, StateMismatchError, UnsupportedStateError
from ckpt_tasks.state.restore_parts import GroupState
from ckpt_tasks.state.restoring import plan_restore
from tests.support.roundtrip import restore, save


def test_parameters_in_a_list_keep_their_memory() -> None:
    """P20: tensors that an optimizer holds are copied into, not replaced; one too few is an error."""
    params = [torch.ones(2, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)]
    saved = save({"it": {"params": params, "step": 1}})
    fresh = [torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)]
    state: dict[str, Any] = {"it": {"params": [*fresh], "step": 0}}
    restore(saved, state)
    assert state["it"]["params"][0] is fresh[0]
    assert [p.detach().tolist() for p in fresh] == [[1.0, 1.0], [2.0, 2.0, 2.0]]
    with pytest.raises(StateMismatchError) as caught:
        restore(saved, {"it": {"params": [*fresh, torch.zeros(1, requires_grad=True)]}})
    assert caught.value.missing == ("it/params/2",)
    with pytest.raises(StateMismatchError) as caught:
        restore(saved, {"it": {"params": fresh[::-1]}})
    assert len(caught.value.different) == 2


@pytest.mark.parametrize(
    ("stored", "here", "said"),
    [
        (torch.ones(3), torch.zeros(2), "float32[2] here, float32[3] in the checkpoint"),
        (torch.ones(1), torch.zeros(2, 1), "float32[2, 1] here"),
        (torch.ones(2), torch.zeros(2).double(), "float64[2] here"),
        (1, torch.zeros(2), "another value in the checkpoint"),
        (np.ones(2), torch.zeros(2), "an array in the checkpoint"),
        (torch.ones(2), np.zeros(2), "another value in the checkpoint"),
        (np.ones(3), np.zeros(2), "float64[2] here, float64[3] in the checkpoint"),
        (np.ones(2), np.frombuffer(b"12345678abcdefgh"), "read-only"),
    ],
)
def test_a_tensor_takes_no_other_shape_dtype_or_kind(stored: Any, here: Any, said: str) -> None:
    """P50: nothing is broadcast or cast into a tensor that the state gives by itself."""
    before = here.tolist()
    with pytest.raises(StateMismatchError) as caught:
        restore(save({"it": stored}), {"it": here})
    assert said in caught.value.different[0]
    assert here.tolist() == before


def test_a_read_only_state_is_refused_where_assigning_is_needed() -> None:
    """P50: a number in a state that cannot be assigned to is an error; a container in it is refilled."""
    saved = save({"numbers": [1]})
    held: list[int] = []
    restore(saved, MappingProxyType({"numbers": held}))
    assert held == [1]
    with pytest.raises(UnsupportedStateError, match="read-only"):
        restore(save({"step": 1}), MappingProxyType({"step": 0}))


def test_a_group_of_another_kind_is_an_error() -> None:
    """P50: a module in the checkpoint is not poured into a dict, nor the reverse."""
    with pytest.raises(StateMismatchError) as caught:
        restore(save({"it": nn.Linear(1, 1), "that": {}}), {"it": {}, "that": nn.Linear(1, 1)})
    assert caught.value.different == (
        "it (plain (dict) here, module in the checkpoint)",
        "that (module (Linear) here, plain in the checkpoint)",
    )


def test_a_kind_from_the_future_is_refused() -> None:
    """P59: a group of a kind that this version does not know is not skipped."""
    with pytest.raises(FormatVersionError, match="unknown kind"):
        plan_restore({"it": 1}, {"it": GroupState("hologram", {})}, {}, rng=False)
