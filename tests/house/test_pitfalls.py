"""docs/PITFALLS.md is true: it has every row, and what it says of tests is what their docstrings say."""

from __future__ import annotations

from tests.house.pitfalls import PAGE, marked, rows, written

ROWS = range(1, 77)


def test_every_pitfall_has_its_row() -> None:
    """The numbers from 1 to 76 have one row each, which has a test or says why nothing covers it yet."""
    table = rows(PAGE.read_text(encoding="utf-8"))
    covered = {number for number, *_ in marked()}
    assert [number for number, _, _ in table] == [*ROWS]
    assert [number for number, fault, gap in table if not fault or not (gap or number in covered)] == []
    assert covered <= {*ROWS}


def test_the_page_is_made_from_the_docstrings() -> None:
    """Links and counts are those that `python -m tests.house.pitfalls` writes."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), "a docstring of a test has changed: run `python -m tests.house.pitfalls`"
