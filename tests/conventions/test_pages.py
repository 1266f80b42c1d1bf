"""Pages that are made from the sources are as they would be made today."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

import ckpt_tasks
from benchmarks.comparison import table
from ckpt_tasks import CheckpointConfig
from ckpt_tasks.run.ledger.config import field_texts
from tools.pages import format as fields_of_records
from tools.pages import options, packages, pitfalls, reference

MADE: list[tuple[Path, str, Callable[[str], str]]] = [
    (options.PAGE, "tools.pages.options", options.written),
    (fields_of_records.PAGE, "tools.pages.format", fields_of_records.written),
    (reference.PAGE, "tools.pages.reference", lambda _: reference.written()),
    (pitfalls.PAGE, "tools.pages.pitfalls", pitfalls.written),
    (packages.PAGE, "tools.pages.packages", packages.written),
    (table.README, "benchmarks.comparison.table", lambda _: table.written(table.README)),
    (table.PAGE, "benchmarks.comparison.table", lambda _: table.written(table.PAGE)),
]


@pytest.mark.parametrize(("page", "maker", "written"), MADE, ids=[page.name for page, _, _ in MADE])
def test_a_page_is_made_from_the_sources(page: Path, maker: str, written: Callable[[str], str]) -> None:
    """Options, names, links to tests, packages and tables of the comparison are those that their maker writes."""
    text = page.read_text(encoding="utf-8")
    assert text == written(text), f"run `python -m {maker}`"


def test_the_pages_leave_nothing_out() -> None:
    """Every option has a text and its row, every exported name its place, and the architecture opens with the packages.

    The pitfalls are numbered from 1 to 76; each has a test, or says why nothing covers it yet.
    """
    names = [option.name for option in fields(CheckpointConfig)]
    assert [name for name, text in field_texts(CheckpointConfig).items() if text] == names
    texts = {page: page.read_text(encoding="utf-8") for page, _, _ in MADE}
    assert all(f"| `{name}` |" in texts[options.PAGE] for name in names)
    exported = {*ckpt_tasks.__all__, "Run"} - {"errors"}
    assert all(f"\n## {name}\n" in texts[reference.PAGE] for name in exported)
    assert 0 < texts[packages.PAGE].find(f"```text\n{packages.drawn()}```") < texts[packages.PAGE].index("## ")
    rows, covered = pitfalls.rows(texts[pitfalls.PAGE]), {number for number, *_ in pitfalls.marked()}
    assert [number for number, _, _ in rows] == [*range(1, 77)]
    assert [number for number, fault, gap in rows if not fault or not (gap or number in covered)] == []
    assert covered <= {*range(1, 77)}
