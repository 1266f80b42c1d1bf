"""The index of one checkpoint: an Arrow file with one row per region of every tensor.

Arrow, because a reader of one group among 10⁵ tensors needs columns, not objects. The bytes are digested before
they are parsed: a damaged Arrow file can parse and can crash its reader. What it says is bounded before objects are
made of it: a column can stand for all of them, and a row of 30 bytes becomes a kilobyte.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ckpt_tasks.errors import IntegrityError, UnsupportedStateError
from ckpt_tasks.format.arrow import FAULTS, read_arrow
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.image import MAX_DIMENSIONS, REGION_BYTES, STORED_DTYPES
from ckpt_tasks.format.keys import is_group, is_object_name, parse_attempt
from ckpt_tasks.format.regions import Box, tiling_fault

__all__ = [
    "MAX_INDEX_BYTES",
    "MAX_REGIONS",
    "IndexRow",
    "coverage_faults",
    "object_faults",
    "read_index",
    "write_index",
]

MAX_INDEX_BYTES = 256 << 20
MAX_REGIONS = 1 << 20
_MAX_EXTENTS = 8 * MAX_REGIONS  # of all regions together
_FREE_CUTS = 64  # blocks() makes regions of a third of REGION_BYTES and more
_MAX_BYTES = 2**62  # of a tensor; what is larger overflows in torch, even where one of its extents is 0

_SCHEMA = pa.schema(
    [
        pa.field("group", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("dtype", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("tensor_shape", pa.list_(pa.int64()), nullable=False),
        pa.field("offset", pa.list_(pa.int64()), nullable=False),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("object", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("begin", pa.int64(), nullable=False),
        pa.field("end", pa.int64(), nullable=False),
        pa.field("digest", pa.binary(16), nullable=False),
    ]
)


class IndexRow(NamedTuple):
    """One region: which tensor, which box of it, and where its bytes are (`begin`, `end` in the object's bytes)."""

    group: str
    key: str
    dtype: str
    tensor_shape: tuple[int, ...]
    box: Box
    object: str
    begin: int
    end: int
    digest: bytes

    @property
    def full_key(self) -> str:
        """The tensor's identity in the checkpoint: "group/key"."""
        return f"{self.group}/{self.key}"


# What the classes' own functions do, without a frame of Python for each of 10⁵.
_BOX: Callable[[tuple[Any, ...]], Box] = partial(tuple.__new__, Box)
_ROW: Callable[[tuple[Any, ...]], IndexRow] = partial(tuple.__new__, IndexRow)


def write_index(rows: Sequence[IndexRow]) -> bytes:
    """Write rows as the bytes of an uncompressed Arrow IPC file; refuse more than are read."""
    extents = sum(len(row.tensor_shape) for row in rows)
    if len(rows) > MAX_REGIONS or extents > _MAX_EXTENTS:
        raise UnsupportedStateError(
            f"the checkpoint has {len(rows)} regions with {extents} extents, more than are read",
            hint="Keep many small tensors as one large one.",
        )
    columns: list[list[object]] = [
        [row.group for row in rows],
        [row.key for row in rows],
        [row.dtype for row in rows],
        [row.tensor_shape for row in rows],
        [row.box.offset for row in rows],
        [row.box.shape for row in rows],
        [row.object for row in rows],
        [row.begin for row in rows],
        [row.end for row in rows],
        [row.digest for row in rows],
    ]
    arrays = [_array(values, field.type) for values, field in zip(columns, _SCHEMA, strict=True)]
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, _SCHEMA) as writer:
        writer.write_table(pa.Table.from_arrays(arrays, schema=_SCHEMA))
    return sink.getvalue()


def read_index(data: bytes, *, digest: str, name: str) -> list[IndexRow]:
    """Read the rows of an index whose digest is known; raise IntegrityError where bytes or rows do not make sense."""
    if digest_hex(data) != digest:
        raise IntegrityError("the index is not the one that was committed", key=name)
    try:
        table = read_arrow(data, _SCHEMA, MAX_REGIONS)
        columns = [_values(table.column(field.name), field) for field in _SCHEMA]
        group, key, dtype, full, offset, shape, place, begin, end, digests = columns
        boxes = map(_BOX, zip(offset, shape, strict=True))
        rows = [*map(_ROW, zip(group, key, dtype, full, boxes, place, begin, end, digests, strict=True))]
        _check(rows, name)
    except FAULTS as error:
        raise IntegrityError(f"the index is malformed: {error!s:.200}", key=name) from error
    return rows


def coverage_faults(rows: Iterable[IndexRow]) -> list[str]:
    """List every tensor whose regions do not tile it exactly, or disagree on its shape or dtype."""
    whole: dict[str, IndexRow] = {}  # nearly all, of 10⁵: one region that is the tensor
    tensors: dict[str, list[IndexRow]] = {}
    for row in rows:
        key, (offset, shape) = row.full_key, row.box
        if key not in whole and key not in tensors and shape == row.tensor_shape and not any(offset):
            whole[key] = row
        elif key in whole:
            tensors[key] = [whole.pop(key), row]
        else:
            tensors.setdefault(key, []).append(row)
    faults = []
    for key, found in tensors.items():
        first = found[0]
        if any(row.tensor_shape != first.tensor_shape or row.dtype != first.dtype for row in found):
            faults.append(f"{key}: its regions disagree on shape or dtype")
            continue
        fault = tiling_fault(first.tensor_shape, (row.box for row in found)) or _cut_fault(found)
        if fault:
            faults.append(f"{key}: {fault}")
    return faults


