"""`ckpt show`: everything about one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.cli.facts import CheckpointArgument, lineage_facts, params_line, parse_target
from ckpt_tasks.cli.ls import title
from ckpt_tasks.cli.output import JsonOption, Output, output, table
from ckpt_tasks.format.keys import is_shard
from ckpt_tasks.report.words import age, count, number, printable, size, span, when

if TYPE_CHECKING:
    from rich.table import Table

    from ckpt_tasks.format.index import IndexRow
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.reading.opening import Opened
    from ckpt_tasks.reading.reading import Run

__all__ = ["show"]

_NOTES_SHOWN = 8
_NOTE_LETTERS = 200  # of one field: the note of an early stop has every evaluation
_OBJECTS_SHOWN = 10
_OWN_LINES = ("command", "code", "host", "accelerator")  # of what made a checkpoint


AllOption = Annotated[bool, typer.Option("--all", help=f"list every object, not only the {_OBJECTS_SHOWN} largest")]


def show(checkpoint: CheckpointArgument, *, every: AllOption = False, as_json: JsonOption = False) -> None:
    """Show what is in a checkpoint, and what made it."""
    from ckpt_tasks.reading.opening import open_checkpoint

    with output(as_json) as out:
        run, record = parse_target(checkpoint).find()
        opened = open_checkpoint(run.history.store, record)
        shown = _facts(run, record, opened)
        out.data(shown)
        if not as_json:
            _print(out, run, shown, every)


def _facts(run: Run, checkpoint: Checkpoint, opened: Opened) -> dict[str, Any]:
    state, manifest = run.head().state, opened.manifest
    parent = next((c.step for c in state.live if c.manifest_digest == checkpoint.parent), None)
    by_group: dict[str, list[IndexRow]] = {}
    for row in opened.rows:
        by_group.setdefault(row.group, []).append(row)
    return {
        "run_key": manifest.run_key,
        "checkpoint_dir": run.history.store.url,
        "step": checkpoint.step,
        "saved_at": checkpoint.saved_at,
        "cost_s": checkpoint.cost_s,
        "size_bytes": checkpoint.size_bytes,
        "abandoned": checkpoint.abandoned,
        "interim": checkpoint.interim,
        "pinned": state.pins.get(checkpoint.manifest_digest),
        "attempt": checkpoint.attempt,
        "manifest": checkpoint.manifest,
        "manifest_digest": checkpoint.manifest_digest,
        "ledger_entry": checkpoint.n,
        "parent": checkpoint.parent,
        "parent_step": parent,
        **lineage_facts(state),
        "world_size": manifest.world_size,
        "environment": dict(manifest.environment),
        "metrics": dict(manifest.metrics),
        "evaluations": [
            {"suite": e.suite, "evaluated_at": e.evaluated_at, "metrics": dict(e.metrics)}
            for e in state.evaluations
            if e.manifest_digest == checkpoint.manifest_digest
        ],
        "groups": [_group(name, saved.kind, by_group.get(name, [])) for name, saved in opened.groups.items()],
        "objects": [
            {"name": record.name, "size_bytes": record.size_bytes} for record in (*manifest.objects, manifest.index)
        ],
        "notes": run.notes(),
    }


def _group(name: str, kind: str, rows: list[IndexRow]) -> dict[str, Any]:
    dtypes: dict[str, int] = {}
    for row in rows:
        dtypes[row.dtype] = dtypes.get(row.dtype, 0) + row.end - row.begin
    return {
        "name": name,
        "kind": kind,
        "tensors": len({row.key for row in rows}),
        "size_bytes": sum(dtypes.values()),
        "dtypes": dict(sorted(dtypes.items(), key=lambda item: -item[1])),
    }


def _print(out: Output, run: Run, shown: Mapping[str, Any], every: bool) -> None:
    out.print(title(run, f" step {shown['step']}"), "", _overview(shown), _groups(shown))
    _print_objects(out, shown, every)
    if shown["evaluations"]:
        out.print(_evaluations(shown))
    if shown["notes"]:
        out.print(_notes(shown["notes"]))


def _overview(shown: Mapping[str, Any]) -> Any:
    from rich.table import Table

    facts = Table.grid(padding=(0, 3))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for name, value in _lines(shown):
        facts.add_row(name, printable(value))
    return facts


def _lines(shown: Mapping[str, Any]) -> list[tuple[str, str]]:
    origin = shown["origin"]
    if shown["parent"] is None:
        came = origin is not None and origin["identity"] == shown["manifest_digest"]
        parent = "the run that it was forked from" if came else "none: training began here"
    elif shown["parent_step"] is None:
        parent = f"{shown['parent']}, pruned"
    else:
        parent = f"step {shown['parent_step']}"
    lines = [
        ("saved", f"{age(shown['saved_at'])}, {when(shown['saved_at'])}"),
        ("cost", f"training waited {span(shown['cost_s'])}"),
        ("size", f"{size(shown['size_bytes'])} from {count(shown['world_size'], 'rank')}"),
        ("went on from", parent),
        *_made_by(shown["environment"]),
        ("digest", f"{shown['manifest_digest']} in ledger entry {shown['ledger_entry']}"),
        ("objects in", shown["manifest"].rpartition("/")[0]),
    ]
    if shown["metrics"]:
        lines.insert(3, ("metrics", ", ".join(f"{name} {number(v)}" for name, v in shown["metrics"].items())))
    if origin is not None:
        lines.append(("run forked from", f"{origin['run_key']}, {origin['url']}, at step {origin['step']}"))
        lines.append(("with changed", params_line(origin["set"]) or "nothing"))
    if shown["params"]:
        lines.append(("parameters", params_line(shown["params"])))
    if shown["pinned"] is not None:
        lines.append(("pinned", shown["pinned"]))
    if shown["abandoned"]:
        lines.append(("left behind", "training went on from an older checkpoint"))
    return lines


def _made_by(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return what made a checkpoint, line by line; old checkpoints have versions only."""
    rest = {name: value for name, value in environment.items() if name not in _OWN_LINES}
    lines = [(name, environment[name]) for name in _OWN_LINES if name in environment]
    return [*lines, ("environment", ", ".join(f"{name} {value}" for name, value in rest.items()))]


