"""Every field that holds a name × every kind of name: a field is held to its kind, and a copy changes nothing there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.checkpoint.restore.reading import Run, open_run
from ckpt_tasks.checkpoint.transfer.syncing import plan_sync, run_sync
from ckpt_tasks.errors import CkptError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import ledger_name, live_list_name, parse_ledger_name
from ckpt_tasks.format.manifest import Manifest
from ckpt_tasks.run.ledger.history import History, newest_first
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import WrappedStore
from tests.faults.hostile import NEWEST, Hostile, train
from tests.faults.hostile_values import attempt_of, put_at
from tests.support.sweeps import quick_first, strides

# Where each field is, and what stands there for a name.
FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "entry's manifest": ("state/live/-1/manifest", str),
    "entry's reuses": ("state/live/-1/reuses", lambda name: [name]),
    "entry's retired": ("state/retired", lambda name: [name]),
    "entry's list": ("state/live", lambda name: {"object": name, "digest": "0" * 32}),
    "entry's table": ("state/evaluations/0/table", str),
    "manifest's object": ("objects/-1/0", str),
    "manifest's index": ("index/0", str),
    "index's object": ("", str),
}
# Which kinds of name a field may hold. What it names has to exist as well; but that is found where it is read.
TAKEN = {
    "entry's manifest": {"own manifest"},
    "entry's reuses": {"own shard", "another's shard", "a new shard"},
    "entry's retired": {
        "own manifest", "another's manifest", "own index", "another's index", "own shard", "another's shard",
        "a new shard", "another object of an attempt",
    },
    "entry's list": set[str](),
    "entry's table": {"own table"},
    "manifest's object": {"another's shard", "a new shard"},  # its own one it names already
    "manifest's index": {"own index"},
    "index's object": {"own shard", "another's shard", "a new shard"},
}  # fmt: skip


def kinds(h: Hostile) -> dict[str, str]:
    """Return a name of every kind that there is in a run."""
    own, other = h.checkpoint()["manifest"].rpartition("/")[0], h.checkpoint(1)["manifest"].rpartition("/")[0]
    return {
        "format.json": "format.json",
        "a ledger entry": ledger_name(1),
        "the next ledger entry": ledger_name(h.entry()["n"] + 40),
        "a ledger entry far off": ledger_name(9000),
        "a live list": live_list_name("0" * 32),
        "a heartbeat": "heartbeat/000001.json",
        "the next heartbeat": "heartbeat/000002.json",
        "own manifest": f"{own}/manifest.json",
        "another's manifest": f"{other}/manifest.json",
        "own index": f"{own}/index.arrow",
        "another's index": f"{other}/index.arrow",
        "own shard": h.shard("extra"),
        "another's shard": next(record[0] for record in h.manifest(1)["objects"] if "/extra-" in record[0]),
        "a new shard": attempt_of(2, "extra-00000-of-00001-7.safetensors"),
        "another object of an attempt": attempt_of(2, "notes.txt"),
        "an attempt": own,
        "own table": h.entry()["state"]["evaluations"][0]["table"],
        "a table of another step": f"evals/{1:012d}-quick-{'0' * 16}.arrow",
        "a table of another suite": f"evals/{NEWEST:012d}-other-{'0' * 16}.arrow",
    }


@pytest.fixture(scope="module")
def base(fast_dir: Path) -> Path:
    """Make a run with one of everything, and a backup that lacks its newest checkpoint."""
    place = fast_dir / "names"
    train(place / "run")
    run, store = open_run(str(place / "run")), LocalStore(place / "backup")
    for step in (1, 2):
        run_sync(run, store, plan_sync(run, store, run.find(step)))
    return place


@pytest.fixture
def h(base: Path, tmp_path: Path) -> Hostile:
    shutil.copytree(base / "run", tmp_path / "run")
    shutil.copytree(base / "backup", tmp_path / "backup")
    return Hostile(tmp_path / "run", tmp_path)


def put(h: Hostile, field: str, name: str) -> None:
    """Write a name into a field, and bytes with the digest that the field says to where the name leads."""
    path, value = FIELDS[field]
    if field.startswith("entry's"):
        h.change_entry(lambda body: put_at(body, path, value(name)))
    elif field.startswith("manifest's"):
        h.change_manifest(lambda body: put_at(body, path, value(name)))
    else:
        first, *rest = h.rows()
        h.put_rows([first._replace(object=name), *rest])
    there = h.root / name
    if field == "entry's table" and not there.is_dir():
        if not there.exists():
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(h.entry_path().read_bytes())  # what would stand in the ledger of a backup
        digest = digest_hex(there.read_bytes())
        h.change_entry(lambda body: body["state"]["evaluations"][0].update(table_digest=digest))


def read(h: Hostile, field: str, path: Path) -> None:
    """Read the object that holds the field as everyone does."""
    if field.startswith("entry's"):
        open_run(str(h.root)).history.read_entry(parse_ledger_name(str(path.relative_to(h.root))) or 0)
        return
    known = h.checkpoint()
    data = (h.root / known["manifest"]).read_bytes()
    Manifest.from_bytes(data, digest=known["manifest_digest"], name=known["manifest"])
    if field.startswith("index's"):
        h.rows()


def files(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def put_back(place: Path, before: dict[str, bytes]) -> None:
    shutil.rmtree(place)
    for name, data in before.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)


@pytest.mark.parametrize("field", quick_first(FIELDS, 3))
def test_a_field_takes_names_of_its_kind_alone(h: Hostile, field: str) -> None:
    """P42: an entry, a manifest or an index that names an object of another kind is damaged, whoever wrote it."""
    taken = set()
    before, entry = files(h.root), h.entry_path()
    for kind, name in kinds(h).items():
        put(h, field, name)
        with suppress(CkptError):
            read(h, field, entry)
            taken.add(kind)
        put_back(h.root, before)
    assert taken == TAKEN[field]


@strides(5)
@pytest.mark.parametrize("field", quick_first(["entry's table", "manifest's object", "index's object"], 2))
def test_a_copy_of_a_hostile_run_changes_nothing_that_is_there(h: Hostile, field: str, stride: int) -> None:
    """P31, P42: whatever name stands in whatever field, a copy adds checkpoints, evaluations and its own entries."""
    backup = h.outside / "backup"
    run, there = files(h.root), files(backup)
    first = sum(name.startswith("ledger/") for name in there)
    for kind, name in [*kinds(h).items()][::stride]:
        put(h, field, name)
        with suppress(CkptError):
            source, store = open_run(str(h.root)), LocalStore(backup)
            run_sync(source, store, plan_sync(source, store))
        after = files(backup)
        changed = {name for name, data in there.items() if after.get(name) != data and "heartbeat" not in name}
        assert changed == set(), kind
        added = after.keys() - there.keys()
        numbers = sorted(parse_ledger_name(name) or 0 for name in added if name.startswith("ledger/"))
        assert numbers == [*range(first, first + len(numbers))], kind
        ours = ("ledger/", "checkpoint_", "evals/", "steps/", "heartbeat/")
        assert [name for name in added if not name.startswith(ours)] == [], kind
        assert not open_run(str(backup)).head().damaged, kind
        assert verify_run_directory(open_run(str(backup)).history).good, kind
        put_back(h.root, run)
        put_back(backup, there)


class Counting(WrappedStore):
    """Count the requests for ledger entries and for lists of them."""

    asked = 0

    def get(self, name: str, max_bytes: int) -> bytes:
        self.asked += name.startswith("ledger/")
        return super().get(name, max_bytes)

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        self.asked += prefix.startswith("ledger")
        return super().names(prefix, limit)


def test_a_number_far_off_costs_no_reads(h: Hostile) -> None:
    """P42: an entry with the number 10^15 makes no copy ask for all numbers below it, at the source or the target."""
    before = open_run(str(h.root)).head().next_n - 1
    for root in (h.root, h.outside / "backup"):
        there = Hostile(root, h.outside)
        body = {**there.entry(), "n": 10**15}
        there.put_entry(body, root / ledger_name(body["n"]))
    h.change_entry(lambda body: body["state"]["live"].pop(0))  # it is looked for in all older entries
    source, target = Counting(LocalStore(h.root)), Counting(LocalStore(h.outside / "backup"))
    assert plan_sync(Run(History(source), "run"), target).diff.missing
    assert source.asked + target.asked < 60
    assert [entry.n for entry, _ in newest_first(History(source))][:2] == [10**15, before]
