"""The process that meets the hostile directories; it says in JSON lines what it does next and how that ended.

Whoever started it knows by the last line which directory a crash or a hang belongs to.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.cli import app
from ckpt_tasks.errors import CkptError
from ckpt_tasks.orchestration.evaluate import evaluate_checkpoint
from ckpt_tasks.reading.reading import open_run
from tests.faults import hostile_cases, hostile_memory, hostile_sweeps, hostile_tensors, hostile_trees
from tests.faults.hostile import UNTOUCHED, Hostile, Model, config, draw, fingerprint, look, state_of, train
from tests.faults.hostile_cases import Case

MORE_BYTES = 2 << 30  # address space beyond what the imports take; torch and its threads have some gigabytes already
LATE_S = 60.0  # of a verb; the machine may be busy
Told = dict[str, Any]


def cases() -> dict[str, Case]:
    """Return every case by name."""
    makers = (
        hostile_cases.names, hostile_cases.files, hostile_cases.jsons, hostile_cases.numbers,
        hostile_tensors.headers, hostile_tensors.indexes, hostile_tensors.regions, hostile_trees.trees,
        hostile_memory.cases,
    )  # fmt: skip
    found = [case for make in makers for case in make()]
    found.append(Case("files that change while they are read", lambda h: None, "any", verbs=("race",)))
    assert len(found) == len({case.name for case in found})
    return {case.name: case for case in found}


class Judge:
    """A program that can be evaluated."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"model": Model()}

    def train_step(self) -> dict[str, float]:
        return {}

    def evaluate(self, suite: str) -> dict[str, float]:
        return {"loss": float(self.state["model"].layer.weight.detach().sum())}


class LateError(BaseException):
    """A verb took too long; nothing that catches errors catches this."""


# ── verbs ────────────────────────────────────────────────────────────────────────────────────────────────────


