"""Foreign archives, drawn part by part: zip files of torch.save, safetensors files.

A draw begins with what the library itself would write, and then contradicts it: sizes, CRCs, names, directories,
opcodes, offsets, and small things that stand for large ones.
"""

from __future__ import annotations

import io
import json
import pickletools
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st

INTS = [0, 1, 2, 3, 5, 255, 1 << 31, (1 << 61) - 1, 1 << 40, 1 << 63, -1, -2]
CODES = ["F64", "F32", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F7", 3]
Entry = dict[str, Any]


def zipped(entries: list[Entry], end: str = "as it is") -> bytes:
    """Write a zip file whose directory may say other things than its records."""
    body, places = bytearray(), []
    for entry in entries:
        name = entry["name"].encode()
        places.append(len(body) + entry.get("moved", 0))
        crc = entry.get("crc", zlib.crc32(entry["data"]))
        sizes = (entry.get("size", len(entry["data"])),) * 2
        head = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, entry.get("how", 0), 0, 0, crc, *sizes, len(name), 0)
        body += head + name + entry["data"]
        entry["fields"] = (entry.get("how", 0), 0, 0, crc, *sizes, len(name), 0, 0, 0, 0, 0)
    listed = [
        struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, *e["fields"], max(at, 0)) + e["name"].encode()
        for e, at in zip(entries, places, strict=True)
    ]
    directory = b"".join(listed)
    begin = len(body)
    if end == "two directories":  # Python reads the one before the locator, others the one that it names
        other = begin + len(directory)
        first = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, len(listed), len(listed), len(directory), begin)
        less = b"".join(listed[:-1])
        second = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, *[len(listed) - 1] * 2, len(less), other + 56)
        body += directory + first + less + second + struct.pack("<4sLQL", b"PK\6\7", 0, other, 1)
        directory, begin = less, other + 56
    else:
        body += directory
    comment = b"more" if end == "a comment" else b""
    body += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, *[len(listed)] * 2, len(directory), begin, len(comment)) + comment
    return (b"x" * 7 if end == "a prefix" else b"") + bytes(body)


def unzipped(data: bytes) -> list[Entry]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return [{"name": entry.filename, "data": file.read(entry)} for entry in file.infolist()]


# ── pickles ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def number(value: int) -> bytes:
    data = value.to_bytes(12, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def call(name: str, *arguments: bytes) -> bytes:
    module, _, last = name.rpartition(".")
    return f"c{module}\n{last}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def shared(make: bytes, levels: int) -> bytes:
    """Push a value that holds the one below it twice, level by level."""
    return b"K\1q\xf0" + b"".join(make + b"q\xf0" for _ in range(levels))


SHARED_TUPLE = b"h\xf0h\xf0\x86"
BOMBS: dict[str, Callable[[int], bytes]] = {
    "tuples in tuples": lambda n: shared(SHARED_TUPLE, n),
    "deep lists": lambda n: b"](" * (n * 500) + b"e" * (n * 500),
    "a text, often": lambda n: text("x" * 200_000) + b"q\xf0" + b"](" + b"h\xf0" * n * 500 + b"e",
    "a quadratic encoding": lambda n: call("_codecs.encode", text("x" * n * 2000), text("idna")),
    "one tuple as many keys": lambda n: (
        shared(SHARED_TUPLE, 20) + b"q\xf1](" + b"".join([b"}h\xf1Nsq\xf2"] * n * 100) + b"e"
    ),
    "keys of one hash": lambda n: b"}(" + b"".join(number(k * ((1 << 61) - 1)) + b"N" for k in range(n * 400)) + b"u",
    "a set of one hash": lambda n: call(
        "__builtin__.set", b"](" + b"".join(number(k * ((1 << 61) - 1)) for k in range(n * 400)) + b"e"
    ),
    "a cycle": lambda n: b"]q\xf0(h\xf0h\xf0e",
    "a storage": lambda n: call("torch.storage.UntypedStorage", number(1 << n)),
    "a quantised tensor": lambda n: call(
        "torch._utils._rebuild_qtensor", b"N", b"K\0", number(1 << n) + b"\x85", b"K\1\x85", b"N", b"\x89", b"N"
    ),
}
for _name in ("__builtin__.bytearray", "torch.Size", "collections.Counter"):
    BOMBS[f"{_name} of a number"] = lambda n, _name=_name: call(_name, number(1 << n))  # type: ignore[misc]
PLACES: dict[str, Callable[[bytes], bytes]] = {
    "value": lambda made: made,
    "key": lambda made: b"}" + made + b"Ns",
    "key in a set": lambda made: call("__builtin__.set", b"](" + made + b"e"),
    "record": lambda made: b"(" + text("storage") + b"ctorch\nFloatStorage\n" + made + text("cpu") + b"K\1tQ",
    "elements": lambda made: (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + made + b"tQ"
    ),
    "size": lambda made: call("torch._utils._rebuild_tensor_v2", b"N", b"K\0", made, b"K\1\x85", b"\x89", b"N"),
    "params": lambda made: (
        b"}(" + text("state") + b"}" + text("param_groups") + b"]}" + text("params") + b"](" + made + b"esau"
    ),
}


def bomb(name: str, place: str, size: int) -> bytes:
    """Return a pickle of a dict with weights' name, and with something small that stands for something large."""
    # Made first, since what it is made of stays on the stack.
    return b"\x80\2" + BOMBS[name](size) + b"q\xf3}" + text("x") + PLACES[place](b"h\xf3") + b"s."


def opcodes(data: bytes) -> list[bytes]:
    places = [at for *_, at in pickletools.genops(data)] + [len(data)]
    return [data[begin:end] for begin, end in pairwise(places)]


# ── draws ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def values(draw: st.DrawFn) -> dict[str, Any]:
    """Draw what somebody saves: weights, an optimizer's dict, plain values, shared and sliced tensors."""
    base = torch.arange(24).to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex64])))
    views = [base, base[3:9], base.reshape(4, 6).T, base.reshape(4, 6)[:, 1:4], base[:0], base[5], base[1].expand(3)]
    views += [torch.nn.Parameter(torch.ones(2)), torch.ones(3, dtype=torch.uint16), torch.eye(2).to_sparse()]
    plain = [None, True, 1, -(1 << 70), 0.5, "é", b"\0\xff", 1j, {1, 2}, bytearray(b"ab"), (1, (2, "x"))]
    leaf = st.sampled_from(views) | st.sampled_from([*plain, torch.float16, torch.Size([2, 3]), OrderedDict(a=1)])
    keys = st.sampled_from(["weight", "bias", "state", "param_groups", "params", "step", "model_state_dict", 1, (1, 2)])
    tree = st.recursive(leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4))
    return draw(st.dictionaries(st.sampled_from(["model", "optimizer", "step", "x"]), tree, max_size=3))


