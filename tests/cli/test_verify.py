"""`ckpt verify`: whatever is wrong is found, named, and makes the exit status 1."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.cli.doctor.host import check_place
from ckpt_tasks.format.parsing import seconds_of
from tests.support.cli_runs import ckpt, flip, only, save_steps, tree
from tests.support.sweeps import quick_first


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero_the_tail(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-32] + bytes(32))


def flip_the_last(path: Path) -> None:
    flip(path, path.stat().st_size - 1)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped": flip_the_last,
    "cut": halve,
    "zeroed": zero_the_tail,
    "missing": Path.unlink,
}


FILES = ["manifest.json", "index.arrow", "model-*.safetensors", "evals/*"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with an evaluation, which verifies: its ledger has the result, and nothing else changes."""
    place = save_steps(tmp_path_factory.mktemp("good") / "run", 1, 2)
    run = open_run(str(place))
    run.record_evaluation(run.find(1), "quick", {"loss": 1.0})
    before = tree(place)
    assert ckpt("verify", place).status == 0
    after = tree(place)
    assert {name: digest for name, digest in after.items() if name in before} == before
    [new] = after.keys() - before.keys()
    assert "/ledger/" in f"/{new}"
    return place


@pytest.mark.parametrize(("name", "damage"), quick_first([*product(FILES, DAMAGES), ("format.json", "flipped")], 3))
def test_damage_is_found(good: Path, run_dir: Path, name: str, damage: str) -> None:
    """P35, P47, P49: a flipped bit, a cut, zeroed or missing file is named, with the tensor; the other one is good."""
    shutil.copytree(good, run_dir)
    of_run = name in {"evals/*", "format.json"}
    path = only(run_dir, name if of_run else f"checkpoint_000000000001/*/{name}")
    DAMAGES[damage](path)
    answer = ckpt("verify", run_dir, "--json")
    found = {one["step"]: one for one in answer.data["checkpoints"]}
    assert (answer.status, found[2]["good"], found[1]["good"]) == (1, True, of_run)
    faults = answer.data["damaged"] if of_run else found[1]["faults"]
    assert path.name in " ".join(faults)
    assert (damage, name[:5]) != ("flipped", "model") or faults[0].startswith("model/bias: bytes ")
    assert of_run or "Damaged: 1 of 2 checkpoints" in ckpt("verify", run_dir).out


def test_one_checkpoint_alone(run_dir: Path) -> None:
    """DIR@STEP reads that checkpoint only: damage to another one is not its fault, and others may still be restored."""
    save_steps(run_dir, 1, 2)
    flip_the_last(only(run_dir, "checkpoint_000000000001/*/model-*"))
    good, bad = ckpt("verify", f"{run_dir}@2", "--json"), ckpt("verify", f"{run_dir}@1", "--json")
    assert (good.status, bad.status) == (0, 1)
    assert [one["step"] for one in good.data["checkpoints"]] == [2]
    assert good.data["read_bytes"] < sum(path.stat().st_size for path in run_dir.glob("checkpoint_*/*/*"))
    assert "1 of 1 checkpoint" in (said := ckpt("verify", f"{run_dir}@1").out)
    assert "A restore passes over" in said
    flip_the_last(only(run_dir, "checkpoint_000000000002/*/model-*"))
    assert "There is none that could be restored" in ckpt("verify", run_dir).out


def test_every_ledger_entry_counts(run_dir: Path) -> None:
    """P49: a ledger entry that is damaged or gone is a fault, however old, even where the newest one is good."""
    save_steps(run_dir, 1, 2)
    entries = sorted((run_dir / "ledger").iterdir(), reverse=True)
    flip(entries[0], 40)
    entries[1].unlink()
    answer = ckpt("verify", run_dir, "--json")
    assert answer.status == 1
    assert all(one["good"] for one in answer.data["checkpoints"])
    assert [line.split(":")[0] for line in answer.data["damaged"]] == [f"ledger/{e.name}" for e in entries[:2]]
    assert "the checkpoints are good, the run's records are not" in ckpt("verify", run_dir).out


def test_a_newest_entry_that_is_damaged_stays_the_newest(run_dir: Path) -> None:
    """Its result is not recorded, since the next entry would hide the damage from those who look later."""
    save_steps(run_dir, 1, 2)
    flip(min((run_dir / "ledger").iterdir()), 40)
    before = tree(run_dir)
    answer = ckpt("verify", run_dir)
    assert answer.status == 1
    assert "does not keep this result: its newest ledger entry is damaged" in " ".join(answer.out.split())
    assert tree(run_dir) == before


def test_the_run_keeps_what_was_found(run_dir: Path) -> None:
    """ls, the doctor and the metrics have the newest result, and of a bad one how much is damaged and the good before.

    One checkpoint alone is not the run.
    """
    save_steps(run_dir, 1, 2)
    [seen] = [one for one in check_place(str(run_dir)) if one.name == "verification"]
    assert (seen.verdict, seen.do) == ("not checked", "ckpt verify DIR")
    assert ckpt("verify", f"{run_dir}@2", "--json").data["recorded"] is False
    assert ckpt("ls", run_dir, "--json").data["checks"] == []
    assert ckpt("verify", run_dir, "--json").data["recorded"] is True
    good = ckpt("ls", run_dir, "--json").data["checks"]
    assert [(one["kind"], one["figures"]["checkpoints"], one["fault"]) for one in good] == [("verify", 2, None)]
    assert measured(run_dir) == {"damaged_checkpoints": 0, "damaged_records": 0, "at": seconds_of(good[0]["at"])}

    flip_the_last(only(run_dir, "checkpoint_000000000001/*/model-*"))
    min((run_dir / "steps").iterdir()).unlink()
    for _ in range(2):
        assert ckpt("verify", run_dir).status == 1
    found = ckpt("ls", run_dir, "--json").data["checks"]
    assert found[0] == good[0]
    assert [one["fault"] is None for one in found] == [True, False]
    assert measured(run_dir) == {"damaged_checkpoints": 1, "damaged_records": 1, "at": seconds_of(found[1]["at"])}
    assert "found 1 of 2 checkpoints damaged, and 1 record" in " ".join(ckpt("ls", run_dir).out.split())
    [seen] = [one for one in check_place(str(run_dir)) if one.name == "verification"]
    assert seen.verdict == "wrong"


def measured(run_dir: Path) -> dict[str, float]:
    names = {"ckpt_last_verified_timestamp_seconds": "at"}
    samples = ckpt("metrics", run_dir, "--json").data["metrics"]
    return {
        names.get(one["name"], one["name"].removeprefix("ckpt_")): one["value"]
        for one in samples
        if one["name"] in names or "damaged" in one["name"]
    }


def test_a_disk_that_cannot_read_is_no_damage_that_a_restore_passes_over(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under EIO the fault names the file with its checkpoint's directory, and says what a restore does."""
    run = save_steps(fast_dir / "eio", 1, 2)
    before, shard = os.preadv, only(run / "checkpoint_000000000002", "**/model-*.safetensors")

    def preadv(fd: int, *rest: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}") == str(shard):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return before(fd, *rest)

    monkeypatch.setattr(os, "preadv", preadv)
    answer = ckpt("verify", run)
    said = "".join(answer.out.split())
    assert answer.status == 1
    assert "".join(str(shard).split()) in said
    assert "Arestoredoesnotpassoverwhatcannotberead" in said
    assert "passesoverthem" not in said
