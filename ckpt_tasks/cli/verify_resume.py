"""`ckpt verify-resume`: prove that a killed program resumes bit for bit."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ckpt_tasks.cli.output import JsonOption, output, printable
from ckpt_tasks.errors import ConfigError

__all__ = ["verify_resume"]

_SHOWN = 5


def verify_resume(
    program: Annotated[str, typer.Argument(metavar="MODULE:PROGRAM", help="the program, as `ckpt train` takes it")],
    steps: Annotated[int, typer.Option(help="how many steps to train")] = 12,
    params: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="a parameter of the program; the value as JSON has it"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a program twice, kill and resume one of the two, compare.

    One trains without a break. The other is killed (SIGKILL) and resumed twice, each time in a new process. After every
    step the state, the metrics and the random streams are compared, value by value. Exits with 1 if something differs,
    and names the first such value and the likely cause.
    """
    with output(as_json) as out:
        from ckpt_tasks.proving.proof import verify_resume as prove

        proof = prove(program, dict(map(_parsed, params or [])), steps=steps)
        out.data({"good": proof.good, **asdict(proof)})
        killed = " and ".join(map(str, proof.killed_within))
        out.print(f"{printable(program)}: {proof.steps} steps, killed within steps {killed}, resumed twice.")
        if proof.difference is None:
            out.print(f"Every step is equal bit for bit: {proof.values} values of state and metrics, and all streams.")
            return
        first = proof.difference
        more = f" and {len(first.what) - _SHOWN} more" if len(first.what) > _SHOWN else ""
        when = {0: "before any kill", 1: "after the first resume", 2: "after the second resume"}[first.after_kills]
        out.print(
            f"Different from step {first.step} on, {when}: {printable(', '.join(first.what[:_SHOWN]))}{more}.",
            f"Likely cause: {printable(first.cause)}.",
        )
        out.fail()


def _parsed(change: str) -> tuple[str, Any]:
    name, equals, text = change.partition("=")
    if not (equals and name.isidentifier()):
        raise ConfigError(f"{change!r:.100} sets no parameter", hint="Write --set lr=1e-4, a plain name.")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text
