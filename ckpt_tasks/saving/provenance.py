"""What made a checkpoint: code, command, versions and machine, as texts for people.

They are collected once a process, behind training's back, and go into every manifest's `environment`. The command line
is shown without what its names or its form give away as secret; the process's environment is never looked at.
"""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

import torch

from ckpt_tasks.storage.secrets import without_secret_arguments

__all__ = ["code_of", "command_of", "provenance"]

_GIT_S = 2.0
_LONGEST = 2000  # characters of a command line
_PACKAGES = ("ckpt-tasks", "numpy", "prefect", "lightning", "transformers", "accelerate")


@cache
def provenance() -> MappingProxyType[str, str]:
    """Return what this process is, by name; what is not known is left out, but for the code, which is "unknown"."""
    found = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
        **_packages(),
        "host": socket.gethostname(),
        "accelerator": _accelerator(),
        "code": code_of(_directory_of_program()),
        "command": command_of(sys.orig_argv, inline=sys.argv[:1] == ["-c"]),
    }
    return MappingProxyType({name: text for name, text in found.items() if text})


def command_of(arguments: Sequence[str], *, inline: bool = False) -> str:
    """Return a command line as one text, without secrets; `inline`: its -c is a program, which is left out."""
    shown = without_secret_arguments(arguments)
    if inline and "-c" in shown:
        at = shown.index("-c") + 1
        shown[at : at + 1] = ["…"]
    text = shlex.join(shown)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def code_of(directory: str) -> str:
    """Return the git commit that is checked out in a directory, and whether tracked files differ from it."""
    commit = _git(directory, "rev-parse", "--verify", "HEAD")
    if not commit:
        return "unknown"
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    if changed is None:
        return f"git {commit}, changes unknown"
    return f"git {commit}, {'with uncommitted changes' if changed else 'clean'}"


def _git(directory: str, *arguments: str) -> str | None:
    """Return what git says; None if it is not there, does not answer in time, or knows no repository here."""
    # No lock is taken, and no program runs that the repository's configuration names.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", directory, *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _directory_of_program() -> str:
    """Return the directory of the script that runs; of an installed command, the working directory."""
    script: str | None = getattr(sys.modules.get("__main__"), "__file__", None)
    if script and not os.path.realpath(script).startswith(os.path.realpath(sys.prefix) + os.sep):
        return os.path.dirname(os.path.abspath(script))
    return os.curdir


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _accelerator() -> str:
    """Return the devices that this process has begun to use; asking does not begin it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}"
    return "none in use"
