"""The public surface, pinned: a name that comes or goes is a decision, made here and in CHANGELOG.md."""

from __future__ import annotations

import ast
import subprocess
import sys

import ckpt_tasks
from tools.sources import ROOT, files, module_name, parse

PUBLIC = [
    "AttemptHooks",
    "ByRank",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointStore",
    "Checkpointer",
    "Gradients",
    "Listener",
    "Location",
    "LookupTable",
    "ReplayBuffer",
    "RestoreReport",
    "ResumableLoader",
    "ResumableSampler",
    "ShuffleBuffer",
    "errors",
    "export_checkpoint",
    "open_run",
    "plan_sync",
    "resumable",
    "resumable_task",
    "run_sync",
    "sample_generator",
]
_OF_PREFECT = {"AttemptHooks", "CheckpointStore", "resumable_task"}


def test_the_public_names_are_these() -> None:
    """The package offers exactly the names pinned here."""
    assert ckpt_tasks.__all__ == PUBLIC, "a public name is for ever: is it meant? Then pin it here, and in CHANGELOG.md"
    assert {name for name in dir(ckpt_tasks) if not name.startswith("_")} >= {*PUBLIC}


def test_a_public_name_is_there() -> None:
    """Every name that is listed can be had, is defined where the table says, and carries a docstring."""
    values = {name: getattr(ckpt_tasks, name) for name in PUBLIC}
    assert [name for name, value in values.items() if not value.__doc__] == []
    del values["errors"]
    assert {value.__name__: value.__module__ for value in values.values()} == typed(), "TYPE_CHECKING has others"
    assert [value.__name__ for value in values.values()] == [*values]


FRESH = """
import importlib, sys, ckpt_tasks

def heavy(*packages):
    return sorted({*packages} & {*sys.modules})

dir(ckpt_tasks)
assert not heavy("torch", "prefect", "pyarrow", "numpy"), heavy("torch", "prefect", "pyarrow", "numpy")
for name in MODULES:
    importlib.import_module(name)
    assert not heavy("torch", "prefect"), (name, heavy("torch", "prefect"))
for name in NAMES:
    getattr(ckpt_tasks, name)
    assert not heavy("prefect"), name
"""


def test_an_import_brings_in_what_it_needs_alone() -> None:
    """A fresh `import ckpt_tasks`, its names listed too, brings in neither torch nor Prefect, pyarrow or numpy.

    Every module of format/ brings in neither torch nor Prefect. The checkpoint library works
    without Prefect in any loop: using its names does not import it.
    """
    modules = [module_name(path) for path in files("ckpt_tasks/format")]
    names = [name for name in PUBLIC if name not in {"errors", *_OF_PREFECT}]
    code = f"MODULES, NAMES = {modules}, {names}\n{FRESH}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def typed() -> dict[str, str | None]:
    """Return the module of each name as type checkers see it: by the imports under TYPE_CHECKING."""
    blocks = [node for node in parse(ROOT / "ckpt_tasks/__init__.py").body if isinstance(node, ast.If)]
    return {
        alias.name: node.module
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
