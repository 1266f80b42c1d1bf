"""`python -m tools.pages.format` writes the tables of fields in docs/internals/FORMAT.md from the declared records."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ckpt_tasks.format import ledger, manifest, records
from ckpt_tasks.run.ledger.config import field_texts
from tools.sources import ROOT

PAGE = ROOT / "docs" / "internals" / "FORMAT.md"
_TABLE = re.compile(r"(?<=^\| )([A-Z]\w+)( \| type \| \|\n\|---\|---\|---\|\n)(?:\|.*\n)*", re.MULTILINE)
_NOT_STORED = frozenset({("Entry", "segments"), ("Entry", "partial")})
_NAMES = {
    str: "text",
    int: "int",
    float: "number",
    bool: "bool",
    Any: "JSON",
    manifest.ObjectRecord: "record",
    records.RunCheck: "check",
}


def written(page: str) -> str:
    """Return the page with a row for each field of the records that it names."""

    def table(found: re.Match[str]) -> str:
        kind = next(getattr(module, found[1]) for module in (records, ledger, manifest) if hasattr(module, found[1]))
        return found[1] + found[2] + "".join(f"{row}\n" for row in _rows(kind))

    return _TABLE.sub(table, page)


def _rows(kind: type) -> list[str]:
    types, texts = get_type_hints(kind, include_extras=True), field_texts(kind)
    stored = [one.name for one in fields(kind) if (kind.__name__, one.name) not in _NOT_STORED]
    rows: list[tuple[str, str, str]] = []
    for name in stored:
        words, text = _words(types[name]), texts.get(name, "")
        if not text and rows and rows[-1][1:] == (words, ""):  # Fields whose names say all share a row.
            rows[-1] = (f"{rows[-1][0]}, `{name}`", words, "")
        else:
            rows.append((f"`{name}`", words, text))
    return [f"| {names} | {words} | {text} |".replace("  |", " |") for names, words, text in rows]


def _words(kind: Any) -> str:
    """Return a type in words; a number's bounds are in the table of limits."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return parts[1].description or _words(parts[0])
    if origin in (Union, UnionType):
        return " or ".join("null" if part is NoneType else _words(part) for part in parts)
    if origin is Literal:
        return " or ".join(f'`"{part}"`' for part in parts)
    if origin is tuple:
        return f"list: {_words(parts[0])}" if Ellipsis in parts else f"[{', '.join(map(_words, parts))}]"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "object" if parts[1] is Any else f"object: {_words(parts[1])}"
    return _NAMES.get(kind) or kind.__name__.lower()


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
