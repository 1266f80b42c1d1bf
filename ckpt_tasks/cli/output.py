"""The output of a verb: texts and tables, or JSON, and errors in the same form.

A `Column` is declared once, for the table on a terminal and for the rows of --json.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from ckpt_tasks.errors import CkptError, ConfigError, SiteError
from ckpt_tasks.format.parsing import finite_json
from ckpt_tasks.run.report.words import HEADER_STYLE, plain_table, printable, size, span

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from ckpt_tasks.checkpoint.restore.reading import Run

_HEAD_BYTES = 4096
_NAMED = 5  # So many columns that are not shown are named.


def write_file(place: Path, text: str, *, what: str, option: str, is_ours: Callable[[bytes], bool]) -> None:
    """Write a file under a temporary name and rename it to `place`.

    Replaces an existing file only if `is_ours` returns True for its first bytes. Raises ConfigError if `place` holds
    any other file, a link, a directory, a pipe or a device, and if the system refuses; the error names the kind of file
    (`what`) and the `option` that chooses another path.
    """
    hint = f"Name another file with {option}."
    if not place.name:
        raise ConfigError(f"{str(place)!r} is not the name of a file", hint=hint)
    temporary = place.with_name(f".{place.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        head = _head(place)
        if head is None or not is_ours(head):
            raise ConfigError(f"{place} exists, is no {what}, and is not replaced", hint=hint)
        try:
            with temporary.open("x", encoding="utf-8") as file:
                file.write(text)
            temporary.replace(place)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
    except OSError as error:
        raise ConfigError(f"the {what} cannot be written: {error}", hint=hint) from error


def _head(place: Path) -> bytes | None:
    """Return the first bytes of a regular file, b"" if nothing has the name, None for anything else."""
    try:
        status = place.lstat()
    except FileNotFoundError:
        return b""
    if not stat.S_ISREG(status.st_mode):
        return None
    with open(place, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        return file.read(_HEAD_BYTES)


# A store must answer the first request within this time; later requests are retried through longer outages.
_FIRST_ANSWER_S = 15.0
_LONGEST_WORD = 20
_FILE_COLUMNS = 200  # The width of a file or a pipe, in which a search must find whole names.


class Output:
    """Prints a verb's answer; `fail()` makes the exit status 1."""

    def __init__(self, as_json: bool):
        self.as_json = as_json
        self.failed = False

    def fail(self, failed: bool = True) -> None:
        """Make the verb exit with status 1 if `failed`."""
        self.failed |= failed

    def answer(self, facts: Mapping[str, Any] | Callable[[], Mapping[str, Any]], parts: Iterable[Any] = ()) -> None:
        """Print the facts as one JSON object if --json was given, else the parts, as `print` does.

        Facts that take long to make are given as a function, which is called for --json only.
        """
        if self.as_json:
            with writing():
                typer.echo(json.dumps(finite_json(facts() if callable(facts) else facts), indent=2))
        else:
            self.print(*parts)

    def print(self, *parts: Any) -> None:
        """Print texts and tables unless --json was given; texts wrap at words, and names are never cut.

        A part is a text, a text with its style, a list of such pieces for one line, or an object that rich can print.
        """
        if not self.as_json:
            screen = console()
            with writing():
                for part in parts:
                    screen.print(_with_whole_words(rendered(part), screen))

    def print_next(self, *commands: str) -> None:
        """Print commands to type next, each on one line: a wrapped command cannot be copied."""
        if not self.as_json:
            screen = console()
            with writing():
                for line in ("Next:", *(f"  {printable(command)}" for command in commands)):
                    screen.print(line, soft_wrap=True)


def rendered(part: Any) -> RenderableType:
    """Turn texts with styles into rich's Text with control characters escaped; return any other part unchanged."""
    from rich.text import Text

    if isinstance(part, str | tuple):
        part = [part]
    if not isinstance(part, list):
        shown: RenderableType = part
        return shown
    pieces = [(piece, "") if isinstance(piece, str) else piece for piece in part]
    return Text.assemble(*(("\n".join(map(printable, text.split("\n"))), style) for text, style in pieces))


