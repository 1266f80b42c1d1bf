"""Where a checkpoint comes from: code, command, versions and machine, as texts for people.

Each process collects these texts once, in the background, and every manifest has them in its `environment`. The command
line is reduced to the names of options, and to values that are known to be harmless. Environment variables are not
read.
"""

from __future__ import annotations

import os
import platform
import re
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

from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.storage.secrets import HIDDEN, without_secrets
from ckpt_tasks.system import system

_GIT_S = 2.0
_LONGEST = 2000  # A longer command line is cut.
# Harmless values: a number, a span of time, a switch, a device, a dtype, or nothing.
_HARMLESS = re.compile(
    r"[+-]?\d{0,12}\.?\d{0,12}(e[+-]?\d{1,3})?[smhd]?|true|false|yes|no|on|off|none|auto|--|"
    r"cpu|(cuda|mps|xpu)(:\d+)?|b?f(p|loat)?(8|16|32|64)",
    re.IGNORECASE | re.ASCII,
)
_STORE = re.compile(r"(s3|gs|gcs|az|abfss?|file)://[\w./-]*", re.ASCII)
# Options look like -n, -lr, --name or name=. A longer word after one hyphen may contain a value, as in -phunter2.
_OPTION = re.compile(
    r"(?P<name>-[a-z]{1,2}|--[a-z][\w.-]*|[a-z_][\w.-]*(?==[^=]))(=(?P<value>.*))?",
    re.IGNORECASE | re.ASCII | re.DOTALL,
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_OF_SECRETS = re.compile("auth|code|key|login|otp|pass|passphrase|passwd|password|pat|pin|pw|pwd|secret|token|user")
_OURS = frozenset(CheckpointConfig.__dataclass_fields__) - {"storage_options"}
_PACKAGES = ("ckpt-tasks", "numpy", "prefect", "lightning", "transformers", "accelerate")


@cache
def provenance() -> MappingProxyType[str, str]:
    """Return the facts of this process by name; omit unknown facts, but give unknown code as "unknown"."""
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
        **_packages(),
        "host": system().host(),
        "accelerator": _accelerator(),
        "code": code_of(directory_of(getattr(sys.modules.get("__main__"), "__file__", None))),
        "command": command_of(sys.orig_argv),
    }
    return MappingProxyType({name: text for name, text in facts.items() if text})


def command_of(arguments: Sequence[str]) -> str:
    """Return a command line as one text: its program, the names of options, and values that are known to be harmless.

    Numbers, switches, devices, existing paths, paths in an object store, imported programs, and the options of a
    CheckpointConfig are harmless. Everything else is hidden, because any word can be a secret.
    """
    shown: list[str] = []
    name = ""
    for argument in arguments:
        option = _OPTION.fullmatch(argument)
        if option is None:
            shown.append(_shown(argument, name, shown))
            name = ""
        else:
            name, value = option["name"], option["value"]
            shown.append(name if value is None else f"{name}={_shown(value, name, shown)}")
            name = name if value is None else ""
    text = shlex.join(shown)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _shown(value: str, name: str, before: Sequence[str]) -> str:
    """Return the value of the option `name` (if any) if it is harmless for this option, else asterisks."""
    names_a_secret = any(_OF_SECRETS.fullmatch(word.lower()) for word in _WORD.findall(name))
    is_program = (
        not before
        or ((name == "-m" or value.endswith(".py")) and all(word.startswith("-") for word in before[1:]))
        or os.path.basename(before[-1]) == "ckpt"
    )
    is_harmless = not names_a_secret and (
        _HARMLESS.fullmatch(value)
        or _STORE.fullmatch(value)
        or os.path.exists(value)
        or (":" in value and value.partition(":")[0] in sys.modules)
    )
    is_ours = name.lstrip("-").replace("-", "_") in _OURS
    return without_secrets(value) if is_program or is_harmless or is_ours else HIDDEN


def code_of(directory: str) -> str:
    """Return the checked-out git commit of a directory, and whether tracked files differ from it."""
    commit = _git(directory, "rev-parse", "--verify", "HEAD")
    if not commit:
        return "unknown"
    filters = (_git(directory, "config", "--name-only", "--get-regexp", r"^filter\.") or "").split("\n")
    without = [word for name in filters if name for word in ("-c", f"{name}=")]
    changed = _git(directory, *without, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    if changed is None:
        return f"git {commit}, changes unknown"
    return f"git {commit}, {'with uncommitted changes' if changed else 'clean'}"


def _git(directory: str, *arguments: str) -> str | None:
    """Return git's output; None if git is missing, does not answer in time, or finds no repository."""
    git = shutil.which("git")
    if git is None:
        return None
    # With these options git takes no lock, and runs no program that a repository's configuration names.
    command = [git, "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", directory, *arguments]
    try:
        # Use a file instead of a pipe: a loader's worker that training forks meanwhile would keep a pipe open for its
        # whole life. With a path and without close_fds, Popen spawns the process, and needs no pipe of its own.
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
    """Return the directory of the running script; the working directory if the script is installed or missing."""
    installed = {"site-packages", "dist-packages"}  # The user's, the system's or PYTHONPATH's packages.
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
    """Return the CUDA devices if this process uses them already; do not initialise CUDA."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    return f"{count} × {torch.cuda.get_device_name(0)}" if count else "none in use"
