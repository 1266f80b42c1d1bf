"""The project's own sources, read as syntax trees."""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from ckpt_tasks.gc_pause import gc_paused

ROOT = Path(__file__).resolve().parents[1]
# What `make` and the tests leave in a checkout.
_MADE = {"build", "dist", "runs", "__pycache__"}


def files(*folders: str, suffix: str = ".py") -> list[Path]:
    """Return the project's files below `folders` (the whole checkout without any), sorted, nothing generated."""
    found: list[Path] = []
    for folder in folders or (".",):
        for place, below, names in os.walk(ROOT / folder):
            below[:] = [name for name in below if name not in _MADE and not name.startswith(".")]
            found += [Path(place, name) for name in names if name.endswith(suffix)]
    return sorted(found)


@functools.cache
def parse(path: Path) -> ast.Module:
    """Parse a file of the checkout, once a process; callers only look at the tree.

    The collector is paused: on Python 3.11 a finalizer that runs in the middle of a parse may let another thread
    parse as well (a traceback does), and both then fail with SystemError (python/cpython#106905).
    """
    with gc_paused():
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    """Return the dotted name under which a file of the checkout is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def walk(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return every node of a file, listed once a process: dozens of rules look at all of them."""
    return (*ast.walk(tree),)


@functools.cache
def imports(tree: ast.Module) -> tuple[tuple[int, str], ...]:
    """Return (line, dotted name) of everything that is imported anywhere in the file, inside functions too.

    `from a import b` yields `a.b`: b may be a module, and `a` alone would hide which one. Names given to
    `import_module` or `__import__` as literals count as well.
    """
    return (*_imports(tree),)


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in {"import_module", "__import__"} and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def _called(node: ast.Call) -> str:
    match node.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"
