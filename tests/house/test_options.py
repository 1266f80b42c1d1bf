"""docs/OPTIONS.md is true: its table is what the config says of its options."""

from __future__ import annotations

from dataclasses import fields

from ckpt_tasks import CheckpointConfig
from ckpt_tasks.ledger.config import option_texts
from tests.house.options import PAGE, written


def test_every_option_has_a_text() -> None:
    """Each option of a run has a text below its field, and no text is empty."""
    assert [name for name, text in option_texts().items() if text] == [
        option.name for option in fields(CheckpointConfig)
    ]


def test_the_page_is_made_from_the_config() -> None:
    """Rows, defaults and texts are those that `python -m tests.house.options` writes."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), "an option has changed: run `python -m tests.house.options`"
    assert all(f"| `{option.name}` |" in page for option in fields(CheckpointConfig))
