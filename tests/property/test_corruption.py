"""Damage of any kind in any file: never restored silently wrong, always the newest good checkpoint with the reasons."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tasks.checkpoint.history import History
from ckpt_tasks.checkpoint.reading import open_run
from ckpt_tasks.checkpoint.upkeep import verify_run_directory
from ckpt_tasks.errors import NoGoodCheckpointError
from ckpt_tasks.format.ledger import lineage
from ckpt_tasks.storage.local import LocalStore
from tests.crash.runs import (
    EXPECTED,
    UNTOUCHED,
    fingerprint,
    head_of,
    named_by,
    on_disk,
    opened,
    prefix_of,
    state_of,
    train,
)

Harm = tuple[int, str, float, int]  # which file, what kind, where in it, which bit

harms = st.lists(
    st.tuples(
        st.integers(0, 10**6),
        st.sampled_from(["flip", "cut", "zero tail", "delete", "swap", "grow", "empty"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 7),
    ),
    min_size=1,
    max_size=3,
)
numbers = count()


class Run:
    """A run with steps 1, 2, 3, what its files were, and copies of it to damage."""

    def __init__(self, root: Path):
        self.root = root / "base"
        train(self.root, 1, 2, 3, max_num_checkpoints=None)
        self.files = {name: (self.root / name).read_bytes() for name in sorted(on_disk(self.root))}
        self.checkpoints = {c.step: c for c in head_of(self.root).live}
        self.named = {step: named_by(self.root, c) for step, c in self.checkpoints.items()}
        self.ledger = sorted((name for name in self.files if name.startswith("ledger/")), reverse=True)

    @contextmanager
    def copied(self) -> Iterator[Path]:
        root = self.root.parent / str(next(numbers))
        shutil.copytree(self.root, root)
        try:
            yield root
        finally:
            shutil.rmtree(root)

    def twin(self, name: str) -> str | None:
        """Return the file of the same name in another checkpoint."""
        for step in self.checkpoints:
            if name in self.named[step]:
                other = self.checkpoints[step % 3 + 1]
                return prefix_of(other) + name.rpartition("/")[2]
        return None

    def expected(self, root: Path) -> list[int]:
        """Return the steps that are still whole and named by the newest whole entry, newest first.

        An entry is whole when it says the same as before: a flipped bit may turn 1e-05 into 1E-05.
        """
        whole = [name for name in self.ledger if _says(root / name) == json.loads(self.files[name])]
        live = json.loads(self.files[whole[-1]])["state"]["live"] if whole else []
        return sorted(
            (c["step"] for c in live if all(_bytes(root / n) == self.files[n] for n in self.named[c["step"]])),
            reverse=True,
        )


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _says(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def damage(run: Run, root: Path, harm: Harm) -> None:
    which, kind, where, bit = harm
    names = sorted(run.files)
    path = root / names[which % len(names)]
    if not path.exists():
        return
    data = bytearray(path.read_bytes())
    at = int(where * len(data))
    if kind == "swap":
        twin = run.twin(names[which % len(names)])
        if twin is None or not (root / twin).exists():
            return
        path.write_bytes((root / twin).read_bytes())
        (root / twin).write_bytes(data)
    elif kind == "delete":
        path.unlink()
    elif kind == "flip" and data:
        data[at] ^= 1 << bit
        path.write_bytes(data)
    else:
        changed = {"cut": data[:at], "zero tail": data[:at] + bytes(len(data) - at), "grow": data + b"\0", "empty": b""}
        path.write_bytes(bytes(changed.get(kind, data)))


@pytest.fixture(scope="module")
def run(fast_dir: Path) -> Run:
    return Run(fast_dir)


def check_restore(run: Run, root: Path) -> None:
    """Restore as a fresh process would, and compare with what is still whole."""
    good = run.expected(root)
    ckpt = opened(root, max_num_checkpoints=None)
    target = state_of(UNTOUCHED)
    try:
        if not good:
            with pytest.raises(NoGoodCheckpointError):
                ckpt.restore(target)
            assert fingerprint(target) == fingerprint(state_of(UNTOUCHED))
            return
        step = ckpt.restore(target)
        assert step == good[0]
        assert fingerprint(target) == EXPECTED[step]
        report = ckpt.last_restore
        assert report is not None
        live = [c.step for c in lineage(head_of(root).live)]
        assert [passed for passed, why in report.skipped if why] == [newer for newer in live if newer > step]
        ckpt.save(9, state_of(9))
    finally:
        ckpt.close()
    again = state_of(UNTOUCHED)
    fresh = opened(root, max_num_checkpoints=None)
    assert fresh.restore(again) == 9
    assert fingerprint(again) == EXPECTED[9]
    fresh.close()


@settings(max_examples=150)
@given(harms)
def test_what_is_damaged_is_passed_over_and_never_restored(run: Run, damages: list[Harm]) -> None:
    """P47, P48, P49, P56: after any damage the newest whole checkpoint comes back bit for bit, or nothing changes."""
    with run.copied() as root:
        for harm in damages:
            damage(run, root, harm)
        check_restore(run, root)


@settings(max_examples=60)
@given(harms)
def test_verify_finds_what_restore_would(run: Run, damages: list[Harm]) -> None:
    """P49: looking at a run names exactly the checkpoints that are damaged, changes nothing, and raises nothing."""
    with run.copied() as root:
        for harm in damages:
            damage(run, root, harm)
        before = {name: (root / name).read_bytes() for name in on_disk(root)}
        if "format.json" not in before:
            return
        faults = verify_run_directory(History(LocalStore(root)))
        whole = {c.step for c, found in faults.checkpoints.values() if not found}
        assert whole == set(run.expected(root))
        assert {name: (root / name).read_bytes() for name in on_disk(root)} == before


@pytest.mark.parametrize("kind", ["flip", "cut", "delete", "zero tail"])
def test_every_file_of_a_checkpoint_counts(run: Run, kind: str) -> None:
    """P47, P48: each file damaged in turn: the checkpoint is passed over, and the reason names a file or tensor."""
    for name in sorted(run.named[3]):
        if kind == "zero tail" and not run.files[name].strip(b"\0"):
            continue
        with run.copied() as root:
            damage(run, root, (sorted(run.files).index(name), kind, 0.6, 3))
            assert run.expected(root) == [2, 1], name
            check_restore(run, root)
            run_of = open_run(str(root))
            [note] = [note for note in run_of.notes() if note["note"] == "fallback"]
            [[step, reason]] = note["skipped"]
            assert step == 3
            assert "checkpoint_000000000003" in reason or "model/" in reason or "extra/" in reason or "rng/" in reason


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_single_bit_counts(run: Run, part: int) -> None:
    """P49: every 61st bit of every file of the newest checkpoint, flipped alone, is found."""
    with run.copied() as root:
        for name in sorted(run.named[3]):
            data = run.files[name]
            for bit in range(part * 7, len(data) * 8, 61 * 4):
                changed = bytearray(data)
                changed[bit // 8] ^= 1 << bit % 8
                (root / name).write_bytes(changed)
                faults = verify_run_directory(History(LocalStore(root)))
                assert {c.step for c, found in faults.checkpoints.values() if found} == {3}, (name, bit)
            (root / name).write_bytes(data)
