"""The layout of one safetensors file, planned before the file has a byte.

A snapshot copies every tensor directly to its final offset; the buffer then *is* the file. So the layout depends only
on names, dtypes and shapes::

    [8 bytes: header length n, little endian] [n bytes: JSON, padded with spaces] [tensors, no gaps]

The padding puts the first tensor on a 4,096-byte boundary (for aligned direct writes). Tensors are in the order of
falling element size, so that each tensor is aligned to its element size. Format: github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ckpt_tasks.errors import IntegrityError, UnsupportedStateError
from ckpt_tasks.format.layout.regions import Box, blocks
from ckpt_tasks.format.parsing import MALFORMED, parse_json, text, well_formed, whole
from ckpt_tasks.gc_pause import gc_paused

ALIGNMENT = 4096
MAX_HEADER_BYTES = 16 << 20  # A reader allocates this much before it verifies the file.
MAX_DIMENSIONS = 64  # torch's limit.
REGION_BYTES = 16 << 20  # The largest region: the unit with its own digest, which can be read alone.
# With many ranks regions are small, so that another number of ranks reads few unneeded bytes.
MIN_REGION_BYTES = 1 << 18


class StoredDtype(NamedTuple):
    """How safetensors stores a dtype: its code, the size of a stored element in bytes, and added dimensions."""

    code: str
    itemsize: int
    suffix: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size of one element of the original dtype in bytes."""
        return self.itemsize * math.prod(self.suffix)


