"""What an attacker does to a run directory: one function each, by name.

`harm` says what must come of it: "checkpoint", the newest one is damaged and passed over; "header", only `verify` finds
it; "entry", the newest ledger entry is damaged, and the one below counts; "any", every verb ends well or with an error
of ours, and what is restored has the values of its step; "values", these are his; "memory", what lies in memory is not
restored. What `ckpt verify` then says matches `named`.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.keys import ledger_name, live_list_name
from tests.faults.hostile import Body, Hostile, Raw, on_entry, on_manifest

ALL = ("ls", "show", "verify", "diff", "export", "plan", "dry run", "part", "evaluate", "prune", "go on")
SOME = ("ls", "verify", "prune", "go on")  # where what is refused is refused by one function for all
ROW = "checkpoint_000000000003"


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Hostile], Any]
    harm: str
    named: str = ""
    verbs: tuple[str, ...] = ALL
    slow: bool = False


def attempt_of(step: int, name: str) -> str:
    return f"checkpoint_{step:012d}/e000001-0123456789abcdef/{name}"


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────

NAMES: dict[str, Any] = {
    "up": "../outside/canary",
    "up within": "checkpoint_000000000003/../../outside/canary",
    "up in an attempt": attempt_of(3, "../../../outside/canary"),
    "absolute": "/etc/passwd",
    "nul": attempt_of(3, "index.arrow\0.json"),
    "newline": attempt_of(3, "index.arrow\n"),
    "backslash": "..\\outside\\canary",
    "url": "simplecache::http://127.0.0.1:9/x",
    "file url": "file:///etc/passwd",
    "long": attempt_of(3, "a" * 10_000),
    "long path": "/".join(["a" * 200] * 60),
    "look-alike": attempt_of(3, "index.arrow").replace("c", "\u0441"),
    "wide digits": attempt_of(3, "index.arrow").replace("3", "\uff13"),
    "half a pair": attempt_of(3, "\ud800"),
    "hidden": attempt_of(3, ".tmp-0123456789abcdef"),
    "another object": "format.json",
    "the ledger": ledger_name(1),
    "empty": "",
    "dot": ".",
    "number": 3,
    "null": None,
    "list": ["a"],
}

Put = Callable[[Body, Any], Any]


def _group(body: Body, name: Any) -> None:
    body["groups"][str(name)] = body["groups"].pop("model")


ENTRY_PLACES: dict[str, Put] = {
    "manifest": lambda body, name: body["state"]["live"][-1].update(manifest=name),
    "attempt": lambda body, name: body["state"]["live"][-1].update(attempt=name),
    "reuses": lambda body, name: body["state"]["live"][-1].update(reuses=[name]),
    "retired": lambda body, name: body["state"].update(retired=[name]),
    "list": lambda body, name: body["state"].update(live={"object": name, "digest": "0" * 32}),
    "list's digest": lambda body, name: body["state"].update(live={"object": f"live/{name}.json", "digest": name}),
    "table": lambda body, name: body["state"]["evaluations"][0].update(table=name),
    "suite": lambda body, name: body["state"]["evaluations"][0].update(suite=name),
    "pin": lambda body, name: body["state"].update(pins={str(name): "his"}),
    "lease": lambda body, name: body["state"]["leases"][0].update(manifest_digest=name, holder=name),
    "owner": lambda body, name: body["state"]["owner"].update(host=name, id=name, process_start=name, released=False),
    "pid": lambda body, name: body["state"]["owner"].update(pid=name, released=False),
    "flow run": lambda body, name: body["state"].update(stalled_flow_run=name, best_metric=name),
    "parent": lambda body, name: body["state"]["live"][-1].update(parent=name, saved_at=name),
    "nonce": lambda body, name: body.update(nonce=name, previous=name, at=name),
}
MANIFEST_PLACES: dict[str, Put] = {
    "object": lambda body, name: body["objects"][-1].__setitem__(0, name),
    "index": lambda body, name: body["index"].__setitem__(0, name),
    "group": _group,
    "attempt": lambda body, name: body.update(attempt=name),
    "run key": lambda body, name: body.update(run_key=name, created_at=name),
    "kind": lambda body, name: body["groups"]["model"].update(kind=name),
    "tensor": lambda body, name: body["groups"]["model"]["tree"].update({"layer.weight": {"~tensor": name}}),
    "state": lambda body, name: body["groups"]["model"]["tree"].update({str(name): 1}),
}
ROW_PLACES: dict[str, Callable[[Any, str], Any]] = {
    "object": lambda row, name: row._replace(object=name),
    "group": lambda row, name: row._replace(group=name),
    "key": lambda row, name: row._replace(key=name),
    "dtype": lambda row, name: row._replace(dtype=name),
}


def names() -> Iterator[Case]:
    """Put every name in every place; the short form takes each name and each place a few times."""
    number = 0
    for place, put in ENTRY_PLACES.items():
        for what, name in NAMES.items():
            number += 1
            verbs, slow = (SOME, True) if number % 19 else (ALL, False)
            yield Case(f"ledger's {place}: {what}", on_entry(put, name), "any", verbs=verbs, slow=slow)
    for place, put in MANIFEST_PLACES.items():
        for what, name in NAMES.items():
            number += 1
            yield Case(f"manifest's {place}: {what}", on_manifest(put, name), "any", slow=number % 19 > 0)
    for place, swap in ROW_PLACES.items():
        for what, name in NAMES.items():
            if not isinstance(name, str) or name == "\ud800" or "\ud800" in name:
                continue
            number += 1
            make = partial(_first_row, swap, name)
            yield Case(f"index's {place}: {what}", make, "checkpoint", slow=number % 19 > 0)


def _first_row(swap: Callable[[Any, str], Any], name: str, h: Hostile) -> None:
    first, *rest = h.rows()
    h.put_rows([swap(first, name), *rest])


# ── other things in the place of files ───────────────────────────────────────────────────────────────────────


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{here}/{path.name}")  # a socket's path has 107 bytes
    os.close(here)


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero, which never ends
    except PermissionError:
        path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def dangling(path: Path) -> None:
    path.symlink_to("nothing-is-here")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


THINGS: dict[str, Callable[[Path], Any]] = {
    "fifo": fifo, "socket": unix_socket, "device": device, "directory": Path.mkdir, "loop": loop, "dangling": dangling,
    "sparse": sparse,
}  # fmt: skip
FILES: dict[str, tuple[Callable[[Hostile], Path], str]] = {
    "format.json": (lambda h: h.root / "format.json", "any"),
    "the newest entry": (lambda h: h.entry_path(), "entry"),
    "the next entry": (lambda h: h.root / ledger_name(h.entry()["n"] + 1), "any"),
    "the manifest": (lambda h: h.root / h.checkpoint()["manifest"], "checkpoint"),
    "the index": (lambda h: h.index_path(), "checkpoint"),
    "a shard": (lambda h: h.root / h.shard("extra"), "checkpoint"),
    "a table": (lambda h: h.root / h.entry()["state"]["evaluations"][0]["table"], "any"),
    "a heartbeat": (lambda h: h.root / "heartbeat" / "000001.json", "any"),
    "the next heartbeat": (lambda h: h.root / "heartbeat" / "000002.json", "any"),
}
DIRECTORIES = ("ledger", "heartbeat", "evals", "live", "checkpoint_000000000003", "checkpoint_000000000004",
               "checkpoint_000000000003/*", "checkpoint_000000000001")  # fmt: skip


def files() -> Iterator[Case]:
    """Put something else in the place of every kind of file, and links in the place of directories."""
    for where, (find, harm) in FILES.items():
        for thing, make in THINGS.items():
            if thing == "sparse" and where in ("a heartbeat", "the next heartbeat"):
                continue

            put = partial(_put, find, make)
            yield Case(f"{thing} for {where}", put, harm, slow=thing in ("socket", "directory", "dangling"))

        def link(h: Hostile, find: Any = find) -> None:
            path = find(h)
            if path.exists():
                h.move_out(path)
            else:
                path.parent.mkdir(exist_ok=True)
                path.symlink_to(h.outside / "canary")

        yield Case(f"link for {where}", link, harm)
    for directory in DIRECTORIES:
        yield Case(f"link for the directory {directory}", partial(_link_directory, directory), "any")
        yield Case(f"loop for the directory {directory}", partial(_loop_directory, directory), "any", slow=True)
    yield Case("hard links to a canary", _hard_links, "any")


def _put(find: Callable[[Hostile], Path], make: Callable[[Path], Any], h: Hostile) -> None:
    path = find(h)
    path.parent.mkdir(exist_ok=True)
    h.replace_file(path, make)


def _directory(h: Hostile, pattern: str) -> Path:
    return next(h.root.glob(pattern), h.root / pattern)


def _link_directory(pattern: str, h: Hostile) -> None:
    path = _directory(h, pattern)
    if path.exists():
        h.move_out(path)
    else:
        path.symlink_to(h.outside)


def _loop_directory(pattern: str, h: Hostile) -> None:
    path = _directory(h, pattern)
    h.replace_file(path, loop) if path.exists() else loop(path)


def _hard_links(h: Hostile) -> None:
    for name in (h.shard("extra"), "format.json", "heartbeat/000002.json", attempt_of(2, "x")):
        path = h.root / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.unlink(missing_ok=True)
        os.link(h.outside / "linked", path)


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────

TEXTS = {
    "deep lists": "[" * 900 + "]" * 900,
    "very deep lists": "[" * 10**6 + "]" * 10**6,
    "deep objects": '{"a":' * 5000 + "1" + "}" * 5000,
    "deep in texts": '["[[[","' + "[" * 300_000 + '"]',
    "nan": "NaN",
    "infinity": "-Infinity",
    "too large a float": "1e999",
    "many digits": "1" * 100_000,
    "as many digits as can be": "9" * 4300,
    "63 bits": str(2**63),
    "many lists": "[" + "[]," * (5 << 20) + "[]]",
    "many objects": "[" + '{"a":0},' * (5 << 20) + "[]]",
    "many numbers": "[" + "1," * (17 << 20) + "1]",
    "a long text": '"' + "x" * (60 << 20) + '"',
}


def jsons() -> Iterator[Case]:
    """Put JSON that takes the stack, the memory or the time of its reader into entries and manifests."""
    places: dict[str, Put] = {
        "event": lambda body, value: body["event"].update(more=value),
        "number of a checkpoint": lambda body, value: body["state"]["live"][-1].update(n=value),
        "cost": lambda body, value: body["state"]["live"][-1].update(cost_s=value),
        "size": lambda body, value: body["state"]["live"][-1].update(size_bytes=value, objects=value, epochs=value),
        "metric": lambda body, value: body["state"]["live"][-1]["metrics"].update(loss=value),
        "lease": lambda body, value: body["state"]["leases"][0].update(expires_at=value),
        "epoch": lambda body, value: body["state"]["owner"].update(epoch=value),
        "spared": lambda body, value: body["state"].update(spared_epochs=value),
        "seconds": lambda body, value: body["event"].update(stall_s=value, flush_s=value, step_s=value),
    }
    large = ("many lists", "many objects", "many numbers", "a long text", "very deep lists")
    for place, put in places.items():
        for what, text in TEXTS.items():
            first = (place == "event" and what not in large) or (what in ("as many digits as can be", "63 bits"))
            verbs, make = SOME if what in large else ALL, on_entry(put, Raw(text))
            yield Case(f"{what} for the {place} in the ledger", make, "any", verbs=verbs, slow=not first)
    for what, text in TEXTS.items():
        add = on_manifest(add_to_tree, Raw(text))
        yield Case(f"{what} in a tree", add, "any", verbs=("verify", "go on") if what in large else ALL,
                   slow=what in ("many objects", "many numbers", "a long text"))  # fmt: skip
        yield Case(
            f"{what} for a size in the manifest",
            on_manifest(lambda body, value: body["objects"][-1].__setitem__(1, value), Raw(text)),
            "checkpoint",
            slow=True,
        )
    yield Case("an entry in UTF-16", _utf_16, "entry")
    yield Case(
        "a manifest in UTF-16", lambda h: h.put_manifest(json.dumps(h.manifest()).encode("utf-16")), "checkpoint"
    )


def add_to_tree(body: Body, node: Any) -> None:
    """Let the group extra hold one value more."""
    body["groups"]["extra"]["tree"]["~dict"].append(["more", node])


def _utf_16(h: Hostile) -> None:
    path = h.entry_path()
    path.write_bytes(path.read_bytes().decode().encode("utf-16"))


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────


def _far_entry(h: Hostile) -> None:
    body = {**h.entry(), "n": 10**20 - 1}
    h.put_entry(body, h.root / ledger_name(body["n"]))


def numbers() -> Iterator[Case]:
    """Put numbers where they are out of their bounds."""
    changes: dict[str, Callable[[Body], Any]] = {
        "a negative step": lambda b: b["state"]["live"][-1].update(step=-1),
        "a step of 13 digits": lambda b: b["state"]["live"][-1].update(step=10**12),
        "a step that is true": lambda b: b["state"]["live"][0].update(step=True),
        "a step that is a float": lambda b: b["state"]["live"][-1].update(step=3.0),
        "the last epoch": lambda b: (b["state"]["owner"].update(epoch=10**9 - 1), b.update(epoch=10**9 - 1)),
        "an epoch of ten digits": lambda b: b["state"]["owner"].update(epoch=10**9),
        "a pid of a path": lambda b: b["state"]["owner"].update(pid="../../outside", released=False),
        "a negative pid": lambda b: b["state"]["owner"].update(pid=-1, released=False),
        "a pid of 40 digits": lambda b: b["state"]["owner"].update(pid=10**40, released=False),
        "the last spared epoch": lambda b: b["state"].update(spared_epochs=10**9 - 1),
        "a time in the year 1": lambda b: _times(b, "0001-01-01T00:00:00+14:00"),
        "a time in the year 9999": lambda b: _times(b, "9999-12-31T23:59:59-14:00"),
        "a time without a zone": lambda b: _times(b, "2026-11-20T12:00:00"),
        "a time that is none": lambda b: _times(b, "yesterday"),
        "a wild mode": lambda b: b["state"].update(best_mode="median"),
        "seconds without end": lambda b: b["event"].update(stall_s=1e300, flush_s=1e-300, step_s=5e-324),
        "costs without end": lambda b: [c.update(cost_s=1.7e308) for c in b["state"]["live"]],
        "codes for the terminal": lambda b: _texts(b, "\x1b[31m\x1b]0;his\a\r\n"),
        "a note without a word": lambda b: b.update(event={"kind": "note"}),
        "an owner twice": lambda b: b["state"]["live"].append(b["state"]["live"][-1]),
        "a number of the future": lambda b: b["state"]["live"][-1].update(n=10**20 - 1),
    }
    for what, change in changes.items():
        yield Case(what, on_entry(change), "any")
    yield Case("the last ledger number", _far_entry, "any")
    yield Case("10,000 checkpoints", lambda h: _long_list(h, 10_000), "any", verbs=("ls", "dry run"), slow=True)
    yield Case("a long list with a number of the future", lambda h: _long_list(h, 3, n=10**12), "entry")


def _texts(body: Body, text: str) -> None:
    newest = body["state"]["live"][-1]
    newest.update(saved_at=text, metrics={text: 1})
    body["event"] = {"kind": "note", "note": text, text: text}
    body["state"].update(pins={newest["manifest_digest"]: text}, best_metric=text)
    body["state"]["leases"][0].update(holder=text)
    body["state"]["owner"].update(host=text, taken_at=text, released=False)
    body["state"]["evaluations"][0]["metrics"] = {text: 1}


def _long_list(h: Hostile, count: int, **more: Any) -> None:
    """Let the newest entry name a list of its newest checkpoint, many times over."""
    body = h.entry()
    newest = {**body["state"]["live"][-1], **more}
    live = [newest, *({**newest, "manifest_digest": f"{n:032x}", "n": 0} for n in range(count))]
    data = canonical_json({"version": 1, "live": live})
    name = live_list_name(digest_hex(data))
    (h.root / "live").mkdir(exist_ok=True)
    (h.root / name).write_bytes(data)
    body["state"]["live"] = {"object": name, "digest": digest_hex(data)}
    h.put_entry(body)


def _times(body: Body, text: str) -> None:
    body.update(at=text)
    body["state"]["owner"].update(taken_at=text, released=False, host="elsewhere")
    for item in (*body["state"]["live"], *body["state"]["evaluations"]):
        item.update({"saved_at" if "saved_at" in item else "evaluated_at": text})
