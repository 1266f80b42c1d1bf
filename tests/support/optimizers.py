"""An optimizer over three equal parameters, whose moments say which is which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.support.roundtrip import assert_same


def three(order: str = "abc", groups: int = 1, **options: Any) -> dict[str, Any]:
    """Return a module with three equal parameters, and an optimizer that got them in an order and in groups."""
    module = nn.ParameterDict({name: torch.zeros(2) for name in "abc"})
    params = [module[name] for name in order]
    lists = [params] if groups == 1 else [params[:1], params[1:]]
    optimizer = torch.optim.Adam([{"params": part} for part in lists], lr=0.1, **options)
    return {"model": module, "optimizer": optimizer}


def stepped(state: dict[str, Any]) -> dict[str, Any]:
    for n, name in enumerate("abc", start=1):
        state["model"][name].grad = torch.full((2,), float(n))
    state["optimizer"].step()
    return state


def moments(state: dict[str, Any]) -> dict[str, float]:
    found = state["optimizer"].state
    return {n: round(found[state["model"][n]]["exp_avg"][0].item(), 4) for n in "abc" if state["model"][n] in found}


def same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for group in one:
        assert_same({**one[group].state_dict()}, {**other[group].state_dict()}, group)