def cli(*arguments: str | Path) -> Told:
    """Call `ckpt` as a user does; raise what a user would see a traceback of."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code in (0, 1, 2), done.output
    assert not any(ord(c) < 32 and c != "\n" for c in done.stdout + done.stderr), "codes that repaint the terminal"
    return {"status": done.exit_code, "out": done.stdout, "err": done.stderr}


def ls(h: Hostile, place: Path) -> Told:
    cli("ls", h.root)
    return cli("ls", h.root, "--json")


def show(h: Hostile, place: Path) -> Told:
    cli("show", h.root)
    return cli("show", h.root, "--json")


def verify(h: Hostile, place: Path) -> Told:
    cli("verify", h.root)
    return cli("verify", h.root, "--json")


def diff(h: Hostile, place: Path) -> Told:
    cli("diff", f"{h.root}@latest", f"{h.root}@2")
    return cli("diff", f"{h.root}@latest", f"{place / 'base'}@2", "--json")


def export(h: Hostile, place: Path) -> Told:
    cli("export", h.root, place / "exported" / "one.safetensors", "--overwrite")
    groups = [word for group in ("model", "optimizer", "extra", "rng") for word in ("--group", group)]
    return cli("export", h.root, place / "exported" / "shards", *groups, "--overwrite")


def plan(h: Hostile, place: Path) -> Told:
    cli("plan", h.root)
    return cli("plan", h.root, "--json")


def dry_run(h: Hostile, place: Path) -> Told:
    return cli("prune", h.root, "--max-num-checkpoints", "1", "--dry-run", "--json")


def part(h: Hostile, place: Path) -> Told:
    run = open_run(str(h.root))
    found = run.find("best")
    run.restore(run.find("latest"), {"model": Model(), "extra": {}}, partial=True)
    return {"step": found.step}


def evaluate(h: Hostile, place: Path) -> Told:
    run = open_run(str(h.root))
    done = evaluate_checkpoint(run, run.find("latest"), f"{__name__}:Judge", None, "other", holder="test")
    return {"step": done.step}


def prune(h: Hostile, place: Path) -> Told:
    return cli("prune", h.root, "--max-num-checkpoints", "1", "--json")


def go_on(h: Hostile, place: Path) -> Told:
    """Restore, draw random numbers, save twice under a policy that prunes, and restore what was saved last."""
    state = state_of(UNTOUCHED)
    with Checkpointer(config(h.root, max_num_checkpoints=1, cadence="auto"), take_over=True) as ckpt:
        try:
            step = ckpt.restore(state)
        except CkptError:
            assert fingerprint(state) == fingerprint(state_of(UNTOUCHED)), "the target has changed"
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


def race(h: Hostile, place: Path) -> Told:
    return hostile_sweeps.raced(h, place)


VERBS: dict[str, Callable[[Hostile, Path], Told]] = {
    "ls": ls, "show": show, "verify": verify, "diff": diff, "export": export, "plan": plan, "dry run": dry_run,
    "part": part, "evaluate": evaluate, "prune": prune, "go on": go_on, "remember": remember, "race": race,
}  # fmt: skip
CHANGING = ("prune", "go on")  # these get a directory of their own


# ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────


def say(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


@contextmanager
def watched(case: str, verb: str) -> Iterator[Told]:
    """Say what begins, and how it ended: well, with an error of ours, late, or in a way that must not be."""
    say(case=case, verb=verb, begins=True)
    told: Told = {}
    began = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, LATE_S)
    try:
        yield told
        end: Told = {"end": "well"}
    except CkptError as error:
        end = {"end": "refused", "type": type(error).__name__, "key": error.key, "says": str(error)[:2000]}
    except LateError:
        end = {"end": "late", "trace": traceback.format_exc()[-3000:]}
    except BaseException as error:  # noqa: BLE001 (that is what is looked for)
        end = {"end": "foreign", "type": type(error).__name__, "trace": traceback.format_exc()[-3000:]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    say(case=case, verb=verb, seconds=round(time.monotonic() - began, 3), **end, **told)


def copied(case: Case, place: Path) -> Hostile:
    """Make the directory of a case: a copy of the good run, changed."""
    root, outside = place / "run", place / "outside"
    for path in (root, outside):
        if path.is_dir():
            shutil.rmtree(path)
    shutil.copytree(place / "base", root)
    shutil.copytree(place / "canaries", outside)
    old = time.time() - 86_400
    for path in (outside, *outside.rglob("*")):
        os.utime(path, (old, old))
    hostile = Hostile(root, outside)
    case.make(hostile)
    return hostile


def quick(case: Case, number: int) -> tuple[str, ...]:
    """Choose the verbs of the short form: one of its own in turn, and one that restores."""
    wanted = {case.verbs[number % len(case.verbs)], "remember", "race", "go on" if number % 2 else "part"}
    if case.harm != "any":
        wanted.add("verify")
    return tuple(verb for verb in case.verbs if verb in wanted)


def meet(case: Case, verbs: tuple[str, ...], place: Path) -> None:
    """Let verbs meet a case, and look at what lies outside after each."""
    h: Hostile | None = None
    for verb in verbs:
        if h is None or verb in CHANGING:
            with watched(case.name, f"make for {verb}"):
                h = copied(case, place)
        assert h is not None
        before = {name: look(place / name) for name in ("outside", "empty")}
        with watched(case.name, verb) as told:
            told.update(VERBS[verb](h, place))
        touched = [name for name, seen in before.items() if look(place / name) != seen]
        if touched:
            say(case=case.name, verb=verb, end="touched", says=f"{touched}: {sorted(look(place / touched[0]))}")


def listed(h: Hostile, place: Path) -> Told:
    """Look at the ledger in every way, unless its newest entry is refused as damaged."""
    if open_run(str(h.root)).head().damaged:
        return {"damaged": True}
    for verb in ("ls", "show", "plan", "dry run"):
        VERBS[verb](h, place)
    return {"damaged": False}


def sweep(what: str, part: int, parts: int, place: Path) -> None:
    """Read every `parts`-th change of one kind."""
    h = copied(Case(what, lambda h: None, "any"), place)
    before = look(place / "outside")
    reader = listed if what == "entries" else hostile_sweeps.met
    for number, (name, make) in enumerate(hostile_sweeps.SWEEPS[what](h)):
        if number % parts == part:
            make()
            with watched(name, "met") as told:
                told.update(reader(h, place))
    if look(place / "outside") != before:
        say(case=what, verb="met", end="touched", says="outside")


def canaries(place: Path) -> None:
    """Make what must not be touched: names that the package itself writes, deletes or sweeps."""
    for name in ("canary", "linked", "seal.json", "index.arrow", "manifest.json", "000001.json", "000002.json",
                 ".tmp-0123456789abcdef", "format.json", "lock", "e000001-0123456789abcdef/manifest.json"):  # fmt: skip
        path = place / "canaries" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"canary {name}")


def limit() -> int:
    """Let this process take so much more address space and no more."""
    torch.set_num_threads(1)
    gc.collect()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
    most = (int(line.split()[1]) << 10) + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return most


def late(number: int, frame: Any) -> None:
    raise LateError


def main() -> None:
    """Meet what each line of standard input names: "quick CASE", "full CASE", or a fifth of a "sweep manifests 0 5"."""
    parser = argparse.ArgumentParser()
    parser.add_argument("place", type=Path)
    place = parser.parse_args().place
    signal.signal(signal.SIGALRM, late)
    known = cases()
    wanted = sys.stdin.read().splitlines()
    for name in ("exported", "empty"):
        (place / name).mkdir(exist_ok=True)
    if not (place / "base").is_dir():
        canaries(place)
        train(place / "base")
    os.chdir(place / "empty")
    say(most_bytes=limit())
    for number, line in enumerate(wanted):
        kind, _, name = line.partition(" ")
        if kind == "sweep":
            what, part, parts = name.split()
            sweep(what, int(part), int(parts), place)
        else:
            verbs = quick(known[name], number) if kind == "quick" else known[name].verbs
            meet(known[name], verbs, place)
    say(done=True)


if __name__ == "__main__":
    main()
