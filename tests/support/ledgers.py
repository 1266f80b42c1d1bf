"""Checkpoints and owners for tests of the ledger."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_tasks import open_run
from ckpt_tasks.errors import CkptError
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.keys import evaluation_name
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.records import Checkpoint, Evaluation, Owner
from ckpt_tasks.run.ledger.history import Head, History
from ckpt_tasks.storage.local import LocalStore


def made(step: int, n: int, parent: str | None = None, **more: Any) -> Checkpoint:
    """Make a checkpoint whose identity is "step@n"."""
    return Checkpoint(
        step=step,
        attempt=f"e000001-{n:016x}",
        manifest=f"checkpoint_{step:012d}/e000001-{n:016x}/manifest.json",
        manifest_digest=f"{step}@{n}",
        parent=parent,
        n=n,
        metrics=more.pop("metrics", {}),
        size_bytes=1,
        objects=3,
        saved_at="2024-01-01",
        cost_s=0.5,
        **more,
    )


def made_reusing(number: int, reuses: tuple[str, ...]) -> Checkpoint:
    """Make a checkpoint that reuses objects of these names; an entry that holds it can be read."""
    return replace(made(number, number, reuses=reuses), manifest_digest=f"{number:032x}")


def owner_of(epoch: int, **more: Any) -> Owner:
    """Make an owner of another host, unless `more` says otherwise."""
    fields: dict[str, Any] = {
        "epoch": epoch,
        "id": f"{epoch:032x}",
        "flow_run_id": "flow",
        "host": "host",
        "machine_id": "m",
        "boot_id": "b",
        "pid_namespace": "pid:[1]",
        "pid": 7,
        "process_start": "99",
        "taken_at": "2024-01-01T00:00:00+00:00",
    }
    return Owner(**{**fields, **more})


def evaluation_of(checkpoint: Checkpoint, **metrics: float) -> Evaluation:
    """Make an evaluation of a checkpoint by the suite "quick"."""
    return Evaluation(
        manifest_digest=checkpoint.manifest_digest,
        step=checkpoint.step,
        suite="quick",
        metrics=metrics,
        table=evaluation_name(checkpoint.step, "quick", "0" * 16),
        table_digest="f" * 32,
        evaluated_at="2024-01-01",
    )


def resealed(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Change an entry or a seal and give it a fitting digest, as a newer writer or an attacker would."""
    body = json.loads(data)
    del body["digest"]
    change(body)
    return canonical_json({**body, "digest": digest_hex(canonical_json(body))})


ME = owner_of(1)
OTHER = owner_of(2)


def take(history: History, owner: Owner) -> None:
    """Make somebody the owner, whoever was it before."""
    history.append({"kind": "owner"}, lambda state, n: state.with_owner(owner, None, "min"), owner=None)


def owned(run: Path) -> History:
    """Make a run directory's ledger, ME its owner."""
    history = History(LocalStore(run))
    take(history, ME)
    return history


def commit(history: History, step: int, owner: Owner | None = ME) -> int:
    """Append the commit of a checkpoint; return its number."""

    def change(state: State, n: int) -> State:
        return state.with_checkpoint(made(step, n), frozenset())

    return history.append({"kind": "commit", "step": step}, change, owner=owner).n


def steps(head: Head) -> list[int]:
    """List the steps of what is live."""
    return [checkpoint.step for checkpoint in head.state.live]


def is_released(run_dir: Path) -> bool:
    """Return True if the last owner of a run has let it go."""
    owner = open_run(str(run_dir)).head().state.owner
    return owner is not None and owner.released


def newest_step(run_dir: Path) -> int:
    """Return the newest committed step, 0 without one."""
    try:
        return open_run(str(run_dir)).find("latest").step
    except CkptError:
        return 0