def title(run: Run, which: str = "") -> list[Any]:
    """Return the pieces of a title line: the run's key, `which` (such as a step), and the run's URL."""
    return [(f"{run.run_key or 'run of unknown key'}{which}", "bold"), "  ", (run.history.store.url, "dim")]


def first(lines: Sequence[str], most: int, option: str = "--json") -> list[str]:
    """Return the first `most` lines; if there are more, a last line counts them and names the `option` to see all."""
    more = [f"… and {len(lines) - most} more ({option})"] if len(lines) > most else []
    return [*lines[:most], *more]


@contextmanager
def writing() -> Iterator[None]:
    """Raise ConfigError if stdout cannot be written (a full disk); typer handles a closed pipe."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"the answer cannot be written: {error.strerror}", hint="Send it elsewhere.") from error


def from_here(path: str) -> str:
    """Return a relative path if a path is below the working directory; return any other path or URL unchanged."""
    place = Path(path)
    return str(place.relative_to(Path.cwd())) if place.is_relative_to(Path.cwd()) else path


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints texts unchanged: brackets in a name are not markup."""
    from rich.console import Console

    made = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _FILE_COLUMNS
    return made


@contextmanager
def output(as_json: bool, *, error_exit: int = 1) -> Iterator[Output]:
    """Yield a verb's output; print a CkptError in one line on stderr (JSON: on stdout), and exit with `error_exit`."""
    from ckpt_tasks.storage.locations import first_answer_s

    limit = first_answer_s.set(_FIRST_ANSWER_S)
    try:
        with _only_our_log(), report_errors(as_json, error_exit=error_exit) as out:
            yield out
    finally:
        first_answer_s.reset(limit)
    if out.failed:
        raise typer.Exit(1)


@contextmanager
def report_errors(as_json: bool, *, error_exit: int = 1) -> Iterator[Output]:
    """Report errors as `output` does, for a verb that trains: change neither the time limit of stores nor the logs."""
    out = Output(as_json)
    try:
        yield out
    except CkptError as error:
        print_error(error, out)
        raise typer.Exit(error_exit) from error


@contextmanager
def _only_our_log() -> Iterator[None]:
    """Show only the logs of ckpt_tasks: an error of another package reaches the user in one of our messages."""
    ours, silence, shown = logging.getLogger("ckpt_tasks"), logging.NullHandler(), logging.StreamHandler()
    logging.getLogger().addHandler(silence)
    ours.addHandler(shown)
    try:
        yield
    finally:
        ours.removeHandler(shown)
        logging.getLogger().removeHandler(silence)


def widest_listing(make: Callable[[int], Table], metrics: Sequence[str], fewest: int, most: int) -> list[Any]:
    """Return the table with as many metrics as fit on the screen without breaking a word, at least `fewest`.

    `make` returns the table for a number of metrics. A line below names some of the omitted metrics.
    """
    screen, shown = console(), max(fewest, min(len(metrics), most))
    while not _fits(made := make(shown), screen) and shown > fewest:
        shown -= 1
    left_out = [*metrics[shown : shown + _NAMED], *(["…"] if len(metrics) > shown + _NAMED else [])]
    said = f"Not shown: {', '.join(left_out)}; --metrics NAME,NAME chooses."
    return [made, (said, "dim")] if left_out else [made]


class Column(NamedTuple):
    """A column: its key in --json (None: only for people), its heading in a terminal (None: only in --json), its value.

    `words` writes the value for people. `numbers` are right-aligned; columns of `numbers` and `whole` columns do not
    wrap.
    """

    key: str | None
    heading: str | None
    value: Callable[[Any], Any]
    words: Callable[[Any], Any] = str
    numbers: bool = False
    whole: bool = False


def column(heading: str, value: str | Callable[[Any], Any], words: Callable[[Any], Any] = str, **how: Any) -> Column:
    """Return a column that --json leaves out; `value` may be the name of an attribute."""
    return Column(None, heading, attrgetter(value) if isinstance(value, str) else value, words, **how)