@st.composite
def torch_files(draw: st.DrawFn) -> bytes:
    """Draw a zip file of torch.save with up to three contradictions."""
    out = io.BytesIO()
    torch.save(draw(values()), out)
    entries = unzipped(out.getvalue())
    end = "as it is"
    for _ in range(draw(st.integers(0, 3))):
        entry = draw(st.sampled_from([e for e in entries if "/data" in e["name"] or "byte" in e["name"]] or entries))
        pickled = next((e for e in entries if e["name"].endswith("data.pkl")), entry)
        changes = {
            "crc": {"crc": draw(st.sampled_from([0, 1]))},
            "cut": {"data": entry["data"][: draw(st.integers(0, len(entry["data"])))]},
            "bytes": {"crc": zlib.crc32(entry["data"]), "data": bytes(len(entry["data"]))},
            "name": {"name": draw(st.sampled_from([entry["name"].upper(), "", "b/data.pkl", "a/data/0", "é/\0"]))},
        }
        what = draw(st.sampled_from([*changes, "size", "moved", "how", "gone", "twice", "end", "endian", "pickle"]))
        if what in ("size", "moved", "how"):
            entry[what] = draw(st.sampled_from([0, 1, 8, 99, 4000] + [1 << 31] * (what != "how")))
        elif what == "gone":
            entries = [e for e in entries if e is not entry] or entries
        elif what == "twice":
            entries = [*entries, {**entry, "data": entry["data"][::-1]}]
        elif what == "end":
            end = draw(st.sampled_from(["two directories", "a comment", "a prefix"]))
        elif what == "endian":
            entries = [{**e, "data": b"big"} if e["name"].endswith("byteorder") else e for e in entries]
        elif what == "pickle":
            bombs = st.builds(bomb, st.sampled_from(sorted(BOMBS)), st.sampled_from(sorted(PLACES)), st.just(50))
            pickled["data"] = draw(st.one_of(edited(pickled["data"]), edited(pickled["data"]), bombs))
        else:
            entry |= changes[what]
    data = zipped(entries, end)
    return data[: draw(st.just(len(data)) | st.integers(0, len(data)))] if draw(st.integers(0, 9)) == 9 else data


@st.composite
def edited(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw a pickle with an opcode more, less, elsewhere, or with another number."""
    try:
        codes = opcodes(data)
    except ValueError:
        return data
    at = draw(st.integers(0, max(len(codes) - 1, 0)))
    others = [number(draw(st.sampled_from(INTS))), *(bytes([code]) for code in b"N}])(tRbQeu\x81")]
    others += codes[: 2 * len(codes) : max(len(codes) // 9, 1)]
    what = draw(st.sampled_from(["less", "more", "other"]))
    return b"".join(
        codes[:at] + ([] if what == "less" else [draw(st.sampled_from(others))]) + codes[at + (what != "more") :]
    )


@st.composite
def safetensors_files(draw: st.DrawFn) -> bytes:
    """Draw a safetensors file: entries of a right one, and what contradicts them."""
    header: dict[str, Any] = {}
    at = 0
    for name in draw(st.lists(st.sampled_from(["weight", "bias", "a.b", "é", "", "x" * 300]), unique=True, max_size=3)):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        size = 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    strange: st.SearchStrategy[Any] = st.sampled_from([*INTS, 0.5, "x", None, [], {}, [1 << 62, 4], [-1], [0, 4], True])
    if draw(st.booleans()):
        texts = ["weight", "pt", '{"tied":{"b":"weight"},"dtypes":{"weight":"float8_e8m0fnu"}}', '{"tied":[]}']
        said = st.dictionaries(st.sampled_from(["format", "bias", "ckpt_tasks"]), strange | st.sampled_from(texts))
        header["__metadata__"] = draw(said)
    for _ in range(draw(st.integers(0, 2))):
        entry = header[draw(st.sampled_from(sorted(header)))] if header else {}
        if isinstance(entry, dict):
            entry[draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))] = draw(
                strange | st.sampled_from(CODES)
            )
    written = json.dumps(header).encode()
    length = draw(st.just(len(written)) | st.sampled_from([0, 7, len(written) + 1, 1 << 40, (1 << 64) - 1]))
    return struct.pack("<Q", length) + written + bytes(range(256))[: draw(st.just(at) | st.integers(0, 50))]
