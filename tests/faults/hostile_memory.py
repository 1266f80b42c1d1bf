"""What an attacker does to the memory directory, where he had the time to before its owner closed it to him."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.testing import die, settle
from tests.faults.hostile import Hostile, config, state_of
from tests.faults.hostile_cases import THINGS, Case
from tests.support.ledgers import resealed

NEXT = 4  # the step that is in memory
# After these the snapshot is as it was, and is restored.
_WHOLE = {"a sparse file for the lock", *(f"a {thing} for the .seal.json" for thing in THINGS)}


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


def _seal(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], Any]:
    def attack(run: Path, out: Path) -> None:
        path = slot_of(run) / "seal.json"
        path.write_bytes(resealed(path.read_bytes(), change))

    return attack


def _replace(path: Path, make: Callable[[Path], Any]) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    make(path)


def _link_slots(run: Path, out: Path) -> None:
    for slot in ("a", "b"):
        _replace(run / slot, lambda path: path.symlink_to(out))


ATTACKS: dict[str, Callable[[Path, Path], Any]] = {
    "slots that are links": _link_slots,
    "a run that is a link": lambda run, out: _replace(run, lambda path: path.symlink_to(out)),
    "a lock linked to a canary": lambda run, out: _replace(run / "lock", lambda path: os.link(out / "linked", path)),
    "a seal of wrong types": _seal(lambda body: body["checkpoint"].update(step="4", n=[])),
    "a seal with a way out": _seal(lambda body: body["checkpoint"].update(manifest="../x")),
    "a seal of another run": _seal(lambda body: body.update(run_key="other")),
    "a seal of a huge step": _seal(lambda body: body["checkpoint"].update(step=10**30)),
    "a deep seal": lambda run, out: (slot_of(run) / "seal.json").write_bytes(b"[" * 10**6),
    "a cut image": lambda run, out: os.truncate(next(slot_of(run).glob("extra-*")), 5000),
}


def _put(where: str, make: Callable[[Path], Any]) -> Callable[[Path, Path], None]:
    def attack(run: Path, out: Path) -> None:
        slot = slot_of(run)
        _replace({"lock": run / "lock", "image": next(slot.glob("extra-*"))}.get(where, slot / where), make)

    return attack


def _attack(attack: Callable[[Path, Path], Any], h: Hostile) -> None:
    attack(filled(h), h.outside)


def cases() -> Iterator[Case]:
    """Yield every case; each finds a snapshot of step 4 in memory that storage has as well."""
    places = ("lock", "seal.json", "manifest.json", "index.arrow", ".seal.json", "image")
    things = {
        f"a {thing} for the {where}": _put(where, make) for (thing, make), where in product(THINGS.items(), places)
    }
    for what, attack in {**ATTACKS, **things}.items():
        harm = "any" if what in _WHOLE else "memory"
        yield Case(f"memory with {what}", partial(_attack, attack), harm, ("remember",))
