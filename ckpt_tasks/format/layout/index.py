"""The index of one checkpoint: an Arrow file with one row per region of every tensor.

In an Arrow file a reader of one group among 10⁵ tensors can use columns, without an object for each row. A reader
checks the digest before it parses: a damaged Arrow file may parse, and may crash its reader. It checks limits before it
makes row objects, since a row of 30 bytes becomes an object of a kilobyte. All checks work on columns; row objects are
made on demand.
"""

from __future__ import annotations

import io
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ckpt_tasks.errors import IntegrityError, UnsupportedStateError
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import is_group, is_shard
from ckpt_tasks.format.layout.arrow import FAULTS, array, numbers_of, read_arrow
from ckpt_tasks.format.layout.columns import MAX_EXTENTS, MAX_REGIONS, Lists, Words, whole_column
from ckpt_tasks.format.layout.image import MIN_REGION_BYTES, REGION_BYTES, STORED_DTYPES, ImageLayout
from ckpt_tasks.format.layout.regions import Box
from ckpt_tasks.format.layout.tiling import Numbers, row_major_faults, untiled
from ckpt_tasks.format.parsing import well_formed
from ckpt_tasks.gc_pause import gc_paused

MAX_INDEX_BYTES = 256 << 20
# A tensor may have this many regions, since many ranks may share it, and three more for each MIN_REGION_BYTES.
_FREE_CUTS = 4096
_MAX_BYTES = 2.0**62  # A larger tensor overflows in torch, even if one of its extents is 0.

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


# For each part of a sharded tensor, by full key: the shape of the whole tensor, and the part's offset.
Places = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
WHOLE: Places = MappingProxyType({})


class IndexRow(NamedTuple):
    """One region: its tensor, its box, and its bytes (`begin` to `end` of `object`)."""

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


# Constructors of Box and IndexRow that need no Python frame, for 10⁵ rows.
_BOX: Callable[[tuple[Any, ...]], Box] = partial(tuple.__new__, Box)
_ROW: Callable[[tuple[Any, ...]], IndexRow] = partial(tuple.__new__, IndexRow)


def write_index(index: Index) -> bytes:
    """Write an index as the bytes of an uncompressed Arrow IPC file.

    Raises UnsupportedStateError if it has more regions or extents than a reader accepts.
    """
    extents = sum(len(chunk.flatten()) for chunk in index.table.column("tensor_shape").chunks)
    if len(index) > MAX_REGIONS or extents > MAX_EXTENTS:
        raise UnsupportedStateError(
            f"the checkpoint has {len(index)} regions with {extents} extents, more than are read",
            hint="Keep many small tensors as one large one.",
        )
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, _SCHEMA) as writer:
        writer.write_table(index.table)
    return sink.getvalue()


def read_index(data: bytes, *, digest: str, name: str) -> Index:
    """Read an index; raise IntegrityError if the bytes do not have this digest, or rows make no sense."""
    if digest_hex(data) != digest:
        raise IntegrityError("the index is not the one that was committed", key=name)
    index = parse_index(data, name)
    with well_formed("the index", name, FAULTS):
        index.check(name)
    return index


def parse_index(data: bytes | memoryview, name: str) -> Index:
    """Read an index without checking its rows; raise IntegrityError if the bytes are not a table of this schema."""
    with well_formed("the index", name, FAULTS):
        return Index(read_arrow(data, _SCHEMA, MAX_REGIONS))


class _Columns:
    """The columns of an index; making them raises one of FAULTS if a value is missing or impossible."""

    def __init__(self, table: pa.Table):
        columns = {field.name: whole_column(table.column(field.name), field) for field in _SCHEMA}
        self.group, self.dtype, self.object = (Words(columns[name]) for name in ("group", "dtype", "object"))
        self.full, self.offset, self.shape = (Lists(columns[name]) for name in ("tensor_shape", "offset", "shape"))
        self.begin: Numbers = numbers_of(columns["begin"])
        self.end: Numbers = numbers_of(columns["end"])
        self.key, self.digest = columns["key"], columns["digest"]


