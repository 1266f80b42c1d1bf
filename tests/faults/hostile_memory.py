"""What an attacker does to the memory directory, where he had the time to before its owner closed it to him."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.testing import die, settle
from tests.faults.hostile import Hostile, config, state_of
from tests.faults.hostile_cases import THINGS, Case

NEXT = 4  # the step that is in memory
# After these the snapshot is as it was, and is restored; without root nothing can be made another user's.
_WHOLE = {"a sparse for the lock", *(f"a {thing} for the .seal.json" for thing in THINGS)}
_WHOLE |= set() if os.geteuid() == 0 else {"a lock of others"}


def filled(h: Hostile) -> Path:
    """Let a process go on from the run and die with a snapshot in memory; return the run's own directory there."""
    memory = h.outside.parent / "memory"
    shutil.rmtree(memory, ignore_errors=True)
    memory.mkdir()
    ckpt = Checkpointer(config(h.root, memory_dir=str(memory)), take_over=True)
    ckpt.restore(state_of(0))
    ckpt.save(NEXT, state_of(NEXT), metrics={"loss": 0.1})
    settle(ckpt)
    die(ckpt)
    return next(memory.glob("ckpt-tasks-*/*"))


def slot_of(run: Path) -> Path:
    return next(path.parent for path in sorted(run.glob("*/seal.json")))


def _seal(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = slot_of(run) / "seal.json"
    body = json.loads(path.read_bytes())
    del body["digest"]
    change(body)
    path.write_bytes(canonical_json({**body, "digest": digest_hex(canonical_json(body))}))


def _replace(path: Path, make: Callable[[Path], Any]) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    make(path)


def _others(path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        path.chmod(0o777)


def _link_slots(run: Path, outside: Path) -> None:
    for slot in ("a", "b"):
        _replace(run / slot, lambda path: path.symlink_to(outside))


def _file_slots(run: Path) -> None:
    for slot in ("a", "b"):
        _replace(run / slot, Path.touch)


def _open_slots(run: Path) -> None:
    for slot in run.glob("[ab]"):
        slot.chmod(0o777)


def _link_files(run: Path, outside: Path) -> None:
    for slot in run.glob("[ab]"):
        for name in ("index.arrow", "manifest.json", ".seal.json"):
            _replace(slot / name, lambda path: path.symlink_to(outside / "canary"))


def _attack(attack: Callable[[Path, Path], Any], h: Hostile) -> None:
    attack(filled(h), h.outside)


def cases() -> list[Case]:
    """Return every case; each finds a snapshot of step 4 in memory that storage has as well."""
    attacks: dict[str, Callable[[Path, Path], Any]] = {
        "slots that are links": _link_slots,
        "a slot that is a file": lambda run, out: _file_slots(run),
        "a slot that is open to all": lambda run, out: _open_slots(run),
        "a run that is open to all": lambda run, out: run.chmod(0o777),
        "a root that is open to all": lambda run, out: run.parent.chmod(0o777),
        "a run of others": lambda run, out: _others(run),
        "a root of others": lambda run, out: _others(run.parent),
        "a run that is a link": lambda run, out: _replace(run, lambda path: path.symlink_to(out)),
        "a root that is a link": lambda run, out: _replace(run.parent, lambda path: path.symlink_to(out)),
        "a lock of others": lambda run, out: _others(run / "lock"),
        "a lock linked to a canary": lambda run, out: _replace(
            run / "lock", lambda path: os.link(out / "linked", path)
        ),
        "a link for the lock": lambda run, out: _replace(run / "lock", lambda path: path.symlink_to(out / "canary")),
        "links for what a seal comes with": _link_files,
        "a seal of wrong types": lambda run, out: _seal(run, lambda b: b["checkpoint"].update(step="4", n=[])),
        "a seal with a way out": lambda run, out: _seal(run, lambda b: b["checkpoint"].update(manifest="../x")),
        "a seal of another run": lambda run, out: _seal(run, lambda b: b.update(run_key="other")),
        "a seal with more": lambda run, out: _seal(run, lambda b: b.update(more=1)),
        "a seal of a huge step": lambda run, out: _seal(run, lambda b: b["checkpoint"].update(step=10**30)),
        "a deep seal": lambda run, out: (slot_of(run) / "seal.json").write_bytes(b"[" * 10**6),
        "a cut image": lambda run, out: os.truncate(next(slot_of(run).glob("extra-*")), 5000),
        "an empty image": lambda run, out: os.truncate(next(slot_of(run).glob("extra-*")), 0),
    }
    for thing, make in THINGS.items():
        for where in ("lock", "seal.json", "manifest.json", "index.arrow", ".seal.json", "image"):

            def put(run: Path, out: Path, make: Any = make, where: str = where) -> None:
                slot = slot_of(run)
                path = {"lock": run / "lock", "image": next(slot.glob("extra-*"))}.get(where, slot / where)
                _replace(path, make)

            attacks[f"a {thing} for the {where}"] = put
    return [
        Case(f"memory with {what}", partial(_attack, attack), "any" if what in _WHOLE else "memory",
             verbs=("remember",), slow=number % 3 > 0 and number > 20)
        for number, (what, attack) in enumerate(attacks.items())
    ]  # fmt: skip
