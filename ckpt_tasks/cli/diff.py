"""`ckpt diff`: compare two checkpoints bit for bit; say what differs, and by how much."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.cli.facts import CheckpointArgument, parse_target
from ckpt_tasks.cli.ls import title
from ckpt_tasks.cli.output import JsonOption, Output, output, reading, table
from ckpt_tasks.report.words import count, number, printable
from ckpt_tasks.storage.port import WatchedStore

if TYPE_CHECKING:
    from rich.table import Table

    from ckpt_tasks.copying.compare import Comparison, Difference
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.reading.reading import Run

__all__ = ["diff"]

_SHOWN = 24
AllOption = Annotated[bool, typer.Option("--all", help=f"list every difference, not only the first {_SHOWN}")]


GroupOption = Annotated[
    list[str] | None, typer.Option("--group", metavar="NAME", help="compare only this group; may be repeated")
]
IgnoreOption = Annotated[
    list[str] | None, typer.Option("--ignore", metavar="NAME", help="leave this group out; may be repeated")
]
MetricsOption = Annotated[bool, typer.Option("--metrics", help="also compare metrics and evaluations")]

Side = tuple["Run", "Checkpoint"]


def diff(
    a: CheckpointArgument,
    b: CheckpointArgument,
    *,
    group: GroupOption = None,
    ignore: IgnoreOption = None,
    metrics: MetricsOption = False,
    every: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the states of two checkpoints bit for bit.

    Exits with 0 if they are equal, 1 if they differ, 2 if one cannot be read. They may belong to two runs. Every bit
    of every tensor counts (NaN payloads, the sign of zero), and every plain value. Random streams are the group rng.
    """
    with output(as_json, error_exit=2) as out:
        sides = parse_target(a).find(), parse_target(b).find()
        comparison = _compare(out, *sides, group or [], ignore or [])
        measured = _metrics(sides) if metrics else {}
        same = comparison.equal and all(_equal(*pair) for pair in measured.values())
        out.data({"equal": same, **_facts(comparison, *sides), **({"metrics": _sides(measured)} if metrics else {})})
        if not as_json:
            _print(out, comparison, sides, every)
            if metrics:
                _print_metrics(out, measured)
        if not same:
            out.fail()


def _compare(out: Output, a: Side, b: Side, groups: list[str], ignore: list[str]) -> Comparison:
    from ckpt_tasks.copying.compare import compare_checkpoints

    with reading(out, "comparing", a[1].size_bytes + b[1].size_bytes) as on_progress:
        stores = [WatchedStore(run.history.store, on_progress) for run, _ in (a, b)]
        return compare_checkpoints(stores[0], a[1], stores[1], b[1], groups=groups, ignore=ignore)


def _metrics(sides: tuple[Side, Side]) -> dict[str, tuple[float | None, float | None]]:
    """Return (A, B) of each metric by name, those of evaluations as suite/metric; None if a side has none."""
    a, b = (_metrics_of(*side) for side in sides)
    return {name: (a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b))}


def _metrics_of(run: Run, checkpoint: Checkpoint) -> dict[str, float]:
    evaluated = (
        evaluation for evaluation in run.evaluations() if evaluation.manifest_digest == checkpoint.manifest_digest
    )
    metrics = {
        f"{evaluation.suite}/{name}": value for evaluation in evaluated for name, value in evaluation.metrics.items()
    }
    return {**checkpoint.metrics, **metrics}


def _equal(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))


def _sides(measured: Mapping[str, tuple[float | None, float | None]]) -> dict[str, Any]:
    return {name: {"a": a, "b": b, "equal": _equal(a, b)} for name, (a, b) in measured.items()}


def _facts(comparison: Comparison, a: tuple[Run, Checkpoint], b: tuple[Run, Checkpoint]) -> dict[str, Any]:
    sides = {
        name: {"checkpoint_dir": run.history.store.url, "step": c.step, "manifest_digest": c.manifest_digest}
        for name, (run, c) in (("a", a), ("b", b))
    }
    return {
        **sides,
        "groups": {name: asdict(compared) for name, compared in comparison.groups.items()},
        "differences": [asdict(difference) for difference in comparison.differences],
    }