class Index:
    """The regions of a checkpoint, or of a part of one, as a table; columns are read on demand."""

    def __init__(self, table: pa.Table):
        self.table = table

    @classmethod
    @gc_paused()
    def of(cls, rows: Iterable[IndexRow]) -> Index:
        """Make an index from rows of regions."""
        columns: list[Sequence[object]] = [*zip(*rows, strict=True)] or [()] * 9
        boxes: list[Sequence[object]] = [*zip(*columns.pop(4), strict=True)] or [(), ()]
        return cls.of_columns(*columns[:4], *boxes, *columns[4:])

    @classmethod
    def of_columns(cls, *columns: Sequence[object]) -> Index:
        """Make an index from columns in the order of the schema."""
        arrays = [array(values, field.type) for values, field in zip(columns, _SCHEMA, strict=True)]
        return cls(pa.Table.from_arrays(arrays, schema=_SCHEMA))

    @classmethod
    @gc_paused()
    def of_layout(cls, group: str, layout: ImageLayout, places: Places = WHOLE) -> Index:
        """Make the rows of a file's regions, without the object's name and the digests, which `placed` adds."""
        regions = layout.regions
        wholes = [places.get(f"{group}/{spec.name}", (spec.shape, None)) for spec, *_ in regions]
        return cls.of_columns(
            [group] * len(regions),
            [spec.name for spec, *_ in regions],
            [spec.dtype for spec, *_ in regions],
            [shape for shape, _ in wholes],
            [
                box.offset if begin is None else tuple(map(operator.add, begin, box.offset))
                for (_, begin), (_, box, *_) in zip(wholes, regions, strict=True)
            ],
            [box.shape for _, box, *_ in regions],
            [""] * len(regions),
            [begin for *_, begin, _ in regions],
            [end for *_, end in regions],
            [bytes(16)] * len(regions),
        )

    @classmethod
    def joined(cls, parts: Iterable[Index]) -> Index:
        """Concatenate the indexes of several parts of a checkpoint."""
        tables = [part.table for part in parts]
        return cls(pa.concat_tables(tables or [_SCHEMA.empty_table()]).unify_dictionaries().combine_chunks())

    def __len__(self) -> int:
        """Return the number of rows, one for each region."""
        return int(self.table.num_rows)

    @cached_property
    def _columns(self) -> _Columns:
        return _Columns(self.table)

    @cached_property
    def rows(self) -> tuple[IndexRow, ...]:
        """All rows, in their order."""
        with gc_paused():
            of = self._columns
            columns = (
                of.group.values(),
                of.key.to_pylist(),
                of.dtype.values(),
                of.full.values(),
                map(_BOX, zip(of.offset.values(), of.shape.values(), strict=True)),
                of.object.values(),
                of.begin.tolist(),
                of.end.tolist(),
                _pieces(of.digest),  # to_pylist would make an Arrow scalar for each.
            )
            return tuple(map(_ROW, zip(*columns, strict=True)))

    @cached_property
    def tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """The dtype and shape of every tensor by full key; valid if `coverage_faults` is empty."""
        with gc_paused():
            keys, dtypes, shapes = self._full_keys, self._columns.dtype.values(), self._columns.full.values()
            return {keys[first]: (dtypes[first], shapes[first]) for first in self._tensor_numbers[1].tolist()}

    def placed(self, name: str, digests: Sequence[bytes]) -> Index:
        """Return the rows with a new name of their object, and with new digests."""
        field = _SCHEMA.field("object")
        codes = array(np.zeros(len(self), np.int32), pa.int32())
        of_object = pa.DictionaryArray.from_arrays(codes, array([name] if digests else [], pa.string()))
        columns = {"object": of_object.cast(field.type), "digest": array(digests, pa.binary(16))}
        arrays = [columns.get(name, self.table.column(name)) for name in _SCHEMA.names]
        return Index(pa.Table.from_arrays(arrays, schema=_SCHEMA))

    def of_object(self, name: str) -> Index:
        """Return the rows of one object."""
        words = self._columns.object
        return self._take(np.flatnonzero(words.codes == words.code.get(name, -1)))

    def of_tensors(self, keys: Container[str]) -> Index:
        """Return the rows of the tensors with these full keys."""
        numbers, firsts = self._tensor_numbers
        wanted = np.array([self._full_keys[first] in keys for first in firsts.tolist()], np.bool_)
        return self if wanted.all() else self._take(np.flatnonzero(wanted[numbers]))

    def same_regions(self, other: Index) -> bool:
        """Return True if another index has the same rows, apart from the names of objects."""
        # Compare digests first: they differ most often.
        return len(self) == len(other) and all(
            _plain(self.table.column(name)).equals(_plain(other.table.column(name)))
            for name in reversed(_SCHEMA.names)
            if name != "object"
        )

    def _take(self, rows: Numbers) -> Index:
        table = self.table.take(array(rows, pa.int64()))
        for n, field in enumerate(_SCHEMA):
            column = table.column(n)
            if pa.types.is_dictionary(field.type) and any(len(one.dictionary) > len(rows) for one in column.chunks):
                table = table.set_column(n, field, column.cast(pa.string()).dictionary_encode().cast(field.type))
        return Index(table)

    @cached_property
    def _full_keys(self) -> list[str]:
        of = self._columns
        of_group = [f"{group}/" for group in of.group.words]
        return [of_group[code] + key for code, key in zip(of.group.codes.tolist(), of.key.to_pylist(), strict=True)]

    @cached_property
    def _tensor_numbers(self) -> tuple[Numbers, Numbers]:
        """The number of each row's tensor, in order of first appearance, and the first row of each tensor."""
        keys = self._columns.key.to_pylist()  # `dictionary_encode` would import pyarrow.compute.
        code = {key: n for n, key in enumerate(dict.fromkeys(keys))}
        codes = self._columns.group.codes * max(1, len(code)) + np.fromiter(map(code.__getitem__, keys), np.int64)
        _, firsts, numbers = np.unique(codes, return_index=True, return_inverse=True)
        rank = np.empty_like(firsts)
        order = np.argsort(firsts)
        rank[order] = np.arange(len(firsts))
        return rank[numbers], firsts[order]

    def check(self, name: str) -> None:
        """Raise IntegrityError if a row has impossible values; `name`: the name of the index."""
        of = self._columns
        bad = [n for n in of.object.used if not is_shard(n)]
        bad += [g for g in of.group.used if not is_group(g)]
        if bad:
            raise IntegrityError(f"the index holds the name {bad[0]!r:.80}", key=name)
        for word in of.dtype.used:
            if word not in STORED_DTYPES:
                self._refuse(of.dtype.codes == of.dtype.code[word], f"the index holds the dtype {word!r:.40}")
        stored = [STORED_DTYPES.get(word) for word in of.dtype.words]  # None: an unknown dtype that no row has.
        sizes = np.array([(one.nbytes, one.itemsize) if one else (1, 1) for one in stored], np.int64).reshape(-1, 2)
        nbytes, itemsize = sizes[of.dtype.codes].T
        other = (of.offset.lengths != of.full.lengths) | (of.shape.lengths != of.full.lengths)
        self._refuse(other, "a region has another number of dimensions than its tensor")
        size_bytes, (elements, _), (_, extent) = of.end - of.begin, of.shape.products(), of.full.products()
        misfit = (of.begin < 0) | (size_bytes < 0) | (size_bytes != elements * nbytes)
        self._refuse(misfit, "a region's bytes do not fit its shape")
        misplaced = (size_bytes > REGION_BYTES) | (of.begin % itemsize != 0)
        self._refuse(misplaced, "a region is too large, or does not lie where its dtype can")
        self._refuse((size_bytes == 0) & (extent * nbytes > _MAX_BYTES), "an empty tensor is too large")

    def coverage_faults(self, *, whole: bool = True) -> list[str]:
        """List each tensor whose regions do not tile it exactly, or differ in its shape or dtype.

        `whole`: one rank wrote the checkpoint, so regions in one object must also be in the order of the elements.
        """
        of = self._columns
        tensor, firsts = self._tensor_numbers
        # Check only tensors with several regions, or with a region that is not the whole tensor: few of 10⁵.
        odd = of.full.some(of.full.numbers != of.shape.numbers) | of.offset.some(of.offset.numbers != 0)
        odd |= np.bincount(tensor)[tensor] > 1
        rows = np.flatnonzero(odd)
        faults: dict[int, str] = {}
        for dims in np.flatnonzero(np.bincount(of.full.lengths[rows])).tolist():
            of_dims = rows[of.full.lengths[rows] == dims]
            of_dims = of_dims[np.lexsort((of.begin[of_dims], tensor[of_dims]))]
            faults |= self._faults_of(of_dims, tensor[of_dims], dims, whole=whole)
        if not faults:
            return []
        return [f"{self._full_keys[firsts[number]]}: {faults[number]}" for number in sorted(faults)]

    def _faults_of(
        self, rows: npt.NDArray[np.int64], tensor: npt.NDArray[np.int64], dims: int, *, whole: bool
    ) -> dict[int, str]:
        """Return faults by tensor number; the rows have `dims` dimensions and are sorted by tensor and byte."""
        of = self._columns
        full, offset, shape = (column.matrix(rows, dims) for column in (of.full, of.offset, of.shape))
        starts = np.flatnonzero(np.r_[True, tensor[1:] != tensor[:-1]])
        counts = np.diff(np.r_[starts, len(rows)])
        first, group = np.repeat(starts, counts), np.repeat(np.arange(len(starts)), counts)
        dtype = of.dtype.codes[rows]
        other = (full != full[first]).any(axis=1) | (dtype != dtype[first])
        faults = dict.fromkeys(tensor[other].tolist(), "its regions disagree on shape or dtype")
        same = ~np.isin(tensor, tensor[other]) if other.any() else slice(None)
        for number in untiled(tensor[same], full[same], offset[same], shape[same]).tolist():
            faults[number] = "its regions leave a hole, overlap or lie outside of it"
        size_bytes = np.add.reduceat(of.end[rows] - of.begin[rows], starts)
        for number in tensor[starts[counts > _FREE_CUTS + 3 * (size_bytes // MIN_REGION_BYTES)]].tolist():
            faults.setdefault(number, f"{int((tensor == number).sum())} regions, too many for its bytes")
        if whole:
            place = of.object.codes[rows]
            together = ~np.logical_or.reduceat(place != place[first], starts)[group]
            for number in np.unique(tensor[together & row_major_faults(full, offset, shape, first)]).tolist():
                faults.setdefault(number, "its regions do not lie in the order of its elements")
        return faults

    def object_faults(self, objects: Mapping[str, tuple[int, int]]) -> list[str]:
        """List each object whose regions do not fill it exactly; `objects`: name → begin and end of its data.

        In a filled object exactly one digest covers each byte, and a tensor is not larger than its object.
        """
        of = self._columns
        order = np.lexsort((of.end, of.begin, of.object.codes))
        firsts = np.searchsorted(of.object.codes[order], np.arange(len(of.object.words) + 1)).tolist()
        inside = {word: order[firsts[code] : firsts[code + 1]] for word, code in of.object.code.items()}
        strange = [row for word, rows in inside.items() if word not in objects for row in rows.tolist()]
        faults = [f"{self._full_keys[row]} lies in an object that the manifest does not name" for row in strange]
        for name, (begin, end) in objects.items():
            rows = inside.get(name, order[:0])
            if [begin, *of.end[rows].tolist()] != [*of.begin[rows].tolist(), end]:
                faults.append(f"{name}: its regions leave a gap, overlap or end elsewhere")
        return faults

    def _refuse(self, bad: npt.NDArray[np.bool_], why: str) -> None:
        if bad.any():
            raise IntegrityError(why, key=self._full_keys[int(bad.argmax())])


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column


def _pieces(column: pa.FixedSizeBinaryArray) -> list[bytes]:
    """List the values of a column of values of one size."""
    size = column.type.byte_width
    data = bytes(column.buffers()[1] or b"")[column.offset * size :]
    return [data[at : at + size] for at in range(0, len(column) * size, size)]
