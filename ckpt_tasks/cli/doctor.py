"""`ckpt doctor`: check what a run needs to resume by itself, and say how to mend it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tasks.cli.completion import complete_run
from ckpt_tasks.cli.output import JsonOption, Output, output, table
from ckpt_tasks.cli.settings import importing_prefect
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.report.words import printable

if TYPE_CHECKING:
    from ckpt_tasks.doctor.checks import Check

__all__ = ["doctor"]

_STYLES = {"ok": "green", "warning": "yellow", "wrong": "bold red", "not checked": "dim"}

DirectoryArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[DIR]", help="a run directory, existing or new", show_default=False, autocompletion=complete_run
    ),
]
PoolOption = Annotated[
    str | None, typer.Option("--pool", metavar="NAME", help="the work pool (default: ckpt-tasks)", show_default=False)
]
DeploymentOption = Annotated[
    str | None, typer.Option("--deployment", metavar="FLOW/NAME", help="check only this deployment", show_default=False)
]


def doctor(
    directory: DirectoryArgument = None,
    *,
    pool: PoolOption = None,
    deployment: DeploymentOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check whether killed runs would resume by themselves.

    Checks Prefect's server, automations and work pool, the store of DIR, this host's memory and the clocks. Changes
    nothing; if DIR holds no run yet, it writes a few small objects below DIR/probe and deletes them. Exits with 1 if
    something is wrong.
    """
    from ckpt_tasks.doctor.host import check_place

    with output(as_json) as out:
        checks = [*_of_prefect(pool, deployment), *check_place(directory)]
        wrong = sum(check.verdict == "wrong" for check in checks)
        out.data({"well": not wrong, "checks": [asdict(check) for check in checks]})
        if not as_json:
            _print(out, checks, wrong)
        if wrong:
            out.fail()


def _of_prefect(pool: str | None, deployment: str | None) -> list[Check]:
    from ckpt_tasks.doctor.checks import Check

    try:
        with importing_prefect():
            from ckpt_tasks.doctor.server import check_prefect  # takes seconds
    except ConfigError as error:
        return [Check("server", "wrong", error.message, error.hint or "")]
    return check_prefect(pool, deployment)


def _print(out: Output, checks: list[Check], wrong: int) -> None:
    from rich.text import Text

    made = table("check", "", "seen", "what to do")
    for check in checks:
        word = Text(check.verdict, style=_STYLES[check.verdict])
        made.add_row(check.name, word, printable(check.seen), printable(check.do))
    out.print(made)
    warnings = sum(check.verdict == "warning" for check in checks)
    if wrong:
        out.print(Text.assemble((f"Wrong: {wrong}", "bold red"), f", warnings: {warnings}."))
    else:
        out.print(Text.assemble(("Nothing is wrong", "bold green"), f", warnings: {warnings}."))
