"""Sweeps: fail the n-th call that changes the disk, or be killed at it, for n = 1, 2, 3 … until it is never reached.

The form is SQLite's I/O-error loop.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.calls import FailingCalls, Mode

ROOT = Path(__file__).resolve().parents[2]
SLOW = (pytest.mark.slow,)
SOAK = (pytest.mark.slow, pytest.mark.soak)
LANDED, KILLED_AFTER = (pytest.param(mode, marks=pytest.mark.slow) for mode in ("landed", "killed after"))


def quick_first(cases: Iterable[Any], every: int = 0) -> list[Any]:
    """Mark all cases `slow` but the first, or but the first of every `every`."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*row, marks=pytest.mark.slow if (n % every if every else n) else ()) for n, row in enumerate(rows)
    ]


def drawn(few: int, many: int) -> list[Any]:
    """Give the seeds of kills at random: a few for `make test-all`, all of them for `make soak`."""
    return [pytest.param(seed, marks=() if seed < few else pytest.mark.soak) for seed in range(many)]


def sparse(cases: Iterable[Any], every: int, quick: Container[Any] = ()) -> list[Any]:
    """Mark all cases `slow` but those of `quick`, and `soak` too but the first of every `every`."""
    return [
        pytest.param(*row, marks=() if row in quick or row[0] in quick else SOAK if n % every else SLOW)
        for n, row in enumerate(case if isinstance(case, tuple) else (case,) for case in cases)
    ]


def strides(quick: int, long: int = 1) -> pytest.MarkDecorator:
    """Let the quick form of a sweep strike every `quick`-th call, that of `make test-all` every `long`-th."""
    each = [pytest.param(1, marks=SOAK)] if long > 1 else []
    return pytest.mark.parametrize("stride", [quick, pytest.param(long, marks=SLOW), *each])


def failing_calls(mode: Mode, stride: int, fewest: int) -> Iterator[FailingCalls]:
    """Give calls of which a later one fails each time; a sweep of fewer than `fewest` calls has swept nothing."""
    for n in count(1, stride):
        calls = FailingCalls(n, mode)
        yield calls
        if not calls.reached:
            break
    assert n > fewest


class Victim:
    """A process that forks others to be killed: lines of words go in, and how each child ended comes out."""

    def __init__(self, process: subprocess.Popen[str]):
        assert process.stdin is not None
        assert process.stdout is not None
        self.words, self._answers = process.stdin, process.stdout
        self.ended = ""

    def strike(self, *words: object) -> str:
        """Let a child act on the words; return "killed", "lived" where its call failed by itself, or "done"."""
        print(*words, sep="\t", file=self.words, flush=True)
        self.ended = self._answers.readline().strip()
        assert self.ended in ("killed", "lived", "done")
        return self.ended

    def deaths(self, stride: int, fewest: int) -> Iterator[int]:
        """Give the numbers of the calls to be killed at, until a child was struck that came to its end."""
        for n in count(1, stride):
            yield n
            if self.ended == "done":
                break
        assert n > fewest


@contextmanager
def victim_of(*arguments: str) -> Iterator[Victim]:
    """Start `python` with the arguments; its main function is `tests.crash.victim.serve`."""
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        victim = Victim(process)
        yield victim
        victim.words.close()
