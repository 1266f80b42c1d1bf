"""`ckpt show` and `ckpt samples`: a checkpoint's contents, the code and machine that wrote it, and its samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

from ckpt_tasks.cli.arguments import CheckpointArgument, JsonOption, lineage_facts, option, params_line, parse_target
from ckpt_tasks.cli.output import column, grid, listing, output, title
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.format.keys import is_shard
from ckpt_tasks.run.report.words import age, count, fine_span, number, size, when
from ckpt_tasks.storage.secrets import HIDDEN

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.restore.reading import Run
    from ckpt_tasks.format.layout.index import IndexRow
    from ckpt_tasks.format.manifest import Manifest
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.run.opening import Opened

_NOTES_SHOWN = 8
# Cut a field of a note after this many characters: the note of an early stop has every evaluation.
_NOTE_LETTERS = 200
_OBJECTS_SHOWN = 10
_OF_NOTES = ("kind", "note", "at", "n")
# These entries of an environment have a line each; all other entries share one line.
_OWN_LINES = ("command", "code", "host", "accelerator")

ObjectsOption = Annotated[
    bool, option("--all", None, f"list every object, not only the {_OBJECTS_SHOWN} largest, and the run's notes")
]


def show(checkpoint: CheckpointArgument, *, every: ObjectsOption = False, as_json: JsonOption = False) -> None:
    """Show what is in DIR@STEP, and what made it.

    A run's notes lie in the entries of its ledger: finding them reads each entry.
    """
    from ckpt_tasks.run.opening import open_checkpoint

    with output(as_json) as out:
        run, record = parse_target(checkpoint).find()
        facts = _facts(run, record, open_checkpoint(run.history.store, record))
        facts |= {"notes": run.notes()} if every else {}
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
        "why": checkpoint.why,
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
        "objects": [{"name": name, "size_bytes": size_bytes} for name, size_bytes in _sizes(checkpoint, manifest)],
    }


def _sizes(checkpoint: Checkpoint, manifest: Manifest) -> Iterator[tuple[str, int]]:
    """Yield name and size of every object, which together are as large as the checkpoint."""
    objects = (*manifest.objects, manifest.index)
    yield from ((record.name, record.size_bytes) for record in objects)
    yield checkpoint.manifest, checkpoint.size_bytes - sum(record.size_bytes for record in objects)


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
    if notes := facts.get("notes"):
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
    yield "waited", f"training waited {fine_span(facts['cost_s'])} for the snapshot"
    yield "size", f"{size(facts['size_bytes'])} from {count(facts['world_size'], 'rank')}"
    if facts["metrics"]:
        yield "metrics", _named(facts["metrics"])
    yield "parent", parent
    # An old checkpoint's environment has only versions.
    yield from ((name, environment[name]) for name in _OWN_LINES if name in environment)
    if HIDDEN in environment.get("command", ""):
        yield HIDDEN, "an argument that is not kept, because it could be a secret"
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
        yield "discarded branch", "training resumed from an older checkpoint"


def _objects(place: str, objects: list[Mapping[str, Any]], every: bool) -> Iterator[Any]:
    """Yield a table of all objects if they are few, else a summary by group and a table of the largest objects."""
    summary, shown = _summary(place, objects), objects
    if not every and len(objects) > summary.row_count + _OBJECTS_SHOWN:
        yield summary
        shown = sorted(objects, key=lambda record: -record["size_bytes"])[:_OBJECTS_SHOWN]
    name = column("object", lambda record: record["name"].removeprefix(place))
    yield listing((name, column("size", itemgetter("size_bytes"), size, numbers=True)), shown)
    if len(shown) < len(objects):
        yield f"… and {len(objects) - len(shown):,} smaller ones (--all)\n", "dim"


def _summary(place: str, objects: list[Mapping[str, Any]]) -> Any:
    """Make a table: for each group, one row of new objects, and one row of objects reused from older checkpoints."""
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


# ── samples ──────────────────────────────────────────────────────────────────────────────────────────────────────

_RANGES_SHOWN = 12
_EPOCHS_SHOWN = 20

OrderOption = Annotated[bool, option("--order", None, "print the samples as they came, EPOCH and ID in a line")]


def samples(checkpoint: CheckpointArgument, *, order: OrderOption = False, as_json: JsonOption = False) -> None:
    """List the samples that made DIR@STEP.

    Lists the samples that a ResumableLoader or ResumableSampler in the state has given to all ranks, as ranges of
    sample numbers: for each epoch, and by how often they were seen. Leaves out samples that a rollback has undone or
    skipped. Shows only counts for a stream, which does not number its samples. Reads only the checkpoint's manifest and
    index.
    """
    from ckpt_tasks.run.opening import open_checkpoint

    with output(as_json) as out:
        run, record = parse_target(checkpoint).find()
        data = [*_data(open_checkpoint(run.history.store, record), order)]
        if not data:
            raise ConfigError(
                "the checkpoint has no position in the data",
                step=record.step,
                hint="Put a ResumableLoader or a ResumableSampler into the state.",
            )
        if order and all(one.get("recorded_since") is None for one in data):
            raise ConfigError("no sample is known by a number", step=record.step, hint="Leave --order out.")
        facts = {
            "run_key": run.run_key,
            "checkpoint_dir": run.history.store.url,
            "step": record.step,
            "manifest_digest": record.manifest_digest,
            "data": data,
        }
        head = [title(run, f" step {record.step}"), ""]
        out.answer(facts, _in_order(data) if order else [*head, *(part for one in data for part in _sample_parts(one))])


def _data(opened: Opened, order: bool) -> Iterator[dict[str, Any]]:
    """Yield the facts of each position in the data; positions that differ by rank are listed rank by rank."""
    from ckpt_tasks.state.data.seen import is_stream, positions_in

    for name, group in opened.groups.items():
        trees = group.trees
        for rank, tree in enumerate(trees):
            for place, state in positions_in(tree, name):
                of = f"{place} of rank {rank}" if len(trees) > 1 else place
                yield {"place": of, **(_of_stream(state) if is_stream(state) else _of_sampler(state, order))}


def _of_stream(state: Mapping[str, Any]) -> dict[str, Any]:
    workers = [
        {"batches": place["batch"] + 1, "samples": place["samples"], "last_batch_began": place["stream"]}
        if place
        else {"batches": 0, "samples": 0, "last_batch_began": None}
        for place in state["places"]
    ]
    # After the last batch of an epoch, a loader's state has a negative number of samples.
    epoch, samples = (state["epoch"] + 1, 0) if state["samples"] < 0 else (state["epoch"], state["samples"])
    return {"kind": "stream", "epoch": epoch, "samples": samples, "workers": workers}


def _of_sampler(state: Mapping[str, Any], order: bool) -> dict[str, Any]:
    from ckpt_tasks.state.data.seen import ids_in, order_in, outside, spans_of, times_seen

    facts = {"kind": "samples", **{name: state[name] for name in ("size", "seed", "shuffle", "epoch", "samples")}}
    if "seen" not in state:
        return {**facts, "recorded_since": None, "epochs": [], "times": []}
    ids, epochs = [], []
    spans = spans_of(state)
    ended = state["epoch"] + (state["samples"] == state["size"])
    for epoch in sorted({*spans, *range(state["seen"]["since"][0], ended)}):
        ids.append(ids_in(state, epoch, spans.get(epoch, [])))
        left_out = outside(ids[-1], state["size"]) if epoch < ended else ids[-1][:0]
        epochs.append({"epoch": epoch, "ids": _inclusive(ids[-1]), "left_out": _inclusive(left_out)})
        if order:
            epochs[-1]["order"] = order_in(state, epoch, spans.get(epoch, [])).tolist()
    times = [{"times": n, "ids": _inclusive(ranges)} for n, ranges in times_seen(ids, state["size"]).items()]
    return {**facts, "recorded_since": state["seen"]["since"], "epochs": epochs, "times": times}


def _inclusive(ranges: Any) -> list[list[int]]:
    return [[first, end - 1] for first, end in ranges.tolist()]


def _in_order(data: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for one in data:
        for epoch in one.get("epochs", ()):
            yield from (f"{epoch['epoch']} {sample}" for sample in epoch["order"])


def _size(ranges: Sequence[Sequence[int]]) -> str:
    return f"{sum(last - first + 1 for first, last in ranges):,}"


def _ranges(ranges: Sequence[Sequence[int]]) -> str:
    shown = [f"{first}-{last}" if last > first else f"{first}" for first, last in ranges[:_RANGES_SHOWN]]
    more = len(ranges) - len(shown)
    return ", ".join(shown) + (f" … and {count(more, 'more range')} (--json)" if more else "")


_EPOCHS = (
    column("epoch", itemgetter(0), whole=True),
    column("samples", lambda row: _size(row[1]["ids"]), numbers=True),
    column("", lambda row: _ranges(row[1]["ids"])),
    column("left out", lambda row: _size(row[1]["left_out"]), numbers=True),
    column("", lambda row: _ranges(row[1]["left_out"])),
)
_TIMES = (
    column("times seen", itemgetter("times"), numbers=True),
    column("samples", lambda row: _size(row["ids"]), numbers=True),
    column("", lambda row: _ranges(row["ids"])),
)


def _sample_parts(one: Mapping[str, Any]) -> Iterator[Any]:
    at = f"in epoch {one['epoch']}, after {count(one['samples'], 'sample')} of it"
    if one["kind"] == "stream":
        yield f"{one['place']}: a stream {at}, those that a rollback has skipped among them."
        for number, worker in enumerate(one["workers"]):
            yield f"  worker {number}: {count(worker['samples'], 'sample')} in {worker['batches']} batches"
        yield "Not known: which samples these are, and how many those of earlier epochs were. A stream has no numbers."
        return
    yield f"{one['place']}: {one['size']:,} samples in a data set{', shuffled' if one['shuffle'] else ''}; {at}."
    if one["recorded_since"] is None:
        yield "Not known: which samples these are. The version that saved this checkpoint kept no record of them."
        return
    if (since := one["recorded_since"]) != [0, 0]:
        before = f"epoch {since[0]}, sample {since[1]} of its order"
        yield f"Not known: what came before {before}. Until then an older version trained, which kept no record."
    alike = [[*rows] for _, rows in groupby(one["epochs"], lambda row: (row["ids"], row["left_out"]))]
    shown = [
        (f"{a['epoch']}-{b['epoch']}" if a is not b else f"{a['epoch']}", a) for a, b in ((r[0], r[-1]) for r in alike)
    ]
    yield listing(_EPOCHS, shown[-_EPOCHS_SHOWN:])
    if len(shown) > _EPOCHS_SHOWN:
        yield f"… and {len(shown) - _EPOCHS_SHOWN} earlier rows (--json)\n", "dim"
    yield listing(_TIMES, one["times"])
