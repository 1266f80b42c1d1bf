"""The index of one checkpoint: an Arrow file with one row per region of every tensor.

Arrow, because a reader of one group among 10⁵ tensors needs columns, not objects. The bytes are digested before
they are parsed: a damaged Arrow file can parse and can crash its reader. What it says is bounded before objects are
made of it: a column can stand for all of them, and a row of 30 bytes becomes a kilobyte. It is checked as columns, too:
objects are made for who looks at the rows.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_tasks.errors import IntegrityError, UnsupportedStateError
from ckpt_tasks.format.arrow import FAULTS, read_arrow
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.gc_pause import gc_paused
from ckpt_tasks.format.image import MAX_DIMENSIONS, MIN_REGION_BYTES, REGION_BYTES, STORED_DTYPES
from ckpt_tasks.format.keys import is_group, is_shard
from ckpt_tasks.format.regions import Box
from ckpt_tasks.format.tiling import row_major_faults, untiled

__all__ = [
    "MAX_INDEX_BYTES",
    "MAX_REGIONS",
    "Index",
    "IndexRow",
    "read_index",
    "write_index",
]

MAX_INDEX_BYTES = 256 << 20
MAX_REGIONS = 1 << 20
_MAX_EXTENTS = 8 * MAX_REGIONS  # of all regions together
_FREE_CUTS = 4096  # of a small tensor that many ranks share; else regions have MIN_REGION_BYTES, or a third of them
_MAX_BYTES = 2.0**62  # of a tensor; what is larger overflows in torch, even where one of its extents is 0
_MAX_ELEMENTS = 2.0**57  # of a region: as many bytes as a number of 64 bits counts, whatever the dtype
_HUGE = 2.0**200

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


def read_index(data: bytes, *, digest: str, name: str) -> Index:
    """Read an index whose digest is known; raise IntegrityError where bytes or rows do not make sense."""
    if digest_hex(data) != digest:
        raise IntegrityError("the index is not the one that was committed", key=name)
    try:
        index = Index(read_arrow(data, _SCHEMA, MAX_REGIONS))
        index.check(name)
    except FAULTS as error:
        raise IntegrityError(f"the index is malformed: {error!s:.200}", key=name) from error
    return index


class Index:
    """An index in memory, as columns; raises one of FAULTS where a value is missing, or numbers are no tensor's."""

    def __init__(self, table: pa.Table):
        columns = {field.name: _whole(table.column(field.name), field) for field in _SCHEMA}
        self._group, self._dtype, self._object = (_Words(columns[name]) for name in ("group", "dtype", "object"))
        self._full, self._offset, self._shape = (_Lists(columns[name]) for name in ("tensor_shape", "offset", "shape"))
        self._begin, self._end = columns["begin"].to_numpy(), columns["end"].to_numpy()
        self._key, self._digest = columns["key"], columns["digest"]

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._begin)

    @cached_property
    def rows(self) -> tuple[IndexRow, ...]:
        """All rows, in their order."""
        with gc_paused():
            columns = (
                self._group.values(),
                self._key.to_pylist(),
                self._dtype.values(),
                self._full.values(),
                map(_BOX, zip(self._offset.values(), self._shape.values(), strict=True)),
                self._object.values(),
                self._begin.tolist(),
                self._end.tolist(),
                self._digest.to_numpy(zero_copy_only=False).tolist(),  # to_pylist makes an Arrow scalar of each
            )
            return tuple(map(_ROW, zip(*columns, strict=True)))

    @cached_property
    def keys(self) -> list[str]:
        """The full key of the tensor of every row."""
        of_group = [f"{group}/" for group in self._group.words]
        return [
            of_group[code] + key for code, key in zip(self._group.codes.tolist(), self._key.to_pylist(), strict=True)
        ]

    @cached_property
    def tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of every tensor, by its full key; what they are while there are no `coverage_faults`."""
        return dict(zip(self.keys, zip(self._dtype.values(), self._full.values(), strict=True), strict=True))

    def check(self, name: str) -> None:
        """Raise IntegrityError where a row makes no sense; `name` is that of the index."""
        bad = [n for n in self._object.used if not is_shard(n)]
        bad += [g for g in self._group.used if not is_group(g)]
        if bad:
            raise IntegrityError(f"the index holds the name {bad[0]!r:.80}", key=name)
        for word in self._dtype.used:
            if word not in STORED_DTYPES:
                self._refuse(self._dtype.codes == self._dtype.code[word], f"the index holds the dtype {word!r:.40}")
        stored = [STORED_DTYPES.get(word) for word in self._dtype.words]  # None: no row has it
        sizes = np.array([(one.nbytes, one.itemsize) if one else (1, 1) for one in stored], np.int64).reshape(-1, 2)
        nbytes, itemsize = sizes[self._dtype.codes].T
        other = (self._offset.lengths != self._full.lengths) | (self._shape.lengths != self._full.lengths)
        self._refuse(other, "a region has another number of dimensions than its tensor")
        size_bytes, (elements, _), (_, extent) = self._end - self._begin, self._shape.products(), self._full.products()
        misfit = (self._begin < 0) | (size_bytes < 0) | (size_bytes != elements * nbytes)
        self._refuse(misfit, "a region's bytes do not fit its shape")
        misplaced = (size_bytes > REGION_BYTES) | (self._begin % itemsize != 0)
        self._refuse(misplaced, "a region is too large, or does not lie where its dtype can")
        self._refuse((size_bytes == 0) & (extent * nbytes > _MAX_BYTES), "an empty tensor is too large")

    def coverage_faults(self, *, whole: bool = True) -> list[str]:
        """List every tensor whose regions do not tile it exactly, or disagree on its shape or dtype.

        `whole`: one rank wrote all of it, so that the regions of a tensor in one object are its elements in order.
        """
        tensor = self._tensors_of_rows()
        # Nearly all, of 10⁵, have one region, and it is the tensor.
        odd = self._full.some(self._full.numbers != self._shape.numbers) | self._offset.some(self._offset.numbers != 0)
        odd |= np.bincount(tensor)[tensor] > 1
        rows = np.flatnonzero(odd)
        faults: dict[int, str] = {}
        for dims in np.flatnonzero(np.bincount(self._full.lengths[rows])).tolist():
            of_dims = rows[self._full.lengths[rows] == dims]
            of_dims = of_dims[np.lexsort((self._begin[of_dims], tensor[of_dims]))]
            faults |= self._faults_of(of_dims, tensor[of_dims], dims, whole=whole)
        first = dict(zip(tensor[::-1].tolist(), range(len(tensor) - 1, -1, -1), strict=True)) if faults else {}
        by_row = sorted((first[number], why) for number, why in faults.items())
        return [f"{self.keys[row]}: {why}" for row, why in by_row]

    def _tensors_of_rows(self) -> npt.NDArray[np.int64]:
        """Number the tensors, and return that of every row."""
        keys = self._key.dictionary_encode()
        codes = self._group.codes * max(1, len(keys.dictionary)) + keys.indices.to_numpy()
        numbers: npt.NDArray[np.int64] = np.unique(codes, return_inverse=True)[1]
        return numbers

    def _faults_of(
        self, rows: npt.NDArray[np.int64], tensor: npt.NDArray[np.int64], dims: int, *, whole: bool
    ) -> dict[int, str]:
        """Say by tensor what is wrong with rows of `dims` dimensions, in the order of tensors and bytes."""
        full, offset, shape = (column.matrix(rows, dims) for column in (self._full, self._offset, self._shape))
        starts = np.flatnonzero(np.r_[True, tensor[1:] != tensor[:-1]])
        counts = np.diff(np.r_[starts, len(rows)])
        first, group = np.repeat(starts, counts), np.repeat(np.arange(len(starts)), counts)
        dtype = self._dtype.codes[rows]
        other = (full != full[first]).any(axis=1) | (dtype != dtype[first])
        faults = dict.fromkeys(tensor[other].tolist(), "its regions disagree on shape or dtype")
        same = ~np.isin(tensor, tensor[other])
        for number in untiled(tensor[same], full[same], offset[same], shape[same]).tolist():
            faults[number] = "its regions leave a hole, overlap or lie outside of it"
        size_bytes = np.add.reduceat(self._end[rows] - self._begin[rows], starts)
        for number in tensor[starts[counts > _FREE_CUTS + 3 * (size_bytes // MIN_REGION_BYTES)]].tolist():
            faults.setdefault(number, f"{int((tensor == number).sum())} regions, too many for its bytes")
        if whole:
            place = self._object.codes[rows]
            together = ~np.logical_or.reduceat(place != place[first], starts)[group]
            for number in np.unique(tensor[together & row_major_faults(full, offset, shape, first)]).tolist():
                faults.setdefault(number, "its regions do not lie in the order of its elements")
        return faults

    def object_faults(self, objects: Mapping[str, tuple[int, int]]) -> list[str]:
        """List every object (name → where its data begin and end) that its regions do not fill, one after the other.

        So no byte is under two digests, and none of the tensors takes more memory than the object has bytes.
        """
        order = np.lexsort((self._end, self._begin, self._object.codes))
        firsts = np.searchsorted(self._object.codes[order], np.arange(len(self._object.words) + 1)).tolist()
        inside = {word: order[firsts[code] : firsts[code + 1]] for word, code in self._object.code.items()}
        strange = [row for word, rows in inside.items() if word not in objects for row in rows.tolist()]
        faults = [f"{self.keys[row]} lies in an object that the manifest does not name" for row in strange]
        for name, (begin, end) in objects.items():
            rows = inside.get(name, order[:0])
            if [begin, *self._end[rows].tolist()] != [*self._begin[rows].tolist(), end]:
                faults.append(f"{name}: its regions leave a gap, overlap or end elsewhere")
        return faults

    def _refuse(self, bad: npt.NDArray[np.bool_], why: str) -> None:
        if bad.any():
            raise IntegrityError(why, key=self.keys[int(bad.argmax())])


class _Words:
    """A column of few words: each once (`words`), its place there (`code`), and that of every row's word (`codes`)."""

    def __init__(self, column: pa.DictionaryArray):
        words = column.dictionary.to_pylist()
        if len(words) > len(column):
            raise ValueError("a dictionary with words that no row has")
        self.words = [*dict.fromkeys(words)]  # a word can stand there twice
        self.code = {word: code for code, word in enumerate(self.words)}
        self.codes = np.array([self.code[word] for word in words], np.int64)[column.indices.to_numpy()]

    @property
    def used(self) -> list[Any]:
        """The words that a row has."""
        # Not np.unique, whose first call imports numpy.ma: 9 ms of every restore in a new process.
        return [self.words[code] for code in np.flatnonzero(np.bincount(self.codes, minlength=len(self.words)))]

    def values(self) -> list[Any]:
        """List the word of every row."""
        return [self.words[code] for code in self.codes.tolist()]


