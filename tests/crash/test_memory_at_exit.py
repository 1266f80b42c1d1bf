"""Memory that is made ahead of a save: when the interpreter ends, no thread that makes it is left or waited for.

A thread that calls into C while Python takes its interpreter apart can abort the process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer
from tests.support.interpreters import python

# A resumed process ends without close() while memory is made for its first save, in 128 slow pieces.
_ENDS = """
import atexit, os, signal, sys, threading, time

@atexit.register  # Called after the exit function of ckpt-tasks, which is registered later.
def say():
    print(touched, [one.name for one in threading.enumerate() if one.name in ("ckpt-take", "ckpt-seal")], flush=True)

import torch
from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.checkpoint.memory import pages

touched, begun, madvise = 0, threading.Event(), pages._madvise

def slow(*arguments):
    global touched
    touched += 1
    begun.set()
    if sys.argv[2] == "Ctrl-C":
        while threading.main_thread().is_alive():
            time.sleep(0.01)
        if touched == 1:
            os.kill(os.getpid(), signal.SIGINT)  # Python waits for this thread by now.
        time.sleep(1)
    time.sleep(0.1)
    return madvise(*arguments)

pages._madvise, pages._TOUCHED_BYTES = slow, 1 << 20
state = {"weights": [torch.zeros(1 << 20) for _ in range(16)]}
ckpt = Checkpointer(CheckpointConfig(checkpoint_dir=sys.argv[1], memory_dir=None))
ckpt.restore(state)
begun.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [False, True])
def test_no_thread_makes_memory_at_the_end_of_the_interpreter(run_dir: Path, interrupted: bool) -> None:
    """Also if Ctrl-C ends Python's own wait for it: the exit waits for the piece under way, and for no other one."""
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=None)) as ckpt:
        ckpt.save(1, {"weights": [torch.zeros(1 << 20) for _ in range(16)]})
    done = python("-c", _ENDS, run_dir, "Ctrl-C" if interrupted else "", whole_end=True)
    assert ("KeyboardInterrupt" in done.stderr) == interrupted
    touched, _, threads = done.stdout.strip().partition(" ")
    assert (done.returncode, threads) == (0, "[]"), done.stderr
    assert int(touched) < 64, "it waited for memory that no save needs"
