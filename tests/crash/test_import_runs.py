"""Kill or fail an import at every call that changes the disk: half of one is no checkpoint, and again it finishes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from ckpt_tasks.errors import CkptError
from tests.crash.import_victim import make_import
from tests.support.calls import FailingCalls, Mode
from tests.support.runs import check_run, head_of, state_of

# The quick form fails every 13th call, the long one each.
EVERY = pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.slow)])
ROOT = Path(__file__).resolve().parents[2]
FEWEST_CALLS = 45  # a sweep that ends before has not swept a whole import


@pytest.fixture(scope="module")
def source(fast_dir: Path) -> Path:
    state = state_of(2)
    saved = {name: state[name].state_dict() for name in ("model", "optimizer")}
    torch.save({**saved, "extra": state["extra"]}, fast_dir / "source.pt")
    return fast_dir / "source.pt"


@pytest.fixture(scope="module")
def victim() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.crash.import_victim"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def finished(source: Path, target: Path) -> None:
    """Import it again if nothing stands; then it is whole, trains on, and sweeps what was left."""
    if not head_of(target).live:
        make_import(source, target, FailingCalls(0, "refused"))
    check_run(target, 2)


@EVERY
@pytest.mark.parametrize("mode", ["killed before", pytest.param("killed after", marks=pytest.mark.slow)])
def test_killed_at_any_call_the_same_import_finishes(
    source: Path, fast_dir: Path, victim: subprocess.Popen[str], mode: Mode, stride: int
) -> None:
    """P30: SIGKILL at every call: there is no checkpoint or the whole one, and the same command finishes it."""
    assert victim.stdin is not None
    assert victim.stdout is not None
    for n in count(1, stride):
        target = fast_dir / f"{mode.replace(' ', '-')}-{n}"
        victim.stdin.write(f"{source}\t{target}\t{n}\t{mode}\n")
        victim.stdin.flush()
        ended = victim.stdout.readline().strip()
        assert ended in ("killed", "lived", "done")
        assert head_of(target).live or ended == "killed"
        finished(source, target)
        shutil.rmtree(target)
        if ended == "done":
            break
    assert n > FEWEST_CALLS


@EVERY
@pytest.mark.parametrize("mode", ["refused", pytest.param("landed", marks=pytest.mark.slow)])
def test_whatever_call_fails_the_same_import_finishes(source: Path, fast_dir: Path, mode: Mode, stride: int) -> None:
    """P28, P30: a call that fails, or whose answer is lost, leaves no checkpoint or the whole one."""
    for n in count(1, stride):
        target = fast_dir / f"{mode}-{n}"
        calls = FailingCalls(n, mode)
        try:
            make_import(source, target, calls)
        except CkptError:
            pass
        else:
            assert head_of(target).live, calls.where
        finished(source, target)
        shutil.rmtree(target)
        if not calls.reached:
            break
    assert n > FEWEST_CALLS
