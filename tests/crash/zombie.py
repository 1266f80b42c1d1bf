"""A trainer that another one takes the run from while it is stopped; prints what it committed and how it ended."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import CkptError
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.testing import located, settle
from tests.support.calls import WatchedCalls
from tests.support.runs import UNTOUCHED, fingerprint, state_of

LARGE = 18 << 20  # more than one part of an upload, in bytes


class StopBefore(WatchedCalls):
    """Stop this process, as SIGSTOP from outside would, before its n-th call of one name below a path."""

    def __init__(self, name: str, below: str, n: int):
        super().__init__()
        self._name, self._below, self._left = name, below, n

    def do(self, name: str, path: str, call: Callable[[], Any]) -> Any:
        if name == self._name and self._below in path:
            self._left -= 1
            if self._left == 0:
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread does not take another step
        return super().do(name, path, call)


def laden(step: int, size_bytes: int) -> dict[str, Any]:
    """Return the state of a step with one more tensor."""
    return {**state_of(step), "ballast": torch.full((size_bytes // 4,), float(step))}


def check_laden(state: dict[str, Any], step: int) -> None:
    assert fingerprint(state) == fingerprint(state_of(step))
    assert bool((state["ballast"] == float(step)).all())


def attempt(verb: Any, *given: Any) -> str:
    """Call a verb; return the error's kind and words as a line, nothing where there was none."""
    try:
        verb(*given)
    except CkptError as error:
        return f"{type(error).__name__}: {error}\n"
    return ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--storage-options", type=json.loads)
    parser.add_argument("--ballast-bytes", type=int, default=1 << 10)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--owner-timeout-s", type=float, default=120)
    parser.add_argument("--stop-before", type=json.loads, help="[name of a call, in its path, which one]")
    options = parser.parse_args(arguments)
    logging.getLogger("ckpt_tasks").setLevel(logging.ERROR)  # it begins with a state that looks trained
    location = Location(options.directory, storage_options=options.storage_options)
    if options.stop_before:
        location = located(LocalStore(options.directory, calls=StopBefore(*options.stop_before)))
    ckpt = Checkpointer(
        CheckpointConfig(
            checkpoint_dir=location,
            memory_dir=None,
            max_num_checkpoints=2,
            owner_timeout_s=options.owner_timeout_s,
        )
    )
    train(ckpt, options.steps, options.ballast_bytes)
    ckpt.close()


def train(ckpt: Checkpointer, steps: int, size_bytes: int) -> None:
    """Restore and save the next steps; after an error try what a program may still try, and end."""
    state = laden(UNTOUCHED, size_bytes)
    first = ckpt.restore(state)
    check_laden(state, first or UNTOUCHED)
    sys.stdout.write(f"restored {first}\n")
    for step in range(first + 1, first + 1 + steps):
        said = attempt(ckpt.save, step, laden(step, size_bytes))
        sys.stdout.write(said or f"saved {step}\n")
        sys.stdout.flush()
        settle(ckpt)  # what is stopped in a prune is stopped there, not in a later save
        if said:
            for verb, *given in [
                (ckpt.save, step, laden(step, size_bytes)),
                (ckpt.prune,),
                (ckpt.note, "failure"),
            ]:
                sys.stdout.write(attempt(verb, *given) or "nothing\n")
            break


if __name__ == "__main__":
    main()
