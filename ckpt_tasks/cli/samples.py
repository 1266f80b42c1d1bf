"""`ckpt samples`: which samples have made a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

from ckpt_tasks.cli.arguments import CheckpointArgument, JsonOption, option, parse_target
from ckpt_tasks.cli.output import column, listing, output, title
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.report.words import count

if TYPE_CHECKING:
    from ckpt_tasks.reading.opening import Opened

_RANGES_SHOWN = 12
_EPOCHS_SHOWN = 20

OrderOption = Annotated[bool, option("--order", None, "print the samples as they came, EPOCH and ID in a line")]


def samples(checkpoint: CheckpointArgument, *, order: OrderOption = False, as_json: JsonOption = False) -> None:
    """List the samples that made DIR@STEP.

    They are those that a ResumableLoader or ResumableSampler in the state has handed to all ranks, as ranges of their
    numbers: for each epoch, and by how often they were seen. What a rollback has undone or skipped is not among them.
    A stream has no numbers for its samples: its counts are shown. Nothing is read but the checkpoint's manifest and
    index.
    """
    from ckpt_tasks.reading.opening import open_checkpoint

    with output(as_json) as out:
        run, record = parse_target(checkpoint).find()
        data = [*_data(open_checkpoint(run.history.store, record), order)]
        if not data:
            raise ConfigError(
                "the checkpoint has no position in the data",
                step=record.step,
                hint="Put a ResumableLoader or a ResumableSampler into the state.",
            )
        facts = {
            "run_key": run.run_key,
            "checkpoint_dir": run.history.store.url,
            "step": record.step,
            "manifest_digest": record.manifest_digest,
            "data": data,
        }
        head = [title(run, f" step {record.step}"), ""]
        out.answer(facts, _in_order(data) if order else [*head, *(part for one in data for part in _parts(one))])


def _data(opened: Opened, order: bool) -> Iterator[dict[str, Any]]:
    """Yield the facts of each position; those of ranks that differ have a rank each."""
    from ckpt_tasks.data.seen import is_stream, positions_in

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
    # Behind the last batch of an epoch, a loader's state has a negative number of samples.
    epoch, samples = (state["epoch"] + 1, 0) if state["samples"] < 0 else (state["epoch"], state["samples"])
    return {"kind": "stream", "epoch": epoch, "samples": samples, "workers": workers}


def _of_sampler(state: Mapping[str, Any], order: bool) -> dict[str, Any]:
    from ckpt_tasks.data.seen import ids_in, order_in, outside, spans_of, times_seen

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


def _parts(one: Mapping[str, Any]) -> Iterator[Any]:
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
