"""`python -m tools.pages.options` writes the table of docs/OPTIONS.md from `CheckpointConfig` and its fields' texts."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, Field, fields

from ckpt_tasks import CheckpointConfig
from ckpt_tasks.run.ledger.config import field_texts
from tools.sources import ROOT

PAGE = ROOT / "docs" / "OPTIONS.md"
_TABLE = re.compile(r"(?<=^\| option \| default \| what it does \|\n\|---\|---\|---\|\n)(?:\|.*\n)*", re.MULTILINE)


def written(page: str) -> str:
    """Return the page with a row for each option, in the order of the config."""
    said = field_texts(CheckpointConfig)
    rows = [f"| `{option.name}` | {_default(option)} | {_cell(said[option.name])} |" for option in _options()]
    table = "".join(f"{row}\n" for row in rows)
    return _TABLE.sub(lambda _: table, page)


def _options() -> tuple[Field[object], ...]:
    return fields(CheckpointConfig)


def _default(option: Field[object]) -> str:
    if option.default is MISSING:
        return ""
    value = option.default
    return f"`{json.dumps(value) if isinstance(value, str) else repr(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
