"""Chains of reuse by many ranks: whatever changes, is pruned or fails, all that a live checkpoint names is there."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ckpt_tasks import Checkpointer
from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.errors import StoreError
from ckpt_tasks.format.keys import attempt_prefix, parse_attempt, unfold
from ckpt_tasks.run.opening import open_checkpoint
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.testing import settle
from tests.checkpoint.ranks.training import config, put, refuse, steps_of
from tests.support.gang import Gang, report

SIZE = 2
GROUPS = ("frozen", "slow", "quick")
WIDTH = (1 << 18) + 64  # of float32: the part of each rank is just large enough to be reused
OF_THEIR_OWN = SIZE  # objects: the random streams of each rank
Values = tuple[tuple[int, ...], ...]  # what fills the part of each rank, by group


class Op(NamedTuple):
    """What all ranks do next: save (in which rank `who` may fail), prune, pin, unpin, roll back, or start again."""

    kind: str
    changed: frozenset[tuple[int, int]] = frozenset()  # group and rank
    which: int = 0  # of the live checkpoints, or which rank


def ops() -> st.SearchStrategy[list[Op]]:
    parts = st.tuples(st.integers(0, len(GROUPS) - 1), st.integers(0, SIZE - 1))
    changed = st.frozensets(parts, max_size=3)
    saves = st.builds(Op, st.just("save"), changed)
    others = st.builds(
        Op, st.sampled_from(["prune", "pin", "unpin", "roll back", "start again", "fail"]), changed, st.integers(0, 3)
    )
    return st.lists(st.one_of(saves, saves, others), min_size=2, max_size=10)


# ── in the ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────


def obey(rank: int, size: int, pipes: list[Connection]) -> None:
    """Do what the test says, until it says no more; report after each what the state holds then."""
    state: dict[str, Any] = {}
    ckpt: Checkpointer | None = None
    while (order := pipes[rank].recv()) is not None:
        kind, *arguments = order
        if kind == "begin":
            root, keeps = arguments
            ckpt, state = begin(root, keeps)
            ckpt.restore(state)
        assert ckpt is not None
        if kind == "save":
            step, values, fails = arguments
            fill(state, values)
            LocalStore.put = refuse if fails == rank else put  # type: ignore[method-assign,assignment]
            try:
                ckpt.save(step, state)
            except StoreError:
                assert fails is not None
            LocalStore.put = put  # type: ignore[method-assign]
        elif kind == "roll back":
            ckpt.rollback(arguments[0])
            ckpt.restore(state)
        elif kind == "prune":
            ckpt.prune()
        elif kind in ("pin", "unpin"):
            getattr(ckpt, kind)(arguments[0])
        elif kind == "end":
            ckpt.close()
        settle(ckpt)  # the prune behind a commit: the test looks at what is left
        report(held(state))


def begin(root: str, keeps: int) -> tuple[Checkpointer, dict[str, Any]]:
    options = config(root, memory_dir=None, max_num_checkpoints=keeps, step_interval=None)
    return Checkpointer(options), {name: torch.zeros(SIZE, WIDTH) for name in GROUPS}


def fill(state: dict[str, Any], values: Values) -> None:
    for name, rows in zip(GROUPS, values, strict=True):
        for row, value in enumerate(rows):
            state[name][row].fill_(value)


def held(state: dict[str, Any]) -> Values:
    """Return what fills the state; a part that is not of one number has none."""
    ends = {name: [tuple(map(int, row.aminmax())) for row in state[name]] for name in GROUPS}
    assert all(least == most for name in GROUPS for least, most in ends[name])
    return tuple(tuple(least for least, _ in ends[name]) for name in GROUPS)


# ── in the test ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Ranks:
    """A gang that does what it is told."""

    def __init__(self, gang: Gang, pipes: list[Connection]):
        self._gang = gang
        self._pipes = pipes

    def do(self, *order: Any) -> Values:
        """Have every rank do the same; return what their state holds then, which is the same everywhere."""
        for pipe in self._pipes:
            pipe.send(order)
        found = []
        for rank in range(SIZE):
            kind, value = self._gang.said(rank)
            assert kind == "report", value
            found.append(value)
        assert found == found[:1] * SIZE
        return found[0]  # type: ignore[no-any-return]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Start a gang that does what it is told."""
    ours, theirs = zip(*(Pipe() for _ in range(SIZE)), strict=True)
    with Gang(SIZE, obey, [*theirs]) as gang:
        yield Ranks(gang, [*ours])
        for pipe in ours:
            pipe.send(None)
        assert gang.end() == [0] * SIZE


