"""`ckpt diff` and `verify-resume`: where two checkpoints or two trainings differ."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.cli.arguments import (
    CheckpointArgument,
    JsonOption,
    complete_group,
    option,
    parse_target,
)
from ckpt_tasks.cli.copy import parse_changes
from ckpt_tasks.cli.output import Output, column, console, listing, output, reading, title
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.run.report.words import count, number
from ckpt_tasks.storage.port import WatchedStore

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.restore.reading import Run
    from ckpt_tasks.checkpoint.transfer.comparison import Comparison, Difference
    from ckpt_tasks.cli.proving.proof import Proof
    from ckpt_tasks.format.records import Checkpoint

_VALUES_SHOWN = 5
_DIFFERENCES_SHOWN = 24
GroupOption = Annotated[
    list[str] | None,
    option("--group", "NAME", "compare only this group; may be repeated", autocompletion=complete_group),
]
IgnoreOption = Annotated[list[str] | None, option("--ignore", "NAME", "leave this group out; may be repeated")]
MetricsOption = Annotated[bool, option("--metrics", None, "also compare metrics and evaluations")]
DifferencesOption = Annotated[
    bool, option("--all", None, f"list every difference, not only the first {_DIFFERENCES_SHOWN}")
]

# ── diff ─────────────────────────────────────────────────────────────────────────────────────────────────────────

Sides = tuple[tuple["Run", "Checkpoint"], tuple["Run", "Checkpoint"]]
Measured = Mapping[str, tuple[float | None, float | None]]


def diff(
    a: CheckpointArgument,
    b: CheckpointArgument,
    *,
    group: GroupOption = None,
    ignore: IgnoreOption = None,
    metrics: MetricsOption = False,
    every: DifferencesOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the values in which two checkpoints differ.

    Exits with 0 if the checkpoints are equal, 1 if they differ, 2 if one is unreadable. They may belong to two runs.
    Compares tensors bit by bit (NaN payloads, sign of zero), plain values by value. Random streams are the group rng.
    """
    with output(as_json, error_exit=2) as out:
        sides = parse_target(a).find(), parse_target(b).find()
        compared = _compare(out, sides, group or [], ignore or [])
        measured = _metrics(sides) if metrics else {}
        same = compared.equal and all(_equal(*pair) for pair in measured.values())
        facts = {
            "equal": same,
            **{
                name: {"checkpoint_dir": run.history.store.url, "step": c.step, "manifest_digest": c.manifest_digest}
                for name, (run, c) in zip("ab", sides, strict=True)
            },
            "groups": {name: asdict(one) for name, one in compared.groups.items()},
            "differences": [asdict(difference) for difference in compared.differences],
        }
        if metrics:
            facts["metrics"] = {n: {"a": x, "b": y, "equal": _equal(x, y)} for n, (x, y) in measured.items()}
        of_metrics = _metric_parts(measured) if metrics else ()
        out.answer(facts, chain(_difference_parts(compared, sides, every), of_metrics))
        out.fail(not same)


def _compare(out: Output, sides: Sides, groups: list[str], ignore: list[str]) -> Comparison:
    from ckpt_tasks.checkpoint.transfer.comparison import compare_checkpoints

    (_, a), (_, b) = sides
    with reading(out, "comparing", a.size_bytes + b.size_bytes) as on_progress:
        stores = [WatchedStore(run.history.store, on_progress) for run, _ in sides]
        return compare_checkpoints(stores[0], a, stores[1], b, groups=groups, ignore=ignore)


def _metrics(sides: Sides) -> Measured:
    """Return the values in A and B (None: no value) of each metric by its name, suite/metric for an evaluation."""
    a, b = (
        {
            **checkpoint.metrics,
            **{
                f"{evaluation.suite}/{name}": value
                for evaluation in run.evaluations()
                if evaluation.manifest_digest == checkpoint.manifest_digest
                for name, value in evaluation.metrics.items()
            },
        }
        for run, checkpoint in sides
    )
    return {name: (a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b))}


def _equal(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))


def _apart(difference: Difference) -> str:
    measured = "" if difference.max_abs is None else number(difference.max_abs)
    return " ".join(filter(None, (measured, f"({difference.unmeasured:,} NaN)" if difference.unmeasured else "")))


_TENSORS = (
    column("tensor", "place"),
    column("elements that differ", lambda one: f"{one.differing:,} of {one.elements:,}", numbers=True),
    column("by at most", _apart, numbers=True),
)
_OTHERS = (
    column("place", "place"),
    column("differs in", "what"),
    column("A", "a"),
    column("B", "b"),
    column("by", _apart, numbers=True),
)
_METRICS = (
    column("metric", itemgetter(0)),
    column("A", lambda row: _number(row[1][0]), numbers=True),
    column("B", lambda row: _number(row[1][1]), numbers=True),
    column(
        "B - A", lambda row: _number(None if None in row[1] or _equal(*row[1]) else row[1][1] - row[1][0]), numbers=True
    ),
)


def _number(value: float | None) -> str:
    return "" if value is None else number(value)


