"""What a verb prints: tables, or JSON; errors in the same form."""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.errors import CkptError, ConfigError, SiteError
from ckpt_tasks.report.words import HEADER_STYLE, plain_table, printable, size, span

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

__all__ = [
    "JsonOption",
    "Output",
    "console",
    "finite",
    "from_here",
    "output",
    "reading",
    "report_errors",
    "table",
    "widest_listing",
    "write_file",
]

_HEAD_BYTES = 4096


def write_file(place: Path, text: str, *, what: str, option: str, is_ours: Callable[[bytes], bool]) -> None:
    """Write a file under a temporary name and rename it to `place`.

    An existing file is replaced only if `is_ours(its first bytes)`. Raises ConfigError for any other file, a link, a
    directory, a pipe or a device at `place`, and if the system refuses; the error names the file's kind (`what`) and
    the `option` that chooses another place.
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
    """Return the first bytes of a regular file, b"" if nothing is there, None if it is not a regular file."""
    try:
        status = place.lstat()
    except FileNotFoundError:
        return b""
    if not stat.S_ISREG(status.st_mode):
        return None
    with open(place, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        return file.read(_HEAD_BYTES)


_FIRST_ANSWER_S = 15.0  # how long the first answer of a store may take; later requests wait out longer outages
_LONGEST_WORD = 20
_FILE_COLUMNS = 200  # a file or a pipe has no width, and a folded name cannot be searched for

JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")]


class Output:
    """Print a verb's answer; `fail()` makes the exit status 1."""

    def __init__(self, as_json: bool):
        self.as_json = as_json
        self.failed = False

    def fail(self) -> None:
        """Make the verb end with exit status 1."""
        self.failed = True

    def data(self, payload: Mapping[str, Any]) -> None:
        """Print the answer as JSON if --json was given; NaN and infinity, which JSON lacks, become strings."""
        if self.as_json:
            with _writing():
                typer.echo(json.dumps(finite(payload), indent=2))

    def print(self, *parts: RenderableType) -> None:
        """Print texts and tables unless --json was given; texts wrap at words, and names are never cut."""
        if not self.as_json:
            screen = console()
            with _writing():
                for part in parts:
                    screen.print(_with_whole_words(part, screen))

    def print_next(self, *commands: str) -> None:
        """Print what to type next, each command in one line: one that is wrapped cannot be copied."""
        if not self.as_json:
            screen = console()
            with _writing():
                for line in ("Next:", *(f"  {printable(command)}" for command in commands)):
                    screen.print(line, soft_wrap=True)


@contextmanager
def _writing() -> Iterator[None]:
    """Say that the answer has no room where stdout goes; a reader that has left is typer's to treat."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"the answer cannot be written: {error.strerror}", hint="Send it elsewhere.") from error


def from_here(path: str) -> str:
    """Return a path below the working directory as a user would type it there; any other path or URL as it is."""
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
    """Yield a verb's output; print a CkptError as one line on stderr (JSON: on stdout) and exit with `error_exit`."""
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
    """Do the same as `output` for a verb that trains: with training's patience for a store, and the flow's own log."""
    out = Output(as_json)
    try:
        yield out
    except CkptError as error:
        _print_error(error, out)
        raise typer.Exit(error_exit) from error


@contextmanager
def _only_our_log() -> Iterator[None]:
    """Keep the logs of other packages off the screen; their errors reach the user as one line of ours."""
    ours, silence, shown = logging.getLogger("ckpt_tasks"), logging.NullHandler(), logging.StreamHandler()
    logging.getLogger().addHandler(silence)
    ours.addHandler(shown)
    try:
        yield
    finally:
        ours.removeHandler(shown)
        logging.getLogger().removeHandler(silence)


def widest_listing(listing: Callable[[int], Table], metrics: Sequence[str], fewest: int) -> list[RenderableType]:
    """Return the listing with as many metrics as fit the screen without breaking a word, `fewest` at least.

    `listing` makes it for a number of metrics. A line that names those left out follows.
    """
    from rich.text import Text

    screen, shown = console(), len(metrics)
    while not _fits(made := listing(shown), screen) and shown > fewest:
        shown -= 1
    left_out = ", ".join(map(printable, metrics[shown:]))
    return [made, Text(f"No room for {left_out}: --metrics NAME,NAME chooses.", style="dim")] if left_out else [made]


def table(*headings: str, right: tuple[str, ...] = (), unwrapped_columns: tuple[str, ...] = ()) -> Table:
    """Make a table in the house's style; columns in `right` hold numbers; they and `unwrapped_columns` never wrap."""
    made = plain_table()
    for heading in headings:
        numbers = heading in right
        kept = numbers or heading in unwrapped_columns
        made.add_column(heading, justify="right" if numbers else "left", no_wrap=kept, overflow="fold")
    return made


def _with_whole_words(part: RenderableType, screen: Console) -> RenderableType:
    """Keep every column as wide as its longest word if the screen has room."""
    from rich.table import Table

    if isinstance(part, Table) and part.header_style == HEADER_STYLE and not _fits(part, screen):
        for column in part.columns:
            column.min_width = None
    return part


def _fits(made: Table, screen: Console) -> bool:
    """Give each wrapping column the width of its longest word, at most 20 characters; say if the table fits then."""
    from rich.measure import Measurement

    for column in made.columns:
        cells = [str(cell) for cell in (column.header, *column.cells)]
        pieces = [piece for cell in cells for piece in (cell.splitlines() if column.no_wrap else cell.split())]
        longest = max(map(len, pieces), default=0)
        column.min_width = longest if column.no_wrap else min(longest, _LONGEST_WORD)
    return Measurement.get(screen, screen.options.update(max_width=1000), made).minimum <= screen.width


def _print_error(error: CkptError, out: Output) -> None:
    if out.as_json:
        fields = ("message", "key", "step", "hint")
        fields_of_error = {"type": type(error).__name__, **{name: getattr(error, name) for name in fields}}
        text = json.dumps({"error": fields_of_error}, indent=2)
        try:
            with _writing():
                typer.echo(text)
        except ConfigError:
            typer.echo(text, err=True)
        return
    from rich.text import Text

    lines = str(error).split("\n") if isinstance(error, SiteError) else [str(error)]  # it ends with lines of a log
    line = Text.assemble(("error: ", "bold red"), "\n".join(map(printable, lines)))
    console(stderr=True).print(line, soft_wrap=True)


def finite(value: Any) -> Any:
    """Return JSON data in which NaN and infinity, which JSON lacks, are strings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


_SHOWN_AFTER_S = 0.5  # shorter reads need no bar


@contextmanager
def reading(out: Output, what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show progress, rate and time left while the block reads; yield a callback that takes the bytes of each read.

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
