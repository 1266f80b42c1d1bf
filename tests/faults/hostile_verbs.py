"""Who meets a hostile directory: verbs of `ckpt`, restores, saves that go on from it, an evaluation, readers."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.checkpoint.transfer.export import export_checkpoint
from ckpt_tasks.errors import CkptError
from ckpt_tasks.flows.prefect.evaluate import evaluate_checkpoint
from ckpt_tasks.run.opening import open_checkpoint
from tests.faults.hostile import UNTOUCHED, Hostile, Model, config, draw, fingerprint, look, state_of
from tests.faults.judged import judged
from tests.support.cli_runs import ckpt

Told = dict[str, Any]


class Judge:
    """A program that can be evaluated."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"model": Model()}

    def train_step(self) -> dict[str, float]:
        return {}

    def evaluate(self, suite: str) -> dict[str, float]:
        return {"loss": float(self.state["model"].layer.weight.detach().sum())}


def cli(*arguments: str | Path) -> Told:
    """Call `ckpt` as a user does: never a traceback, nor codes that repaint the terminal."""
    answer = ckpt(*arguments)
    assert answer.status in (0, 1, 2), answer.out
    assert not any(ord(c) < 32 and c != "\n" for c in answer.out + answer.err), "codes that repaint the terminal"
    return {"status": answer.status, "out": answer.out}


def both(*arguments: str | Path) -> Told:
    cli(*arguments)
    return cli(*arguments, "--json")


def export(h: Hostile, place: Path) -> Told:
    cli("export", h.root, place / "exported" / "one.safetensors", "--overwrite")
    groups = [word for group in ("model", "optimizer", "extra", "rng") for word in ("--group", group)]
    return cli("export", h.root, place / "exported" / "shards", *groups, "--overwrite")


def part(h: Hostile, place: Path) -> Told:
    run = open_run(str(h.root))
    found = run.find("best")
    run.restore(run.find("latest"), {"model": Model(), "extra": {}}, partial=True)
    return {"step": found.step}


def evaluate(h: Hostile, place: Path) -> Told:
    run = open_run(str(h.root))
    done = evaluate_checkpoint(run, run.find("latest"), f"{__name__}:Judge", None, "other", holder="test")
    return {"step": done.step}


def untouched(state: dict[str, Any]) -> None:
    assert fingerprint(state) == fingerprint(state_of(UNTOUCHED)), "the target has changed"


def go_on(h: Hostile, place: Path) -> Told:
    """Restore, draw random numbers, save twice under a policy that prunes, and restore what was saved last."""
    state = state_of(UNTOUCHED)
    with Checkpointer(config(h.root, max_num_checkpoints=1, cadence="auto"), take_over=True) as ckpt:
        try:
            step = ckpt.restore(state)
        except CkptError:
            untouched(state)
            raise
        report = ckpt.last_restore
        draw(state)
        told: Told = {"step": step, "right": fingerprint(state) == fingerprint(state_of(step or UNTOUCHED))}
        if report is not None:
            told |= {"skipped": [*map(list, report.skipped)], "damaged": [*report.damaged]}
        for more in (4, 5):
            ckpt.save(more, state_of(more), metrics={"loss": 1 / more})
    again = state_of(UNTOUCHED)
    with Checkpointer(config(h.root)) as ckpt:
        told["then"] = ckpt.restore(again)
    assert fingerprint(again) == fingerprint(state_of(5)), "what was saved last did not come back"
    return told


def remember(h: Hostile, place: Path) -> Told:
    """Go on with the memory directory that the process before left."""
    state = state_of(UNTOUCHED)
    with Checkpointer(config(h.root, memory_dir=str(place / "memory"), max_num_checkpoints=2)) as ckpt:
        step = ckpt.restore(state)
        right = fingerprint(state) == fingerprint(state_of(step))
        source = ckpt.last_restore.source if ckpt.last_restore is not None else ""
        for more in (5, 6, 7):
            ckpt.save(more, state_of(more))
    return {"step": step, "right": right, "source": source}


