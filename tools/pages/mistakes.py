"""`python -m tools.pages.mistakes` writes docs/MISTAKES.md from what is printed when each mistake is really made."""

from __future__ import annotations

import os
import re
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path

from tools.pages.mistake_list import MISTAKES
from tools.pages.mistaken import printed
from tools.sources import ROOT

PAGE = ROOT / "docs" / "MISTAKES.md"
WIDTH = 88
_LIST = re.compile(r"(?<=<!-- made by python -m tools\.pages\.mistakes -->\n).*", re.DOTALL)
_ONE = re.compile(r"^## ([^\n]+)\n\n```text\n(.*?)\n```$", re.DOTALL | re.MULTILINE)


def folded(text: str) -> str:
    """Return a text in lines that the page shows whole, as a narrow terminal does."""
    return "\n".join(
        textwrap.fill(line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


def written(page: str, texts: Mapping[str, str]) -> str:
    """Return the page with every mistake and what is printed of it."""
    parts = [f"\n## {words}\n\n```text\n{folded(text)}\n```\n" for words, text in texts.items()]
    return _LIST.sub(lambda _: "".join(parts), page)


def texts_of(page: str) -> dict[str, str]:
    """Return what the page says is printed, folded, by the mistake."""
    return dict(_ONE.findall(page))


def all_printed() -> dict[str, str]:
    """Make every mistake in a directory of its own; return what is printed, by the mistake."""
    texts = {}
    for one in MISTAKES:
        with tempfile.TemporaryDirectory() as place:
            texts[one.words] = printed(one, Path(place))
    return texts


if __name__ == "__main__":
    os.environ["COLUMNS"] = str(WIDTH)
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), all_printed()), encoding="utf-8")
