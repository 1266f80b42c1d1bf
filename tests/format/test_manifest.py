"""The manifest: comes back equal, newer versions are refused, hostile names never reach a path."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.errors import CkptError, FormatVersionError, IntegrityError, UnsupportedStateError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.manifest import MAX_GROUPS, NEWEST_VERSION, Manifest, ObjectRecord
from ckpt_tasks.format.tree import KINDS

MANIFEST = Manifest(
    run_key="lm",
    step=0,
    attempt="e000001-0123456789abcdef",
    world_size=1,
    index=ObjectRecord("checkpoint_000000000000/e000001-0123456789abcdef/index.arrow", 10, "f" * 32, 10),
    objects=(
        ObjectRecord(
            "checkpoint_000000000000/e000001-0123456789abcdef/model-00000-of-00001-0.safetensors", 9, "e" * 32, 8
        ),
    ),
    groups={"model": {"kind": "module", "tree": {"b": 1, "a": [2]}}},
    metrics={"loss": 0.5},
    created_at="2024-01-01T00:00:00+00:00",
    environment={"torch": "2.13"},
)


def read(data: bytes) -> Manifest:
    return Manifest.from_bytes(data, digest=digest_hex(data), name="manifest.json")


def changed(change: Any) -> bytes:
    body = json.loads(MANIFEST.to_bytes())
    change(body)
    return json.dumps(body).encode()


def record_of(body: dict[str, Any], place: str) -> list[Any]:
    record: list[Any] = body["index"] if place == "index" else body["objects"][0]
    return record


def test_a_manifest_comes_back_equal() -> None:
    """P27: what was written is what is read, step 0 too, the order of keys included."""
    again = read(MANIFEST.to_bytes())
    assert again == MANIFEST
    assert list(again.groups["model"]["tree"]) == ["b", "a"]


@given(st.dictionaries(st.text(max_size=5), st.floats(), max_size=4))
def test_every_metric_comes_back(metrics: dict[str, float]) -> None:
    """P62: NaN and the infinities are metrics as well, and the file stays JSON that everyone reads."""
    data = Manifest(**{**vars(MANIFEST), "metrics": metrics}).to_bytes()
    json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    again = read(data).metrics
    assert {k: repr(v) for k, v in again.items()} == {k: repr(v) for k, v in metrics.items()}


def test_other_bytes_are_refused_before_they_are_parsed() -> None:
    """P49: whatever bit flips, the manifest is no longer the one that was committed."""
    data = MANIFEST.to_bytes()
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        with pytest.raises(IntegrityError, match="not the one that was committed"):
            Manifest.from_bytes(bytes(flipped), digest=digest_hex(data), name="manifest.json")


def test_an_entry_of_a_later_version_is_said_by_the_manifest() -> None:
    """P59: a manifest whose trees version 1 cannot hold says version 3 or 5, and one that says less is damage."""
    groups = {"it": {"kind": "plain", "tree": {"~path": ["PosixPath", "a", {}]}}}
    data = replace(MANIFEST, groups=groups).to_bytes()
    assert json.loads(data)["version"] == 3
    assert read(data).groups == groups
    newest = {"it": {"kind": "plain", "tree": {"~wrapper": ["module:Class", {"": []}]}}}
    assert json.loads(replace(MANIFEST, groups=newest).to_bytes())["version"] == 5 == max(row.since for row in KINDS)
    for version in (1, 2):
        with pytest.raises(IntegrityError, match="not that of its trees"):
            read(data.replace(b'"version":3', b'"version":%d' % version))


def test_a_newer_version_is_refused_with_what_to_do() -> None:
    """P59: a manifest of a newer format says so and what to do, whatever else is in it."""
    with pytest.raises(FormatVersionError, match="Upgrade"):
        read(changed(lambda body: body.update(version=NEWEST_VERSION + 1)))
    with pytest.raises(FormatVersionError):
        read(json.dumps({"version": 99, "everything": "else"}).encode())


@pytest.mark.parametrize("version", [0, -1, 1.0, "1", None, True, [1]])
def test_what_is_no_version_is_damage(version: Any) -> None:
    """P59: a version that is not a whole number from 1 on is damage, not a guess."""
    with pytest.raises(IntegrityError):
        read(changed(lambda body: body.update(version=version)))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "simplecache::http://host/x", "", "a\n", 3, None, []])
@pytest.mark.parametrize("place", ["index", "objects"])
def test_a_hostile_name_never_becomes_a_path(name: Any, place: str) -> None:
    """P42: an object's name with `..`, a URL, a protocol or a control character is refused on reading."""

    def change(body: dict[str, Any]) -> None:
        record_of(body, place)[0] = name

    with pytest.raises(IntegrityError):
        read(changed(change))


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(step=-1),
        lambda body: body.update(step=1.5),
        lambda body: body.update(step=False),
        lambda body: body.update(run_key=None),
        lambda body: body.update(run_key=3),
        lambda body: body.update(attempt=None),
        lambda body: body.update(attempt="e000002-0123456789abcdef"),
        lambda body: body.update(world_size=True),
        lambda body: body.update(world_size=-1),
        lambda body: body.update(created_at=3),
        lambda body: body.update(environment={"torch": 3}),
        lambda body: body.update(groups={"model": {"kind": 3, "tree": 1}}),
        lambda body: body.update(groups={"model": {"kind": "module"}}),
        lambda body: body.update(groups={"../x": body["groups"]["model"]}),
        lambda body: body["objects"].append(body["objects"][0]),
        lambda body: body["objects"].append(body["index"]),
        *(
            lambda body, place=place, at=at, value=value: record_of(body, place).__setitem__(at, value)
            for place in ("index", "objects")
            for at, value in ((1, True), (1, "9"), (1, 1 << 63), (2, 3), (2, None), (3, -1), (3, True), (3, 1.0))
        ),
        lambda body: body.update(step=True),
        lambda body: body.update(world_size="1"),
        lambda body: body["index"].pop(),
        lambda body: body["index"].__setitem__(1, -1),
        lambda body: body["index"].__setitem__(1, 1e300),
        lambda body: body.update(objects=None),
        lambda body: body.update(objects={"a": 1}),
        lambda body: body.update(groups={"../x": {}}),
        lambda body: body.update(groups={"model": 5}),
        lambda body: body.update(groups=[]),
        lambda body: body.update(metrics={"loss": "low"}),
        lambda body: body.update(metrics={"loss": 10**400}),
        lambda body: body.update(metrics=[1]),
        lambda body: body.update(environment=None),
        lambda body: body.pop("run_key"),
    ],
)
def test_a_malformed_manifest_is_an_integrity_error(change: Any) -> None:
    """P49: missing keys, negative counts, texts where numbers must be: damage, whatever the digest says."""
    with pytest.raises(IntegrityError):
        read(changed(change))


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=3), inside, max_size=3),
    ),
    st.sampled_from(sorted(json.loads(MANIFEST.to_bytes()))),
)
def test_any_json_in_any_place_is_read_or_refused(value: Any, place: str) -> None:
    """P49: no value in any place of a manifest raises anything but our errors."""
    try:
        manifest = read(changed(lambda body: body.update({place: value})))
    except CkptError:
        return
    assert all(math.isnan(v) or isinstance(v, float) for v in manifest.metrics.values())


def test_the_most_groups_are_written_and_read_and_one_more_is_neither() -> None:
    """P42: what a reader takes a saver writes, up to the bound and no further."""
    groups = {f"g{n}": {"kind": "plain", "tree": n} for n in range(MAX_GROUPS)}
    most = replace(MANIFEST, groups=groups)
    assert read(most.to_bytes()) == most
    groups["one_more"] = {"kind": "plain", "tree": 1}
    with pytest.raises(UnsupportedStateError, match=f"{MAX_GROUPS + 1} groups"):
        replace(MANIFEST, groups=groups).to_bytes()
    with pytest.raises(IntegrityError, match=f"{MAX_GROUPS + 1} groups"):
        read(changed(lambda body: body.update(groups=groups)))