def _print(
    out: Output, comparison: Comparison, sides: tuple[tuple[Run, Checkpoint], tuple[Run, Checkpoint]], every: bool
) -> None:
    from rich.text import Text

    for name, (run, checkpoint) in zip("AB", sides, strict=True):
        out.print(Text.assemble((f"{name}  ", "dim"), title(run, f" step {checkpoint.step}")))
    out.print(_summary(comparison))
    if not comparison.equal:
        out.print(*_listing(comparison.differences if every else comparison.differences[:_SHOWN]))
        if len(comparison.differences) > _SHOWN and not every:
            out.print(Text(f"… and {len(comparison.differences) - _SHOWN} more (--all)\n", style="dim"))
    tensors = count(sum(group.tensors for group in comparison.groups.values()), "tensor")
    values = count(sum(group.values for group in comparison.groups.values()), "plain value")
    if comparison.equal:
        out.print(Text.assemble(("Equal bit for bit", "bold green"), f": {tensors}, {values}."))
    else:
        places = count(len({difference.place for difference in comparison.differences}), "place")
        out.print(Text.assemble(("Different", "bold red"), f" in {places}, of {tensors} and {values}."))
        if all(difference.place.startswith("rng/") for difference in comparison.differences):
            out.print("Only random streams differ, as those that are never seeded do: --ignore rng compares the rest.")


def _print_metrics(out: Output, measured: Mapping[str, tuple[float | None, float | None]]) -> None:
    from rich.text import Text

    if not measured:
        out.print("Neither has a metric.")
        return
    made = table("metric", "A", "B", "B - A", right=("A", "B", "B - A"))
    for name, (a, b) in measured.items():
        apart = "" if a is None or b is None or _equal(a, b) else number(b - a)
        shown = ("" if value is None else number(value) for value in (a, b))
        made.add_row(printable(name), *shown, apart, style="dim" if _equal(a, b) else "")
    out.print(made)
    wrong = sum(not _equal(a, b) for a, b in measured.values())
    if wrong:
        out.print(Text.assemble(("Different", "bold red"), f" in {wrong} of {count(len(measured), 'metric')}."))
    else:
        out.print(Text.assemble(("Equal", "bold green"), f": {count(len(measured), 'metric')}."))


def _summary(comparison: Comparison) -> Any:
    made = table("group", "tensors", "plain values", "", right=("tensors", "plain values"))
    for name, compared in comparison.groups.items():
        places = {d.place for d in comparison.differences if d.place.partition("/")[0] == name}
        result = f"{count(len(places), 'place')} differ{'s' if len(places) == 1 else ''}" if places else "equal"
        made.add_row(name, _count(compared.tensors), _count(compared.values), result, style="" if places else "dim")
    return made


def _listing(differences: tuple[Difference, ...]) -> list[Table]:
    """Return one table of tensors whose values differ, and one of everything else: they need different columns."""
    tensors = table("tensor", "elements that differ", "by at most", right=("elements that differ", "by at most"))
    others = table("place", "differs in", "A", "B", "by", right=("by",))
    for difference in differences:
        if difference.elements is not None:
            tensors.add_row(
                printable(difference.place), f"{difference.differing:,} of {difference.elements:,}", _apart(difference)
            )
        else:
            others.add_row(
                printable(difference.place),
                difference.what,
                printable(difference.a),
                printable(difference.b),
                _apart(difference),
            )
    return [made for made in (tensors, others) if made.row_count]


def _apart(difference: Difference) -> str:
    measured = "" if difference.max_abs is None else number(difference.max_abs)
    return " ".join(
        part for part in (measured, f"({difference.unmeasured:,} NaN)" if difference.unmeasured else "") if part
    )


def _count(many: int) -> str:
    return f"{many:,}" if many else ""
