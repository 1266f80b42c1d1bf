"""The help screens: verbs and options under headings, as plain text, so that `ckpt --help` answers at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from ckpt_tasks.cli.completion import without_typers_flags

__all__ = ["SectionedCommand", "SectionedGroup"]


class SectionedGroup(TyperGroup):
    """A command with verbs, each listed under the heading of its `rich_help_panel`."""

    def get_params(self, ctx: Any) -> Any:
        return without_typers_flags(super().get_params(ctx))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        verbs = [(name, verb) for name in self.list_commands(ctx) if (verb := self.get_command(ctx, name)) is not None]
        verbs = [(name, verb) for name, verb in verbs if not verb.hidden]
        width = max(len(name) for name, _ in verbs)
        limit = formatter.width - width - 6
        _write(
            formatter,
            ((_heading(verb, "Verbs"), name.ljust(width), verb.get_short_help_str(limit)) for name, verb in verbs),
        )


class SectionedCommand(TyperCommand):
    """A verb whose options are listed under the headings of their `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for option in self.get_params(ctx):
            if (record := option.get_help_record(ctx)) is not None:
                if option.param_type_name == "argument":
                    rows.append(("Arguments", option.metavar or record[0], record[1]))
                else:
                    rows.append((_heading(option, "Options"), *record))
        _write(formatter, rows)


def _heading(what: Any, default: str) -> str:
    panel = getattr(what, "rich_help_panel", None)
    return panel if isinstance(panel, str) else default


def _write(formatter: Any, rows: Iterable[tuple[str, str, str]]) -> None:
    sections: dict[str, list[tuple[str, str]]] = {}
    for heading, name, text in rows:
        sections.setdefault(heading, []).append((name, text))
    for heading, lines in sections.items():
        with formatter.section(heading):
            formatter.write_dl(lines)
