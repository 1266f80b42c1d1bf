"""`python -m tools.pages.pitfalls` writes the tests of docs/internals/PITFALLS.md from their docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tools.sources import ROOT, files, parse, walk

PAGE = ROOT / "docs" / "internals" / "PITFALLS.md"
_ROW = re.compile(r"^\| P(\d+) \|([^|]*)\|[^|]*\|([^|]*)\|$", flags=re.MULTILINE)


def rows(page: str) -> list[tuple[int, str, str]]:
    """Return (number, fault, what is not covered yet) of every row."""
    return [(int(number), fault.strip(), gap.strip()) for number, fault, gap in _ROW.findall(page)]


def marked() -> Iterator[tuple[int, int, str, str]]:
    """Yield (number, how many its test covers, file below tests/, test) for every number in the docstring of a test."""
    for path in files("tests"):
        for node in walk(parse(path)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                numbers = re.findall(r"\bP(\d+)\b", ast.get_docstring(node) or "")
                for number in numbers:
                    yield int(number), len(numbers), str(path.relative_to(ROOT / "tests")), node.name


def written(page: str) -> str:
    """Return the page with the counts of its rows, and in each the file of a test that covers little else."""
    first: dict[int, str] = {}
    for number, _, file, _ in sorted(marked()):
        first.setdefault(number, file)

    def row(match: re.Match[str]) -> str:
        number, fault, gap = match.groups()
        link = f"`{first[int(number)]}`" if int(number) in first else ""
        return f"| P{number} |{fault}| {link} |{gap}|"

    gaps = [gap for _, _, gap in rows(page)]
    missing = sum(gap.startswith("**not yet**") for gap in gaps)
    counts = f"Of {len(gaps)} rows {gaps.count('')} are covered, {len(gaps) - gaps.count('') - missing} are"
    page = re.sub(r"Of \d+ rows \d+ are covered, \d+ are", counts, _ROW.sub(row, page))
    return re.sub(r"and \d+ are not covered yet", f"and {missing} are not covered yet", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
