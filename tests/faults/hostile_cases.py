"""What an attacker does to a run directory that no one changed place says: one function each, by name.

`harm` says what must come of it: "checkpoint", the newest one is damaged and passed over; "entry", the newest ledger
entry is damaged, and the one below counts; "any", every verb ends well or with an error of ours, and what is restored
has the values of its step; "values", these are his; "memory", what lies in memory is not restored. What `ckpt verify`
then says matches `named`.
"""

from __future__ import annotations

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
from tests.faults.hostile_values import LARGE, NODES, as_utf_16, attempt_of, put_at
from tests.faults.hostile_verbs import ALL


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Hostile], Any]
    harm: str
    named: str = ""
    verbs: tuple[str, ...] = ALL
    slow: bool = False


# ── documents ────────────────────────────────────────────────────────────────────────────────────────────────

_EXTRA, _OPTIMIZER = "groups/extra/tree", "groups/optimizer/tree"
_NUMPY, _NOISE = "groups/rng/tree/numpy/state/state", "groups/noise/tree/state/state"
_PYTHON = "groups/rng/tree/python/state"
# Places that libraries read, or that took more than an error once: what to put there.
PUTS: dict[str, list[tuple[str, Any]]] = {
    "a position beyond its numbers": [(f"{_NUMPY}/pos", 2**31 - 1), (f"{_NOISE}/pos", 2**31 - 1)],
    "a position before its numbers": [(f"{_NUMPY}/pos", -(2**31)), (f"{_NOISE}/pos", -(2**31))],
    "a position of many digits": [(f"{_NUMPY}/pos", 10**30), (f"{_NOISE}/pos", 10**30)],
    "too few numbers": [(f"{at}/key", {"~tensor": ["extra/array", {"array": True}]}) for at in (_NUMPY, _NOISE)],
    "texts for numbers": [(f"{_NUMPY}/key", "numbers"), (f"{_NOISE}/key", "numbers")],
    "Python's stream of another length": [(f"{_PYTHON}/numbers", [1, 2])],
    "Python's stream of huge numbers": [(f"{_PYTHON}/numbers", [2**70] * 625)],
    "another version of a stream": [(f"{_PYTHON}/version", 99)],
    "torch's stream of another tensor": [("groups/rng/tree/torch/state", {"~tensor": "extra/big"})],
    "streams of another kind": [("groups/rng/kind", "plain"), (f"{_NUMPY}/pos", 2**31 - 2)],
    "no stream": [("groups/rng/tree", {})],
    "a gauss that is none": [(f"{_PYTHON}/gauss", "x")],
    "a module that is a list": [("groups/model/tree", [1])],
    "a module that is an optimizer": [("groups/model/kind", "optimizer")],
    "an optimizer that is a module": [("groups/optimizer/kind", "module")],
    "a group of an unknown kind": [("groups/extra/kind", "pickle")],
    "an optimizer's state as pairs": [(f"{_OPTIMIZER}/state", [["a", {}]])],
    "an optimizer's state for others": [(f"{_OPTIMIZER}/state/x", {})],
    "shapes of texts": [(f"{_OPTIMIZER}/shapes", {"model/layer.bias": "x"})],
    "parameters that are lists": [(f"{_OPTIMIZER}/param_groups/0/params", [[1]])],
    "no parameter groups": [(f"{_OPTIMIZER}/param_groups", [])],
    "entries on the CPU that are numbers": [(f"{_OPTIMIZER}/on_cpu", 7)],
    "an object's state that it cannot take": [("groups/counting/tree", {"count": "x"})],
    "100,000 groups": [(f"groups/g{n}", {"kind": "plain", "tree": 1}) for n in range(100_000)],
    "no groups": [("groups", {})],
}
_OWNER, _NEWEST = "state/owner", "state/live/-1"
ENTRY_PUTS: dict[str, list[tuple[str, Any]]] = {
    "the last epoch": [(f"{_OWNER}/epoch", 10**9 - 1), ("epoch", 10**9 - 1)],
    "a pid of a path": [(f"{_OWNER}/pid", "../../outside"), (f"{_OWNER}/released", False)],
    "a negative pid": [(f"{_OWNER}/pid", -1), (f"{_OWNER}/released", False)],
    "a pid of 40 digits": [(f"{_OWNER}/pid", 10**40), (f"{_OWNER}/released", False)],
    "a list that leads out": [("state/live", {"object": "live/../../outside/canary.json", "digest": "0" * 32})],
    "seconds without end": [("event/stall_s", 1e300), ("event/flush_s", 1e-300), ("event/step_s", 5e-324)],
    "a resume of no numbers": [("event/resumed", {"start_s": -1, "owner_s": "nan", "step_s": 1e300, "x": []})],
    "a resume of no parts": [("event/resumed", [1])],
    "a drill of no step": [("state/drills", [{"step": -1}])],
    "drills that are a number": [("state/drills", 7)],
    "a verification of no checkpoint": [("state/verifications", [{"checkpoints": -1}])],
    "verifications that are a number": [("state/verifications", 7)],
    "costs without end": [(f"state/live/{n}/cost_s", 1.7e308) for n in range(3)],
    "a number of the future": [(f"{_NEWEST}/n", 10**20 - 1)],
    "as many digits as can be": [(f"{_NEWEST}/{key}", Raw("9" * 4300)) for key in ("n", "cost_s", "size_bytes")],
    "63 bits": [(f"{_NEWEST}/{key}", 2**63) for key in ("n", "cost_s", "size_bytes", "objects", "epochs")],
    **{
        f"a time such as {text}": [
            ("at", text), (f"{_OWNER}/taken_at", text), (f"{_OWNER}/host", "elsewhere"), (f"{_OWNER}/released", False),
            *((f"state/live/{n}/saved_at", text) for n in range(3)), ("state/evaluations/0/evaluated_at", text),
        ]
        for text in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-11-20T12:00:00", "yesterday")
    },
}  # fmt: skip


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


