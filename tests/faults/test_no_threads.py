"""A process that can start no other thread, or has no memory for one, goes on or says so: it does not hang."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from operator import eq, le
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import StoreError
from tests.support.sweeps import quick_first

_START = threading.Thread.start


def _state(value: float = 0.0) -> dict[str, Any]:
    """Return a state that several threads copy, write and verify."""
    return {f"part{n}": torch.full((1 << 20,), value) for n in range(4)}


def _opened(run_dir: Path, memory: Path | None) -> Checkpointer:
    return Checkpointer(CheckpointConfig(checkpoint_dir=run_dir, memory_dir=memory, step_interval=1))


@contextmanager
def _failing(monkeypatch: pytest.MonkeyPatch, strikes: Callable[[int], bool]) -> Iterator[list[int]]:
    """Let those starts of our threads fail that `strikes` names, by their number from 1 on; yield those that did."""
    numbers, struck = count(1), list[int]()

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("ckpt-") and strikes(number := next(numbers)):
            struck.append(number)
            raise RuntimeError("can't start new thread")
        _START(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        yield struck


def _do(way: str, run_dir: Path, memory: Path | None) -> None:
    """Restore, save or close while starts fail; raises only StoreError."""
    ckpt, state = _opened(run_dir, memory), _state()
    try:
        at = ckpt.restore(state)
        assert all((part == float(at)).all() for part in state.values())
        if way != "restore":
            report = ckpt.save if way == "save" else ckpt.step
            report(at + 1, _state(at + 1.0))
    except StoreError as error:
        if "thread" not in str(error):
            raise
    finally:
        ckpt.close()


# (way, a memory directory, this start alone fails or all from it on)
CASES = [("restore", True, True), ("restore", False, False), ("save", False, True), ("step", True, False)]


@pytest.mark.parametrize(("way", "with_memory", "only"), quick_first(CASES, 3))
def test_any_start_of_a_thread_may_fail(
    way: str, *, with_memory: bool, only: bool, fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first, second, … start: our error or success, nothing is half restored, and the next process goes on."""
    run_dir = fast_dir / f"{way}-{with_memory}-{only}"
    memory = fast_dir / f"{run_dir.name}-memory" if with_memory else None
    if memory is not None:
        memory.mkdir()
    with _opened(run_dir, memory) as ckpt:
        ckpt.save(1, _state(1.0))
    for n in count(1):
        with _failing(monkeypatch, partial(eq if only else le, n)) as struck:
            _do(way, run_dir, memory)
        state = _state()
        with _opened(run_dir, memory) as ckpt:
            at = ckpt.restore(state)
            assert at >= 1
            assert all((part == float(at)).all() for part in state.values())
            ckpt.save(at + 1, _state(at + 1.0))
        if not struck:
            break
    assert n > (1 if way == "restore" else 2), "a thread was started"


_CHILD = """
import os, resource, sys, torch
from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import CkptError

def limited(where, kib):
    state = {f"part{n}": torch.ones(1 << 20) for n in range(4)}
    ckpt = Checkpointer(CheckpointConfig(checkpoint_dir=f"{where}-{kib}", memory_dir=None))
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (kib << 10)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    try:
        ckpt.save(1, state)
        ckpt.close()
    except (CkptError, MemoryError, RuntimeError, OSError, SystemError, ImportError):  # those of torch and Python
        os._exit(3)
    os._exit(0)

for kib in range(0, 200_000, 2_100):
    if (pid := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        limited(sys.argv[1], kib)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_too_little_memory_for_threads_is_no_hang(tmp_path: Path) -> None:
    """Under an address space that ends anywhere within the memory that threads need, the process ends by itself."""
    command = [sys.executable, "-c", _CHILD, str(tmp_path / "run")]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True
    )
    ends = Counter(done.stdout.split())
    assert ends["0"] > 0, ends
    assert ends["3"] > 0, ends


_WITHOUT = """
import sys, torch
from ckpt_tasks import CheckpointConfig, Checkpointer
state = {"value": torch.ones(3)}
for step in (1, 2):
    with Checkpointer(CheckpointConfig(checkpoint_dir=sys.argv[1], memory_dir=None)) as ckpt:
        assert ckpt.restore(state) == step - 1
        ckpt.save(step, state)
print("sympy" in sys.modules)
"""


@pytest.mark.slow
def test_a_restore_imports_no_compiler(run_dir: Path) -> None:
    """Half a second of a resume: torch imports sympy to make a tensor like one without values."""
    done = subprocess.run([sys.executable, "-c", _WITHOUT, str(run_dir)], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr
