"""Named regressions: what an attacker did to a run directory that once took more than an error, or may not.

`harm` says what must come of it: "checkpoint", the newest one is damaged and passed over; "entry", the newest ledger
entry is damaged, and the one below counts; "any", every verb ends well or with an error of ours, and what is restored
has the values of its step; "values", these are his; "memory", what lies in memory is not restored.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ckpt_tasks.format.digests import canonical_json, digest_bytes, digest_hex
from ckpt_tasks.format.keys import ledger_name, live_list_name
from ckpt_tasks.format.layout.regions import Box
from tests.faults.hostile import Body, Hostile, Raw
from tests.faults.hostile_values import NODES, put_at
from tests.faults.hostile_verbs import ALL


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Hostile], Any]
    harm: str = "any"
    verbs: tuple[str, ...] = ALL


# ── documents ────────────────────────────────────────────────────────────────────────────────────────────────

_OPTIMIZER, _NUMPY, _NOISE = (
    "groups/optimizer/tree",
    "groups/rng/tree/numpy/state/state",
    "groups/noise/tree/state/state",
)
_PYTHON = "groups/rng/tree/python/state"
MANIFEST: dict[str, list[tuple[str, Any]]] = {
    "a position beyond its numbers": [(f"{_NUMPY}/pos", 2**31 - 1), (f"{_NOISE}/pos", 2**31 - 1)],
    "a position of many digits": [(f"{_NUMPY}/pos", 10**30), (f"{_NOISE}/pos", 10**30)],
    "too few numbers": [(f"{at}/key", {"~tensor": ["extra/array", {"array": True}]}) for at in (_NUMPY, _NOISE)],
    "Python's stream of huge numbers": [(f"{_PYTHON}/numbers", [2**70] * 625)],
    "torch's stream of another tensor": [("groups/rng/tree/torch/state", {"~tensor": "extra/big"})],
    "streams of another kind": [("groups/rng/kind", "plain"), (f"{_NUMPY}/pos", 2**31 - 2)],
    "a module that is a list": [("groups/model/tree", [1])],
    "an optimizer that is a module": [("groups/optimizer/kind", "module")],
    "an optimizer's state as pairs": [(f"{_OPTIMIZER}/state", [["a", {}]])],
    "shapes of texts": [(f"{_OPTIMIZER}/shapes", {"model/layer.bias": "x"})],
    "parameters that are lists": [(f"{_OPTIMIZER}/param_groups/0/params", [[1]])],
    "an object's state that it cannot take": [("groups/counting/tree", {"count": "x"})],
    "100,000 groups": [(f"groups/g{n}", {"kind": "plain", "tree": 1}) for n in range(100_000)],
}
_OWNER, _NEWEST = "state/owner", "state/live/-1"
ENTRY: dict[str, list[tuple[str, Any]]] = {
    "the last epoch": [(f"{_OWNER}/epoch", 10**9 - 1), ("epoch", 10**9 - 1)],
    "a pid of a path": [(f"{_OWNER}/pid", "../../outside"), (f"{_OWNER}/released", False)],
    "a pid of 40 digits": [(f"{_OWNER}/pid", 10**40), (f"{_OWNER}/released", False)],
    "a list that leads out": [("state/live", {"segments": ["../../outside/canary"], "tail": []})],
    "seconds without end": [("event/stall_s", 1e300), ("event/flush_s", 1e-300), ("event/step_s", 5e-324)],
    "a resume of no numbers": [("event/resumed", {"start_s": -1, "owner_s": "nan", "step_s": 1e300, "x": []})],
    "checks that are a number": [("state/checks", 7)],
    "costs without end": [(f"state/live/{n}/cost_s", 1.7e308) for n in range(3)],
    "as many digits as can be": [(f"{_NEWEST}/{key}", Raw("9" * 4300)) for key in ("n", "cost_s", "size_bytes")],
    "63 bits": [(f"{_NEWEST}/{key}", 2**63) for key in ("n", "cost_s", "size_bytes", "objects", "epochs")],
    **{
        f"a time such as {text}": [
            ("at", text), (f"{_OWNER}/taken_at", text), (f"{_OWNER}/host", "elsewhere"), (f"{_OWNER}/released", False),
            *((f"state/live/{n}/saved_at", text) for n in range(3)), ("state/evaluations/0/evaluated_at", text),
        ]
        for text in ("0001-01-01T00:00:00+14:00", "yesterday")
    },
}  # fmt: skip


def on_entry(change: Callable[..., Any], *arguments: Any) -> Callable[[Hostile], None]:
    """Return what changes the newest entry by `change(body, *arguments)`."""
    return lambda h: h.change_entry(lambda body: change(body, *arguments))


def on_manifest(change: Callable[..., Any], *arguments: Any) -> Callable[[Hostile], None]:
    """Return what changes the newest manifest by `change(body, *arguments)`."""
    return lambda h: h.change_manifest(lambda body: change(body, *arguments))


def put_all(body: Body, puts: list[tuple[str, Any]]) -> None:
    for path, value in puts:
        put_at(body, path, value)


def add_to_tree(body: Body, node: Any) -> None:
    """Let the group extra hold one value more."""
    body["groups"]["extra"]["tree"]["~dict"].append(["more", node])


def _texts(body: Body, text: str = "\x1b[31m\x1b]0;his\a\r\n") -> None:
    newest = body["state"]["live"][-1]
    newest.update(saved_at=text, metrics={text: 1})
    body["event"] = {"kind": "note", "note": text, text: text}
    body["state"].update(pins={newest["manifest_digest"]: text}, best_metric=text)
    body["state"]["leases"][0].update(holder=text)
    body["state"]["owner"].update(host=text, taken_at=text, released=False)


def _far_list(h: Hostile) -> None:
    """Let the newest entry name a list of checkpoints of a number that is to come."""
    body = h.entry()
    newest = {**body["state"]["live"][-1], "n": 10**12}
    data = canonical_json({"version": 1, "live": [newest, {**newest, "manifest_digest": "0" * 32, "n": 0}]})
    digest = digest_hex(data)
    name = live_list_name(digest)
    (h.root / "live").mkdir(exist_ok=True)
    (h.root / name).write_bytes(data)
    body["state"]["live"] = {"segments": [digest], "tail": []}
    h.put_entry(body)


def _far_entry(h: Hostile) -> None:
    body = {**h.entry(), "n": 10**20 - 1}
    h.put_entry(body, h.root / ledger_name(body["n"]))


def documents() -> Iterator[Case]:
    some = ("verify", "show", "diff", "export", "part", "continue")
    for what, node in NODES.items():
        yield Case(f"tree with {what}", on_manifest(add_to_tree, node), verbs=some)
    for what, puts in MANIFEST.items():
        yield Case(f"manifest with {what}", on_manifest(put_all, puts))
    for what, puts in ENTRY.items():
        yield Case(f"entry with {what}", on_entry(put_all, puts))
    for what, text in {"deep lists": "[" * 10**6 + "]" * 10**6, "many lists": "[" + "[]," * (5 << 20) + "[]]"}.items():
        yield Case(f"{what} in a tree", on_manifest(add_to_tree, Raw(text)), verbs=("verify", "continue"))
    digits = [("groups/extra/tree/~dict/0/1", Raw("9" * 3000))]
    yield Case("whole numbers of 3,000 digits", on_manifest(put_all, digits), "values")
    yield Case("codes for the terminal", on_entry(_texts))
    yield Case("the last ledger number", _far_entry)
    yield Case("a list with a number of the future", _far_list, "entry")
    twice = on_manifest(lambda body: body["objects"].append(body["objects"][0]))
    yield Case("an object named twice", twice, "checkpoint")


# ── other things in the place of files ───────────────────────────────────────────────────────────────────────


def unix_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{here}/{path.name}")  # a socket's path has 107 bytes
    os.close(here)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


THINGS: dict[str, Callable[[Path], Any]] = {
    "fifo": os.mkfifo, "socket": unix_socket, "endless device": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir, "loop": lambda path: path.symlink_to(path.name), "sparse file": sparse,
    "dangling link": lambda path: path.symlink_to("nothing-is-here"),
}  # fmt: skip
FILES: dict[str, tuple[Callable[[Hostile], Path], str]] = {
    "format.json": (lambda h: h.root / "format.json", "any"),
    "the newest entry": (lambda h: h.entry_path(), "entry"),
    "the next entry": (lambda h: h.root / ledger_name(h.entry()["n"] + 1), "any"),
    "the manifest": (lambda h: h.root / h.checkpoint()["manifest"], "checkpoint"),
    "the index": (lambda h: h.index_path(), "checkpoint"),
    "a shard": (lambda h: h.root / h.shard("extra"), "checkpoint"),
    "a table": (lambda h: h.root / h.entry()["state"]["evaluations"][0]["table"], "any"),
    "the next heartbeat": (lambda h: h.root / "heartbeat" / "000002.json", "any"),
}
DIRECTORIES = ("ledger", "heartbeat", "evals", "live", "checkpoint_000000000003", "checkpoint_000000000003/*")


def files() -> Iterator[Case]:
    for (where, (find, harm)), (thing, make) in product(FILES.items(), THINGS.items()):
        if (where, thing) != ("the next heartbeat", "sparse file"):
            yield Case(f"{thing} for {where}", partial(put_thing, find, make), harm)
    for where, (find, harm) in FILES.items():
        yield Case(f"link for {where}", partial(put_link, find), harm)
    for name in DIRECTORIES:
        yield Case(f"link for the directory {name}", partial(put_link, partial(_directory, name)))


def _directory(pattern: str, h: Hostile) -> Path:
    return next(h.root.glob(pattern), h.root / pattern)


def put_link(find: Callable[[Hostile], Path], h: Hostile) -> None:
    h.move_out(find(h))


def put_thing(find: Callable[[Hostile], Path], make: Callable[[Path], Any], h: Hostile) -> None:
    path = find(h)
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)


# ── regions ──────────────────────────────────────────────────────────────────────────────────────────────────


def _say(h: Hostile, **changes: Any) -> None:
    """Change what the index says of one tensor."""
    h.put_rows(row._replace(**changes) if row.key == "big" else row for row in h.rows())


def _same_bytes(h: Hostile) -> None:
    """Let the same bytes be a thousand tensors: what has a megabyte on disk would take a gigabyte in memory."""
    [table] = [row for row in h.rows() if row.key == "table"]
    more = [table._replace(group="extra", key=f"more{n}") for n in range(1000)]
    pairs = [[f"more{n}", {"~tensor": f"extra/more{n}"}] for n in range(1000)]
    h.put_rows([*h.rows(), *more], lambda body: body["groups"]["extra"]["tree"]["~dict"].extend(pairs))


def _swapped(h: Hostile) -> None:
    """Let the two halves of a tensor lie the other way around."""
    rows = h.rows()
    at = next(n for n, row in enumerate(rows) if row.key == "big")
    whole, half = rows[at], (rows[at].end - rows[at].begin) // 2
    data = (h.root / whole.object).read_bytes()
    halves = []
    for first, begin in ((half, whole.begin), (0, whole.begin + half)):
        here = digest_bytes(data[begin : begin + half])
        halves.append(whole._replace(box=Box((first // 4,), (half // 4,)), begin=begin, end=begin + half, digest=here))
    h.put_rows([*rows[:at], *halves, *rows[at + 1 :]])


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


def _shaped(*shape: int, **more: Any) -> Callable[[Hostile], None]:
    return lambda h: _say(h, tensor_shape=shape, box=Box((0,) * len(shape), shape), **more)


def regions() -> Iterator[Case]:
    changes: dict[str, Callable[[Hostile], Any]] = {
        "the same bytes for 1,000 tensors": _same_bytes,
        "regions in the header": lambda h: _say(h, begin=0, end=12_000),
        "regions beyond the object": lambda h: _say(h, begin=2**62, end=2**62 + 12_000),
        "regions of one byte less": lambda h: _say(h, end=16_095),
        "regions in another order": _swapped,
        "a shape that overflows": _shaped(0, 2**62, 2**62, begin=4096, end=4096),
        "65 dimensions": _shaped(3000, *[1] * 64),
    }
    for what, change in changes.items():
        yield Case(f"index with {what}", change, "checkpoint")
    yield Case("a tensor in two objects", _two_objects)
    for dtype, size in {"float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1, "bool": 1, "complex64": 8}.items():
        retype = _shaped(12_000 // size, dtype=dtype)
        yield Case(f"a tensor said to be of {dtype}", retype, "values", ("verify", "diff", "export", "continue"))