def row_facts(columns: Sequence[Column], rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the rows as --json prints them."""
    return [{one.key: one.value(row) for one in columns if one.key is not None} for row in rows]


def listing(columns: Sequence[Column], rows: Iterable[Any] = (), style: Callable[[Any], str] | None = None) -> Table:
    """Make a table in the common style, with control characters escaped; `style` returns the style of a row."""
    made, shown = plain_table(), [one for one in columns if one.heading is not None]
    for one in shown:
        kept = one.numbers or one.whole
        made.add_column(
            rendered(one.heading or ""), justify="right" if one.numbers else "left", no_wrap=kept, overflow="fold"
        )
    for row in rows:
        cells = (one.words(one.value(row)) for one in shown)
        texts = (rendered(cell) if isinstance(cell, str | tuple) else cell for cell in cells)
        made.add_row(*texts, style=style(row) if style else "")
    return made


def grid(lines: Iterable[tuple[str, ...]]) -> Table:
    """Make a table of names and values without headings; the third item of a line is the line's style."""
    from rich.table import Table

    made = Table.grid(padding=(0, 3))
    made.add_column(style="dim")
    made.add_column(overflow="fold")
    for name, value, *style in lines:
        made.add_row(name, rendered(value), style="".join(style))
    return made


def _with_whole_words(part: RenderableType, screen: Console) -> RenderableType:
    """Keep every column as wide as its longest word if the screen has room."""
    from rich.table import Table

    if isinstance(part, Table) and part.header_style == HEADER_STYLE and not _fits(part, screen):
        for column in part.columns:
            column.min_width = None
    return part


def _fits(made: Table, screen: Console) -> bool:
    """Give each wrapping column the width of its longest word, up to 20; return True if the table then fits."""
    from rich.measure import Measurement

    narrowest = plain_table()  # Rich measures its only row, instead of each cell of a long table.
    for column in made.columns:
        cells = [str(cell) for cell in (column.header, *column.cells)]
        pieces = [piece for cell in cells for piece in (cell.splitlines() if column.no_wrap else cell.split())]
        longest = max(map(len, pieces), default=0)
        column.min_width = longest if column.no_wrap else min(longest, _LONGEST_WORD)
        narrowest.add_column()
    narrowest.add_row(*("x" * (column.min_width or 0) for column in made.columns))
    return Measurement.get(screen, screen.options.update(max_width=1000), narrowest).minimum <= screen.width


def print_error(error: CkptError, out: Output) -> None:
    """Print an error in one line on stderr; with --json, as an object on stdout."""
    if out.as_json:
        fields = ("message", "key", "step", "hint")
        fields_of_error = {"type": type(error).__name__, **{name: getattr(error, name) for name in fields}}
        text = json.dumps({"error": fields_of_error}, indent=2)
        try:
            with writing():
                typer.echo(text)
        except ConfigError:
            typer.echo(text, err=True)
        return
    # Keep the line breaks of a SiteError, which ends with several lines of a log.
    text = str(error) if isinstance(error, SiteError) else printable(str(error))
    console(stderr=True).print(rendered([("error: ", "bold red"), text]), soft_wrap=True)


_SHOWN_AFTER_S = 0.5  # Shorter reads need no bar.


@contextmanager
def reading(out: Output, what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show progress, rate and time left while the block reads; yield a callback for the size of each read in bytes.

    The bar appears on stderr after half a second, only on a terminal, and disappears at the end.
    """
    from rich.progress import BarColumn, Progress, TextColumn

    screen = console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", style="dim"),
        BarColumn(),
        TextColumn("{task.fields[work]}"),
        console=screen,
        transient=True,
        disable=out.as_json or not screen.is_terminal,
    )
    task = bar.add_task(what, total=total_bytes, work="")
    began, done = bar.get_time(), 0

    def on_progress(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        bar.update(task, completed=done, work=_work(done, total_bytes, bar.get_time() - began))
        if not bar.live.is_started and not bar.disable and bar.get_time() - began > _SHOWN_AFTER_S:
            bar.start()

    try:
        yield on_progress
    finally:
        bar.stop()


def _work(done: int, total_bytes: int, took_s: float) -> str:
    rate = done / max(took_s, 1e-9)
    left_s = max(total_bytes - done, 0) / max(rate, 1.0)
    return f"{size(done)} of {size(total_bytes)}, {size(rate)}/s, {span(round(left_s))} left"
