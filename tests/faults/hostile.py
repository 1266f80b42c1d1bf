"""Run directories as an attacker writes them: whatever he changes has fitting digests, all the way up to the ledger."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.format.digests import canonical_json, digest_hex
from ckpt_tasks.format.layout.index import Index, IndexRow, write_index
from ckpt_tasks.run.ledger.config import CheckpointConfig
from tests.support.indexes import read_as_committed

STEPS = (1, 2, 3)
NEWEST = STEPS[-1]
UNTOUCHED = 99  # the step of a state that no checkpoint holds
Body = dict[str, Any]


class Model(torch.nn.Module):
    """A layer that is trained, and a table that is not: every checkpoint after the first one reuses its object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 3)
        self.table = torch.nn.Parameter(torch.ones(1 << 18), requires_grad=False)


class Counting:
    """An object with a state of its own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": [self.count] * 3}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = int(state["count"])


def state_of(step: int) -> dict[str, Any]:
    """Return a state whose every value follows from its step, with a word of every kind of the vocabulary."""
    generator = torch.Generator().manual_seed(1000 + step)
    model = Model()
    optimizer = torch.optim.Adam(model.layer.parameters(), lr=0.1 + step)
    for parameter in model.layer.parameters():
        parameter.grad = torch.rand(parameter.shape, generator=generator)
    optimizer.step()
    with torch.no_grad():
        for parameter in model.layer.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
    extra = {
        "step": step,
        "name": f"at {step}",
        "big": torch.rand(3000, generator=generator),
        "trained": torch.rand(4, generator=generator).requires_grad_(),
        "transposed": torch.rand(2, 3, generator=generator).t(),
        "array": np.arange(step, step + 5),
        "scalar": np.float32(step),
        "kinds": [torch.float32, torch.device("cpu"), (step, None), deque([step], 4), b"\0\1", 1j, {1, 2}],
        7: {("a", 1): float("nan")},
    }
    noise = np.random.Generator(np.random.MT19937(step))
    return {"model": model, "optimizer": optimizer, "extra": extra, "counting": Counting(step), "noise": noise}


def fingerprint(state: Mapping[str, Any]) -> str:
    """Digest what a restore must bring back, or leave alone."""
    seen = hashlib.sha256()
    tensors = [*state["model"].state_dict().values(), *(state["extra"][name] for name in ("big", "trained"))]
    for entry in state["optimizer"].state_dict()["state"].values():
        tensors += [entry["exp_avg"], entry["exp_avg_sq"]]
    for tensor in tensors:
        seen.update(tensor.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes())
    words = (state["extra"]["step"], state["extra"]["name"], state["extra"]["array"].tolist(), state["counting"].count)
    seen.update(json.dumps(words).encode())
    return seen.hexdigest()


def draw(state: Mapping[str, Any]) -> None:
    """Draw from every stream that a restore sets: a position outside of a stream's numbers shows only now."""
    random.random()
    np.random.random()  # noqa: NPY002 (the stream that programs draw from)
    torch.rand(1)
    state["noise"].random(3)


def config(root: Path, **more: Any) -> CheckpointConfig:
    return CheckpointConfig(
        checkpoint_dir=str(root),
        **{"memory_dir": None, "max_num_checkpoints": None, "run_key": "run", "best_metric": "loss", **more},
    )


def train(root: Path) -> None:
    """Make a run of the steps 1, 2, 3 that has one of everything: a pin, a lease, an evaluation, objects given up."""
    with Checkpointer(config(root)) as ckpt:
        for step in STEPS:
            ckpt.save(step, state_of(step), metrics={"loss": 1 / step})
        ckpt.pin(1, "mine")
        ckpt.note("made", by="an attacker")
    run = open_run(str(root))
    run.record_evaluation(run.find(NEWEST), "quick", {"loss": 0.5})
    hostile = Hostile(root, root)
    body = hostile.entry()
    newest = body["state"]["live"][-1]
    body["state"]["leases"] = [
        {"id": "00" * 8, "manifest_digest": newest["manifest_digest"], "holder": "him", "expires_at": time.time() + 1e6}
    ]
    body["state"]["retired"] = ["checkpoint_000000000000/e000001-00000000000000aa/gone.safetensors"]
    body["event"] = {"kind": "commit", "step": NEWEST, "stall_s": 0.1, "flush_s": 0.2, "step_s": 0.3}
    hostile.put_entry(body)


class Raw(NamedTuple):
    """Text to stand in JSON as it is, which Python's writer would not write."""

    text: str


