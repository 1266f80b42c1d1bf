"""What an attacker writes into a place of an entry, a manifest or an index, and strategies that draw it."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

from ckpt_tasks.format.layout.regions import Box
from tests.faults.hostile import Body, Hostile, Raw, with_raw, without_raw

At = tuple[str | int, ...]
_PRIME = 2**61 - 1  # whole numbers that are multiples of it have the hash 0


def attempt_of(step: int, name: str) -> str:
    return f"checkpoint_{step:012d}/e000001-0123456789abcdef/{name}"


NAMES: list[Any] = [
    "../outside/canary", "checkpoint_000000000003/../../outside/canary", attempt_of(3, "../../../outside/canary"),
    "/etc/passwd", attempt_of(3, "index.arrow\0.json"), attempt_of(3, "index.arrow\n"), "..\\outside\\canary",
    "simplecache::http://127.0.0.1:9/x", "file:///etc/passwd", attempt_of(3, "a" * 10_000), "/".join(["a" * 200] * 60),
    attempt_of(3, "index.arrow").replace("c", "\u0441"), attempt_of(3, "index.arrow").replace("3", "\uff13"),
    attempt_of(3, "\ud800"), attempt_of(3, ".tmp-0123456789abcdef"), "format.json",
    "ledger/00000000000000000000-9999.json", "", ".", "live/../../outside/canary.json", "\x1b[31m\x1b]0;his\a\r\n",
]  # fmt: skip
NUMBERS: list[Any] = [
    None, True, -1, 0, 1, 3.0, 0.5, -0.0, 2**31 - 1, -(2**31), 2**31, 2**63, 10**9 - 1, 10**9, 10**12, 10**20 - 1,
    10**40, 1e300, 1.7e308, 5e-324, Raw("9" * 4300), Raw("1" * 100_000), Raw("NaN"), Raw("-Infinity"), Raw("1e999"),
    "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-11-20T12:00:00", "yesterday", "9" * 50,
]  # fmt: skip
DEEP: list[Any] = [
    Raw("[" * 900 + "]" * 900), Raw('{"a":' * 5000 + "1" + "}" * 5000), Raw('["[[[","' + "[" * 300_000 + '"]'),
]  # fmt: skip
NODES: dict[str, Any] = {
    "an unknown kind": {"~os.system": "true"},
    "a class": {"__reduce__": ["os.system", ["true"]]},
    "keys of one hash": {"~dict": [[n * _PRIME, 0] for n in range(1, 30_000)]},
    "a frozen set of one hash in a key": {"~dict": [[{"~frozenset": [n * _PRIME for n in range(1, 30_000)]}, 0]]},
    "a deque without end": {"~deque": [2**62, []]},
    "a huge time": {"~timedelta": [10**20, 0, 0]},
    "a scalar out of its bounds": {"~numpy": ["int8", 1000]},
    "a float for a whole scalar": {"~numpy": ["int64", {"~float": "nan"}]},
    "a device that is none": {"~torch": ["device", "banana"]},
    "a size of too much": {"~torch": ["size", [2**70]]},
    "a module for a dtype": {"~torch": ["dtype", "nn"]},
    "a tensor in a key": {"~dict": [[{"~tuple": [{"~tensor": "extra/big"}]}, 0]]},
    "a tensor that is not there": {"~tensor": "extra/nothing"},
    "a tensor of another group": {"~tensor": "model/table"},
    "strides without end": {"~tensor": ["extra/big", {"stride": [2**62]}]},
    "negative strides": {"~tensor": ["extra/big", {"stride": [-1]}]},
    "too many strides": {"~tensor": ["extra/big", {"stride": [1] * 100_000}]},
    "a gradient for whole numbers": {"~tensor": ["extra/array", {"requires_grad": True}]},
    "an array that takes a gradient": {"~tensor": ["extra/big", {"requires_grad": True, "array": True}]},
    "bytes that are none": {"~bytes": "\ud800"},
    "a time that is none": {"~datetime": "9999-99-99"},
    "half a pair": "\ud800",
    "half a pair for a key": {"\ud800": 1},
    "deep tuples": Raw('{"~tuple":[' * 120 + "1" + "]}" * 120),
}
PLAIN: list[Any] = [
    "x", [], [[]], [1, 2], ["x"], {}, {"x": 1}, {"~tuple": []}, {"~bytes": "AA=="}, {"~float": "nan"},
    {"~dict": [[1, 2]]}, {"object": "live/x.json", "digest": "0" * 32},
]  # fmt: skip
GONE, TWICE = object(), object()  # the place is taken out; what is there comes twice


def places(value: Any, at: At = ()) -> Iterator[At]:
    """Yield the way to every value in a JSON document."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*at, key)
        yield from places(item, (*at, key))


