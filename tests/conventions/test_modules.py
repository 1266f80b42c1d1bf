"""A package's private names are its own, and no two modules import each other."""

from __future__ import annotations

import ast
import graphlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.conventions.test_private_names import is_private
from tools.sources import ROOT, files, imports, module_name, parse, walk, where

SOURCES = files("ckpt_tasks")


def package_of(path: Path) -> str:
    return path.relative_to(ROOT / "ckpt_tasks").parts[0]


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module defines: functions, classes, variables and attributes."""
    for node in walk(tree):
        name: str | None = None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        if name is not None and is_private(name):
            yield name


def read_of_others(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of private names that are looked up on anything but self, or imported."""
    for node in walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))


def at_run_time(tree: ast.Module) -> ast.Module:
    """Return a module without what only type checkers import."""
    kept = [n for n in tree.body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    return ast.Module(body=kept, type_ignores=[])


def graph(sources: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Return which modules each module imports, inside of functions too."""
    found: dict[str, set[str]] = {name: set() for name in sources}
    for name, tree in sources.items():
        for _, imported in imports(at_run_time(tree)):
            module = imported if imported in sources else imported.rpartition(".")[0]
            if module in sources and module != name:
                found[name].add(module)
    return found


def test_no_private_name_of_another_package_is_read() -> None:
    """A name that begins with _ and is defined in one package is read in that package only."""
    packages = defaultdict(set)
    for path in SOURCES:
        for name in defined(parse(path)):
            packages[name].add(package_of(path))
    wrong = [
        f"{where(path, line)}: {name} belongs to {', '.join(sorted(packages[name]))}/"
        for path in SOURCES
        for line, name in read_of_others(parse(path))
        if name in packages and package_of(path) not in packages[name] and name not in OF_OTHERS
    ]
    assert wrong == [], "give the other package a public name for what you need"


def test_tests_use_no_private_name_of_ours() -> None:
    """Tests reach the product by its public names, `ckpt_tasks.testing` among them; they may change a private constant.

    A number that nobody outside of its module needs (`_PAGE = 200`) is made small by its name, in upper case.
    """
    ours = {name for path in SOURCES for name in defined(parse(path))}
    used = {
        (str(path.relative_to(ROOT / "tests")), name)
        for path in files("tests", suffix=".py")
        for name in read_by_test(parse(path))
        if name in ours and not name.isupper()
    }
    assert used == OTHERWISE, "ask the product for what the test needs to know, by ckpt_tasks.testing"


def read_by_test(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a test looks up, imports or replaces, and does not define itself."""
    own = {*defined(tree)}
    yield from (name for _, name in read_of_others(tree) if name not in own)
    for node in walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "setattr":
            texts = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
            yield from (name for text in texts if is_private(name := text.rpartition(".")[2]))


# Others' names that ours defines as well; the last is the protocol's, which a simulation breaks.
OTHERWISE = {
    ("crash/test_forked_children.py", "_pool"),
    ("crash/test_forked_children.py", "_workers"),
    ("integrations/dcp/test_many_ranks.py", "_config"),
    ("flows/test_preemption.py", "_prefect_sigterm_handler"),
    ("conventions/test_docs.py", "_config"),
    ("state/kinds/test_sparse.py", "_indices"),
    ("state/kinds/test_sparse.py", "_values"),
    ("property/test_protocol.py", "_read_back"),
}
# Names of torch's that ours happens to define as well.
OF_OTHERS = {"_dataset", "_modules"}


def test_no_two_modules_import_each_other() -> None:
    """Imports make no circle, not even one that a function closes when it runs."""
    modules = {module_name(path): parse(path) for path in SOURCES if path != ROOT / "ckpt_tasks" / "__init__.py"}
    graphlib.TopologicalSorter(graph(modules)).prepare()