def _difference_parts(compared: Comparison, sides: Sides, every: bool) -> Iterator[Any]:
    for name, (run, checkpoint) in zip("AB", sides, strict=True):
        yield [(f"{name}  ", "dim"), *title(run, f" step {checkpoint.step}")]
    differences = compared.differences
    places: dict[str, set[str]] = {}
    for difference in differences:
        places.setdefault(difference.place.partition("/")[0], set()).add(difference.place)
    yield listing(
        (
            column("group", itemgetter(0)),
            column("tensors", lambda row: f"{row[1].tensors:,}" if row[1].tensors else "", numbers=True),
            column("plain values", lambda row: f"{row[1].values:,}" if row[1].values else "", numbers=True),
            column("", lambda row: _differ(len(places.get(row[0], ())))),
        ),
        compared.groups.items(),
        lambda row: "" if row[0] in places else "dim",
    )
    # Differences in the values of tensors have a table of their own, since they need other columns.
    shown = differences if every else differences[:_DIFFERENCES_SHOWN]
    for columns, of_tensors in ((_TENSORS, True), (_OTHERS, False)):
        if rows := [one for one in shown if (one.elements is not None) == of_tensors]:
            yield listing(columns, rows)
    if len(shown) < len(differences):
        yield f"… and {len(differences) - len(shown)} more (--all)\n", "dim"
    tensors = count(sum(group.tensors for group in compared.groups.values()), "tensor")
    values = count(sum(group.values for group in compared.groups.values()), "plain value")
    if compared.equal:
        yield [("Equal bit for bit", "bold green"), f": {tensors}, {values}."]
        return
    where = count(sum(map(len, places.values())), "place")
    yield [("Different", "bold red"), f" in {where}, of {tensors} and {values}."]
    if {*places} == {"rng"}:
        yield "Only random streams differ, as those that are never seeded do: --ignore rng compares the rest."


def _metric_parts(measured: Measured) -> Iterator[Any]:
    if not measured:
        yield "Neither has a metric."
        return
    yield listing(_METRICS, measured.items(), lambda row: "dim" if _equal(*row[1]) else "")
    wrong, metrics = sum(not _equal(a, b) for a, b in measured.values()), count(len(measured), "metric")
    if wrong:
        yield [("Different", "bold red"), f" in {wrong} of {metrics}."]
    else:
        yield [("Equal", "bold green"), f": {metrics}."]


def _differ(places: int) -> str:
    return f"{count(places, 'place')} differ{'s' if places == 1 else ''}" if places else "equal"


# ── verify-resume ────────────────────────────────────────────────────────────────────────────────────────────────


def verify_resume(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="MODULE:PROGRAM | -- COMMAND…", help="a program, as `ckpt train` takes it; or a command"
        ),
    ],
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="how many steps to train a program [default: 12]")
    ] = None,
    params: Annotated[
        list[str] | None,
        typer.Option("--param", metavar="NAME=VALUE", help="a parameter of the program; the value as JSON has it"),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="train a program on as many processes of this host [default: 1]")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a program twice, kill and resume one, compare.

    One training runs without a break. The other is killed (SIGKILL) and resumed twice, each time in a new process.
    Compares the state, the metrics and the random streams value by value after every step, and the evaluation "quick"
    at the end. Exits with 1 if a value differs, and names the first such value and the likely cause.

    Instead of a program, give the command of your own script with a Checkpointer: `ckpt verify-resume -- python
    train.py --dir {run}`. {run} in the command, or the environment variable CKPT_RUN, gives the script the directory of
    its run. Compares the metrics of every step and the whole last checkpoint.
    """
    with output(as_json) as out:
        with console(stderr=True).status("") as shown:
            proof = _proof(program, steps, params or [], ranks, lambda doing: shown.update(f"Training {doing} …"))
        out.answer({"good": proof.good, **asdict(proof)}, _words(proof, program))
        out.fail(proof.difference is not None)


def _words(proof: Proof, program: list[str]) -> Iterator[str]:
    of_program, killed = _is_program(program), " and ".join(map(str, proof.killed_within))
    when = "killed within steps" if of_program else "killed after the commits of steps"
    yield f"{shlex.join(program)}: {proof.steps} steps, {when} {killed}, resumed twice."
    if proof.difference is None:
        what = "Every step is" if of_program else "Metrics of all steps and the last checkpoint are"
        streams = "all streams" if of_program else "torch's streams"
        yield f"{what} equal bit for bit: {proof.values} values of state and metrics, and {streams}."
        if proof.outside:
            changed = f"Not in the state, and changed by a resume: {', '.join(proof.outside)}. "
            yield f"{changed}If an evaluation, a later step or the end reads it, put it into the state."
        return
    one = proof.difference
    more = f" and {len(one.what) - _VALUES_SHOWN} more" if len(one.what) > _VALUES_SHOWN else ""
    when = ("before any kill", "after the first resume", "after the second resume")[one.after_kills]
    yield f"Different from step {one.step} on, {when}: {', '.join(one.what[:_VALUES_SHOWN])}{more}."
    yield f"Likely cause: {one.cause}."


def _proof(
    program: list[str], steps: int | None, params: list[str], ranks: int | None, say: Callable[[str], object]
) -> Proof:
    if _is_program(program):
        from ckpt_tasks.cli.proving.proof import prove_resume

        given = {k: n for k, n in (("steps", steps), ("ranks", ranks)) if n is not None}
        return prove_resume(program[0], parse_changes(params), say=say, **given)
    if steps is not None or ranks is not None or params:
        raise ConfigError(
            "--steps, --param and --ranks are for a program", hint="Give a command its own options, after the --."
        )
    from ckpt_tasks.cli.proving.script import verify_script

    return verify_script(program, say)


def _is_program(words: list[str]) -> bool:
    """Return True for MODULE:PROGRAM; a command has several words, or its only word is an executable file."""
    return len(words) == 1 and shutil.which(words[0]) is None
