"""The names of a DCP state become groups, and are told from them again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ckpt_tasks.format.tree import TensorRef, decode
from ckpt_tasks.integrations.dcp.dcp_names import flat_state, groups_of, name_all

names = st.sampled_from(["model", "a", "b.c", "0", "state", "rng", "dcp", "x/y", "_extra_state", "ä"])
leaves = st.sampled_from([1, "x", None, (1, 2), torch.zeros(1)])
states = st.dictionaries(
    names,
    st.recursive(leaves, lambda inner: st.dictionaries(names, inner, max_size=3) | st.lists(inner, max_size=3)),
    max_size=5,
)


class Group(NamedTuple):
    kind: str
    tree: Any
    by_rank: bool = False

    @property
    def trees(self) -> list[Any]:
        return [self.tree]


@given(states)
def test_names_are_told_from_the_groups_again(state: dict[str, Any]) -> None:
    """Whatever the state: what DCP asks for by its names and paths is what it has saved."""
    try:
        flat, paths = flatten_state_dict(state)
    except ValueError:  # two values have one name
        return
    naming = name_all({name: isinstance(value, torch.Tensor) for name, value in flat.items()}, paths)
    packed = {name: TensorRef(naming.keys[name]) if name in naming.keys else value for name, value in flat.items()}
    groups = {name: Group(one["kind"], decode(one["tree"])) for name, one in groups_of(naming, packed).items()}
    found, found_paths = flat_state(groups, naming.root)
    assert found == packed
    assert found_paths == paths
