"""The limit on a flush is one on progress: a store that is slow and moves is waited for, and not one that stands."""

from __future__ import annotations

import subprocess
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from ckpt_tasks import Checkpointer
from ckpt_tasks.errors import StoreError
from ckpt_tasks.testing import under_way
from tests.support.calls import WatchedCalls
from tests.support.interpreters import python
from tests.support.pipelines import Gate, committed, opened, state_at
from tests.support.systems import Told
from tests.support.waiting import until

_TIMEOUT_S = 1.0
_WRITE_S = 0.3
_GROUPS = 6


class Slow(WatchedCalls):
    """Take a while for every write to a checkpoint's objects; one write after the other."""

    def __init__(self, clock: Told) -> None:
        super().__init__()
        self._clock = clock
        self.ckpt: Checkpointer | None = None
        self.stuck: list[bool] = []

    def cut(self, fd: int, piece: object) -> object:
        if "/checkpoint_" in self.paths[fd] and self.ckpt is not None:
            self._clock.now_s += _WRITE_S
            self.stuck.append(under_way(self.ckpt).stuck)
        return piece


def test_a_slow_store_that_moves_is_not_stuck(run_dir: Path, clock: Told) -> None:
    """P43: a checkpoint that takes longer than `flush_timeout_s` is committed, as each of its objects arrives."""
    slow = Slow(clock)
    with opened(run_dir, slow, flush_timeout_s=_TIMEOUT_S) as ckpt:
        slow.ckpt = ckpt
        ckpt.save(1, {f"group{n}": torch.full((1000,), float(n)) for n in range(_GROUPS)})
    assert clock.now_s > _TIMEOUT_S
    assert slow.stuck == [False] * len(slow.stuck) != []
    assert committed(run_dir) == [1]


def test_a_store_that_stands_still_is_stuck_after_it_has_moved(run_dir: Path, gate: Gate, clock: Told) -> None:
    """P43: progress with one checkpoint does not hide that the store takes nothing of the next one."""
    gate.opened.set()
    ckpt = opened(run_dir, gate, flush_timeout_s=_TIMEOUT_S)
    ckpt.save(1, state_at(1))
    gate.opened.clear()
    gate.reached.clear()

    def stands_still() -> None:
        gate.reached.wait()
        clock.now_s += 2 * _TIMEOUT_S

    standing = threading.Thread(target=stands_still, daemon=True)
    standing.start()
    with pytest.raises(StoreError, match=r"has taken nothing for 1 s \(step 2\)"):
        ckpt.save(2, state_at(2))
    standing.join()
    gate.opened.set()
    until(lambda: not under_way(ckpt).stuck)
    ckpt.close()
    assert committed(run_dir) == [1, 2]


TRAINER = """
    import threading, time
    import torch
    from ckpt_tasks import CheckpointConfig, Checkpointer
    from tests.support.calls import WatchedCalls

    class Held(WatchedCalls):
        def cut(self, fd, piece):
            if "/checkpoint_" in self.paths[fd] and ckpt.position >= 3:
                {hold}
            return piece

    ckpt = Checkpointer(CheckpointConfig(checkpoint_dir={run!r}, step_interval=1, memory_dir={memory!r},
                                         flush_timeout_s={limit_s}))
    ckpt.run.history.store._calls = Held()

    def train():
        for step in range(1, 10**6):
            ckpt.step(step, {{"weights": torch.full((1000,), float(step))}})

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    while ckpt.position < 20:
        time.sleep(0.01)
    {end}
"""


def _trainer(
    run_dir: Path, *, hold: str, memory: str | None = None, end: str = "", limit_s: float = 2.0
) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(TRAINER).format(run=str(run_dir), memory=memory, hold=hold, end=end, limit_s=limit_s)
    return python("-c", code)


def test_the_end_waits_for_a_store_that_stands_still_until_its_limit(run_dir: Path, tmp_path: Path) -> None:
    """P43, P72: with a daemon thread that trains on, the process ends, and says which step is not committed.

    It says as well that the next start on this host has that step.
    """
    ended = _trainer(run_dir, hold="time.sleep(10**6)", memory=str(tmp_path))
    assert ended.returncode == 0
    assert ended.stderr.count("is not committed") == 1
    assert "the next start on this host can restore it" in ended.stderr
    assert "has taken nothing for 2 s" in ended.stderr


# Ctrl-C once the main thread waits at the interpreter's end.
_INTERRUPT = """
    import _thread, sys

    def interrupt():
        called, names = threading.main_thread().ident, []
        while names[:1] != ["wait"] or "_end_all" not in names:
            time.sleep(0.01)
            frame, names = sys._current_frames()[called], []
            while frame:
                names.append(frame.f_code.co_name)
                frame = frame.f_back
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
"""


def test_a_second_interrupt_ends_the_wait_at_the_end(run_dir: Path) -> None:
    """P69, P72: Ctrl-C while the interpreter waits for a slow store ends it at once, with the step that is missing."""
    done = _trainer(run_dir, hold="time.sleep(10**6)", end=_INTERRUPT, limit_s=600.0)
    assert done.stderr.count("is not committed") == 1
    assert "it is lost with this process" in done.stderr
    assert "interrupted" in done.stderr
    assert "Traceback" not in done.stderr
