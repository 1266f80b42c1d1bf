"""The tables of kinds: a row of the format has its live row."""

from __future__ import annotations

from ckpt_tasks.format import saved_kinds, tree
from ckpt_tasks.state.kinds.kinds import KINDS
from ckpt_tasks.state.tensors.value_kinds import KINDS as VALUES


def test_every_row_has_its_other_half() -> None:
    """A kind of group or of value is in both tables."""
    assert saved_kinds.KINDS.keys() == KINDS.keys()
    assert {row.tag for row in tree.KINDS if row.type is tree.Typed} == VALUES.keys()
