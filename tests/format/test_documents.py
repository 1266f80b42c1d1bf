"""What is stored as JSON (entries, segments, manifests, seals): read back equal, or refused as damaged or as newer."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.errors import CkptError, FormatVersionError, IntegrityError, StateError, UnsupportedStateError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import MAX_EPOCH, MAX_LEDGER_NUMBER, MAX_STEP
from ckpt_tasks.format.ledger import Entry, State
from ckpt_tasks.format.live import read_segment, write_segment
from ckpt_tasks.format.manifest import MAX_GROUPS, Manifest, ObjectRecord
from ckpt_tasks.format.records import Lease, Origin, RunCheck, Seal
from tests.support.ledgers import evaluation_of, made, owner_of, resealed

PLACE = "checkpoint_000000000000/e000001-0123456789abcdef/"
NONE: frozenset[str] = frozenset()
MANIFEST = Manifest(
    run_key="lm",
    step=0,
    attempt="e000001-0123456789abcdef",
    world_size=1,
    index=ObjectRecord(f"{PLACE}index.arrow", 10, "f" * 32, 10),
    objects=(ObjectRecord(f"{PLACE}model-00000-of-00001-0.safetensors", 9, "e" * 32, 8),),
    groups={"model": {"kind": "module", "tree": {"b": 1, "a": [2]}}},
    metrics={"loss": 0.5},
    created_at="2024-01-01T00:00:00+00:00",
    environment={"torch": "2.13"},
)
FIRST = made(10, 1, "0@0", metrics={"loss": 0.5}, epochs=1, reuses=(MANIFEST.objects[0].name,))
DRILL = RunCheck(kind="drill", at="2024", host="box", fault="killed", figures={"step": 20, "ranks": 2, "start_s": 1.5})
COUNTS: dict[str, float] = {"checkpoints": 2, "damaged_checkpoints": 0, "damaged_records": 0}
VERIFIED = RunCheck(kind="verify", at="2024", host="box", fault=None, figures=COUNTS)
FULL = (
    State(origin=Origin(url="/runs/a", run_key="a", step=1, manifest_digest="1@2", identity="1@3", set={}, params={}))
    .with_checkpoint(FIRST, NONE)
    .with_evaluation(evaluation_of(FIRST, loss=0.5))
    .with_checkpoint(made(20, 2, "10@1"), NONE)
    .with_owner(owner_of(1), "loss", "min")
    .with_pin("10@1", "mine")
    .with_check(DRILL)
    .with_check(VERIFIED)
    .with_lease(Lease(id="a", manifest_digest="20@2", holder="eval", expires_at=100.0), 0.0)
    .retire(NONE, (f"{PLACE}index.arrow",), NONE)
)
SEAL = Seal(
    run_key="lm",
    checkpoint=replace(made(7, 4, "6@3", metrics={"loss": 0.5}), n=-1),
    newest="6@3",
    in_flight=None,
)


def entry(state: State, **more: Any) -> Entry:
    event = {"kind": "note"}
    fields = {"n": 3, "epoch": 1, "nonce": "c" * 32, "previous": None, "at": "2024", "event": event, **more}
    return Entry(**fields, state=state)


def unsealed(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    body = json.loads(data)
    change(body)
    return json.dumps(body).encode()


@dataclass(frozen=True)
class Document:
    """An object that is stored: its value and its bytes; `sealed`: a digest of the rest is one of its fields."""

    value: Any
    data: bytes
    read: Callable[[bytes], Any]
    sealed: bool = False

    def changed(self, change: Callable[[dict[str, Any]], object]) -> bytes:
        """Return the bytes after a change, with a digest that fits."""
        return resealed(self.data, change) if self.sealed else unsealed(self.data, change)


DOCUMENTS = {
    "entry": Document(entry(FULL), entry(FULL).to_bytes()[0], lambda data: Entry.from_bytes(data, "x")[0], True),
    "seal": Document(SEAL, SEAL.to_bytes(), Seal.from_bytes, True),
    "manifest": Document(
        MANIFEST,
        MANIFEST.to_bytes(),
        lambda data: Manifest.from_bytes(data, digest=digest_hex(data), name="x"),
    ),
    "segment": Document(
        FULL.live,
        write_segment(FULL.live),
        lambda data: read_segment(data, digest=digest_hex(data), name="x"),
    ),
}
documents = pytest.mark.parametrize("name", DOCUMENTS)


@documents
def test_what_is_written_is_read_back(name: str) -> None:
    """P27: equal, step 0 and the order of keys included, in another layout of the JSON too."""
    document = DOCUMENTS[name]
    assert document.read(document.data) == document.value
    again = document.read(json.dumps(json.loads(document.data), indent=1).encode())
    assert again == document.value
    assert name != "manifest" or [*again.groups["model"]["tree"]] == ["b", "a"]


@pytest.mark.parametrize("name", ["entry", "seal"])
def test_every_flipped_bit_is_damage_or_means_the_same(name: str) -> None:
    """P49: the digest within covers every byte: with one bit flipped it is refused, or still says exactly the same."""
    document, refused = DOCUMENTS[name], 0
    for at in range(len(document.data)):
        try:
            again = document.read(
                document.data[:at] + bytes([document.data[at] ^ 1 << at % 8]) + document.data[at + 1 :]
            )
        except IntegrityError:
            refused += 1
        else:
            assert again == document.value
    assert refused > 0.98 * len(document.data)


def test_other_bytes_are_refused_before_they_are_parsed() -> None:
    """P49: whatever else is there, a manifest or a segment is not the one that was committed."""
    digest = digest_hex(MANIFEST.to_bytes())
    for data in (b"", b"{", MANIFEST.to_bytes() + b" "):
        with pytest.raises(IntegrityError, match="not the one that was committed"):
            Manifest.from_bytes(data, digest=digest, name="x")
        with pytest.raises(IntegrityError):
            read_segment(data, digest=digest, name="x")


TORN = [b"", b"null", b"[]", b"{", b"{}", b'{"digest":1}', b'{"version":1}', b"\xff", b"\0" * 500, b"[" * 100_000]


@documents
@pytest.mark.parametrize("data", TORN, ids=lambda data: repr(data[:12]))
def test_torn_bytes_are_damage(name: str, data: bytes) -> None:
    """P35, P49: a cut, zero-filled or foreign object is damage, which counts as "nothing happened"."""
    with pytest.raises(IntegrityError):
        DOCUMENTS[name].read(data)


@documents
def test_a_newer_one_says_upgrade(name: str) -> None:
    """P59: a newer version is not damage: the reader stops and says upgrade, whatever else is in it."""
    document = DOCUMENTS[name]
    with pytest.raises(FormatVersionError, match="Upgrade"):
        document.read(document.changed(lambda body: body.update(version=2)))
    refuses(document, ("version",), [0, -1, 1.0, "1", None, True, [1]])


# ── fields ───────────────────────────────────────────────────────────────────────────────────────────────────

GONE = object()
TEXT: list[Any] = [GONE, None, 3, ["a"]]
WHOLE = [GONE, -1, True, 1.5, "1", None]
OUT = ["../x", "/etc/passwd", "simplecache::http://host/x", "file:///x", "", "a\n", 3, None, []]
COUNT: list[Any] = [*WHOLE[1:], 1 << 63, 1e300]
NO_TEXT: list[Any] = [3, None]
FAR: Any = 10**400
# What each field must not be, by the way to it.
BAD: dict[str, dict[tuple[Any, ...], list[Any]]] = {
    "entry": {
        ("n",): [*WHOLE, MAX_LEDGER_NUMBER + 1],
        ("epoch",): [*WHOLE, MAX_EPOCH + 1],
        **{(field,): TEXT for field in ("nonce", "at")},
        ("previous",): [GONE, 3],
        ("state",): [GONE, [], None],
        ("event",): [GONE, []],
        ("state", "retired"): [["../../etc/passwd"], [3], None],
        ("state", "live"): [{"segments": ["../x"], "tail": []}, {"segments": ["file:///x"], "tail": []}, {"tail": []}],
        ("state", "live", 0, "more"): [1],
        ("state", "owner"): [[1]],
        ("state", "best_mode"): ["median", None],
        **{("state", name): [3] for name in ("stalled_flow_run", "best_metric", "program", "params", "origin")},
        ("state", "stalled_attempts"): WHOLE,
        ("state", "spared_epochs"): [*WHOLE, MAX_EPOCH + 1],
    },
    "seal": {
        ("run_key",): TEXT,
        ("newest",): [GONE, 3],
        ("in_flight",): [GONE, 3],
        ("more",): [1],
        ("checkpoint",): [GONE, None],
        ("checkpoint", "step"): [8],
        ("checkpoint", "n"): [-2],
        ("checkpoint", "manifest"): OUT,
    },
    "manifest": {
        ("run_key",): TEXT,
        ("step",): WHOLE,
        ("world_size",): WHOLE,
        ("attempt",): [*TEXT, "e000002-0123456789abcdef"],
        ("created_at",): [3],
        ("environment",): [None, {"torch": 3}],
        ("groups",): [
            [],
            *({"model": group} for group in (5, {"kind": 3, "tree": 1}, {"kind": "module"})),
            {"../x": {"kind": "module", "tree": {}}},
        ],
        ("metrics",): [[1], {"loss": "low"}, {"loss": FAR}],
        ("objects",): [None, {"a": 1}, [[*MANIFEST.objects[0]]] * 2, [[*MANIFEST.index]]],
        **{
            (*record, at): values
            for record in (("index",), ("objects", 0))
            for at, values in enumerate([OUT, COUNT, NO_TEXT, COUNT])
        },
        ("index", 3): [GONE, *COUNT],
    },
    "segment": {("live",): [GONE, 3, [], [{}]], ("live", 0, "n"): [*WHOLE]},
}


def refuses(document: Document, way: tuple[Any, ...], values: list[Any]) -> None:
    """Put each value into a field, or take the field away, and see it refused as damage."""
    for value in values:

        def change(body: Any, value: Any = value) -> None:
            for part in way[:-1]:
                body = body[part]
            if value is GONE:
                del body[way[-1]]
            elif isinstance(body, dict) or way[-1] < len(body):
                body[way[-1]] = copy.deepcopy(value)

        with pytest.raises(IntegrityError):
            document.read(document.changed(change))


def cases() -> Iterator[Any]:
    for name, ways in BAD.items():
        yield from (pytest.param(name, way, id=f"{name}-{'-'.join(map(str, way))}") for way in ways)


@pytest.mark.parametrize(("name", "way"), [*cases()])
def test_what_nobody_wrote_is_damage(name: str, way: tuple[Any, ...]) -> None:
    """P42, P49: names with a way out, missing and foreign fields, other types: damage, even where the digest fits."""
    refuses(DOCUMENTS[name], way, BAD[name][way])


VALUES = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=3), inside, max_size=3),
)
PLACES = [
    (name, part, place)
    for name, document in DOCUMENTS.items()
    for part, body in (("", json.loads(document.data)), ("state", json.loads(document.data).get("state", {})))
    for place in sorted(body)
]


@given(VALUES, st.sampled_from(PLACES))
def test_any_json_in_any_place_is_read_or_refused(value: Any, at: tuple[str, str, str]) -> None:
    """P49: no value in any place raises anything but our errors."""
    name, part, place = at
    try:
        DOCUMENTS[name].read(
            DOCUMENTS[name].changed(lambda body: (body[part] if part else body).update({place: value}))
        )
    except CkptError:
        return


@given(
    st.dictionaries(st.text(max_size=4), st.floats(), max_size=3),
    st.dictionaries(st.text(max_size=4), st.floats() | st.text() | st.lists(st.floats(), max_size=2), max_size=3),
)
def test_numbers_that_json_lacks_come_back(metrics: dict[str, float], fields: dict[str, Any]) -> None:
    """P62: NaN and infinity in metrics, and in what an event tells, are written as JSON that everyone reads."""
    checkpoint = made(1, 1, metrics=metrics)
    state = State().with_checkpoint(checkpoint, NONE).with_evaluation(evaluation_of(checkpoint, loss=float("nan")))
    stored = entry(state, event={**fields, "kind": "note"}).to_bytes()[0]
    manifest = replace(MANIFEST, metrics=metrics).to_bytes()
    for data in (stored, manifest):
        json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    again = DOCUMENTS["entry"].read(stored).state
    assert repr(again.live[0].metrics) == repr({k: metrics[k] for k in sorted(metrics)})
    assert repr(again.evaluations[0].metrics["loss"]) == "nan"
    assert repr({**DOCUMENTS["manifest"].read(manifest).metrics}) == repr(metrics)


# ── entries ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_digest_of_an_entry_is_that_of_what_it_says() -> None:
    """The next entry names it: it is the same in another layout, and another value has another one."""
    data, digest = entry(FULL).to_bytes()
    other = json.dumps(json.loads(data), indent=1).encode()
    assert Entry.from_bytes(data, "x")[1] == Entry.from_bytes(other, "x")[1] == digest
    with pytest.raises(IntegrityError):
        Entry.from_bytes(other.replace(b'"mine"', b'"ours"'), "x")


def test_the_bytes_of_an_entry_are_told_from_any_others() -> None:
    """P49: an entry is in the bytes that were written, and in no others: a flipped bit, a cut, another layout."""
    data, digest = entry(FULL).to_bytes()
    assert entry(FULL).is_in(data, digest)
    for at in range(0, len(data), 7):
        assert not entry(FULL).is_in(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], digest)
    for other in (b"", data[:-1], json.dumps(json.loads(data), indent=1).encode(), entry(FULL, n=4).to_bytes()[0]):
        assert not entry(FULL).is_in(other, digest)


def test_a_commit_that_nests_too_deep_is_refused_without_being_parsed() -> None:
    """P47: without parsing what was written, its bounds hold as well: a reader would refuse the entry."""
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(StateError, match="deeper"):
        entry(FULL, event={"kind": "commit", "observed": deep}).to_bytes(parse=False)
    assert entry(FULL).to_bytes(parse=False) == entry(FULL).to_bytes()


def test_a_look_reads_the_newest_checkpoints() -> None:
    """With `newest` an entry lacks older checkpoints and says so."""
    data, digest = entry(FULL).to_bytes()
    found, its = Entry.from_bytes(data, "x", 1)
    assert ([one.step for one in found.state.live], found.partial, its) == ([20], True, digest)
    assert Entry.from_bytes(data, "x", 2) == (entry(FULL), digest)


def test_an_unknown_event_is_neither_put_nor_passed_over() -> None:
    """P47, P59: what would stop every reader is refused by its writer; a reader stops and says upgrade."""
    with pytest.raises(StateError, match="unknown event"):
        entry(FULL, event={"kind": "teleport"}).to_bytes()
    kinds: list[Any] = ["teleport", ["note"]]
    for event in ({"kind": kind} for kind in kinds):
        with pytest.raises(FormatVersionError, match="Upgrade"):
            DOCUMENTS["entry"].read(DOCUMENTS["entry"].changed(partial(dict.update, event=event)))


def test_the_last_numbers_are_read() -> None:
    """The bounds of entries refuse what is beyond them and nothing else."""
    last = entry(replace(FULL, spared_epochs=MAX_EPOCH), n=MAX_LEDGER_NUMBER, epoch=MAX_EPOCH)
    assert Entry.from_bytes(last.to_bytes()[0], "x")[0] == last
    assert entry(FULL, n=2).to_bytes()  # its own checkpoint has its number
    most = made(MAX_STEP, 1, epochs=2**63 - 1)
    most = replace(most, size_bytes=2**63 - 1, objects=2**63 - 1, cost_s=1e9)
    largest = State().with_checkpoint(most, NONE).with_owner(owner_of(MAX_EPOCH, pid=2**31 - 1), None, "min")
    assert Entry.from_bytes(entry(largest).to_bytes()[0], "x")[0].state == largest


# ── manifests ────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_rank_has_its_tree() -> None:
    """P49: a group of several ranks has one tree, or one for each rank; a group of one rank has one tree."""
    for ranks, trees, good in ((2, [1, 2], True), (2, [1], False), (2, 1, False), (1, [1], False)):
        group = {"it": {"kind": "plain", "trees": trees}}
        data = replace(MANIFEST, groups=group, world_size=ranks).to_bytes()
        if good:
            assert DOCUMENTS["manifest"].read(data).groups == group
            continue
        with pytest.raises(IntegrityError):
            DOCUMENTS["manifest"].read(data)


def test_the_most_groups_are_written_and_read_and_one_more_is_neither() -> None:
    """P42: what a reader takes a saver writes, up to the bound and no further."""
    groups = {f"g{n}": {"kind": "plain", "tree": n} for n in range(MAX_GROUPS)}
    most = replace(MANIFEST, groups=groups)
    assert DOCUMENTS["manifest"].read(most.to_bytes()) == most
    groups["one_more"] = {"kind": "plain", "tree": 1}
    with pytest.raises(UnsupportedStateError, match=f"{MAX_GROUPS + 1} groups"):
        replace(MANIFEST, groups=groups).to_bytes()
    with pytest.raises(IntegrityError, match=f"{MAX_GROUPS + 1} groups"):
        DOCUMENTS["manifest"].read(DOCUMENTS["manifest"].changed(lambda body: body.update(groups=groups)))
