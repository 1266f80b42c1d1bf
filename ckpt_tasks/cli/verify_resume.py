"""`ckpt verify-resume`: prove that a killed program resumes bit for bit."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.cli.output import JsonOption, output
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.report.words import printable

if TYPE_CHECKING:
    from ckpt_tasks.proving.proof import Proof

__all__ = ["verify_resume"]

_SHOWN = 5


def verify_resume(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="MODULE:PROGRAM | -- COMMAND…", help="a program, as `ckpt train` takes it; or a command"
        ),
    ],
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="how many steps to train a program [default: 12]")
    ] = None,
    params: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="a parameter of the program; the value as JSON has it"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a program twice, kill and resume one, compare.

    One of the two trains without a break. The other is killed (SIGKILL) and resumed twice, each time in a new process.
    After every step the state, the metrics and the random streams are compared, value by value, and at the end the
    evaluation "quick". Exits with 1 if something differs, and names the first such value and the likely cause.

    A command, `ckpt verify-resume -- python train.py --dir {run}`, is a script of your own with a Checkpointer. It is
    told where its run is to be by {run} among its words, or by the environment variable CKPT_RUN. Compared are the
    metrics of every step and the whole last checkpoint.
    """
    with output(as_json) as out:
        proof = _proof(program, steps, params or [])
        out.data({"good": proof.good, **asdict(proof)})
        killed = " and ".join(map(str, proof.killed_within))
        when = "killed within steps" if _is_program(program) else "killed after the commits of steps"
        out.print(f"{printable(shlex.join(program))}: {proof.steps} steps, {when} {killed}, resumed twice.")
        if proof.difference is None:
            what = "Every step is" if _is_program(program) else "Metrics of all steps and the last checkpoint are"
            streams = "all streams" if _is_program(program) else "torch's streams"
            out.print(f"{what} equal bit for bit: {proof.values} values of state and metrics, and {streams}.")
            if proof.outside:
                out.print(
                    f"Not in the state, and changed by a resume: {printable(', '.join(proof.outside))}. "
                    "If an evaluation, a later step or the end reads it, put it into the state."
                )
            return
        first = proof.difference
        more = f" and {len(first.what) - _SHOWN} more" if len(first.what) > _SHOWN else ""
        when = {0: "before any kill", 1: "after the first resume", 2: "after the second resume"}[first.after_kills]
        out.print(
            f"Different from step {first.step} on, {when}: {printable(', '.join(first.what[:_SHOWN]))}{more}.",
            f"Likely cause: {printable(first.cause)}.",
        )
        out.fail()


def _proof(program: list[str], steps: int | None, params: list[str]) -> Proof:
    if _is_program(program):
        from ckpt_tasks.proving.proof import verify_resume as prove

        return prove(program[0], dict(map(_parsed, params)), steps=12 if steps is None else steps)
    if steps is not None or params:
        raise ConfigError("--steps and --set are for a program", hint="Give a command its own options, after the --.")
    from ckpt_tasks.proving.script import verify_script

    return verify_script(program)


def _is_program(words: list[str]) -> bool:
    """Tell MODULE:PROGRAM from a command, which is several words or names a file."""
    return len(words) == 1 and shutil.which(words[0]) is None


def _parsed(change: str) -> tuple[str, Any]:
    name, equals, text = change.partition("=")
    if not (equals and name.isidentifier()):
        raise ConfigError(f"{change!r:.100} sets no parameter", hint="Write --set lr=1e-4, a plain name.")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text
