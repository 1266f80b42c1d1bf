"""A restore drill: restore a run's checkpoint into its program, in a fresh process of this host, and record the result.

A drill only reads: it leases the checkpoint, and does not disturb a process that trains. The process is started as
`python -m ckpt_tasks.session.drill ORDER ANSWER`: a file with the order, and one for the answer (JSON).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ckpt_tasks import errors
from ckpt_tasks.errors import CkptError, ConfigError, ObjectNotFoundError, StoreError
from ckpt_tasks.format.records import Checkpoint, Drill
from ckpt_tasks.reading.leasing import leased
from ckpt_tasks.reading.reading import Run, open_run
from ckpt_tasks.session.local import build_from_seed, find_program
from ckpt_tasks.session.parameters import effective_params
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.system import now_iso, system

_LONGEST_FAULT = 2000


def drill_run(
    location: Location, program: str | None = None, *, run_key: str | None = None, which: int | str = "latest"
) -> Drill:
    """Restore a checkpoint into a program ("module:Factory"; None: the run's own) in a fresh process; record it.

    The `fault` of the drill says why this host cannot restore it: damage, a program that cannot be built or does not
    fit, a killed process. Raises ConfigError without a program, CheckpointNotFoundError, and StoreError if the store
    does not answer, ProgramError if `program` cannot be built; then nothing is recorded.
    """
    run = open_run(location, run_key)
    checkpoint, recorded = run.find(which), run.head().state.program
    if not (program or recorded):
        raise ConfigError("the run does not name its program", hint="Name it: --program MODULE:PROGRAM.")
    named = {"program": program or recorded, "given": program is not None}
    order = {"location": vars(location), "identity": checkpoint.manifest_digest, **named}
    drill = Drill(manifest_digest=checkpoint.manifest_digest, step=checkpoint.step, at=now_iso(), host=system().host())
    with leased(run, checkpoint, f"restore drill on {drill.host}"):
        drill = replace(drill, **_answer(order))
        event = {"kind": "note", "note": "drill", **asdict(drill)}
        run.history.append(event, lambda state, n: state.with_drill(drill), owner=None)
    return drill


def _answer(order: Mapping[str, Any]) -> dict[str, Any]:
    # The child can import whatever this process can import.
    places = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])
    with tempfile.TemporaryDirectory(prefix="ckpt-drill-") as place:
        given, answer = Path(place, "order"), Path(place, "answer")
        given.write_text(json.dumps(order), encoding="utf-8")
        child = subprocess.run(
            [sys.executable, "-m", "ckpt_tasks.session.drill", str(given), str(answer)],
            env={**os.environ, "PYTHONPATH": places},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if not answer.exists():
            said = child.stderr.strip().splitlines()
            return {"fault": f"the process ended with {child.returncode}: {said[-1] if said else ''}"[:_LONGEST_FAULT]}
        answered: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in answered:
        kind, message, hint = answered["error"]
        raise getattr(errors, kind)(message, hint=hint)
    return answered


def _restored(run: Run, checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Build the program and restore all of its state; return the seconds for both."""
    params = effective_params(find_program(name), run.head().state.params, None)
    program = build_from_seed(name, params)
    start_s = system().age_s()
    report = run.restore(checkpoint, program.state)
    return {"start_s": round(start_s, 6), "restore_s": round(report.seconds, 6)}


def main(given: str, answer: str) -> None:
    """Carry out the order in one file, and write the answer to the other."""
    order = json.loads(Path(given).read_text(encoding="utf-8"))
    try:
        run = open_run(Location(**order["location"]))
        checkpoint = next(c for c in run.checkpoints() if c.manifest_digest == order["identity"])
        answered = _restored(run, checkpoint, order["program"])
    except Exception as error:  # noqa: BLE001 (the parent raises or records it)
        outage = isinstance(error, StoreError) and not isinstance(error, ObjectNotFoundError)
        mistake = order["given"] and isinstance(error, ConfigError)  # The user may have misspelled the name.
        if isinstance(error, CkptError) and (outage or mistake):
            answered = {"error": [type(error).__name__, error.message, error.hint]}
        else:
            answered = {"fault": f"{type(error).__name__}: {error}"[:_LONGEST_FAULT]}
    Path(answer).write_text(json.dumps(answered), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
