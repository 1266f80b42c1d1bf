"""Rows as Arrow files: evaluation results."""

from __future__ import annotations

import io
from collections.abc import Mapping

import pyarrow as pa

from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.arrow import FAULTS, read_arrow

__all__ = ["read_metrics", "write_metrics"]

_MAX_METRICS = 1 << 20
_METRICS = pa.schema([pa.field("metric", pa.string(), nullable=False), pa.field("value", pa.float64(), nullable=False)])


def write_metrics(metrics: Mapping[str, float], about: Mapping[str, str]) -> bytes:
    """Write metrics as the bytes of an Arrow IPC file, one row each; `about` goes into the schema's metadata."""
    schema = _METRICS.with_metadata({name.encode(): value.encode() for name, value in about.items()})
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(pa.table([list(metrics), [float(v) for v in metrics.values()]], schema=schema))
    return sink.getvalue()


def read_metrics(data: bytes) -> dict[str, float]:
    """Read what `write_metrics` wrote; the bytes are verified before. Raises IntegrityError on anything else."""
    try:
        table = read_arrow(data, _METRICS, _MAX_METRICS)
        names, values = table.column("metric"), table.column("value")
        if names.null_count or values.null_count:
            raise ValueError("a value is missing")
        return dict(zip(names.to_pylist(), values.to_pylist(), strict=True))
    except FAULTS as error:
        raise IntegrityError(f"the table of metrics is malformed: {error!s:.200}") from error
