"""What an attacker does to the tensors of a checkpoint: headers, the index, and what the index says of regions."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from ckpt_tasks.format.digests import digest_bytes, digest_hex
from ckpt_tasks.layout.regions import Box
from tests.faults.hostile import Body, Hostile, on_manifest, zeros
from tests.faults.hostile_cases import Case

LAST = "transposed"  # the last tensor in the shard of the group extra

# ── headers of shards ────────────────────────────────────────────────────────────────────────────────────────


def headers() -> Iterator[Case]:
    """Give a shard a header that lies; what a restore needs is in the index, so `verify` alone reads it."""
    changes: dict[str, Callable[[Body], Any]] = {
        "overlapping tensors": lambda b: b["big"].update(data_offsets=[0, 12_004]),
        "a gap": lambda b: b["big"].update(data_offsets=[4, 12_004]),
        "offsets beyond the end": lambda b: b["big"].update(data_offsets=[2**62, 2**62 + 12_000]),
        "offsets backwards": lambda b: b["big"].update(data_offsets=[12_000, 0]),
        "offsets of 300 digits": lambda b: b["big"].update(data_offsets=[0, 10**300]),
        "a negative shape": lambda b: b["big"].update(shape=[-3000]),
        "two negative extents": lambda b: b["big"].update(shape=[-3000, -1]),
        "a shape that overflows": lambda b: b["big"].update(shape=[2**63, 2**63, 3000]),
        "a shape that wraps to the right size": lambda b: b["big"].update(shape=[2**62, 4, 3000]),
        "another shape": lambda b: b["big"].update(shape=[2999]),
        "another dtype": lambda b: b["big"].update(dtype="F64"),
        "an unknown dtype": lambda b: b["big"].update(dtype="F4"),
        "a name with a way out": lambda b: b.update({"../../outside/canary": b.pop("big")}),
        "no offsets": lambda b: b["big"].pop("data_offsets"),
        "a text for a shape": lambda b: b["big"].update(shape="3000"),
        "a list for a tensor": lambda b: b.update(big=[]),
    }
    for what, change in changes.items():
        put = partial(_change_header, change)
        yield Case(f"header with {what}", put, "header", named="extra-00000", verbs=("verify", "export", "go on"))
    texts = {
        "that is not JSON": b"{",
        "that is a list": b"[]",
        "that nests deep": b"[" * 500_000 + b"]" * 500_000,
        "of 200,000 tensors": json.dumps({str(n): {} for n in range(200_000)}).encode(),
        "of many objects": b'{"a":[' + b"{}," * (4 << 20) + b"{}]}",
        "in Latin-1": b'{"\xe9":1}',
    }
    for what, text in texts.items():
        yield Case(f"header {what}", partial(_text_header, text), "any", verbs=("verify", "go on"),
                   slow="many" in what)  # fmt: skip
    for length in (2**60, 2**63, 2**64 - 1, 17 << 20, 0):
        yield Case(
            f"header of {length} bytes",
            partial(_long_header, length),
            "header",
            named="extra-00000",
            verbs=("verify", "go on"),
        )
    for digested in (0, 7, 2**40, 2**62):
        yield Case(
            f"header of which {digested} bytes are digested",
            on_manifest(lambda body, size: body["objects"][-1].__setitem__(3, size), digested),
            "checkpoint",
            named="checkpoint_000000000003",
        )


def _change_header(change: Callable[[Body], Any], h: Hostile) -> None:
    body = h.header("extra")
    change(body)
    h.put_header("extra", json.dumps(body).encode())


def _text_header(text: bytes, h: Hostile) -> None:
    h.put_header("extra", text)


def _long_header(length: int, h: Hostile) -> None:
    h.put_header("extra", json.dumps(h.header("extra")).encode(), length=length)


# ── the index ────────────────────────────────────────────────────────────────────────────────────────────────


def _table(h: Hostile) -> pa.Table:
    return pa.ipc.open_file(pa.BufferReader(h.index_path().read_bytes())).read_all()


def write_table(table: pa.Table, *, rows: int | None = None, **options: Any) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue()


def _column(h: Hostile, name: str, values: Any) -> None:
    table = _table(h)
    at = table.schema.get_field_index(name)
    array = values if isinstance(values, pa.Array) else pa.array(values, table.schema.field(at).type)
    h.put_index(write_table(table.set_column(at, table.schema.field(at).with_type(array.type), array)))


def _bomb(h: Hostile, codec: str) -> None:
    table = _table(h)
    long = pa.array(["w" * (200 << 20), *["x"] * (table.num_rows - 1)], pa.string())
    at = table.schema.get_field_index("key")
    h.put_index(write_table(table.set_column(at, table.schema.field(at), long), compression=codec))


def _patch(h: Hostile, column: str, buffer: int, change: Callable[[list[int]], list[int]]) -> None:
    """Change a column's offsets, or its numbers into the dictionary, in the bytes of the file."""
    array = _table(h)[column].combine_chunks()
    array = array.indices if pa.types.is_dictionary(array.type) else array
    known = array.buffers()[buffer].to_pybytes()
    count = len(array) + (not pa.types.is_integer(array.type))
    old = known[: 4 * count]
    data = h.index_path().read_bytes()
    assert old in data
    h.put_index(data.replace(old, struct.pack(f"<{count}i", *change([*struct.unpack(f"<{count}i", old)]))))


