"""The layout of a file: any safetensors reader opens it, the data is aligned, and hostile headers are refused."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open

from ckpt_tasks.errors import IntegrityError, UnsupportedStateError
from ckpt_tasks.format.layout.image import (
    ALIGNMENT,
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    REGION_BYTES,
    STORED_DTYPES,
    TensorSpec,
    parse_header,
    plan_image,
    plan_parts,
)
from ckpt_tasks.format.layout.regions import blocks_in_order
from tests.support.sweeps import quick_first

specs = st.lists(
    st.builds(
        TensorSpec,
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter("__metadata__".__ne__),
        st.sampled_from(sorted(STORED_DTYPES)),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    max_size=8,
    unique_by=lambda spec: spec.name,
)


@given(specs)
@example([])
def test_a_file_of_any_layout_opens_in_plain_safetensors(wanted: list[TensorSpec]) -> None:
    """P6, P39, P40: the library of others finds every tensor, with the dtype and shape that we say, and aligned."""
    layout = plan_image(wanted)
    assert parse_header(layout.header, layout.size_bytes).keys() == {spec.name for spec in wanted}
    assert len(layout.header) % ALIGNMENT == 0
    sizes = [STORED_DTYPES[slot.spec.dtype].itemsize for slot in layout.slots]
    assert sizes == sorted(sizes, reverse=True)
    ends = [len(layout.header), *(slot.end for slot in layout.slots)]
    assert ends[-1] == layout.size_bytes
    for slot, begin, stored_bytes in zip(layout.slots, ends[:-1], sizes, strict=True):
        assert (slot.begin, slot.end - slot.begin) == (begin, slot.spec.size_bytes)
        assert slot.begin % stored_bytes == 0
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as written:
        written.write(layout.header + bytes(layout.size_bytes - len(layout.header)))
        written.flush()
        with safe_open(written.name, framework="numpy") as file:
            assert set(file.keys()) == {spec.name for spec in wanted}
            for spec in wanted:
                found, stored = file.get_slice(spec.name), STORED_DTYPES[spec.dtype]
                assert found.get_dtype() == stored.code
                assert tuple(found.get_shape()) == (*spec.shape, *stored.suffix)


@pytest.mark.parametrize(
    ("names", "dtype", "said"),
    [
        (["__metadata__"], "float32", "__metadata__"),
        (["w", "w"], "float32", "w"),
        (["w"], "qint8", "qint8"),
        (["n" * (MAX_HEADER_BYTES + 1)], "float32", "header"),
    ],
    ids=["the header's own name", "one name twice", "an unknown dtype", "a header over 16 MiB"],
)
def test_what_a_file_cannot_hold_is_refused(names: list[str], dtype: str, said: str) -> None:
    """P6, P7, P42: planning refuses, by name, a tensor that would make a file that no reader opens."""
    with pytest.raises(UnsupportedStateError, match=said) as caught:
        plan_image([TensorSpec(name, dtype, (1,)) for name in names])
    assert said == "header" or caught.value.key == names[-1]


@pytest.mark.parametrize(
    ("count", "name"),
    quick_first([(100_000, "layer.{}.weight"), (30_000, "\1" * 90 + "{}")]),
    ids=["many", "names that JSON escapes"],
)
def test_a_hundred_thousand_tensors_are_cut_into_files_that_can_be_read(count: int, name: str) -> None:
    """P42: 10⁵ tensors, or fewer with long or escaped names, give several files with headers in the limit."""
    wanted = [TensorSpec(name.format(number), "float32", (2, 2)) for number in range(count)]
    parts = plan_parts(wanted, 1 << 40)
    assert [spec for part in parts for spec in part] == wanted
    assert len(parts) > 1
    for part in parts:
        assert len(plan_image(part).header) <= 8 + MAX_HEADER_BYTES


@given(specs, st.integers(0, 300))
@example([TensorSpec(name, "float32", (4,)) for name in "abcd"], 32)
def test_parts_keep_order_and_size(wanted: list[TensorSpec], most: int) -> None:
    """A group is cut in order, where the next tensor would be too much; only a single tensor makes a file larger."""
    parts = plan_parts(wanted, most)
    assert [spec for part in parts for spec in part] == wanted
    sizes = [sum(spec.size_bytes for spec in part) for part in parts]
    assert all(part and (len(part) == 1 or size <= most) for part, size in zip(parts, sizes, strict=True))
    assert all(size + after[0].size_bytes > most for size, after in zip(sizes, parts[1:], strict=False))


@pytest.mark.parametrize("shape", [(5 << 20,), (3, 5 << 20), (1, 2, 9 << 20), (70_000, 100), (), (0, 3)])
@pytest.mark.parametrize("dtype", ["float32", "complex128", "bool"])
def test_the_regions_of_a_slot_cover_its_bytes(shape: tuple[int, ...], dtype: str) -> None:
    """P38, P47: a tensor's regions tile it, and their bytes follow each other through its slot, 16 MiB at most each."""
    layout = plan_image([TensorSpec("first", "float64", (3,)), TensorSpec("w", dtype, shape)])
    slot = next(slot for slot in layout.slots if slot.spec.name == "w")
    regions = slot.regions()
    assert blocks_in_order([box for box, _, _ in regions], shape)
    assert [begin for _, begin, _ in regions] == [slot.begin, *(end for _, _, end in regions[:-1])]
    assert regions[-1][2] == slot.end
    assert all(end - begin <= REGION_BYTES for _, begin, end in regions)


