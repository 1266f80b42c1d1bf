"""Twice as much of anything in a run directory takes twice the work to look at, and no more."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ckpt_tasks.cli import app
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.parsing import MAX_CONTAINERS, MAX_VALUES
from ckpt_tasks.reading.opening import open_checkpoint
from ckpt_tasks.reading.reading import open_run
from tests.faults.hostile import Body, Hostile, train
from tests.faults.hostile_cases import add_to_tree
from tests.faults.hostile_values import attempt_of
from tests.support.resources import counted_steps

FEW = 300
MOST = 2.6  # what is sorted, and what is there once, is in it


def live(body: Body, n: int) -> None:
    one = body["state"]["live"][-1]
    body["state"]["live"] += [{**one, "n": 0, "manifest_digest": f"{at:032x}", "saved_at": ""} for at in range(n)]


def chain(body: Body, n: int) -> None:
    one = body["state"]["live"][-1]
    body["state"]["live"] += [
        {**one, "n": at % 2, "manifest_digest": f"{at:032x}", "parent": f"{at + 1:032x}"} for at in range(n)
    ]


def evaluated(body: Body, n: int) -> None:
    live(body, n)
    one = body["state"]["evaluations"][0]
    for at in range(n):
        name = f"evals/{one['step']:012d}-suite{at}-{'0' * 16}.arrow"
        more = {"manifest_digest": f"{at:032x}", "suite": f"suite{at}", "table": name, "metrics": {f"metric{at}": at}}
        body["state"]["evaluations"].append({**one, **more})


def metrics(body: Body, n: int) -> None:
    live(body, n)
    for at, one in enumerate(body["state"]["live"]):
        one["metrics"] = {f"metric{at}": 1}


def leases(body: Body, n: int) -> None:
    live(body, n)
    one = body["state"]["leases"][0]
    body["state"]["leases"] += [{**one, "id": f"{at:016x}", "manifest_digest": f"{at:032x}"} for at in range(n)]


def pins(body: Body, n: int) -> None:
    live(body, n)
    body["state"]["pins"].update({f"{at:032x}": "his" for at in range(n)})


def retired(body: Body, n: int) -> None:
    live(body, n)
    body["state"]["retired"] += [attempt_of(0, f"gone{at}") for at in range(n)]


def reused(body: Body, n: int) -> None:
    live(body, n)
    for at, one in enumerate(body["state"]["live"]):
        one["reuses"] = [*one["reuses"], attempt_of(2, f"x-{at:05d}-of-00001-0.safetensors")]


MANY: dict[str, Callable[[Body, int], Any]] = {
    "checkpoints": live, "parents": chain, "evaluations": evaluated, "metrics": metrics, "leases": leases, "pins": pins,
    "retired names": retired, "reused names": reused,
}  # fmt: skip
VERBS: dict[str, tuple[str, ...]] = {
    "ls": (), "show": (), "plan": (), "prune": ("--max-num-checkpoints", "2", "--keep-best", "1", "--dry-run"),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(fast_dir: Path) -> Path:
    train(fast_dir / "sizes")
    return fast_dir / "sizes"


@pytest.mark.parametrize(
    "verb", ["ls", *(pytest.param(verb, marks=pytest.mark.slow) for verb in VERBS if verb != "ls")]
)
@pytest.mark.parametrize("what", MANY)
def test_twice_as_much_is_twice_the_work(base: Path, tmp_path: Path, what: str, verb: str) -> None:
    """P42: whatever an entry holds many of, a look at the run takes steps in proportion to the entry's length."""
    steps = []
    for n in (FEW, 2 * FEW):
        shutil.copytree(base, tmp_path / str(n))
        hostile = Hostile(tmp_path / str(n), tmp_path)
        hostile.change_entry(lambda body, n=n: MANY[what](body, n))  # type: ignore[misc]
        with counted_steps() as count:
            done = CliRunner().invoke(app, [verb, str(hostile.root), *VERBS[verb], "--json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)
        steps.append(count())
    assert steps[1] < MOST * steps[0], steps


def objects(hostile: Hostile, n: int) -> None:
    """Let the checkpoint reuse many objects that hold nothing."""
    header = b'{"__metadata__":{"format":"pt"}}'.ljust(4088)
    data = struct.pack("<Q", len(header)) + header
    names = [attempt_of(2, f"x-{at:05d}-of-00001-0.safetensors") for at in range(n)]
    hostile.change_manifest(lambda body: body["objects"].extend([name, 4096, digest_hex(data), 4096] for name in names))
    hostile.change_entry(lambda body: body["state"]["live"][-1]["reuses"].extend(names))


def tree(make: Callable[[int], Any]) -> Callable[[Hostile, int], None]:
    return lambda hostile, n: hostile.change_manifest(lambda body: add_to_tree(body, make(n)))


def groups(hostile: Hostile, n: int) -> None:
    hostile.change_manifest(
        lambda body: body["groups"].update({f"g{at}": {"kind": "plain", "tree": at} for at in range(n)})
    )


HELD: dict[str, Callable[[Hostile, int], None]] = {
    "objects": objects,
    "groups": groups,
    "a list": tree(lambda n: [*range(n)]),
    "a dict": tree(lambda n: {f"k{at}": at for at in range(n)}),
    "keys of another kind": tree(lambda n: {"~dict": [[at, at] for at in range(n)]}),
    "a set": tree(lambda n: {"~set": [*range(n)]}),
    "tensors": tree(lambda n: [{"~tensor": "extra/big"} for _ in range(n)]),
    "tensors with strides": tree(lambda n: [{"~tensor": ["extra/big", {"stride": [1]}]} for _ in range(n)]),
    "deep lists": tree(lambda n: [[[at] * 3] * 2 for at in range(n)]),
}


@pytest.mark.parametrize("what", HELD)
def test_twice_as_large_a_checkpoint_is_twice_the_work(base: Path, tmp_path: Path, what: str) -> None:
    """P42: whatever a manifest or an index holds many of, to open it takes steps in proportion."""
    steps = []
    for n in (FEW, 2 * FEW):
        shutil.copytree(base, tmp_path / str(n))
        hostile = Hostile(tmp_path / str(n), tmp_path)
        HELD[what](hostile, n)
        run = open_run(str(hostile.root))
        with counted_steps() as count:
            opened = open_checkpoint(run.history.store, run.find("latest"))
            opened.check_trees()
        steps.append(count())
    assert steps[1] < MOST * steps[0], steps


FULL: dict[str, Callable[[], Any]] = {
    "numbers": lambda: [1234567] * (MAX_VALUES - 1000),
    "texts": lambda: ["abcdefghij"] * (MAX_VALUES - 1000),
    "lists": lambda: [[1, 1, 1]] * (MAX_CONTAINERS - 1000),
    "keys": lambda: {f"k{at}": 1 for at in range(MAX_VALUES // 2 - 100_000)},
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FULL)
def test_a_manifest_at_its_limits_takes_three_gib(base: Path, tmp_path: Path, what: str) -> None:
    """P42: the largest manifests that are read at all are shown in at most 3 GiB of memory."""
    shutil.copytree(base, tmp_path / "run")
    Hostile(tmp_path / "run", tmp_path).change_manifest(lambda body: add_to_tree(body, FULL[what]()))
    command = [str(Path(sys.prefix, "bin", "ckpt")), "show", str(tmp_path / "run"), "--json"]
    showing = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(showing.pid, 0)
    showing.returncode = os.waitstatus_to_exitcode(status)
    assert showing.returncode == 0
    assert used.ru_maxrss < 3 << 20, f"{used.ru_maxrss >> 10} MiB"  # ru_maxrss is in KiB
