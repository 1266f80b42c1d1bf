"""`ckpt up` and `ckpt down`: start and stop a server, a worker and our deployments on this machine."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ckpt_tasks.cli.output import JsonOption, report_errors, table
from ckpt_tasks.cli.settings import ckpt_command, importing_prefect

__all__ = ["down", "up"]

_GONE = ("ended", "was gone")

PortOption = Annotated[
    int | None, typer.Option("--port", metavar="N", help="port of the server [default: Prefect's own, 4200]")
]


def up(*, port: PortOption = None, as_json: JsonOption = False) -> None:
    """Start a Prefect server, a worker and the deployments here.

    What runs already stays as it is; the same command restarts what died. The deployments are those of prefect.yaml in
    the working directory, or else the example's. Returns when all of it answers. The server asks for a password, in a
    file that only you can read. A server that PREFECT_API_URL names is used, and never stopped.
    """
    with report_errors(as_json) as out:
        with importing_prefect():
            from ckpt_tasks.deploying.site import bring_up

        if not as_json:
            out.print("Starting what does not run yet: half a minute …")

        site = bring_up(Path.cwd(), port)
        out.data({**asdict(site), "deployments": list(site.deployments)})
        shown = table("part", "state", "", unwrapped_columns=("part",))
        for part in site.parts:
            shown.add_row(part.name, part.status, part.about)
        asks = f"; it asks for the password in {file}" if (file := site.password_file) else ""
        out.print(shown, f"The page is at {site.page}{asks}", "")
        first = next((name for name in site.deployments if name.startswith("train/")), site.deployments[0])
        out.print_next(
            f"export PREFECT_API_URL={site.url}",
            *([f'export PREFECT_API_AUTH_STRING="$(cat {shlex.quote(file)})"'] if file else []),
            f"prefect deployment run '{first}' --watch",
            f"{ckpt_command()} down",
        )


def down(*, as_json: JsonOption = False) -> None:
    """Stop what `ckpt up` started.

    Running training finishes its step, commits, and resumes with the next `ckpt up`. Also cleans up after a reboot or a
    kill.
    """
    with report_errors(as_json) as out:
        with importing_prefect():
            from ckpt_tasks.deploying.site import take_down

        parts = take_down()
        out.data({"parts": [asdict(part) for part in parts]})
        shown = table("part", "state", "", unwrapped_columns=("part",))
        for part in parts:
            shown.add_row(part.name, part.status, part.about)
        out.print(shown if parts else "Nothing of ckpt up is there to end.")
        ours = [name for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING") if name in os.environ]
        if ours and any(part.name == "server" and part.status in _GONE for part in parts):
            out.print_next(f"unset {' '.join(ours)}")
