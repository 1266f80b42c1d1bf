"""The metrics of the steps between two commits, as an Arrow file: one row for each metric of each step."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pyarrow as pa

from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.layout.arrow import FAULTS, array, read_arrow

MAX_STEPS_BYTES = 256 << 20
_MAX_ROWS = 1 << 23

_SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("at_s", pa.float64(), nullable=False),
        pa.field("metric", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
    ]
)


class StepMetrics(NamedTuple):
    """The metrics of one completed step; `at_s` is in seconds since 1970."""

    step: int
    at_s: float
    metrics: Mapping[str, float]


def write_steps(steps: Iterable[StepMetrics]) -> bytes:
    """Write the metrics of steps, in the given order, as the bytes of an uncompressed Arrow IPC file."""
    rows = [(step, at_s, name, float(value)) for step, at_s, metrics in steps for name, value in metrics.items()]
    columns = [*zip(*rows, strict=True)] or [(), (), (), ()]
    arrays = [array(values, field.type) for values, field in zip(columns, _SCHEMA, strict=True)]
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, _SCHEMA) as writer:
        writer.write_table(pa.Table.from_arrays(arrays, schema=_SCHEMA))
    return sink.getvalue()


def steps_file(steps: Iterable[StepMetrics]) -> bytes:
    """Return the digest and the bytes of `write_steps`, for a snapshot in memory that outlives its process."""
    data = write_steps(steps)
    return bytes.fromhex(digest_hex(data)) + data


def read_steps(data: bytes, *, digest: str, name: str) -> list[StepMetrics]:
    """Read bytes from `write_steps`; raise IntegrityError if they do not have this digest or are malformed."""
    if digest_hex(data) != digest:
        raise IntegrityError("the metrics of steps are not those that were committed", key=name)
    steps: dict[int, tuple[float, dict[str, float]]] = {}
    try:
        table = read_arrow(data, _SCHEMA, _MAX_ROWS)
        if any(column.null_count for column in table.columns):
            raise ValueError("a value is missing")
        for batch in table.to_batches():
            numbers, times, metric, values = batch.columns
            words = metric.dictionary.to_pylist()  # Convert each word once: a row has only the word's number.
            codes = metric.indices.to_pylist()
            for step, at_s, code, value in zip(
                numbers.to_pylist(), times.to_pylist(), codes, values.to_pylist(), strict=True
            ):
                steps.setdefault(step, (at_s, {}))[1][words[code]] = value
    except FAULTS as error:
        raise IntegrityError(f"the metrics of steps are malformed: {error!s:.200}", key=name) from error
    return [StepMetrics(step, at_s, metrics) for step, (at_s, metrics) in steps.items()]
