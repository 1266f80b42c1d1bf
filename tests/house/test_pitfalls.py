"""docs/PITFALLS.md is true: it has every row, what it names exists, and every number in a test is in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.house.sources import ROOT, files, parse

PAGE = ROOT / "docs" / "PITFALLS.md"
ROWS = range(1, 76)


def rows() -> dict[int, list[str]]:
    """Return number → the other cells of its row: the fault, the tests, what is not covered yet."""
    lines = re.findall(r"^\| P(\d+) \|(.*)\|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    numbers = [int(number) for number, _ in lines]
    assert len(numbers) == len({*numbers}), "a number has two rows"
    return {int(number): [cell.strip() for cell in cells.split("|")] for number, cells in lines}


def named(cell: str) -> set[tuple[str, str]]:
    """Return the (file, test) of every link in a cell; what it says and where it leads are the same file."""
    found = re.findall(r"\[([\w/]+\.py)::(\w+)\]\(\.\./(tests/[\w/]+\.py)\)", cell)
    assert len(found) == cell.count("]("), cell
    assert all(f"tests/{said}" == leads_to for said, _, leads_to in found), cell
    return {(leads_to, test) for _, test, leads_to in found}


def marked() -> Iterator[tuple[int, str, str]]:
    """Yield (number, file, test) for every number in the docstring of a test."""
    for path in files("tests"):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in re.findall(r"\bP(\d+)\b", ast.get_docstring(node) or ""):
                    yield int(number), str(path.relative_to(ROOT)), node.name


def test_every_pitfall_has_its_row() -> None:
    """The numbers from 1 to 75 have one row each, which says what covers it, or why nothing does yet."""
    found = rows()
    assert [*found] == [*ROWS]
    assert [number for number, cells in found.items() if len(cells) != 3 or not cells[0]] == []
    assert [number for number, (_, tests, why) in found.items() if not tests and not why] == []


def test_the_counts_are_those_of_the_rows() -> None:
    """The sentence above the table counts as the table does."""
    counts = re.search(r"Of (\d+) rows (\d+) are covered, (\d+) are .*, and (\d+) are not", PAGE.read_text("utf-8"))
    assert counts is not None
    lasts = [why for _, _, why in rows().values()]
    missing = sum(why.startswith("**not yet**") for why in lasts)
    expected = [len(lasts), lasts.count(""), len(lasts) - lasts.count("") - missing, missing]
    assert [int(count) for count in counts.groups()] == expected


def test_a_test_that_a_row_names_exists_and_carries_its_number() -> None:
    """Whoever renames a test, or takes the number out of its docstring, meets the table."""
    known = {*marked()}
    wrong = [(n, *test) for n, (_, tests, _) in rows().items() for test in named(tests) if (n, *test) not in known]
    assert wrong == []


def test_a_number_in_a_test_is_in_the_table() -> None:
    """Every file with a test that carries a row's number is linked in that row."""
    linked = {n: {file for file, _ in named(tests)} for n, (_, tests, _) in rows().items()}
    wrong = {(n, file) for n, file, _ in marked() if file not in linked.get(n, set())}
    assert wrong == set()
