"""A process that forks others to be killed: `python -m tests.crash.victim`, then lines "directory n mode" on stdin.

Each line forks a process that restores step 3, saves step 4, and is killed at its n-th call. The answer is a line:
"killed", "lived" where that call failed by itself (a name was taken), or "done" where it never came to it. Forked,
because importing torch takes a hundred times as long as the save.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.ledger.config import CheckpointConfig
from ckpt_tasks.storage.locations import Location
from tests.support.calls import FailingCalls, Mode
from tests.support.runs import UNTOUCHED, opened, state_of


def save_and_die(root: Path, n: int, mode: Mode) -> bool:
    calls = FailingCalls(n, mode)
    ckpt = opened(root, calls=calls)
    assert ckpt.restore(state_of(UNTOUCHED)) == 3
    ckpt.save(4, state_of(4))
    ckpt.close()
    return calls.reached


def save_fourth(arguments: Sequence[str]) -> None:
    """Do the same in an object store, of which the URL and the options in JSON are given; whoever kills is outside."""
    url, storage_options = arguments
    location = Location(url, storage_options=json.loads(storage_options))
    config = CheckpointConfig(checkpoint_dir=location, memory_dir=None, max_num_checkpoints=2)
    ckpt = Checkpointer(config)
    assert ckpt.restore(state_of(UNTOUCHED)) == 3
    ckpt.save(4, state_of(4))
    ckpt.close()


def serve(act: Callable[[list[str]], bool]) -> None:
    """For each line of words fork a process that acts on them; it says whether it came to the call, if it lived."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 2 if act(line.rstrip("\n").split("\t")) else 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        print(  # noqa: T201 (the answer)
            {0: "done", 9: "killed", 2 << 8: "lived"}.get(status, f"status {status}"), flush=True
        )


def act(words: list[str]) -> bool:
    root, n, mode = words
    return save_and_die(Path(root), int(n), cast("Mode", mode))


if __name__ == "__main__":
    serve(act)
