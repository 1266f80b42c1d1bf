"""The tables of kinds: a row of the format has its live row, and the version of a manifest follows from the rows."""

from __future__ import annotations

import json

import pytest

from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format import kinds, tree
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.manifest import NEWEST_VERSION, Manifest, ObjectRecord
from ckpt_tasks.objects.kinds import KINDS
from ckpt_tasks.tensors.kinds import KINDS as VALUES


def test_every_row_has_a_version_and_its_other_half() -> None:
    """A kind of group or of value is in both tables, and names a version of the format that this code reads."""
    assert kinds.KINDS.keys() == KINDS.keys()
    assert {row.tag for row in tree.KINDS if row.type is tree.Typed} == VALUES.keys()
    versions = [*(row.since for row in kinds.KINDS.values()), *(row.since for row in tree.KINDS)]
    assert {*versions} <= {*range(1, NEWEST_VERSION + 1)}


def test_a_kind_of_a_later_version_makes_the_manifest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest with a kind of group that version 1 lacks says so, and a reader expects it to."""
    monkeypatch.setitem(kinds.KINDS, "plain", kinds.SavedKind(NEWEST_VERSION))
    made = Manifest(
        run_key="run",
        step=1,
        attempt="e000001-0123456789abcdef",
        world_size=1,
        index=ObjectRecord("checkpoint_000000000001/e000001-0123456789abcdef/index.arrow", 1, "0" * 32, 1),
        objects=(),
        groups={"lr": {"kind": "plain", "tree": 1}, "model": {"kind": "module", "tree": {}}},
    )
    data = made.to_bytes()
    assert json.loads(data)["version"] == NEWEST_VERSION
    assert Manifest.from_bytes(data, digest=digest_hex(data), name="manifest.json").groups == made.groups
    monkeypatch.undo()
    with pytest.raises(IntegrityError, match="is not that of its trees"):
        Manifest.from_bytes(data, digest=digest_hex(data), name="manifest.json")
