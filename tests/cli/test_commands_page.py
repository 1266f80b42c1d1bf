"""docs/COMMANDS.md is true: its help, and the form of what --json prints."""

from __future__ import annotations

import pytest

from tools.pages.commands import PAGE, form, forms, written


def test_the_page_is_what_the_verbs_print() -> None:
    """Every verb has its help of today, and its examples answer JSON of the form that the page says."""
    page = PAGE.read_text(encoding="utf-8")
    assert written(forms()) == page, "run `python -m tools.pages.commands`"
    assert page.count("\n### `ckpt ") >= 20


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([1, 0.5], "number"),
        ([None, "a", True], "boolean or string or null"),
        ([{"a": [1, None], "b": {}}, {"a": ["x"]}], "{a: [number or string or null], b: {}}"),
        ([{"a": "x", "b": 1, "c": True}], "{a, b, c: boolean}"),
    ],
)
def test_a_form_has_what_values_have_in_common(values: list[object], says: str) -> None:
    """The form of an answer names every kind of value that it may hold."""
    assert str(form(values)) == f"[{says}]"
