"""`ckpt init`: write a project that runs at once."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from ckpt_tasks.cli.output import JsonOption, output
from ckpt_tasks.cli.settings import ckpt_command

__all__ = ["init"]

DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="a new or empty directory", show_default=False)]
NameOption = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="name of the run and the deployments [default: that of DIR]"),
]

_ABOUT = {
    "training.py": "the program: your data and your model go here",
    "test_resume.py": "kills it, resumes it, and compares every bit",
    "prefect.yaml": "what `ckpt up` deploys",
    "README.md": "the commands",
    ".gitignore": "",
}


def init(directory: DirectoryArgument, *, name: NameOption = None, as_json: JsonOption = False) -> None:
    """Write a project that runs at once.

    It holds a program with a small example of a model and its data for you to replace, deployments, and a test that
    kills the training and resumes it. DIR must be new or empty.
    """
    from ckpt_tasks.deploying.project import PROGRAM, write_project

    with output(as_json) as out:
        named, written = write_project(directory, name)
        out.data({"name": named, "directory": str(directory.absolute()), "program": PROGRAM, "files": written})
        width = max(map(len, written))
        out.print(f"{named}: a project in {directory}")
        for file in written:
            out.print(f"  {file.ljust(width)}  {_ABOUT[file]}".rstrip())
        there = [] if directory.absolute() == Path.cwd() else [f"cd {shlex.quote(str(directory))}"]
        ckpt = ckpt_command() if os.sep not in ckpt_command() else os.path.abspath(ckpt_command())
        out.print_next(*there, f"{ckpt} train {PROGRAM} --run-key {named} --steps 3000", f"{ckpt} up")
