"""docs/internals/PRIVATE.md names each private name of other packages that we use, and the test that guards it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.conventions.test_pyproject import DIRECT, pinned
from tools.sources import ROOT, files, parse, walk

PAGE = (ROOT / "docs" / "internals" / "PRIVATE.md").read_text(encoding="utf-8")
FOUND = PAGE.partition("## Found by the test")[2].partition("## Kept by hand")[0]
SHIPPED = files("ckpt_tasks", "flows", "deployments", suffix=".py")
PUBLIC = {"_replace", "_asdict", "_fields", "_exit", "_CKPT_COMPLETE"}  # documented: of named tuples, os and click
# Their versions are the user's: what is used of them is looked for first.
FREE = {"python", "cuda", "peft", "trl", "aiohttp", "websockets"}
# The newest versions that were tried beyond constraints.txt.
TRIED = {
    canonicalize_name(name): Version(version)
    for name, version in re.findall(r"^- (\w+) ([\d.]+\d)", PAGE.partition("## Pins")[2], re.MULTILINE)
}
TESTS = sorted(set(re.findall(r"`(test_\w+)`", PAGE)))


def is_private(name: str) -> bool:
    return bool(re.fullmatch(r"_(?!_)\w{1,}", name)) and name not in PUBLIC


@cache
def ours() -> frozenset[str]:
    """Return every private name that our own sources define."""
    found: set[str] = set()
    for path in SHIPPED:
        for node in walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                found.add(node.attr)
    return frozenset(found)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def foreign(tree: ast.Module) -> Iterator[str]:
    """Yield private names that are looked up on something, or imported, and that nothing of ours defines."""
    for node in walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            super_of = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
            names = [node.attr] if super_of or node.attr not in ours() else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if node.value not in ours() else []
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            names = [name for name in names if name not in ours()]
        yield from filter(is_private, names)


def used() -> set[str]:
    return {name for path in SHIPPED for name in foreign(parse(path))}


def test_every_private_name_is_on_the_page() -> None:
    """What we use of others' private names is listed, and what is listed is used."""
    listed = set(re.findall(r"`(_\w+)`", FOUND))
    assert used() - listed == set(), "add them to docs/internals/PRIVATE.md, each with a test"
    assert listed - used() - ours() == set(), "take them off docs/internals/PRIVATE.md"


def test_every_row_has_its_test() -> None:
    """No row of the page goes without a test, and each test that it names exists."""
    assert [row for row in rows() if "`test_" not in row] == []
    there = "".join(path.read_text(encoding="utf-8") for path in files("tests"))
    assert [name for name in TESTS if f"\ndef {name}(" not in there] == []


def rows() -> list[str]:
    return [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| of ")]


OWNERS = {canonicalize_name(name.strip()) for row in rows() for name in row.split("|")[1].split(",")}


def test_a_private_use_has_an_upper_bound() -> None:
    """No list of requirements admits the first minor version with which a package's private names were not tried."""
    for owner in sorted(OWNERS - FREE):
        asked = [requirement for requirement in DIRECT if canonicalize_name(requirement.name) == owner]
        tried = TRIED.get(owner, pinned(owner))
        major, minor, *_ = tried.release
        assert asked, f"pyproject.toml asks for no version of {owner}"
        assert [str(each) for each in asked if not each.specifier.contains(tried)] == []
        assert [str(each) for each in asked if each.specifier.contains(f"{major}.{minor + 1}")] == []
