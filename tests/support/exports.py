"""Exports of the newest checkpoint of a run, read back with the library of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ckpt_tasks.copying.export import ExportReport, export_checkpoint
from ckpt_tasks.reading.reading import open_run

INDEX = "model.safetensors.index.json"


def export(run_dir: Path, out: Path, **how: Any) -> ExportReport:
    run = open_run(str(run_dir))
    return export_checkpoint(run.history.store, run.find("latest"), out, **how)


def loaded(out: Path) -> dict[str, torch.Tensor]:
    """Read an export as others do: one file, or the shards that the index names."""
    if out.is_file():
        return dict(load_file(out))
    files = set(json.loads((out / INDEX).read_text())["weight_map"].values())
    return {name: tensor for file in sorted(files) for name, tensor in load_file(out / file).items()}


def about(file: Path) -> Any:
    with safe_open(file, framework="pt") as opened:
        return json.loads(opened.metadata()["ckpt_tasks"])
