"""docs/REFERENCE.md is true: it is what the exported names say of themselves."""

from __future__ import annotations

import ckpt_tasks
from tests.house.reference import PAGE, written


def test_the_page_is_made_from_the_docstrings() -> None:
    """Every exported name has its place, and so has what `open_run` returns; the page is as it would be written."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(), "a public docstring has changed: run `python -m tests.house.reference`"
    assert all(f"\n## {name}\n" in page for name in [*ckpt_tasks.__all__, "Run"] if name != "errors")
