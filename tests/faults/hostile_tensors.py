"""What an attacker lets the index of a checkpoint say of regions, where no one changed place says it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ckpt_tasks.format.digests import digest_bytes, digest_hex
from ckpt_tasks.layout.regions import Box
from tests.faults.hostile import Body, Hostile, zeros
from tests.faults.hostile_cases import Case

LAST = "transposed"  # the last tensor in the shard of the group extra


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
    yield Case("a tensor in two objects", _two_objects, "any")
    for dtype in ("float8_e8m0fnu", "float4_e2m1fn_x2", "bool", "complex64", "float8_e4m3fn", "uint8"):
        size = {"bool": 1, "uint8": 1, "complex64": 8}.get(dtype, 1)

        shape = (12_000 // size,)
        retype = partial(_first, dtype=dtype, tensor_shape=shape, box=Box((0,), shape))
        yield Case(f"a tensor said to be of {dtype}", retype, "values", verbs=("verify", "diff", "export", "go on"))