def _far_entry(h: Hostile) -> None:
    body = {**h.entry(), "n": 10**20 - 1}
    h.put_entry(body, h.root / ledger_name(body["n"]))


def _many_objects(h: Hostile) -> None:
    record = h.manifest()["objects"][0]
    names = (record[0].rpartition("/")[0] + f"/x-{n:05d}-of-00001-0.safetensors" for n in range(100_000))
    h.change_manifest(lambda body: body["objects"].extend([name, *record[1:]] for name in names))


def documents() -> Iterator[Case]:
    """Change entries and manifests in more than one place, or in one that every run of the tests must look at."""
    some = ("verify", "show", "diff", "export", "part", "go on")
    for what, node in NODES.items():
        yield Case(f"tree with {what}", on_manifest(add_to_tree, node), "any", verbs=some)
    yield Case("tree with a huge whole number", on_manifest(add_to_tree, Raw("9" * 4300)), "any", verbs=some)
    for what, puts in PUTS.items():
        yield Case(f"manifest with {what}", on_manifest(put_all, puts), "any")
    for what, puts in ENTRY_PUTS.items():
        yield Case(f"entry with {what}", on_entry(put_all, puts), "any")
    for what, text in LARGE.items():
        slow = what not in ("very deep lists", "many lists")
        yield Case(f"{what} in a tree", on_manifest(add_to_tree, text), "any", verbs=("verify", "go on"), slow=slow)
        for path in ("event/more", f"{_NEWEST}/metrics/loss"):
            put = on_entry(put_all, [(path, text)])
            yield Case(f"{what} in {path}", put, "any", verbs=("ls", "verify", "prune", "go on"), slow=True)
    digits = on_manifest(put_all, [(f"{_EXTRA}/~dict/0/1", Raw("9" * 3000))])
    yield Case("whole numbers of 3,000 digits", digits, "values")
    yield Case("a size of many lists", on_manifest(put_all, [("objects/-1/1", LARGE["many lists"])]), "checkpoint",
               slow=True)  # fmt: skip
    yield Case("codes for the terminal", on_entry(_texts), "any")
    yield Case("the last ledger number", _far_entry, "any")
    yield Case("10,000 checkpoints", lambda h: _long_list(h, 10_000), "any", verbs=("ls", "dry run"), slow=True)
    yield Case("a long list with a number of the future", lambda h: _long_list(h, 3, n=10**12), "entry")
    yield Case("an entry in UTF-16", lambda h: h.entry_path().write_bytes(as_utf_16(h.entry())), "entry")
    yield Case("a manifest in UTF-16", lambda h: h.put_manifest(as_utf_16(h.manifest())), "checkpoint")
    twice = on_manifest(lambda body: body["objects"].append(body["objects"][0]))
    yield Case("an object named twice", twice, "checkpoint", named="manifest")
    yield Case("too many objects", _many_objects, "checkpoint", slow=True)


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