def _text_bytes(h: Hostile) -> None:
    data, [word] = h.index_path().read_bytes(), [row.key for row in h.rows() if row.key == "layer.weight"]
    h.put_index(data.replace(word.encode(), b"\xff" * len(word)))


def _extension(h: Hostile) -> None:
    table = _table(h)
    field = table.schema.field("key").with_metadata({"ARROW:extension:name": "his", "ARROW:extension:metadata": "x"})
    at = table.schema.get_field_index("key")
    h.put_index(write_table(table.cast(table.schema.set(at, field))))


def _footer(h: Hostile, at: int) -> None:
    data = bytearray(h.index_path().read_bytes())
    data[at : at + 4] = struct.pack("<i", 2**31 - 1)
    h.put_index(bytes(data))


def _many(h: Hostile, count: int) -> None:
    table = pa.concat_tables([_table(h)] * count)
    h.put_index(write_table(table.combine_chunks()))


def indexes() -> Iterator[Case]:
    """Write an index that Arrow opens and that no writer of ours writes."""
    changes: dict[str, Callable[[Hostile], Any]] = {
        "compressed by zstd": lambda h: h.put_index(write_table(_table(h), compression="zstd")),
        "compressed by lz4": lambda h: h.put_index(write_table(_table(h), compression="lz4")),
        "a bomb by zstd": lambda h: _bomb(h, "zstd"),
        "a bomb by lz4": lambda h: _bomb(h, "lz4"),
        "a batch for every row": lambda h: h.put_index(write_table(pa.concat_tables([_table(h)] * 30), rows=1)),
        "two million rows": lambda h: _many(h, 1 + (2 << 20) // _table(h).num_rows),
        "extension types": _extension,
        "a first message without end": lambda h: _footer(h, 12),
        "texts beyond the end": lambda h: _patch(h, "key", 1, lambda n: [n[0], *[2**31 - 1] * (len(n) - 1)]),
        "one text beyond the end": lambda h: _patch(h, "key", 1, lambda n: [*n[:3], 2**30, *n[4:]]),
        "texts backwards": lambda h: _patch(h, "key", 1, lambda n: n[::-1]),
        "texts before the start": lambda h: _patch(h, "key", 1, lambda n: [-(2**31), *n[1:]]),
        "texts that are no UTF-8": _text_bytes,
        "lists beyond the end": lambda h: _patch(h, "shape", 1, lambda n: [n[0], *[2**31 - 1] * (len(n) - 1)]),
        "one list beyond the end": lambda h: _patch(h, "shape", 1, lambda n: [*n[:3], 2**30, *n[4:]]),
        "lists before the start": lambda h: _patch(h, "shape", 1, lambda n: [-(2**31), *n[1:]]),
        "words beyond the dictionary": lambda h: _patch(h, "object", 1, lambda n: [2**31 - 1] * len(n)),
        "words before the dictionary": lambda h: _patch(h, "object", 1, lambda n: [-(2**31)] * len(n)),
        "words that no row has": lambda h: _column(
            h,
            "group",
            pa.DictionaryArray.from_arrays(
                pa.array([0] * _table(h).num_rows, pa.int32()), pa.array(["model", *map(str, range(10**5))])
            ),
        ),
        "a million dimensions": lambda h: _column(
            h, "tensor_shape", [[1] * 10**6, *_table(h)["tensor_shape"].to_pylist()[1:]]
        ),
        "views for texts": lambda h: _column(h, "key", _table(h)["key"].combine_chunks().cast(pa.string_view())),
        "large texts": lambda h: _column(h, "key", _table(h)["key"].combine_chunks().cast(pa.large_string())),
        "floats for numbers": lambda h: _column(h, "begin", _table(h)["begin"].combine_chunks().cast(pa.float64())),
        "no rows": lambda h: h.put_index(write_table(_table(h).slice(0, 0))),
        "another table": lambda h: h.put_index(write_table(pa.table({"x": [1]}))),
        "a stream": lambda h: h.put_index(_stream(_table(h))),
        "zeros": lambda h: h.put_index(bytes(5000)),
        "nothing": lambda h: h.put_index(b""),
    }
    slow = ("two million rows", "a bomb by lz4", "large texts", "another table")
    for what, change in changes.items():
        yield Case(f"index with {what}", change, "checkpoint", named="index.arrow", slow=what in slow)


def _stream(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


# ── regions ──────────────────────────────────────────────────────────────────────────────────────────────────


def _first(h: Hostile, **changes: Any) -> None:
    rows = h.rows()
    at = next(n for n, row in enumerate(rows) if row.key == "big")
    rows[at] = rows[at]._replace(**changes)
    h.put_rows(rows)


def _same_bytes(h: Hostile, count: int) -> None:
    """Let the same bytes be a thousand tensors: what has a megabyte on disk would take a gigabyte in memory."""
    [table] = [row for row in h.rows() if row.key == "table"]
    more = [table._replace(group="extra", key=f"more{n}") for n in range(count)]

    def name_them(body: Body) -> None:
        tree = body["groups"]["extra"]["tree"]["~dict"]
        tree += [[f"more{n}", {"~tensor": f"extra/more{n}"}] for n in range(count)]

    h.put_rows([*h.rows(), *more], name_them)


def _two_objects(h: Hostile) -> None:
    """Let the two halves of a tensor lie in objects of their own; this version writes every tensor whole."""
    rows = h.rows()
    at = next(n for n, row in enumerate(rows) if row.key == "table")
    whole = rows[at]
    data = (h.root / whole.object).read_bytes()[whole.begin : whole.end]
    header = struct.pack("<Q", 4088) + b"{}".ljust(4088)
    half, halves, records = len(data) // 2, [], []
    for part in (0, 1):
        name = h.checkpoint()["manifest"].replace("manifest.json", f"model-00000-of-00001-{part + 7}.safetensors")
        here = data[part * half : (part + 1) * half]
        (h.root / name).write_bytes(header + here)
        records.append([name, 4096 + half, digest_hex(header), 4096])
        box = Box((part * half // 4,), (half // 4,))
        halves.append(whole._replace(object=name, box=box, begin=4096, end=4096 + half, digest=digest_bytes(here)))

    def name_them(body: Body) -> None:
        body["objects"] = [record for record in body["objects"] if record[0] != whole.object] + records

    h.put_rows([*rows[:at], *halves, *rows[at + 1 :]], name_them)


def _swapped(h: Hostile) -> None:
    """Let the two halves of a tensor lie the other way around."""
    rows = h.rows()
    at = next(n for n, row in enumerate(rows) if row.key == "big")
    whole, half = rows[at], (rows[at].end - rows[at].begin) // 2
    data = (h.root / whole.object).read_bytes()
    halves = [
        whole._replace(
            box=Box((first // 4,), (half // 4,)), begin=begin, end=begin + half,
            digest=digest_bytes(data[begin : begin + half]),
        )
        for first, begin in ((half, whole.begin), (0, whole.begin + half))
    ]  # fmt: skip
    h.put_rows([*rows[:at], *halves, *rows[at + 1 :]])


def _cut_small(h: Hostile, shape: tuple[int, ...], count: int, size_bytes: int) -> None:
    """Cut a tensor of zeros into many regions whose first indices are all the same."""
    each = size_bytes // count
    digest = zeros(each)
    last = next(row for row in h.rows() if row.key == LAST)
    boxes = [
        last._replace(
            box=Box((0, n * each // 4), (1, each // 4)), begin=n * each, end=(n + 1) * each, digest=digest
        )
        for n in range(count)
    ]  # fmt: skip
    h.grow("extra", LAST, shape, boxes, size_bytes)


def _huge(h: Hostile, size_bytes: int) -> None:
    """Let a tensor be larger than any memory, in a file that takes no room on the disk."""
    region = 16 << 20
    digest = zeros(region)
    last = next(row for row in h.rows() if row.key == LAST)
    boxes = [
        last._replace(box=Box((at // 4,), (region // 4,)), begin=at, end=at + region, digest=digest)
        for at in range(0, size_bytes, region)
    ]
    h.grow("extra", LAST, (size_bytes // 4,), boxes, size_bytes)
    h.change_manifest(_plain_ref)


def _plain_ref(body: Body) -> None:
    for pair in body["groups"]["extra"]["tree"]["~dict"]:
        if pair[0] == LAST:
            pair[1] = {"~tensor": f"extra/{LAST}"}


def regions() -> Iterator[Case]:
    """Let the rows of an index say what no layout says."""
    changes: dict[str, Callable[[Hostile], Any]] = {
        "the same bytes for 1,000 tensors": lambda h: _same_bytes(h, 1000),
        "the same bytes for two tensors": lambda h: _same_bytes(h, 1),
        "regions in the header": lambda h: _first(h, begin=0, end=12_000),
        "regions beyond the object": lambda h: _first(h, begin=2**62, end=2**62 + 12_000),
        "regions that lie crooked": lambda h: _first(h, begin=4097, end=16_097),
        "a shape that overflows": lambda h: _first(
            h, tensor_shape=(0, 2**62, 2**62), box=Box((0, 0, 0), (0, 2**62, 2**62)), begin=4096, end=4096
        ),
        "an empty tensor of 2^63 rows": lambda h: _first(
            h, tensor_shape=(2**63 - 1, 0), box=Box((0, 0), (2**63 - 1, 0)), begin=4096, end=4096
        ),
        "65 dimensions": lambda h: _first(h, tensor_shape=(3000, *[1] * 64), box=Box((0,) * 65, (3000, *[1] * 64))),
        "2,000 regions of 4 bytes": lambda h: _cut_small(h, (1, 2_000), 2_000, 8_000),
        "regions in another order": _swapped,
        "regions of one byte less": lambda h: _first(h, end=16_095),
    }
    for what, change in changes.items():
        yield Case(f"index with {what}", change, "checkpoint", named="00003/|extra/")
    yield Case(
        "a tensor of a terabyte of zeros", lambda h: _huge(h, 1 << 40), "any", verbs=("part", "go on"), slow=True
    )
    yield Case("index with a footer that points away", lambda h: _footer(h, -10), "any", slow=True)
    yield Case("a tensor in two objects", _two_objects, "any")
    for dtype in ("float8_e8m0fnu", "float4_e2m1fn_x2", "bool", "complex64", "float8_e4m3fn", "uint8"):
        size = {"bool": 1, "uint8": 1, "complex64": 8}.get(dtype, 1)

        shape = (12_000 // size,)
        retype = partial(_first, dtype=dtype, tensor_shape=shape, box=Box((0,), shape))
        yield Case(f"a tensor said to be of {dtype}", retype, "values", verbs=("verify", "diff", "export", "go on"))
