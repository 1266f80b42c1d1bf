"""Twice as much of anything in a run directory takes twice the work to look at, and no more."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.run.opening import open_checkpoint
from tests.faults.hostile import Body, Hostile, train
from tests.faults.hostile_cases import add_to_tree
from tests.faults.hostile_values import attempt_of
from tests.support.cli_runs import ckpt
from tests.support.resources import counted_steps

FEW = 300
MOST = 2.6  # what is sorted, and what is there once, is in it


def digest(at: int) -> str:
    return f"{at:032x}"


def evaluated(state: Body, n: int) -> None:
    one = state["evaluations"][0]
    for at in range(n):
        name = f"evals/{one['step']:012d}-suite{at}-{'0' * 16}.arrow"
        more = {"manifest_digest": digest(at), "suite": f"suite{at}", "table": name, "metrics": {f"metric{at}": at}}
        state["evaluations"].append({**one, **more})


def parents(state: Body, n: int) -> None:
    for at, one in enumerate(state["live"][-n:]):
        one.update(n=at % 2, parent=digest(at + 1))


def leases(state: Body, n: int) -> None:
    one = state["leases"][0]
    state["leases"] += [{**one, "id": f"{at:016x}", "manifest_digest": digest(at)} for at in range(n)]


def of_each(name: str, value: Callable[[int], Any]) -> Callable[[Body, int], Any]:
    return lambda state, n: [one.update({name: value(at)}) for at, one in enumerate(state["live"][-n:])]


# What is done to the state of an entry that has n checkpoints more.
MANY: dict[str, Callable[[Body, int], Any]] = {
    "checkpoints": lambda state, n: None,
    "parents": parents,
    "evaluations": evaluated,
    "metrics": of_each("metrics", lambda at: {f"metric{at}": 1}),
    "leases": leases,
    "pins": lambda state, n: state["pins"].update({digest(at): "his" for at in range(n)}),
    "retired names": lambda state, n: state["retired"].extend(attempt_of(0, f"gone{at}") for at in range(n)),
    "reused names": of_each("reuses", lambda at: [attempt_of(2, f"x-{at:05d}-of-00001-0.safetensors")]),
}
VERBS: dict[str, tuple[str, ...]] = {
    "ls": (), "show": (), "prune": ("--max-num-checkpoints", "2", "--keep-best", "1", "--dry-run"),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(fast_dir: Path) -> Path:
    train(fast_dir / "sizes")
    return fast_dir / "sizes"


def check_work(base: Path, place: Path, change: Callable[[Hostile, int], Any], look: Callable[[Path], Any]) -> None:
    steps = []
    for n in (FEW, 2 * FEW):
        shutil.copytree(base, place / str(n))
        change(Hostile(place / str(n), place), n)
        with counted_steps() as count:
            look(place / str(n))
        steps.append(count())
    assert steps[1] < MOST * steps[0], steps


@pytest.mark.parametrize("verb", ["ls", *(pytest.param(verb, marks=pytest.mark.slow) for verb in [*VERBS][1:])])
@pytest.mark.parametrize("what", MANY)
def test_twice_as_much_is_twice_the_work(base: Path, tmp_path: Path, what: str, verb: str) -> None:
    """P42: whatever an entry holds many of, a look at the run takes steps in proportion to the entry's length."""

    def change(body: Body, n: int) -> None:
        state = body["state"]
        one = state["live"][-1]
        state["live"] += [{**one, "n": 0, "manifest_digest": digest(at), "saved_at": ""} for at in range(n)]
        MANY[what](state, n)

    def look(root: Path) -> None:
        assert ckpt(verb, root, *VERBS[verb], "--json").status == 0

    check_work(base, tmp_path, lambda h, n: h.change_entry(lambda body: change(body, n)), look)


def objects(h: Hostile, n: int) -> None:
    """Let the checkpoint reuse many objects that hold nothing."""
    header = b'{"__metadata__":{"format":"pt"}}'.ljust(4088)
    data = struct.pack("<Q", len(header)) + header
    names = [attempt_of(2, f"x-{at:05d}-of-00001-0.safetensors") for at in range(n)]
    h.change_manifest(lambda body: body["objects"].extend([name, 4096, digest_hex(data), 4096] for name in names))
    h.change_entry(lambda body: body["state"]["live"][-1]["reuses"].extend(names))


def groups(body: Body, n: int) -> None:
    body["groups"].update({f"g{at}": {"kind": "plain", "tree": at} for at in range(n)})


def tree(make: Callable[[int], Any]) -> Callable[[Body, int], None]:
    return lambda body, n: add_to_tree(body, [make(at) for at in range(n)])


HELD: dict[str, Callable[[Body, int], Any]] = {
    "groups": groups,
    "dicts": lambda body, n: add_to_tree(body, {f"k{at}": at for at in range(n)}),
    "sets": lambda body, n: add_to_tree(body, {"~set": [*range(n)]}),
    "tensors with strides": tree(lambda at: {"~tensor": ["extra/big", {"stride": [1]}]}),
    "deep lists": tree(lambda at: [[at] * 3] * 2),
}


@pytest.mark.parametrize("what", ["objects", *HELD])
def test_twice_as_large_a_checkpoint_is_twice_the_work(base: Path, tmp_path: Path, what: str) -> None:
    """P42: whatever a manifest or an index holds many of, to open it takes steps in proportion."""

    def change(h: Hostile, n: int) -> None:
        objects(h, n) if what == "objects" else h.change_manifest(lambda body: HELD[what](body, n))

    def look(root: Path) -> None:
        run = open_run(str(root))
        open_checkpoint(run.history.store, run.find("latest")).check_trees()

    check_work(base, tmp_path, change, look)