def object_faults(rows: Iterable[IndexRow], objects: Mapping[str, tuple[int, int]]) -> list[str]:
    """List every object (name → where its data begin and end) that its regions do not fill, one after the other.

    So no byte is under two digests, and none of the tensors takes more memory than the object has bytes.
    """
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in objects}
    strange = []
    for row in rows:
        if row.object in found:
            found[row.object].append((row.begin, row.end))
        else:
            strange.append(f"{row.full_key} lies in an object that the manifest does not name")
    return strange + [
        f"{name}: its regions leave a gap, overlap or end elsewhere"
        for name, spans in found.items()
        if not _fill(sorted(spans), *objects[name])
    ]


def _fill(spans: list[tuple[int, int]], at: int, end: int) -> bool:
    for begin, until in spans:
        if begin != at:
            return False
        at = until
    return at == end


def _cut_fault(found: list[IndexRow]) -> str | None:
    """Say that a tensor's regions lie in another order than its elements, or that it is cut into far too many.

    A restore reads what lies together in one go, and comparing two tensors meets all pairs of their regions.
    """
    if len({row.object for row in found}) == 1:
        lying = [row.box for row in sorted(found, key=lambda row: row.begin)]
        if lying != sorted(lying):
            return "its regions do not lie in the order of its elements"
    size_bytes = sum(row.end - row.begin for row in found)
    if len(found) <= _FREE_CUTS + 3 * size_bytes // REGION_BYTES:
        return None
    return f"{len(found)} regions for {size_bytes} bytes"


def _check(rows: list[IndexRow], name: str) -> None:
    names = {row.object for row in rows}
    bad = [n for n in names if not is_object_name(n) or parse_attempt(n) is None]
    bad += [g for g in {row.group for row in rows} if not is_group(g)]
    if bad:
        raise IntegrityError(f"the index holds the name {bad[0]!r:.80}", key=name)
    sizes = {dtype: (stored.nbytes, stored.itemsize) for dtype, stored in STORED_DTYPES.items()}
    for row in rows:  # of 10⁵: taken apart once, each row
        _, _, dtype, full, (offset, shape), _, begin, end, _ = row
        stored = sizes.get(dtype)
        if stored is None:
            raise IntegrityError(f"the index holds the dtype {dtype!r:.40}", key=row.full_key)
        nbytes, itemsize = stored
        if not len(full) == len(offset) == len(shape):
            raise IntegrityError("a region has another number of dimensions than its tensor", key=row.full_key)
        size_bytes = end - begin
        if begin < 0 or size_bytes != math.prod(shape) * nbytes:
            raise IntegrityError("a region's bytes do not fit its shape", key=row.full_key)
        if size_bytes > REGION_BYTES or begin % itemsize:
            raise IntegrityError("a region is too large, or does not lie where its dtype can", key=row.full_key)
        if not size_bytes and math.prod(filter(None, full)) * nbytes > _MAX_BYTES:
            raise IntegrityError("an empty tensor is too large", key=row.full_key)


def _values(column: pa.ChunkedArray, field: pa.Field) -> list[Any]:
    # Arrow checks neither that a column declared without nulls has none, nor that a shape is one.
    if column.null_count:
        raise ValueError(f"a value is missing in the column {field.name}")
    if pa.types.is_list(field.type):
        numbers = pc.list_flatten(column)
        if numbers.null_count or (pc.min(numbers).as_py() or 0) < 0:
            raise ValueError(f"a missing or a negative number in the column {field.name}")
        if len(numbers) > _MAX_EXTENTS or (pc.max(pc.list_value_length(column)).as_py() or 0) > MAX_DIMENSIONS:
            raise ValueError(f"more dimensions than a tensor has in the column {field.name}")
    return _listed(column)


def _listed(column: pa.ChunkedArray) -> list[Any]:
    """Do what to_pylist() does, in a third of its time: 10⁵ short lists and repeated texts."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # of no chunks
        return []
    if pa.types.is_dictionary(array.type):
        if len(array.dictionary) > len(array):
            raise ValueError("a dictionary with words that no row has")
        words = array.dictionary.to_pylist()
        return [words[number] for number in array.indices.to_pylist()]
    if pa.types.is_list(array.type):
        if len(array.values) > _MAX_EXTENTS:
            raise ValueError("a list of numbers that no row has")
        ends, numbers = array.offsets.to_pylist(), array.values.to_pylist()
        return [tuple(numbers[begin:end]) for begin, end in pairwise(ends)]
    values: list[Any] = array.to_pylist()
    return values


def _array(values: list[object], kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode().cast(kind)
    return pa.array(values, kind)
