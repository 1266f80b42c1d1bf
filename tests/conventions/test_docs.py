"""The documentation is true: its Python runs, its links lead somewhere, its words are the project's."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import Child
from tools.sources import ROOT, files, parse, walk, where

README = ROOT / "README.md"
PAGES = files(suffix=".md")
# Never used (docs/internals/FORMAT.md, glossary): they say nothing, or name what has another name here.
NEVER = {
    "chunk", "common", "handler", "helper", "helpers", "iteration", "manager", "misc", "processor", "util", "utils",
}  # fmt: skip
NEVER_TOGETHER = {"global_step"}
# `load` is kept for the one name that torch gave it: what we do is called restore.
LOAD_ALLOWED = {"load_state_dict", "load_checkpoint"}  # the names that torch and Lightning call
# Each block is a script of its own, which tests/checkpoint/test_recipes.py runs.
SCRIPTS = {ROOT / "docs" / "RECIPES.md"}


def python_blocks(page: Path) -> str:
    """Return the page with everything but its ```python blocks blanked, so that line numbers stay."""
    kept: list[str] = []
    inside = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = re.fullmatch(r"(```+)\s*(\w*).*", line)
        if fence and not inside:
            inside = fence[2] or "text"
        elif fence and inside and not fence[2]:
            inside = ""
        kept.append(line if inside == "python" and not fence else "")
    return "\n".join(kept).strip("\n") and "\n".join(kept)


def prose(page: Path) -> str:
    """Return the page without its fenced blocks and code spans: what is left is read as Markdown."""
    text = re.sub(r"^(```+).*?^\1\s*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^(```+).*?^\1\s*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#{1,6} (.+?)\s*$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        leads_to = (page.parent / name).resolve() if name else page
        inside = leads_to.is_relative_to(ROOT) and leads_to.exists()
        if not inside or (anchor and leads_to.suffix == ".md" and anchor not in anchors(leads_to)):
            yield f"{page.relative_to(ROOT)} → {target}"


def words(name: str) -> set[str]:
    """Return the words of a name: snake_case, kebab-case and CamelCase are taken apart."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}


def is_never(name: str) -> bool:
    loads = "load" in words(name) and name not in LOAD_ALLOWED
    return bool(words(name) & NEVER) or any(term in name.lower() for term in NEVER_TOGETHER) or loads


def public_symbols(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of what a reader of the module's API meets: functions, classes, their arguments and fields."""
    for node in walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield from ((arg.lineno, arg.arg) for arg in ast.walk(node.args) if isinstance(arg, ast.arg))
        if isinstance(node, ast.ClassDef | ast.Module):
            for statement in node.body:
                targets = statement.targets if isinstance(statement, ast.Assign) else []
                targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
                yield from ((target.lineno, target.id) for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "LOOP.md"], ids=lambda page: page.stem)
def test_two_lines_make_a_plain_loop_resumable(page: Path) -> None:
    """Without the import, the new line and the changed one, the first example is a PyTorch program that trains."""
    text = page.read_text(encoding="utf-8")
    example = re.sub(r"^from ckpt_tasks.*\n", "", text.split("```python\n")[1].partition("```")[0], flags=re.MULTILINE)
    without, new = re.subn(r"^[^#\n]*resumable\((?:  # new\n.*\n\)|.*# new)\n", "", example, flags=re.MULTILINE)
    without, changed = re.subn(r"in epochs:  # was: (.*)", r"in \1:", without)
    assert (new, changed) == (1, 1)
    exec(
        compile(re.sub(r"^ +epochs\.log.*\n", "", without, flags=re.MULTILINE), str(page), "exec"),
        {"__name__": "__main__"},
    )


def program(page: Path) -> Any:
    """Return the parameter of a page's program, which may import a framework."""
    foreign = re.search(r"^ *(import|from) (datasets|lightning|transformers)\b", python_blocks(page), re.MULTILINE)
    marks = [pytest.mark.framework] * bool(foreign) + [pytest.mark.slow] * (PROGRAMS.index(page) % 2)
    return pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks)


PROGRAMS = sorted({README, *filter(python_blocks, PAGES)} - SCRIPTS)


@pytest.mark.parametrize("page", [*map(program, PROGRAMS)])
def test_python_in_the_documentation_runs(page: Path, tmp_path: Path) -> None:
    """The ```python blocks of a page run in order, as one program, in a new process and an empty directory."""
    (place := tmp_path / "empty").mkdir()
    with Child(execute, [str(page), str(place)], tmp_path / "said") as child:
        assert child.wait(600) == 0, child.said()


def execute(arguments: Sequence[str]) -> None:
    """Execute a page's blocks as a script."""
    page, place = arguments
    os.chdir(place)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # loaders have workers
    exec(compile(python_blocks(Path(page)), page, "exec"), {"__name__": "__main__"})


def test_links_lead_somewhere() -> None:
    """Every relative link of a page leads to a file of the checkout, and its anchor to a heading there."""
    assert [link for page in PAGES for link in broken_links(page)] == []


OF_OTHERS = {"O_EXCL", "ckpt_tasks.dcp", "ckpt_tasks.tables"}  # a flag of the kernel, and modules


def test_the_tour_names_what_is_there() -> None:
    """Every class, function and method that ARCHITECTURE.md names is defined in the code."""
    there = {name for path in files("ckpt_tasks", "flows") for name in _defined(parse(path))}
    text = (ROOT / "docs" / "internals" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`\.?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?)`", text)) - OF_OTHERS
    gone = sorted(name for name in named if name not in there and not name.endswith(".py"))
    assert gone == [], "docs/internals/ARCHITECTURE.md names what the code no longer defines"


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef))
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_names_use_our_words() -> None:
    """No file, folder, public function, class, argument or field has a name from the list of words never used."""
    sources = files("ckpt_tasks", "flows", "tests", "benchmarks", "tools", "deployments", "docs", suffix="")
    wrong = {str(path.relative_to(ROOT)) for path in sources for part in path.relative_to(ROOT).parts if is_never(part)}
    wrong |= {
        f"{where(path, line)}: {name}"
        for path in files("ckpt_tasks", "flows")
        for line, name in public_symbols(path)
        if not name.startswith("_") and is_never(name)
    }
    assert wrong == set(), "these names use a word of NEVER: take one of the glossary in docs/internals/FORMAT.md"