class _Lists:
    """A column of short lists: how many `numbers` each has, where they end, and the numbers of all of them."""

    def __init__(self, column: pa.ListArray):
        flat = pc.list_flatten(column)
        if flat.null_count or (pc.min(flat).as_py() or 0) < 0:
            raise ValueError("a missing or a negative number in a list")
        self.numbers: npt.NDArray[np.int64] = flat.to_numpy()
        self.lengths = np.diff(column.offsets.to_numpy()).astype(np.int64)
        self.ends = np.cumsum(self.lengths)
        if len(flat) > _MAX_EXTENTS or self.lengths.max(initial=0) > MAX_DIMENSIONS:
            raise ValueError("more dimensions than a tensor has")

    def values(self) -> list[tuple[int, ...]]:
        """List the list of every row, as a tuple."""
        # All of one length at once: half the time of cutting out each of 10⁵.
        begins = self.ends - self.lengths
        lists: dict[int, Iterator[tuple[int, ...]]] = {0: repeat(())}
        for length in np.flatnonzero(np.bincount(self.lengths)[1:]) + 1:
            places = begins[self.lengths == length]
            lists[int(length)] = zip(*(self.numbers[places + n].tolist() for n in range(length)), strict=True)
        return [next(lists[length]) for length in self.lengths.tolist()]

    def matrix(self, rows: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Return the lists of some rows, all of this length, as a matrix."""
        begins = (self.ends - self.lengths)[rows]
        matrix: npt.NDArray[np.int64] = self.numbers[begins[:, None] + np.arange(length)]
        return matrix

    def some(self, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Say for every row whether what is `said` of each number is true of one in its list."""
        count = np.concatenate(([0], np.cumsum(mask)))
        found: npt.NDArray[np.bool_] = count[self.ends] != count[self.ends - self.lengths]
        return found

    def products(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the product of every list, -1 where it is beyond any size, and about that of what is not 0 in it."""
        product, magnitude = np.ones(len(self.ends), np.int64), np.ones(len(self.ends))
        for n in range(int(self.lengths.max(initial=0))):
            there = self.lengths > n
            factor = self.numbers[(self.ends - self.lengths)[there] + n]
            product[there] *= factor  # it may overflow
            magnitude[there] = np.minimum(magnitude[there] * np.maximum(factor, 1), _HUGE)
        product[(magnitude > _MAX_ELEMENTS) & ~self.some(self.numbers == 0)] = -1
        return product, magnitude


def _whole(column: pa.ChunkedArray, field: pa.Field) -> pa.Array:
    # Arrow does not check that a column declared without nulls has none.
    if column.null_count:
        raise ValueError(f"a value is missing in the column {field.name}")
    if column.num_chunks == 1:
        return column.chunk(0)  # nearly always; to combine it starts what computes, 9 ms the first time
    array = column.combine_chunks()
    return pa.array([], field.type) if isinstance(array, pa.ChunkedArray) else array  # of no chunks


def _array(values: list[object], kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode().cast(kind)
    return pa.array(values, kind)