def header_of(entries: Any, size_bytes: int = 0) -> tuple[bytes, int]:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text, 8 + len(text) + size_bytes


def entry(*offsets: Any, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


NOTHING: list[Any] = [b"not json", b"[" * 100_000, b"\xff\xfe", [], 3]
NO_METADATA: list[Any] = [[], {"a": 3}, {"a": "\ud800"}, {"\ud800": "a"}]
HEADERS: list[tuple[Any, int]] = [
    *((entries, 0) for entries in NOTHING),
    *(({"a": one}, 4) for one in (3, {}, entry(0, 4, dtype=None), entry(0), entry(), entry(0, 2, 4), entry("0", "4"))),
    *(({"a": entry(0, 4, shape=shape)}, 4) for shape in (3, "12", [float("inf")], [-1], [True])),
    *(({"a": entry(*offsets)}, 4) for offsets in ((0.0, 4.0), (0, float("inf")), (0, 8), (4, 0), (-4, 4))),
    *(({"a": entry(*offsets)}, 8) for offsets in ((0, 4), (4, 8))),
    *(({"a": entry(0, 4), "b": entry(begin, begin + 4)}, begin + 4) for begin in (2, 8)),
    ({"a": entry(0, 4), "b": entry(4, 2), "c": entry(2, 8)}, 8),
    *(({"__metadata__": value}, 0) for value in NO_METADATA),
    ({"\ud800": entry(0, 4)}, 4),
]


@pytest.mark.parametrize(("entries", "data_bytes"), HEADERS, ids=str)
def test_a_hostile_header_is_an_integrity_error(entries: Any, data_bytes: int) -> None:
    """P49: a header that no writer made (gaps, overlaps, infinite or negative numbers) is refused as damaged."""
    with pytest.raises(IntegrityError):
        parse_header(*header_of(entries, data_bytes))


def test_the_bounds_of_a_header() -> None:
    """P42, P49: the longest is read; one that is longer, cut, or claims more than there is, takes no memory."""

    def padded(length: int) -> bytes:
        return struct.pack("<Q", length) + b"{}".ljust(length)

    longest = padded(MAX_HEADER_BYTES)
    assert parse_header(longest, len(longest)) == {}
    for header in (padded(MAX_HEADER_BYTES + 1), longest[:-1]):
        with pytest.raises(IntegrityError, match="claims"):
            parse_header(header, len(header))
    for prefix in (b"", b"\0" * 7, struct.pack("<Q", 1 << 63), struct.pack("<Q", MAX_HEADER_BYTES + 1)):
        with pytest.raises(IntegrityError):
            parse_header(prefix, 1 << 62)
    # 64 dimensions are torch's, and a complex number adds one.
    assert parse_header(*header_of({"a": entry(0, 4, shape=[1] * (MAX_DIMENSIONS + 1))}, 4))
    with pytest.raises(IntegrityError, match="does not have"):
        parse_header(*header_of({"a": entry(0, 4, shape=[1] * (MAX_DIMENSIONS + 2))}, 4))


@given(st.integers(0, 8 * 300 - 1))
def test_a_flipped_bit_in_a_header_is_refused_or_harmless_to_places(bit: int) -> None:
    """P49: after one flipped bit a header is an error of ours, or its tensors still fill the file exactly."""
    layout = plan_image([TensorSpec("first", "float64", (3,)), TensorSpec("second", "bfloat16", (2, 5))])
    data = bytearray(layout.header)
    data[bit // 8] ^= 1 << bit % 8
    try:
        found = parse_header(bytes(data), layout.size_bytes)
    except IntegrityError:
        return
    spans = sorted(place[2:] for place in found.values())
    assert [begin for begin, _ in spans] == [len(layout.header), *(end for _, end in spans[:-1])]
