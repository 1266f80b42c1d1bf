"""a reader of a package learns from its docstrings what a function does, and what it raises."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ckpt_tasks import errors
from tools.sources import ROOT, files, parse, where

OURS = {*errors.__all__, "ValueError", "NotImplementedError"}
CLI = ROOT / "ckpt_tasks" / "cli"  # a verb's docstring is its help; what it raises is printed as one line


def offered(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Yield the functions and public methods that a module offers, each with the docstring of its class."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node, ""
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    yield method, ast.get_docstring(node) or ""


def raised(function: ast.FunctionDef) -> set[str]:
    """Return the names of the errors that a function raises itself."""
    found = (node.exc for node in ast.walk(function) if isinstance(node, ast.Raise) and node.exc is not None)
    return {ast.unparse(error.func) for error in found if isinstance(error, ast.Call)} & OURS


def silent(paths: list[Path]) -> list[str]:
    """List the functions that raise an error of ours, and whose docstring and class say nothing of raising.

    A method without a docstring keeps the contract of its interface, which says it (storage/port.py).
    """
    return [
        f"{where(path, function.lineno)} {function.name} raises {', '.join(sorted(raised(function)))}"
        for path in paths
        for function, about in offered(parse(path))
        if (said := ast.get_docstring(function))
        and raised(function)
        and not re.search(r"\b[Rr]aises?\b", f"{said} {about} {ast.get_docstring(parse(path))}")
    ]


def test_a_function_that_raises_says_so() -> None:
    """Whoever calls a function of another package learns from its docstring that it raises an error of ours."""
    assert silent([path for path in files("ckpt_tasks") if path.parent != CLI and path.name != "verb.py"]) == []


def test_an_offered_function_has_a_docstring() -> None:
    """Every module and every function without an underscore says what it is."""
    sources = [(path, parse(path)) for path in files("ckpt_tasks") if path.name != "__init__.py"]
    wrong = [where(path, 1) for path, tree in sources if not ast.get_docstring(tree)]
    for path, tree in sources:
        offers = offered(tree)
        wrong += [where(path, one.lineno) for one, about in offers if not about and ast.get_docstring(one) is None]
    assert wrong == []
