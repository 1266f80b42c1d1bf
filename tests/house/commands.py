"""`python -m tests.house.commands` writes docs/COMMANDS.md from the help of `ckpt` and of each of its verbs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from ckpt_tasks.cli import app
from tests.house.sources import ROOT

PAGE = ROOT / "docs" / "COMMANDS.md"
_LINK = re.compile(r"\bdocs/(\w+\.md)")
_HEAD = """# The command `ckpt`

What `ckpt --help` and `ckpt VERB --help` print, on one page. `python -m tests.house.commands` writes it.
"""


def written() -> str:
    """Return the page."""
    root: Any = get_command(app)
    context = root.make_context("ckpt", [], resilient_parsing=True)
    sections: dict[str, list[str]] = {}
    for name in root.list_commands(context):
        verb = root.get_command(context, name)
        if not verb.hidden:
            about = verb.context_class(verb, info_name=name, parent=context)
            sections.setdefault(verb.rich_help_panel, []).append("\n".join(_verb(verb, about)))
    text = [_HEAD, f"{root.help} {root.epilog}\n"]
    for heading, verbs in sections.items():
        text += [f"## {heading}\n", *verbs]
    return "\n".join(text)


def _verb(verb: Any, context: Any) -> Iterator[str]:
    yield f"### ckpt {context.info_name}\n"
    yield f"```text\n{verb.get_usage(context).removeprefix('Usage: ')}\n```\n"
    for paragraph in verb.help.split("\n\n"):
        yield " ".join(paragraph.split()) + "\n"
    sections: dict[str, list[str]] = {}
    for option in verb.get_params(context):
        if (record := option.get_help_record(context)) is not None:
            words = (option.metavar or record[0], record[1]) if option.param_type_name == "argument" else record
            panel = getattr(option, "rich_help_panel", None)
            heading = panel if isinstance(panel, str) else "option"
            sections.setdefault(heading, []).append(f"| `{_cell(words[0])}` | {_cell(words[1])} |")
    for heading, rows in sections.items():
        yield "\n".join([f"| {heading} | |", "|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return _LINK.sub(r"[\1](\1)", " ".join(text.split())).replace("|", r"\|").replace("<", r"\<")


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
