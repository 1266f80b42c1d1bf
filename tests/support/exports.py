"""Exports of the newest checkpoint of a run, read back with the library of others; and one that is cut by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.checkpoint.transfer.export import ExportReport, export_checkpoint, write_export
from ckpt_tasks.checkpoint.transfer.export_torch import plan_torch_export
from ckpt_tasks.format.digests import digest_bytes, digest_hex
from ckpt_tasks.format.layout.index import Index, IndexRow, write_index
from ckpt_tasks.format.layout.regions import Box
from ckpt_tasks.format.manifest import Manifest, ObjectRecord
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.state.tensors.tensors import same_bits
from ckpt_tasks.storage.local import LocalStore

INDEX = "model.safetensors.index.json"


def export(run_dir: Path, out: Path, **how: Any) -> ExportReport:
    run = open_run(str(run_dir))
    return export_checkpoint(run.history.store, run.find("latest"), out, **how)


def export_for_torch(run_dir: Path, out: Path, **how: Any) -> ExportReport:
    run = open_run(str(run_dir))
    return write_export(run.history.store, plan_torch_export(run.history.store, run.find("latest"), out, **how))


def loaded(out: Path) -> dict[str, torch.Tensor]:
    """Read an export as others do: one file, or the shards that the index names."""
    if out.is_file():
        return dict(load_file(out))
    files = set(json.loads((out / INDEX).read_text())["weight_map"].values())
    return {name: tensor for file in sorted(files) for name, tensor in load_file(out / file).items()}


def about(file: Path) -> Any:
    with safe_open(file, framework="pt") as opened:
        return json.loads(opened.metadata()["ckpt_tasks"])


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def parts(store: LocalStore, tensor: torch.Tensor, boxes: list[Box]) -> Checkpoint:
    """Write a checkpoint by hand whose one tensor is cut into boxes, each in an object of another checkpoint."""
    rows, records = [], []
    for n, box in enumerate(boxes):
        part = bits(tensor[tuple(slice(o, o + extent) for o, extent in zip(box.offset, box.shape, strict=True))])
        name = f"checkpoint_{n:012d}/e000001-00000000000000aa/x-00000-of-00001-0.safetensors"
        store.put(name, [b"head", part])
        records.append(ObjectRecord(name, 4 + len(part), digest_hex(b"head"), 4))
        end = 4 + len(part)
        rows.append(IndexRow("x", "w", "float32", tuple(tensor.shape), box, name, 4, end, digest_bytes(part)))
    folder = "checkpoint_000000000099/e000001-00000000000000aa"
    index = write_index(Index.of(rows))
    store.put(f"{folder}/index.arrow", [index])
    manifest = Manifest(
        run_key="r",
        step=99,
        attempt="e000001-00000000000000aa",
        world_size=1,
        index=ObjectRecord(f"{folder}/index.arrow", len(index), digest_hex(index), len(index)),
        objects=tuple(records),
        groups={"x": {"kind": "module", "tree": {"w": {"~tensor": "x/w"}}}},
    ).to_bytes()
    store.put(f"{folder}/manifest.json", [manifest])
    return Checkpoint(
        step=99,
        attempt="e000001-00000000000000aa",
        manifest=f"{folder}/manifest.json",
        manifest_digest=digest_hex(manifest),
        parent=None,
        n=0,
        metrics={},
        size_bytes=0,
        objects=len(boxes),
        saved_at="",
        cost_s=0.0,
        reuses=tuple(record.name for record in records),
    )


def equal(one: Any, other: Any) -> bool:
    """Say whether nested values have the same types, and tensors the same bits."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and same_bits(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
