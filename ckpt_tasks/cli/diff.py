"""`ckpt diff`: are two checkpoints equal bit for bit, and if not, in what and by how much."""

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

    Exits with 0 if they are equal, 1 if they differ and 2 if one cannot be read. The two may be of two runs. Every
    bit of every tensor counts (NaN payloads, the sign of zero), and so does every plain value, random streams included.
    """
    with output(as_json, trouble=2) as out:
        sides = parse_target(a).find(), parse_target(b).find()
        found = _compare(out, *sides)
        out.data(_facts(found, *sides))
        if not as_json:
            _print(out, found, sides, every)
        if not found.equal:
            out.fail()


def _compare(out: Output, a: tuple[Run, Checkpoint], b: tuple[Run, Checkpoint]) -> Comparison:
    from ckpt_tasks.copying.compare import compare_checkpoints

    with reading(out, "comparing", a[1].size_bytes + b[1].size_bytes) as on_progress:
        stores = [WatchedStore(run.history.store, on_progress) for run, _ in (a, b)]
        return compare_checkpoints(stores[0], a[1], stores[1], b[1])


def _facts(found: Comparison, a: tuple[Run, Checkpoint], b: tuple[Run, Checkpoint]) -> dict[str, Any]:
    sides = {
        name: {"checkpoint_dir": run.history.store.url, "step": c.step, "manifest_digest": c.manifest_digest}
        for name, (run, c) in (("a", a), ("b", b))
    }
    return {
        "equal": found.equal,
        **sides,
        "groups": {name: asdict(compared) for name, compared in found.groups.items()},
        "differences": [asdict(difference) for difference in found.differences],
    }


def _print(
    out: Output, found: Comparison, sides: tuple[tuple[Run, Checkpoint], tuple[Run, Checkpoint]], every: bool
) -> None:
    from rich.text import Text

    for name, (run, checkpoint) in zip("AB", sides, strict=True):
        out.print(Text.assemble((f"{name}  ", "dim"), title(run, f" step {checkpoint.step}")))
    out.print(_summary(found))
    if not found.equal:
        out.print(*_listing(found.differences if every else found.differences[:_SHOWN]))
        if len(found.differences) > _SHOWN and not every:
            out.print(Text(f"… and {len(found.differences) - _SHOWN} more (--all)\n", style="dim"))
    tensors = count(sum(group.tensors for group in found.groups.values()), "tensor")
    values = count(sum(group.values for group in found.groups.values()), "plain value")
    if found.equal:
        out.print(Text.assemble(("Equal bit for bit", "bold green"), f": {tensors}, {values}."))
    else:
        places = count(len({difference.place for difference in found.differences}), "place")
        out.print(Text.assemble(("Different", "bold red"), f" in {places}, of {tensors} and {values}."))


def _summary(found: Comparison) -> Any:
    made = table("group", "tensors", "plain values", "", right=("tensors", "plain values"))
    for name, compared in found.groups.items():
        places = {d.place for d in found.differences if d.place.partition("/")[0] == name}
        result = f"{count(len(places), 'place')} differ{'s' if len(places) == 1 else ''}" if places else "equal"
        made.add_row(name, _count(compared.tensors), _count(compared.values), result, style="" if places else "dim")
    return made


def _listing(differences: tuple[Difference, ...]) -> list[Table]:
    """Return the tensors that differ in values, and then everything else: their columns have little in common."""
    tensors = table("tensor", "elements that differ", "by at most", right=("elements that differ", "by at most"))
    others = table("place", "differs in", "A", "B", "by", right=("by",))
    for one in differences:
        if one.elements is not None:
            tensors.add_row(printable(one.place), f"{one.differing:,} of {one.elements:,}", _apart(one))
        else:
            others.add_row(printable(one.place), one.what, printable(one.a), printable(one.b), _apart(one))
    return [made for made in (tensors, others) if made.row_count]


def _apart(one: Difference) -> str:
    measured = "" if one.max_abs is None else number(one.max_abs)
    return " ".join(part for part in (measured, f"({one.unmeasured:,} NaN)" if one.unmeasured else "") if part)


def _count(many: int) -> str:
    return f"{many:,}" if many else ""
