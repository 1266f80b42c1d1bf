"""Processes that train a program for `verify_resume`, record digests of every step, and may kill themselves.

Started as `python -m ckpt_tasks.proving.child ORDERS`, a JSON list. A fork carries out each order: it has torch
imported, but not the program.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import CkptError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.tree import TensorRef
from ckpt_tasks.ledger.config import CheckpointConfig
from ckpt_tasks.session.local import LocalSession
from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.groups import flat, objects_of
from ckpt_tasks.state.loader import ResumableLoader
from ckpt_tasks.state.rng import GENERATORS
from ckpt_tasks.state.sampler import ResumableSampler
from ckpt_tasks.state.values import has_state

__all__ = ["train"]

_LOADERS = (ResumableLoader, ResumableSampler, DataLoader)


def train(order: Mapping[str, Any]) -> None:
    """Train to the last step; save at the ordered steps, and die in the ordered step, after its computation."""
    never = order["steps"] + 1
    config = CheckpointConfig(checkpoint_dir=order["run"], step_interval=never, memory_dir=None)
    with Checkpointer(config) as ckpt, open(order["log"], "a", encoding="utf-8") as log:
        session = LocalSession(ckpt, order["program"], order["params"])
        step = session.restore()
        loaders = [name for name, value in flat(session.state).items() if isinstance(value, _LOADERS)]
        _write(log, {"begin": step, "unsaved": _unsaved(session.program, session.state), "loaders": loaders})
        train_step = session.program.train_step

        def dying() -> Mapping[str, float]:
            reported = train_step()
            if ckpt.position + 1 == order["die_within"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return reported

        session.program.train_step = dying  # type: ignore[method-assign]
        while step < order["steps"]:
            session.run(step + 1)
            step += 1
            metrics = {name: value.hex() for name, value in session.metrics.items()}
            attributes = _attributes(session.program)
            _write(log, {"step": step, "metrics": metrics, "values": _values(session.state), "attributes": attributes})
            if step in order["saves"]:
                session.save(step)


def _write(log: Any, line: Mapping[str, Any]) -> None:
    log.write(json.dumps(line) + "\n")
    log.flush()


def _values(state: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of every tensor and the text of every other value, by its path."""
    captured = capture(state)
    values = dict(_leaves({name: group.tree for name, group in captured.groups.items()}, ""))
    for key, tensor in captured.tensors.items():
        plain = tensor.detach().cpu().contiguous()
        values[key] = digest_hex(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return values


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from _leaves(item, f"{path}/{key}".lstrip("/"))
    elif isinstance(tree, (list, tuple)):
        for n, item in enumerate(tree):
            yield from _leaves(item, f"{path}/{n}")
    elif type(tree) is not TensorRef:
        yield path, repr(tree)


def _attributes(program: Any) -> dict[str, str]:
    """Return the plain attributes of a program; those outside of its state start again in a new process."""
    plain = (bool, int, float, str)
    return {name: repr(value) for name, value in vars(program).items() if isinstance(value, plain)}


def _unsaved(program: Any, state: Mapping[str, Any]) -> list[list[str]]:
    """List objects with a state that the program holds outside of its own state: path, class and kind."""
    known = {id(one) for one in objects_of(state)}
    for one in objects_of(state):
        if isinstance(one, torch.nn.Module):
            known |= {id(module) for module in one.modules()}
    unsaved = []
    for path, value in _held(program, "program", 0):
        kind = _kind(value)
        if kind is not None and id(value) not in known:
            unsaved.append([path, type(value).__qualname__, kind])
    return unsaved


def _held(value: Any, path: str, level: int) -> Iterator[tuple[str, Any]]:
    yield path, value
    if level > 2 or _kind(value) is not None:
        return
    if isinstance(value, (list, tuple)):
        items: Any = ((f"[{n}]", item) for n, item in enumerate(value[:20]))
    elif isinstance(value, dict):
        items = ((f"[{key!r}]", item) for key, item in list(value.items())[:50])
    else:
        items = ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())
    for name, item in items:
        if not isinstance(item, torch.Tensor):
            yield from _held(item, path + name, level + 1)


def _kind(value: Any) -> str | None:
    if isinstance(value, GENERATORS):
        return "generator"
    if isinstance(value, DataLoader):
        return "loader"
    if isinstance(value, torch.nn.Module) and not value.state_dict():
        return None  # a loss or a dropout: nothing in it changes
    return "stateful" if not isinstance(value, type) and has_state(value) else None


def _status_of(order: Mapping[str, Any]) -> int:
    """Carry out an order in a fork; return its exit status, or the negative number of the signal that ended it."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        train(order)
        status = 0
    except CkptError as error:
        sys.stderr.write(f"\n{error}\n")
    except BaseException:  # noqa: BLE001 (whoever started this process reads it, and the fork must end here)
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    for one in json.loads(sys.argv[1]):
        if _status_of(one) != (0 if one["die_within"] is None else -signal.SIGKILL):
            sys.exit(2)
