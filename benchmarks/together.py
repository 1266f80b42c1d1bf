"""Contenders side by side in one process, for what is too large to be built anew for each."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.peers import CONTENDERS, OURS, Contender, differing, flat, states
from benchmarks.stall import fsync_all, remove
from benchmarks.states import Trained

__all__ = ["check_same", "durable_save_s", "opened"]

_NAMES = (OURS, "DCP save", "safetensors save_file", "torch.save")


@contextmanager
def opened(directory: Path, device: str) -> Iterator[dict[str, Contender]]:
    """Make the contenders, by name, each with a directory of its name; at the end all of them are removed."""
    shutil.rmtree(directory, ignore_errors=True)
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP's, at every call, that nothing is distributed here
        contenders: dict[str, Contender] = {}
        for name in _NAMES:
            (directory / name).mkdir(parents=True)
            contenders[name] = CONTENDERS[name](directory / name, device)
            stack.callback(contenders[name].close)
        yield contenders
    shutil.rmtree(directory)


def durable_save_s(contender: Contender, trained: Trained, path: Path) -> float:
    """Save to a path, on disk when it ends, and return the seconds; what was there and what others wrote goes first."""
    remove(path)
    os.sync()
    started = time.perf_counter()
    contender.save_async(trained.state, path)
    contender.wait()
    if not contender.synced:
        fsync_all(path)
    return time.perf_counter() - started


def check_same(name: str, trained: Trained, into: Trained) -> None:
    """Raise RuntimeError where what was read back is not, to the bit, what was saved."""
    if odd := differing(flat(states(trained.state)), flat(states(into.state))):
        raise RuntimeError(f"{name}: {len(odd)} tensors are not what was saved, {odd[0]} for one")