def run_chain(ranks: Ranks, root: Path, keeps: int, chain: list[Op]) -> None:
    """Do one thing after the other; after each look at every object, and restore every checkpoint."""
    ranks.do("begin", str(root), keeps)
    values: Values = tuple((0,) * SIZE for _ in GROUPS)
    saved = {1: values}
    ranks.do("save", 1, values, None)
    knows = True  # whether the gang knows what the newest checkpoint has
    for step, op in enumerate(chain, start=2):
        steps = sorted(checkpoint.step for checkpoint in open_run(root).checkpoints())
        there = steps[op.which % len(steps)]
        if op.kind in ("save", "fail"):
            values = changed(values, op.changed, step)
            ranks.do("save", step, values, op.which % SIZE if op.kind == "fail" else None)
            saved[step] = values
            if op.kind == "save" and knows:
                assert len([*root.glob(f"checkpoint_{step:012d}/*/*.safetensors")]) <= len(op.changed) + OF_THEIR_OWN
            knows = op.kind == "save"
        elif op.kind == "start again":
            ranks.do("end")
            values = ranks.do("begin", str(root), keeps)
        elif op.kind == "roll back":
            values = ranks.do(op.kind, there)
            assert values == saved[there]
        else:
            ranks.do(op.kind, there)
        look(root, saved, pruned=op.kind == "prune")
    ranks.do("end")
    look(root, saved, pruned=False)


def changed(values: Values, parts: frozenset[tuple[int, int]], step: int) -> Values:
    return tuple(
        tuple(step if (group, rank) in parts else value for rank, value in enumerate(rows))
        for group, rows in enumerate(values)
    )


def look(root: Path, saved: dict[int, Values], *, pruned: bool) -> None:
    """Every live checkpoint verifies and restores; what it reuses is what it says, and nothing else is left."""
    steps_of(root)
    run, named = open_run(root), set()
    for checkpoint in run.checkpoints():
        opened = open_checkpoint(run.history.store, checkpoint)
        attempt = parse_attempt(checkpoint.manifest)
        assert attempt is not None
        objects = {record.name for record in opened.manifest.objects}
        foreign = {name for name in objects if not name.startswith(attempt_prefix(attempt))}
        assert {*unfold(checkpoint.reuses)} == foreign
        named |= {*objects, checkpoint.manifest, opened.manifest.index.name}
        event(f"names objects of {len({parse_attempt(name) for name in foreign})} other attempts")
        event(f"folded {any('[' in name for name in checkpoint.reuses)}")
        _, state = begin(str(root), 1)
        run.restore(checkpoint, state, partial=True)
        assert held(state) == saved[checkpoint.step]
    if pruned:
        assert {str(path.relative_to(root)) for path in root.glob("checkpoint_*/*/*")} == named


@pytest.mark.parametrize("examples", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_what_a_live_checkpoint_names_is_never_deleted(ranks: Ranks, examples: int) -> None:
    """P65: objects that ranks name again, through any number of checkpoints, outlive what wrote them, and no longer.

    What has not changed since the last save is not written again, unless that failed.

    Every live checkpoint restores bit for bit after each save, failed save, prune, pin, rollback and start.
    """

    @settings(max_examples=examples)
    @given(st.integers(1, 3), ops())
    def chains(keeps: int, chain: list[Op]) -> None:
        with TemporaryDirectory() as place:
            run_chain(ranks, Path(place, "run"), keeps, chain)

    chains()
