"""The tables of kinds: a row of the format has its live row, and the version of a manifest follows from the rows."""

from __future__ import annotations

from ckpt_tasks.format import kinds, tree
from ckpt_tasks.format.manifest import NEWEST_VERSION
from ckpt_tasks.state.kinds.kinds import KINDS
from ckpt_tasks.state.tensors.kinds import KINDS as VALUES


def test_every_row_has_a_version_and_its_other_half() -> None:
    """A kind of group or of value is in both tables, and names a version of the format that this code reads."""
    assert kinds.KINDS.keys() == KINDS.keys()
    assert {row.tag for row in tree.KINDS if row.type is tree.Typed} == VALUES.keys()
    versions = [*(row.since for row in kinds.KINDS.values()), *(row.since for row in tree.KINDS)]
    assert {*versions} <= {*range(1, NEWEST_VERSION + 1)}