def met(h: Hostile, place: Path) -> Told:
    """Open the newest checkpoint; if that goes, do everything else with it that a reader does."""
    run = open_run(str(h.root))
    checkpoint = run.find("latest")
    opened = open_checkpoint(run.history.store, checkpoint)
    state = state_of(UNTOUCHED)
    try:
        run.restore(checkpoint, state, partial=False)
    except CkptError:
        untouched(state)
        raise
    draw(state)
    groups = [name for name in opened.groups if name != "rng"]
    target = place / "exported" / "x.safetensors"
    export_checkpoint(run.history.store, checkpoint, target, groups=groups, overwrite=True)
    return {"step": checkpoint.step}


def listed(h: Hostile, place: Path) -> Told:
    """Look at the ledger in every way, unless its newest entry is refused as damaged."""
    if open_run(str(h.root)).head().damaged:
        return {"damaged": True}
    for verb in ("ls", "show", "report", "dry run"):
        VERBS[verb](h, place)
    return met(h, place)


VERBS: dict[str, Callable[[Hostile, Path], Told]] = {
    "ls": lambda h, _: both("ls", h.root),
    "show": lambda h, _: both("show", h.root),
    "verify": lambda h, _: both("verify", h.root),
    "diff": lambda h, place: (
        cli("diff", f"{h.root}@latest", f"{h.root}@2")
        and cli("diff", f"{h.root}@latest", f"{place / 'base'}@2", "--json")
    ),
    "export": export,
    "report": lambda h, place: both("report", h.root, "--out", place / "report.html"),
    "dry run": lambda h, _: cli("prune", h.root, "--max-num-checkpoints", "1", "--dry-run", "--json"),
    "part": part,
    "evaluate": evaluate,
    "prune": lambda h, _: cli("prune", h.root, "--max-num-checkpoints", "1", "--json"),
    "continue": go_on,
    "remember": remember,
    "met": met,
    "listed": listed,
}
ALL = ("ls", "show", "verify", "diff", "export", "report", "dry run", "part", "evaluate", "prune", "continue")
CHANGING = ("prune", "continue")  # these get a directory of their own


# ── a verb meets a directory ─────────────────────────────────────────────────────────────────────────────────────


def canaries(place: Path) -> None:
    """Make what must not be touched: names that the package itself writes, deletes or sweeps."""
    for name in ("canary", "linked", "seal.json", "index.arrow", "manifest.json", "000001.json", "000002.json",
                 ".tmp-0123456789abcdef", "format.json", "lock", "e000001-0123456789abcdef/manifest.json"):  # fmt: skip
        path = place / "canaries" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"canary {name}")
    for name in ("exported", "empty"):
        (place / name).mkdir()


def copied(place: Path) -> Hostile:
    """Make a copy of the good run, with canaries of old age beside it."""
    root, outside = place / "run", place / "outside"
    for path in (root, outside):
        if path.is_dir():
            shutil.rmtree(path)
    shutil.copytree(place / "base", root)
    shutil.copytree(place / "canaries", outside)
    old = time.time() - 86_400
    for path in (outside, *outside.rglob("*")):
        os.utime(path, (old, old))
    return Hostile(root, outside)


def meet(h: Hostile, place: Path, verb: str) -> Told:
    """Let a verb meet the directory: it ends well, or with an error of ours, and nothing outside is touched."""

    def met_it() -> str:
        os.chdir(place / "empty")
        try:
            told = {"end": "well", **VERBS[verb](h, place)}
        except CkptError as error:
            told = {"end": "refused", "key": error.key, "says": str(error)[:2000]}
        return json.dumps(told)

    before = {name: look(place / name) for name in ("outside", "empty")}
    told: Told = json.loads(judged(met_it, most_kib=2 << 20))
    for name, seen in before.items():
        assert look(place / name) == seen, f"{verb} has touched {name}"
    return told