# By torch's name. safetensors lacks some of these dtypes: files store them as other dtypes.
STORED_DTYPES: Mapping[str, StoredDtype] = {
    "float64": StoredDtype("F64", 8),
    "int64": StoredDtype("I64", 8),
    "uint64": StoredDtype("U64", 8),
    "complex64": StoredDtype("C64", 8),
    "complex128": StoredDtype("F64", 8, (2,)),
    "float32": StoredDtype("F32", 4),
    "int32": StoredDtype("I32", 4),
    "uint32": StoredDtype("U32", 4),
    "complex32": StoredDtype("F16", 2, (2,)),
    "float16": StoredDtype("F16", 2),
    "bfloat16": StoredDtype("BF16", 2),
    "int16": StoredDtype("I16", 2),
    "uint16": StoredDtype("U16", 2),
    "int8": StoredDtype("I8", 1),
    "uint8": StoredDtype("U8", 1),
    "bool": StoredDtype("BOOL", 1),
    "float8_e4m3fn": StoredDtype("F8_E4M3", 1),
    "float8_e5m2": StoredDtype("F8_E5M2", 1),
    "float8_e4m3fnuz": StoredDtype("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": StoredDtype("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": StoredDtype("U8", 1),
    "float4_e2m1fn_x2": StoredDtype("U8", 1),
}


_ITEMSIZES = {stored.code: stored.itemsize for stored in STORED_DTYPES.values()}
_NBYTES = {name: stored.nbytes for name, stored in STORED_DTYPES.items()}
_LETTER_BYTES = 6  # The longest form of a character of a name in a header, such as \u0007.


class TensorSpec(NamedTuple):
    """One tensor to store: its name in the file, torch's name of the dtype, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The tensor's size in the file."""
        return _NBYTES[self.dtype] * math.prod(self.shape)


class Slot(NamedTuple):
    """Where a tensor's bytes are in the file: `begin` is the first byte, `end` is the byte after the last one."""

    spec: TensorSpec
    begin: int
    end: int

    def regions(self, region_bytes: int = REGION_BYTES) -> list[tuple[Box, int, int]]:
        """Cut the tensor into regions of at most `region_bytes`: (box, first byte in the file, end in the file)."""
        itemsize = STORED_DTYPES[self.spec.dtype].nbytes
        regions, begin = [], self.begin
        for box in blocks(self.spec.shape, region_bytes // itemsize):
            end = begin + box.size * itemsize
            regions.append((box, begin, end))
            begin = end
        return regions


@dataclass(frozen=True)
class ImageLayout:
    """The exact layout of one file: its header's bytes, every tensor's slot, and the file's size in bytes."""

    header: bytes
    slots: tuple[Slot, ...]
    size_bytes: int
    region_bytes: int = REGION_BYTES

    @cached_property
    @gc_paused()
    def regions(self) -> list[tuple[TensorSpec, Box, int, int]]:
        """All regions in the order of the file: (spec, box, begin, end)."""
        return [
            (slot.spec, box, begin, end) for slot in self.slots for box, begin, end in slot.regions(self.region_bytes)
        ]


def plan_image(specs: Iterable[TensorSpec], region_bytes: int = REGION_BYTES) -> ImageLayout:
    """Lay out tensors in one file, by falling element size and otherwise in the given order.

    Raises UnsupportedStateError for a dtype that cannot be stored, a name that appears twice, and a header over 16 MiB.
    """
    ordered = sorted(specs, key=lambda spec: -_stored(spec).itemsize)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin, offsets = 0, []
    for spec in ordered:
        stored, end = _stored(spec), begin + spec.size_bytes
        if spec.name in entries:
            raise UnsupportedStateError("a file cannot hold a second entry of this name", key=spec.name)
        entries[spec.name] = {
            "dtype": stored.code,
            "shape": [*spec.shape, *stored.suffix],
            "data_offsets": [begin, end],
        }
        offsets.append((spec, begin, end))
        begin = end
    header = header_of(entries)
    start = len(header)
    slots = tuple(Slot(spec, start + b, start + e) for spec, b, e in offsets)
    return ImageLayout(header, slots, start + begin, region_bytes)


def header_of(entries: Mapping[str, object]) -> bytes:
    """Write the padded header of a file; raise UnsupportedStateError if it is over 16 MiB."""
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    start = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT
    if start - 8 > MAX_HEADER_BYTES:
        raise UnsupportedStateError(f"the names of {len(entries) - 1} tensors need a header of {len(text)} bytes")
    return struct.pack("<Q", start - 8) + text.ljust(start - 8)


def plan_bytes(name: str, size_bytes: int) -> ImageLayout:
    """Lay out a file without a header, whose contents are one tensor of bytes."""
    return ImageLayout(b"", (Slot(TensorSpec(name, "uint8", (size_bytes,)), 0, size_bytes),), size_bytes)


def plan_parts(specs: Sequence[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Cut a group into files of at most `max_shard_bytes` and half the largest header; a larger tensor is one file."""
    parts: list[list[TensorSpec]] = []
    size_bytes = sum(spec.size_bytes for spec in specs)
    header_bytes = sum(100 + _LETTER_BYTES * len(spec.name) + 21 * len(spec.shape) for spec in specs)
    if specs and size_bytes <= max_shard_bytes and header_bytes <= MAX_HEADER_BYTES // 2:
        return [[*specs]]  # This is fast: most groups are one file.
    size_bytes = header_bytes = 0
    for spec in specs:
        entry_bytes = 100 + len(json.dumps(spec.name, ensure_ascii=False).encode()) + 21 * len(spec.shape)
        full = size_bytes + spec.size_bytes > max_shard_bytes or header_bytes + entry_bytes > MAX_HEADER_BYTES // 2
        if not parts or full:
            parts.append([])
            size_bytes = header_bytes = 0
        parts[-1].append(spec)
        size_bytes += spec.size_bytes
        header_bytes += entry_bytes
    return parts


@gc_paused()
def parse_header(prefix: bytes, size_bytes: int) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Read the header of a safetensors file: name → (safetensors dtype, stored shape, begin, end).

    Offsets count from the file's start. `prefix` has at least the header; `size_bytes` is the size of the whole file.
    Raises IntegrityError if the header is cut, too large or malformed, if a tensor's bytes do not fit its dtype and
    shape, or if the tensors do not fill the rest of the file exactly.
    """
    with well_formed("the safetensors header", None, (struct.error, *MALFORMED)):
        (length,) = struct.unpack_from("<Q", prefix)
        if length > MAX_HEADER_BYTES or 8 + length > min(len(prefix), size_bytes):
            raise IntegrityError(f"the safetensors header claims {length} bytes")
        entries = parse_json(bytes(prefix[8 : 8 + length]), encoding="utf-8")
        metadata = entries.pop("__metadata__", None)
        texts = [*entries] if metadata is None else [*entries, *metadata, *map(text, metadata.values())]
        "".join(texts).encode()  # Refuse half of a surrogate pair, as safetensors does.
        header = {name: _parse_entry(entry, 8 + length) for name, entry in entries.items()}
    at = 8 + length
    for name, (_, _, begin, end) in sorted(header.items(), key=lambda item: item[1][2:]):
        if begin != at or end < begin:
            raise IntegrityError("the tensors of a safetensors file leave a gap or overlap", key=name)
        at = end
    if at != size_bytes:
        raise IntegrityError(f"a safetensors file has {size_bytes} bytes and its tensors end at {at}")
    return header


def _parse_entry(entry: Mapping[str, Any], start: int) -> tuple[str, tuple[int, ...], int, int]:
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), map(whole, entry["data_offsets"])
    if len(shape) > MAX_DIMENSIONS + 1 or end - begin != math.prod(map(whole, shape)) * _ITEMSIZES[dtype]:
        raise ValueError(f"a tensor of {dtype:.40} {shape!r:.80} does not have {end - begin} bytes")
    return dtype, shape, start + begin, start + end


def _stored(spec: TensorSpec) -> StoredDtype:
    stored = STORED_DTYPES.get(spec.dtype)
    if stored is None:
        raise UnsupportedStateError(f"tensors of dtype {spec.dtype} cannot be stored", key=spec.name)
    return stored