def _groups(shown: Mapping[str, Any]) -> Any:
    made = table("group", "kind", "tensors", "size", "dtypes", right=("tensors", "size"))
    for group in shown["groups"]:
        dtypes = ", ".join(group["dtypes"])
        tensors = f"{group['tensors']:,}" if group["tensors"] else ""
        made.add_row(
            group["name"], printable(group["kind"]), tensors, size(group["size_bytes"]) if tensors else "", dtypes
        )
    return made


def _print_objects(out: Output, shown: Mapping[str, Any], every: bool) -> None:
    """Print every object if there are few; of many, how many each group has, and the largest ones."""
    from rich.text import Text

    place, objects = shown["manifest"].rpartition("/")[0] + "/", shown["objects"]
    summary = _summary(place, objects)
    if not every and len(objects) > summary.row_count + _OBJECTS_SHOWN:
        out.print(summary)
        objects = sorted(objects, key=lambda record: -record["size_bytes"])[:_OBJECTS_SHOWN]
    made = table("object", "size", right=("size",))
    for record in objects:
        made.add_row(record["name"].removeprefix(place), size(record["size_bytes"]))
    out.print(made)
    if len(objects) < len(shown["objects"]):
        out.print(Text(f"… and {len(shown['objects']) - len(objects):,} smaller ones (--all)\n", style="dim"))


def _summary(place: str, objects: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row for the objects of each group; reused ones of older checkpoints have their own rows."""
    columns = ("objects", "size", "smallest", "largest")
    made = table("objects of", "", *columns, right=columns)
    kinds: dict[tuple[str, str], list[int]] = {}
    for record in objects:
        file = record["name"].rpartition("/")[2]
        group = file.partition("-")[0] if is_shard(record["name"]) else file
        own = record["name"].startswith(place)
        kinds.setdefault((group, "" if own else "of older checkpoints"), []).append(record["size_bytes"])
    for (group, whose), sizes in kinds.items():
        made.add_row(group, whose, f"{len(sizes):,}", *map(size, (sum(sizes), min(sizes), max(sizes))))
    return made


def _evaluations(shown: Mapping[str, Any]) -> Any:
    made = table("evaluation", "done", "metrics")
    for evaluation in shown["evaluations"]:
        metrics = ", ".join(f"{name} {number(value)}" for name, value in evaluation["metrics"].items())
        made.add_row(evaluation["suite"], age(evaluation["evaluated_at"]), printable(metrics))
    return made


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _NOTE_LETTERS else f"{text[:_NOTE_LETTERS]}… (--json)"


def _notes(notes: list[Mapping[str, Any]]) -> Any:
    made = table("note of the run", "noted", "")
    for note in notes[:_NOTES_SHOWN]:
        fields = {name: value for name, value in note.items() if name not in ("kind", "note", "at", "n")}
        text = ", ".join(f"{name} {_short(value)}" for name, value in fields.items())
        made.add_row(printable(str(note.get("note", ""))), age(note["at"]), printable(text))
    if len(notes) > _NOTES_SHOWN:
        made.add_row("", "", f"… and {len(notes) - _NOTES_SHOWN} older ones (--json)", style="dim")
    return made
