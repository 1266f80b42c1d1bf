"""What made a checkpoint: code, command, versions and machine, as texts for people.

They are collected once per process, in the background, and go into every manifest's `environment`. Values of the
command line that look secret, by name or by form, are left out. Environment variables are never read.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

import torch

from ckpt_tasks.storage.secrets import without_secret_arguments
from ckpt_tasks.system import system

__all__ = ["code_of", "command_of", "directory_of", "provenance"]

_GIT_S = 2.0
_LONGEST = 2000  # characters of a command line
_PACKAGES = ("ckpt-tasks", "numpy", "prefect", "lightning", "transformers", "accelerate")


@cache
def provenance() -> MappingProxyType[str, str]:
    """Return the facts of this process by name; unknown ones are left out, except the code, which is "unknown"."""
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
        **_packages(),
        "host": system().host(),
        "accelerator": _accelerator(),
        "code": code_of(directory_of(getattr(sys.modules.get("__main__"), "__file__", None))),
        "command": command_of(sys.orig_argv, inline=sys.argv[:1] == ["-c"]),
    }
    return MappingProxyType({name: text for name, text in facts.items() if text})


def command_of(arguments: Sequence[str], *, inline: bool = False) -> str:
    """Return a command line as one text, without secrets; `inline`: its -c is a program, which is left out."""
    shown = without_secret_arguments(arguments)
    if inline and "-c" in shown:
        at = shown.index("-c") + 1
        shown[at : at + 1] = ["…"]
    text = shlex.join(shown)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def code_of(directory: str) -> str:
    """Return the checked-out git commit of a directory, and whether tracked files differ from it."""
    commit = _git(directory, "rev-parse", "--verify", "HEAD")
    if not commit:
        return "unknown"
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    if changed is None:
        return f"git {commit}, changes unknown"
    return f"git {commit}, {'with uncommitted changes' if changed else 'clean'}"


def _git(directory: str, *arguments: str) -> str | None:
    """Return git's output; None if git is missing, does not answer in time, or finds no repository."""
    git = shutil.which("git")
    if git is None:
        return None
    # Takes no lock, and runs no program that the repository's configuration names.
    command = [git, "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", directory, *arguments]
    try:
        # No pipe, for the output or inside Popen: this is a thread, and a loader's worker that training forks meanwhile
        # would hold it open for as long as it lives. With a path and without close_fds, Popen spawns and needs none.
        with tempfile.TemporaryFile() as said:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.DEVNULL,
                close_fds=False,
                timeout=_GIT_S,
                check=False,
            )
            said.seek(0)
            return said.read().decode().strip() if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None


def directory_of(script: str | None) -> str:
    """Return the directory of the script that runs; the working directory for what was installed, or for none."""
    installed = {"site-packages", "dist-packages"}  # of the user, of the system, or along PYTHONPATH
    if script is None or not installed.isdisjoint(Path(script).resolve().parts):
        return os.curdir
    is_command = os.path.realpath(script).startswith(os.path.realpath(sys.prefix) + os.sep)
    return os.curdir if is_command else os.path.dirname(os.path.abspath(script))


def _packages() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _accelerator() -> str:
    """Return the CUDA devices if this process uses them already; does not initialise CUDA."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    return f"{count} × {torch.cuda.get_device_name(0)}" if count else "none in use"
