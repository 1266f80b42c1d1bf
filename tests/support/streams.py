"""Streams of Hugging Face's datasets, each made by operations that users write, over several shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ckpt_tasks import ResumableLoader, ShuffleBuffer

ROWS, SHARDS = 24, 4


def library() -> Any:
    """Return datasets, which takes a second to import: only what makes a stream does so."""
    import datasets
    import datasets.distributed

    return datasets


def rows(count: int = ROWS, first: int = 0) -> Any:
    """Return a stream of numbers in shards."""
    return library().Dataset.from_dict({"a": [*range(first, first + count)]}).to_iterable_dataset(num_shards=SHARDS)


def write_shards(directory: Path) -> dict[str, list[str]]:
    """Write the numbers in each kind of file; return the files' names."""
    for shard in range(SHARDS):
        part = library().Dataset.from_dict({"a": [*range(shard * 6, shard * 6 + 6)]})
        part.to_parquet(str(directory / f"{shard}.parquet"))
        part.to_json(str(directory / f"{shard}.json"))
        part.save_to_disk(str(directory / f"{shard}"))
        next((directory / f"{shard}").glob("*.arrow")).rename(directory / f"{shard}.arrow")
    return {kind: sorted(map(str, directory.glob(f"*.{kind}"))) for kind in ("parquet", "json", "arrow")}


def _generated(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for number in range(6):
            yield {"a": shard * 6 + number}


def _doubled(row: dict[str, Any]) -> dict[str, Any]:
    return {"a": row["a"], "b": row["a"] * 2}


def _halves(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"a": [one for one in batch["a"] for _ in range(2)]}


OPERATIONS: dict[str, Callable[[], Any]] = {
    "rows": rows,
    "generator": lambda: library().IterableDataset.from_generator(_generated, gen_kwargs={"shards": [0, 1, 2, 3]}),
    "map": lambda: rows().map(_doubled),
    "map of batches": lambda: rows().map(_halves, batched=True, batch_size=5, remove_columns=["a"]),
    "map of a generator's batches": lambda: OPERATIONS["generator"]().map(_halves, batched=True, batch_size=5),
    "filter": lambda: rows(40).filter(lambda row: row["a"] % 3),
    "filter of batches": lambda: rows(40).filter(lambda b: [a % 3 > 0 for a in b["a"]], batched=True, batch_size=7),
    "map and filter": lambda: rows(40).map(_doubled).filter(lambda row: row["b"] % 3),
    "batch": lambda: rows(46).batch(2).map(lambda row: {"a": row["a"][0]}),
    "interleave": lambda: library().interleave_datasets([rows(), rows(30, 100)]),
    "interleave all": lambda: library().interleave_datasets([rows(), rows(30, 100)], stopping_strategy="all_exhausted"),
    "interleave by chance": lambda: library().interleave_datasets(
        [rows(), rows(30, 100)], probabilities=[0.7, 0.3], seed=3
    ),
    "interleave by chance, all": lambda: library().interleave_datasets(
        [rows(), rows(30, 100)], probabilities=[0.7, 0.3], seed=3, stopping_strategy="all_exhausted"
    ),
    "interleave maps": lambda: library().interleave_datasets([rows().map(_doubled), rows(30, 100).map(_doubled)]),
    "concatenate": lambda: library().concatenate_datasets([rows(), rows(10, 100)]),
    "concatenate maps": lambda: library().concatenate_datasets([rows().map(_doubled), rows(10, 100).map(_doubled)]),
    "take": lambda: rows(60).take(20),
    "skip": lambda: rows(40).skip(15),
    "skip and take": lambda: rows(60).map(_doubled).skip(15).take(20),
    "repeat": lambda: rows(12).repeat(2),
    "repeat maps": lambda: rows(12).map(_doubled).repeat(2),
    "shuffle of shards": lambda: rows().shuffle(seed=5, buffer_size=1),
    "shuffle of a map's shards": lambda: rows().map(_doubled).shuffle(seed=5, buffer_size=1),
    "columns": lambda: rows().map(_doubled).select_columns(["a"]).rename_column("a", "c").rename_column("c", "a"),
    "torch": lambda: rows().map(_doubled).with_format("torch"),
    "numpy": lambda: rows().with_format("numpy").map(_doubled),
    "tables": lambda: (
        rows().with_format("arrow").map(lambda table: table, batched=True, batch_size=5).with_format(None)
    ),
    "node of 2": lambda: library().distributed.split_dataset_by_node(rows(48), rank=1, world_size=2),
    "node of 3": lambda: library().distributed.split_dataset_by_node(rows(72), rank=1, world_size=3),
    "node, map, filter": lambda: library().distributed.split_dataset_by_node(
        rows(60).map(_doubled).filter(lambda row: row["a"] % 3), rank=0, world_size=2
    ),
    "buffer": lambda: ShuffleBuffer(rows(), 7, seed=1),
    "buffer of a map": lambda: ShuffleBuffer(rows().map(_doubled), 5, seed=1),
    "buffer of an interleave": lambda: ShuffleBuffer(OPERATIONS["interleave by chance"](), 5, seed=1),
    "buffer of shuffled shards": lambda: ShuffleBuffer(OPERATIONS["shuffle of a map's shards"](), 7, seed=1),
    "buffer of a map of batches": lambda: ShuffleBuffer(OPERATIONS["map of batches"](), 7, seed=1),
}


def batches_of(loader: ResumableLoader, epochs: int, stop: int | None = None) -> list[tuple[int, Any]]:
    """Take batches epoch after epoch, from the loader's position up to `stop` batches."""
    taken: list[tuple[int, Any]] = []
    for epoch in loader.epochs(epochs):
        for batch in loader:
            taken.append((epoch, [int(one) for one in batch["a"]]))
            if len(taken) == stop:
                return taken
    return taken