def changed(body: Body, changes: list[tuple[At, Any]]) -> Body:
    """Return a copy of a document with other values in some places; a place that is gone by then is passed over."""
    body = copy.deepcopy(body)
    for at, value in changes:
        inside: Any = body
        try:
            for key in at[:-1]:
                inside = inside[key]
            before = inside[at[-1]]
        except (KeyError, IndexError, TypeError):
            continue
        if type(inside) not in (dict, list):  # An earlier change has put a text there.
            continue
        if value is GONE:
            del inside[at[-1]]
        elif value is TWICE:
            inside.append(before) if isinstance(inside, list) else inside.update({f"{at[-1]}2": before})
        else:
            inside[at[-1]] = value
    return body


def put_at(body: Body, path: str, value: Any) -> None:
    """Put a value into one place, given as keys with slashes between; a place that is not there is made."""
    *way, last = path.split("/")
    inside: Any = body
    for key in way:
        inside = inside[int(key)] if isinstance(inside, list) else inside[key]
    inside[int(last) if isinstance(inside, list) else last] = value


Change = Callable[[Hostile], None]


def drawn(body: Body, put: Callable[[Hostile, Body], None]) -> st.SearchStrategy[Change]:
    """Draw one to three changes of a document, which `put` writes with digests that fit."""
    values = st.sampled_from([*NAMES, *NUMBERS, *DEEP, *NODES.values(), *PLAIN, GONE, TWICE])
    changes = st.lists(st.tuples(st.sampled_from([*places(body)]), values), min_size=1, max_size=3)
    return changes.map(lambda made: lambda h: put(h, changed(body, made)))


def drawn_index(data: bytes) -> st.SearchStrategy[Change]:
    """Draw changes of bytes and words of an index, which Arrow reads, and of what its rows say."""
    words = [-1, 0, 1, 2**31 - 1, -(2**31), 1 << 30, len(data)]
    at = st.integers(0, len(data) // 4 - 1)
    byte = st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255).map(lambda value: bytes([value])))
    word = st.tuples(at.map(lambda n: 4 * n), st.sampled_from(words).map(lambda value: struct.pack("<i", value)))

    def write(changes: list[tuple[int, bytes]]) -> Change:
        new = bytearray(data)
        for begin, piece in changes:
            new[begin : begin + len(piece)] = piece
        return lambda h: h.put_index(bytes(new[: len(data)]))

    texts = st.sampled_from(
        [name for name in NAMES if "\ud800" not in name] + ["bool", "complex64", "float4_e2m1fn_x2"]
    )
    field = st.sampled_from(["object", "group", "key", "dtype"])
    numbers = st.sampled_from([0, 1, 4095, 4096, 4097, 12_000, 2**31, 2**62])
    extents = st.lists(st.sampled_from([0, 1, 5, 3000, 2**31, 2**62, 2**63 - 1]), max_size=66).map(tuple)

    def say(field: str, value: Any, row: int) -> Change:
        def put(h: Hostile) -> None:
            rows = h.rows()
            more: dict[str, Any] = {"box": Box((0,) * len(value), value)} if field == "tensor_shape" else {}
            rows[row % len(rows)] = rows[row % len(rows)]._replace(**{field: value}, **more)
            h.put_rows(rows)

        return put

    said = st.one_of(
        st.tuples(field, texts),
        st.tuples(st.sampled_from(["begin", "end"]), numbers),
        st.tuples(st.just("tensor_shape"), extents),
    )
    rows = st.tuples(said, st.integers(0, 50)).map(lambda drawn: say(drawn[0][0], drawn[0][1], drawn[1]))
    return st.lists(byte | word, min_size=1, max_size=3).map(write) | rows


def drawn_header(body: Body) -> st.SearchStrategy[Change]:
    """Draw changes of a shard's header, texts that are none, and lengths that it does not have."""
    changes = drawn(body, lambda h, new: h.put_header("extra", with_raw(*_json(new))))
    texts = [b"{", b"[]", b"[" * 500_000 + b"]" * 500_000, b'{"\xe9":1}', b"{" + b'"a":{},' * 200_000 + b'"b":{}}']
    lengths = st.sampled_from([0, 17 << 20, 2**60, 2**63, 2**64 - 1])
    return st.one_of(
        changes,
        st.sampled_from(texts).map(lambda text: lambda h: h.put_header("extra", text)),
        lengths.map(lambda length: lambda h: h.put_header("extra", json.dumps(body).encode(), length=length)),
    )


def _json(body: Body) -> tuple[bytes, dict[str, str]]:
    plain, texts = without_raw(body)
    return json.dumps(plain).encode(), texts
