"""`ckpt fork`: begin a new run from any checkpoint of another run, with changed parameters."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.cli.facts import CheckpointArgument, parse_target, written
from ckpt_tasks.cli.output import JsonOption, Output, from_here, output, reading
from ckpt_tasks.cli.settings import ckpt_command
from ckpt_tasks.cli.sync import SingleOption, print_unleased
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.report.words import printable, size, span

if TYPE_CHECKING:
    from ckpt_tasks.copying.fork import ForkPlan, Moved
    from ckpt_tasks.reading.reading import Run
    from ckpt_tasks.storage.port import Store

__all__ = ["fork"]

ToArgument = Annotated[str, typer.Argument(metavar="TO", help="the new run directory", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="a parameter of the program to change; the value as JSON has it"),
]
KeyOption = Annotated[
    str | None, typer.Option("--run-key", metavar="KEY", help="key of the new run [default: the last part of TO]")
]


def fork(
    checkpoint: CheckpointArgument,
    to: ToArgument,
    *,
    changes: SetOption = None,
    run_key: KeyOption = None,
    single_writer: SingleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Begin a new run from a checkpoint of another one.

    In one file system nothing is copied: the new run gets hard links. In one S3 store the server copies. Otherwise
    every byte is sent and verified. Afterwards the runs are independent: either may be pruned or deleted. After an
    interruption, give the same command again.
    """
    with output(as_json) as out:
        changed = parse_changes(changes or [])
        wanted = parse_target(checkpoint)
        run = wanted.open()
        _check_changes(run, changed)
        from ckpt_tasks.copying.fork import find_source, plan_fork, run_fork
        from ckpt_tasks.storage.locations import Location

        place = Location(to).resolve(run_key)
        target, began = place.open(), time.monotonic()
        chosen = find_source(run, wanted.which, target)
        planned = plan_fork(run, chosen, target, changed, run_key)
        with reading(out, "copying", chosen.size_bytes) as on_progress:
            moved = run_fork(
                run, target, planned, single_writer=single_writer or place.single_writer, on_progress=on_progress
            )
        took_s = time.monotonic() - began
        out.data({**_facts(planned, target, moved, took_s), "leased": not run.read_only})
        if not as_json:
            _print(out, planned, target, moved, took_s)
            out.print_next(*next_steps(planned, target.url, run.head().state.program))
            print_unleased(out, run)


def _check_changes(run: Run, changed: Mapping[str, Any]) -> None:
    """Raise ConfigError if a plain loop trains the run: nothing would apply the changes after a restore."""
    state = run.head().state
    if changed and state.program is None and state.params is None:
        raise ConfigError(
            "--set changes parameters of a program, and no flow has recorded one for this run",
            hint="Fork without --set and change the values in your own loop, after its restore.",
        )


def parse_changes(changes: Sequence[str]) -> dict[str, Any]:
    """Read NAME=VALUE texts; a value that is not JSON is a string.

    Raises ConfigError for a bad name, a name that is given twice, and a value such as True or .5, which JSON writes
    otherwise: a string instead of a number would be noticed late.
    """
    parsed: dict[str, Any] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"{change!r:.100} changes no parameter", hint="Write --set lr=1e-4, a plain name.")
        if name in parsed:
            raise ConfigError(f"the parameter {name!r} is set twice")
        parsed[name] = _value(name, text)
    return parsed


def _value(name: str, text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_no_constant)
        json.dumps(value, allow_nan=False)  # 1e999 is read as an infinity
    except (ValueError, RecursionError):
        if text in ("True", "False", "None") or _is_number(text):
            hint = "Write 0.1, 1000, true, false or null; a text that looks like one in quotes: name='\"True\"'."
            raise ConfigError(f"{name}={text!r:.80} is not a value that JSON knows", hint=hint) from None
        return text
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _facts(planned: ForkPlan, target: Store, moved: Moved, took_s: float) -> dict[str, Any]:
    origin, checkpoint = planned.origin, planned.checkpoint
    return {
        "from": origin.url,
        "from_run_key": origin.run_key,
        "to": target.url,
        "run_key": planned.run_key,
        "step": checkpoint.step,
        "manifest_digest": checkpoint.manifest_digest,
        "set": dict(origin.set),
        "params": None if planned.params is None else dict(planned.params),
        "size_bytes": checkpoint.size_bytes,
        **moved._asdict(),
        "took_s": round(took_s, 3),
    }


def _print(out: Output, planned: ForkPlan, target: Store, moved: Moved, took_s: float) -> None:
    from rich.table import Table
    from rich.text import Text

    origin = planned.origin
    facts = Table.grid(padding=(0, 3))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    lines = [
        ("from", f"{origin.run_key}  {origin.url}"),
        ("to", f"{planned.run_key}  {target.url}"),
        ("step", str(origin.step)),
        ("bytes", _ways(moved)),
        ("took", span(took_s)),
    ]
    for name, value in lines:
        facts.add_row(name, printable(value))
    before = origin.params or {}
    for name, value in origin.set.items():
        was = f" (was {written(before[name])})" if name in before else ""
        facts.add_row("set", printable(f"{name} = {written(value)}{was}"))
    done = "There already" if planned.done else "Forked"
    out.print(facts, "", Text.assemble((done, "bold green"), ". The two runs stand alone now: either may be deleted."))


def _ways(moved: Moved) -> str:
    ways = (
        (moved.linked_bytes, "in files of both runs"),
        (moved.copied_bytes, "copied by the store: `ckpt verify` reads them"),
        (moved.sent_bytes, "sent, every byte verified"),
        (moved.found_bytes, "lay there already"),
    )
    return ", ".join(f"{size(size_bytes)} {way}" for size_bytes, way in ways if size_bytes) or "none"


def next_steps(planned: ForkPlan, url: str, program: str | None) -> tuple[str, ...]:
    """Return the commands that train and show the new run; `program` is None if a plain loop trains it."""
    place = from_here(url)
    chosen = [] if place == f"runs/{planned.run_key}" else ["--checkpoint-dir", place]
    steps = str(2 * planned.checkpoint.step)  # without it, the default may be fewer than the run has
    training = [ckpt_command(), "train", program or "", "--steps", steps, "--run-key", planned.run_key, *chosen]
    loop = f"your loop, with CheckpointConfig(checkpoint_dir={place!r})"
    return (shlex.join(training) if program else loop, shlex.join([ckpt_command(), "show", place]))
