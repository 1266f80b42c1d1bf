"""The public surface, pinned: a name that comes or goes is a decision, made here and in CHANGELOG.md."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import ckpt_tasks
from tools.sources import ROOT, parse

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


def fresh(code: str) -> str:
    """Run code in a new interpreter and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names_are_these() -> None:
    """The package offers exactly the names pinned here."""
    assert ckpt_tasks.__all__ == PUBLIC, "a public name is for ever: is it meant? Then pin it here, and in CHANGELOG.md"
    assert {name for name in dir(ckpt_tasks) if not name.startswith("_")} >= {*PUBLIC}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_there(name: str) -> None:
    """Every name that is listed can be had, is defined where the table says, and carries a docstring."""
    value = getattr(ckpt_tasks, name)
    assert value.__doc__
    if name != "errors":
        assert value.__module__ == typed()[name]
        assert value.__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as in any module, by name."""
    with pytest.raises(AttributeError, match="'Chekpointer'"):
        ckpt_tasks.Chekpointer  # noqa: B018


def test_importing_the_package_imports_neither_torch_nor_prefect() -> None:
    """A fresh `import ckpt_tasks`, its names listed too, brings in neither torch nor Prefect, pyarrow or numpy."""
    code = "import sys, ckpt_tasks; dir(ckpt_tasks)\n"
    code += "print(sorted({'torch', 'prefect', 'pyarrow', 'numpy'} & {*sys.modules}))"
    assert fresh(code) == "[]"


def test_only_the_orchestration_needs_prefect() -> None:
    """The checkpoint library works without Prefect in any loop: using its names does not import it."""
    names = [name for name in PUBLIC if name not in {"errors", *_OF_PREFECT}]
    code = f"import sys, ckpt_tasks\nfor name in {names}:\n    getattr(ckpt_tasks, name)\n"
    assert fresh(code + "    assert 'prefect' not in sys.modules, name\nprint(name)") == names[-1]


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


def test_type_checkers_see_what_runs() -> None:
    """The imports under TYPE_CHECKING are of all public names."""
    assert {*typed(), "errors"} == {*ckpt_tasks.__all__}
