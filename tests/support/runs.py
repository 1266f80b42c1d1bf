"""Small runs to break: a state whose values follow from its step alone, and what must hold of any run directory."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.format.keys import attempt_prefix, parse_attempt
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.manifest import Manifest
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.upkeep.verifying import verify_checkpoint
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.local_fs import Calls
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.storage.port import Store
from ckpt_tasks.testing import located
from tests.support.places import LocalPlace, Place

Root = Path | Place  # a path is a local directory


def state_of(step: int) -> dict[str, Any]:
    """Return a state whose every value follows from the step: a module, an optimizer with state, and plain values."""
    generator = torch.Generator().manual_seed(1000 + step)
    model = torch.nn.Linear(5, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + step, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.rand(parameter.shape, generator=generator)
    return {
        "model": model,
        "optimizer": optimizer,
        "extra": {"step": step, "big": torch.rand(3000, generator=generator), "name": f"at {step}"},
    }


def fingerprint(state: dict[str, Any]) -> str:
    """Digest every bit of a state."""
    seen = hashlib.sha256()
    for name, tensor in [*state["model"].state_dict().items(), ("big", state["extra"]["big"])]:
        seen.update(name.encode() + tensor.numpy().tobytes())
    optimizer = state["optimizer"].state_dict()
    for number, held in optimizer["state"].items():
        seen.update(str(number).encode() + held["momentum_buffer"].numpy().tobytes())
    seen.update(repr(optimizer["param_groups"]).encode())
    seen.update(json.dumps([state["extra"]["step"], state["extra"]["name"]]).encode())
    return seen.hexdigest()


EXPECTED = {step: fingerprint(state_of(step)) for step in range(40)}
UNTOUCHED = 999  # the step of a state that no checkpoint holds


def place_of(root: Root) -> Place:
    return LocalPlace(root) if isinstance(root, Path) else root


def options(location: Location, **more: Any) -> CheckpointConfig:
    return CheckpointConfig(checkpoint_dir=location, **{"max_num_checkpoints": 2, "memory_dir": None, **more})


def opened(
    root: Root, *, calls: Calls = os, store: Store | None = None, take_over: bool = False, **more: Any
) -> Checkpointer:
    """Return a Checkpointer on a run directory; a local store makes its calls through `calls`."""
    if store is None:
        store = place_of(root).store if calls is os else LocalStore(place_of(root).url, calls=calls)
    return Checkpointer(options(located(store), **more), take_over=take_over)


def train(root: Root, *steps: int, **more: Any) -> None:
    """Restore and save at each of the steps, then let the directory go."""
    with opened(root, **more) as ckpt:
        ckpt.restore(state_of(UNTOUCHED))
        for step in steps:
            ckpt.save(step, state_of(step))


def restored(root: Root, **more: Any) -> tuple[int, Checkpointer]:
    """Restore as a fresh process would, and check that the values are exactly those of the step."""
    ckpt = opened(root, **more)
    target = state_of(UNTOUCHED)
    step = ckpt.restore(target)
    assert fingerprint(target) == (EXPECTED[step] if ckpt.checkpoints() else fingerprint(state_of(UNTOUCHED)))
    return step, ckpt


def run_of(root: Root) -> Run:
    """Return the run as a reader sees it."""
    history = History(place_of(root).store)
    return Run(history, history.check(None))


def head_of(root: Root) -> State:
    return History(place_of(root).store).head().state


def faults_of(root: Root) -> dict[int, list[str]]:
    """Verify every live checkpoint; return the faults by step, only where there are any."""
    store = place_of(root).store
    found = {c.step: verify_checkpoint(store, c) for c in head_of(root).live}
    return {step: faults for step, faults in found.items() if faults}


def named_by(root: Root, checkpoint: Checkpoint) -> set[str]:
    """Name every object of a checkpoint, read from its manifest past the store."""
    data = place_of(root).get(checkpoint.manifest)
    manifest = Manifest.from_bytes(data, digest=checkpoint.manifest_digest, name=checkpoint.manifest)
    return {checkpoint.manifest, manifest.index.name, *(record.name for record in manifest.objects)}


def on_disk(root: Root) -> set[str]:
    """List every file that lies there, past the store, hidden ones too."""
    return place_of(root).names()


def unnamed(root: Root) -> set[str]:
    """List the files of attempts that no live checkpoint names."""
    named = {name for checkpoint in head_of(root).live for name in named_by(root, checkpoint)}
    return {name for name in on_disk(root) if parse_attempt(name) is not None} - named


def prefix_of(checkpoint: Checkpoint) -> str:
    attempt = parse_attempt(checkpoint.manifest)
    assert attempt is not None
    return attempt_prefix(attempt)


def check_run(root: Root, newest: int, then: int = 5) -> None:
    """A fresh process finds the newest checkpoint whole, goes on from it, and sweeps what the failed attempt left."""
    assert faults_of(root) == {}
    step, ckpt = restored(root)
    assert step == newest
    assert ckpt.last_restore is not None
    assert ckpt.last_restore.skipped == ()
    ckpt.save(then, state_of(then))
    ckpt.close()
    assert faults_of(root) == {}
    step, ckpt = restored(root)
    assert step == then
    ckpt.close()
    assert unnamed(root) == set()
    assert len([name for name in on_disk(root) if ".tmp-" in name]) <= 1
