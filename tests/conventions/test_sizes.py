"""Modules and functions stay small enough to be read at once; the aims are 300 and 40 lines, these are the limits."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tools.sources import files, parse, walk, where

MODULE_LINES = 400
FUNCTION_LINES = 60

SOURCES = files("ckpt_tasks", "flows", "tests", "benchmarks", "tools")


def too_long(path: Path) -> Iterator[str]:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > MODULE_LINES:
        yield f"{where(path, 1)} has {lines} lines: what is the second thing in it?"
    for node in walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            length = (node.end_lineno or first) - first + 1
            if length > FUNCTION_LINES:
                yield f"{where(path, first)}: {node.name} has {length} lines"


def test_a_module_is_one_thing() -> None:
    """A module has at most 400 lines and each of its functions, decorators and docstring included, at most 60."""
    assert [fault for path in SOURCES for fault in too_long(path)] == []