class Hostile:
    """A run directory to be changed; `outside` is what must not be touched from it."""

    def __init__(self, root: Path, outside: Path):
        self.root = root
        self.outside = outside

    # ── the ledger ───────────────────────────────────────────────────────────────────────────────────────────

    def entry_path(self) -> Path:
        path: Path = min(self.root.glob("ledger/[0-9]*.json"))
        return path

    def entry(self) -> Body:
        """Return the newest entry, without its digest."""
        body: Body = json.loads(self.entry_path().read_bytes())
        del body["digest"]
        return body

    def put_entry(self, body: Body, path: Path | None = None) -> None:
        """Write an entry with a fitting digest; `Raw` texts stand in it as they are."""
        plain, texts = without_raw(body)
        digest = digest_hex(with_raw(canonical_json(plain), texts))
        (path or self.entry_path()).write_bytes(with_raw(canonical_json({**plain, "digest": digest}), texts))

    def change_entry(self, change: Callable[[Body], Any]) -> None:
        body = self.entry()
        change(body)
        self.put_entry(body)

    def checkpoint(self, step: int = NEWEST) -> Body:
        """Return a live checkpoint, as the newest entry lists it."""
        found: Body = next(c for c in self.entry()["state"]["live"] if c["step"] == step)
        return found

    # ── manifest, index, shards ──────────────────────────────────────────────────────────────────────────────

    def manifest(self, step: int = NEWEST) -> Body:
        body: Body = json.loads((self.root / self.checkpoint(step)["manifest"]).read_bytes())
        return body

    def put_manifest(self, body: Body | bytes, step: int = NEWEST) -> None:
        """Write a manifest, and its digest wherever the newest entry has it."""
        known = self.checkpoint(step)
        plain, texts = ({}, {}) if isinstance(body, bytes) else without_raw(body)
        data = body if isinstance(body, bytes) else with_raw(json.dumps(plain, separators=(",", ":")).encode(), texts)
        (self.root / known["manifest"]).write_bytes(data)
        text = json.dumps(self.entry()).replace(known["manifest_digest"], digest_hex(data))
        self.put_entry(json.loads(text))

    def change_manifest(self, change: Callable[[Body], Any]) -> None:
        body = self.manifest()
        change(body)
        self.put_manifest(body)

    def index_path(self) -> Path:
        return self.root / str(self.manifest()["index"][0])

    def rows(self) -> list[IndexRow]:
        return [*read_as_committed(self.index_path().read_bytes()).rows]

    def put_index(self, data: bytes, change: Callable[[Body], Any] = lambda body: None) -> None:
        """Write an index, and its size and digest into the manifest."""
        body = self.manifest()
        (self.root / body["index"][0]).write_bytes(data)
        body["index"][1:] = [len(data), digest_hex(data), len(data)]
        change(body)
        self.put_manifest(body)

    def put_rows(self, rows: Iterable[IndexRow], change: Callable[[Body], Any] = lambda body: None) -> None:
        self.put_index(write_index(Index.of([*rows])), change)

    def shard(self, group: str) -> str:
        """Return the name of the newest checkpoint's own shard of a group."""
        prefix = self.checkpoint()["manifest"].rpartition("/")[0]
        names = [record[0] for record in self.manifest()["objects"]]
        return str(next(name for name in names if name.startswith(f"{prefix}/{group}-")))

    def header(self, group: str) -> Body:
        data = (self.root / self.shard(group)).read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        body: Body = json.loads(data[8 : 8 + length])
        return body

    def put_header(self, group: str, text: bytes, *, length: int | None = None) -> None:
        """Give a shard another header; the rows of its tensors move with it."""
        name = self.shard(group)
        data = (self.root / name).read_bytes()
        start = 8 + struct.unpack_from("<Q", data)[0]
        header = text.ljust(-(-(8 + len(text)) // 4096) * 4096 - 8)
        first = struct.pack("<Q", len(header) if length is None else length) + header
        (self.root / name).write_bytes(first + data[start:])
        moved = len(first) - start
        rows = [
            row._replace(begin=row.begin + moved, end=row.end + moved) if row.object == name else row
            for row in self.rows()
        ]

        def record(body: Body) -> None:
            place = next(record for record in body["objects"] if record[0] == name)
            place[1:] = [len(first) + len(data) - start, digest_hex(first), len(first)]

        self.put_rows(rows, record)

    def move_out(self, path: Path) -> None:
        """Move a file or directory out of the run directory, and leave a link to it, or to a canary."""
        place = self.outside / ("canary" if not path.exists() else f"moved-{path.name}")
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            shutil.move(path, place)
        path.symlink_to(place)


def with_raw(data: bytes, texts: Mapping[str, str]) -> bytes:
    for mark, raw in texts.items():
        data = data.replace(b'"%s"' % mark.encode(), raw.encode())
    return data


def without_raw(value: Any) -> tuple[Any, dict[str, str]]:
    """Put a mark in the place of every Raw text; return the marks with their texts."""
    texts: dict[str, str] = {}

    def strip(value: Any) -> Any:
        if isinstance(value, Raw):
            mark = f"@@raw{len(texts)}@@"
            texts[mark] = value.text
            return mark
        if isinstance(value, dict):
            return {key: strip(item) for key, item in value.items()}
        return [strip(item) for item in value] if isinstance(value, list) else value

    return strip(value), texts


def look(place: Path) -> dict[str, Any]:
    """Describe everything below a directory: types, modes, bytes, times. Two looks are equal if nothing was touched."""
    found: dict[str, Any] = {}
    for path in [place, *sorted(place.rglob("*"))]:
        status = path.lstat()
        body = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path.relative_to(place))] = (status.st_mode, status.st_mtime_ns, body)
    return found
