"""`ckpt show` and `ckpt diff`: what is in a checkpoint and what made it, and where two differ and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

from ckpt_tasks.cli.arguments import CheckpointArgument, JsonOption, lineage_facts, option, params_line, parse_target
from ckpt_tasks.cli.output import Output, column, grid, listing, output, reading, title
from ckpt_tasks.format.keys import is_shard
from ckpt_tasks.report.words import age, count, number, size, span, when
from ckpt_tasks.storage.port import WatchedStore

if TYPE_CHECKING:
    from ckpt_tasks.copying.compare import Comparison, Difference
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.layout.index import IndexRow
    from ckpt_tasks.reading.opening import Opened
    from ckpt_tasks.reading.reading import Run

_NOTES_SHOWN = 8
# The limit for a field of a note, in characters: the note of an early stop has every evaluation.
_NOTE_LETTERS = 200
_OBJECTS_SHOWN = 10
_DIFFERENCES_SHOWN = 24
_OF_NOTES = ("kind", "note", "at", "n")
# These entries of an environment have a line each; all other entries share one line.
_OWN_LINES = ("command", "code", "host", "accelerator")

ObjectsOption = Annotated[bool, option("--all", None, f"list every object, not only the {_OBJECTS_SHOWN} largest")]
GroupOption = Annotated[list[str] | None, option("--group", "NAME", "compare only this group; may be repeated")]
IgnoreOption = Annotated[list[str] | None, option("--ignore", "NAME", "leave this group out; may be repeated")]
MetricsOption = Annotated[bool, option("--metrics", None, "also compare metrics and evaluations")]
DifferencesOption = Annotated[
    bool, option("--all", None, f"list every difference, not only the first {_DIFFERENCES_SHOWN}")
]


def show(checkpoint: CheckpointArgument, *, every: ObjectsOption = False, as_json: JsonOption = False) -> None:
    """Show what is in DIR@STEP, and what made it."""
    from ckpt_tasks.reading.opening import open_checkpoint

    with output(as_json) as out:
        run, record = parse_target(checkpoint).find()
        facts = _facts(run, record, open_checkpoint(run.history.store, record))
        out.answer(facts, _parts(run, facts, every))


def _facts(run: Run, checkpoint: Checkpoint, opened: Opened) -> dict[str, Any]:
    state, manifest = run.head().state, opened.manifest
    parent = next((c.step for c in state.live if c.manifest_digest == checkpoint.parent), None)
    by_group: dict[str, list[IndexRow]] = {}
    for row in opened.rows:
        by_group.setdefault(row.group, []).append(row)
    return {
        "run_key": manifest.run_key,
        "checkpoint_dir": run.history.store.url,
        **{name: getattr(checkpoint, name) for name in ("step", "saved_at", "cost_s", "size_bytes")},
        "abandoned": checkpoint.abandoned,
        "interim": checkpoint.interim,
        "pinned": state.pins.get(checkpoint.manifest_digest),
        **{name: getattr(checkpoint, name) for name in ("attempt", "manifest", "manifest_digest")},
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


def _named(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in values.items())


_GROUPS = (
    column("group", itemgetter("name")),
    column("kind", itemgetter("kind")),
    column("tensors", lambda group: f"{group['tensors']:,}" if group["tensors"] else "", numbers=True),
    column("size", lambda group: size(group["size_bytes"]) if group["tensors"] else "", numbers=True),
    column("dtypes", lambda group: ", ".join(group["dtypes"])),
)
_EVALUATIONS = (
    column("evaluation", itemgetter("suite")),
    column("done", itemgetter("evaluated_at"), age),
    column("metrics", itemgetter("metrics"), _named),
)
_NOTES = (
    column("note of the run", lambda note: note.get("note", "")),
    column("noted", lambda note: note.get("at"), lambda at: age(at) if at else ""),
    column("", lambda note: ", ".join(f"{k} {_short(v)}" for k, v in note.items() if k not in _OF_NOTES)),
)


def _parts(run: Run, facts: Mapping[str, Any], every: bool) -> Iterator[Any]:
    yield title(run, f" step {facts['step']}")
    yield ""
    yield grid(_lines(facts))
    yield listing(_GROUPS, facts["groups"])
    yield from _objects(facts["manifest"].rpartition("/")[0] + "/", facts["objects"], every)
    if facts["evaluations"]:
        yield listing(_EVALUATIONS, facts["evaluations"])
    if notes := facts["notes"]:
        table = listing(_NOTES, notes[:_NOTES_SHOWN])
        if len(notes) > _NOTES_SHOWN:
            table.add_row("", "", f"… and {len(notes) - _NOTES_SHOWN} older ones (--json)", style="dim")
        yield table


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    origin, environment = facts["origin"], facts["environment"]
    parent = f"step {facts['parent_step']}" if facts["parent_step"] is not None else f"{facts['parent']}, pruned"
    if facts["parent"] is None:
        came = origin is not None and origin["identity"] == facts["manifest_digest"]
        parent = "the run that it was forked from" if came else "none: training began here"
    yield "saved", f"{age(facts['saved_at'])}, {when(facts['saved_at'])}"
    yield "cost", f"training waited {span(facts['cost_s'])}"
    yield "size", f"{size(facts['size_bytes'])} from {count(facts['world_size'], 'rank')}"
    if facts["metrics"]:
        yield "metrics", _named(facts["metrics"])
    yield "went on from", parent
    # Old checkpoints have only versions.
    yield from ((name, environment[name]) for name in _OWN_LINES if name in environment)
    yield "environment", ", ".join(f"{name} {value}" for name, value in environment.items() if name not in _OWN_LINES)
    yield "digest", f"{facts['manifest_digest']} in ledger entry {facts['ledger_entry']}"
    yield "objects in", facts["manifest"].rpartition("/")[0]
    if origin is not None:
        yield "run forked from", f"{origin['run_key']}, {origin['url']}, at step {origin['step']}"
        yield "with changed", params_line(origin["set"]) or "nothing"
    if facts["params"]:
        yield "parameters", params_line(facts["params"])
    if facts["pinned"] is not None:
        yield "pinned", facts["pinned"]
    if facts["abandoned"]:
        yield "left behind", "training went on from an older checkpoint"


def _objects(place: str, objects: list[Mapping[str, Any]], every: bool) -> Iterator[Any]:
    """Yield all objects if they are few, else the number of objects in each group, and the largest objects."""
    summary, shown = _summary(place, objects), objects
    if not every and len(objects) > summary.row_count + _OBJECTS_SHOWN:
        yield summary
        shown = sorted(objects, key=lambda record: -record["size_bytes"])[:_OBJECTS_SHOWN]
    name = column("object", lambda record: record["name"].removeprefix(place))
    yield listing((name, column("size", itemgetter("size_bytes"), size, numbers=True)), shown)
    if len(shown) < len(objects):
        yield f"… and {len(objects) - len(shown):,} smaller ones (--all)\n", "dim"


def _summary(place: str, objects: list[Mapping[str, Any]]) -> Any:
    """Return one row for the objects of each group, and one for those that it reuses of older checkpoints."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for record in objects:
        file = record["name"].rpartition("/")[2]
        group = file.partition("-")[0] if is_shard(record["name"]) else file
        own = record["name"].startswith(place)
        kinds.setdefault((group, "" if own else "of older checkpoints"), []).append(record["size_bytes"])
    columns = (
        column("objects of", lambda row: row[0][0]),
        column("", lambda row: row[0][1]),
        column("objects", lambda row: f"{len(row[1]):,}", numbers=True),
        column("size", lambda row: size(sum(row[1])), numbers=True),
        column("smallest", lambda row: size(min(row[1])), numbers=True),
        column("largest", lambda row: size(max(row[1])), numbers=True),
    )
    return listing(columns, kinds.items())


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _NOTE_LETTERS else f"{text[:_NOTE_LETTERS]}… (--json)"


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

    Exits with 0 if they are equal, 1 if they differ, 2 if one cannot be read. They may belong to two runs. Every bit
    of every tensor counts (NaN payloads, the sign of zero), and every plain value. Random streams are the group rng.
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
    from ckpt_tasks.copying.compare import compare_checkpoints

    (_, a), (_, b) = sides
    with reading(out, "comparing", a.size_bytes + b.size_bytes) as on_progress:
        stores = [WatchedStore(run.history.store, on_progress) for run, _ in sides]
        return compare_checkpoints(stores[0], a, stores[1], b, groups=groups, ignore=ignore)


def _metrics(sides: Sides) -> Measured:
    """Return both values (A, B) of each metric by name, evaluations as suite/metric; None if one is missing."""
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
    # Tensors with different values need other columns than all other differences.
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
