"""Modules and functions stay small enough to be read at once; the aims are 300 and 40 lines, these are the limits."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.sources import ROOT, files, parse, where

MODULE_LINES = 400
FUNCTION_LINES = 60

SOURCES = files("ckpt_tasks", "flows", "tests", "benchmarks", "tools")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_one_thing(path: Path) -> None:
    """A module has at most 400 lines and each of its functions, decorators and docstring included, at most 60."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MODULE_LINES, f"{where(path, 1)} has {lines} lines: what is the second thing in it?"
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            length = (node.end_lineno or first) - first + 1
            assert length <= FUNCTION_LINES, f"{where(path, first)}: {node.name} has {length} lines"
