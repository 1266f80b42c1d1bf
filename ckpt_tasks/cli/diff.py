"""`ckpt diff`: compare two checkpoints bit for bit; say what differs, and by how much."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.cli.facts import CheckpointArgument, parse_target
from ckpt_tasks.cli.ls import title
from ckpt_tasks.cli.output import JsonOption, Output, output, printable, reading, table
from ckpt_tasks.report.words import count, number
from ckpt_tasks.storage.port import WatchedStore

if TYPE_CHECKING:
    from rich.table import Table

    from ckpt_tasks.copying.compare import Comparison, Difference
    from ckpt_tasks.format.ledger import Checkpoint
    from ckpt_tasks.reading.reading import Run

__all__ = ["diff"]

_SHOWN = 24
AllOption = Annotated[bool, typer.Option("--all", help=f"List every difference, not only the first {_SHOWN}.")]


def diff(a: CheckpointArgument, b: CheckpointArgument, every: AllOption = False, as_json: JsonOption = False) -> None:
    """Compare the states of two checkpoints bit for bit.

    Exits with 0 if they are equal, 1 if they differ, 2 if one cannot be read. They may belong to two runs. Every bit
    of every tensor counts (NaN payloads, the sign of zero), and every plain value; random streams are part of it.
    """
    with output(as_json, trouble=2) as out:
        sides = parse_target(a).find(), parse_target(b).find()
        comparison = _compare(out, *sides)
        out.data(_facts(comparison, *sides))
        if not as_json:
            _print(out, comparison, sides, every)
        if not comparison.equal:
            out.fail()


def _compare(out: Output, a: tuple[Run, Checkpoint], b: tuple[Run, Checkpoint]) -> Comparison:
    from ckpt_tasks.copying.compare import compare_checkpoints

    with reading(out, "comparing", a[1].size_bytes + b[1].size_bytes) as on_progress:
        stores = [WatchedStore(run.history.store, on_progress) for run, _ in (a, b)]
        return compare_checkpoints(stores[0], a[1], stores[1], b[1])


def _facts(comparison: Comparison, a: tuple[Run, Checkpoint], b: tuple[Run, Checkpoint]) -> dict[str, Any]:
    sides = {
        name: {"checkpoint_dir": run.history.store.url, "step": c.step, "manifest_digest": c.manifest_digest}
        for name, (run, c) in (("a", a), ("b", b))
    }
    return {
        "equal": comparison.equal,
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
