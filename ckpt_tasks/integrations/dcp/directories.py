"""Convert between DCP's own directories and checkpoints of a run, bit for bit, in both directions."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.checkpoint.transfer.export import ExportedFile, ExportReport
from ckpt_tasks.checkpoint.transfer.importing.dcp_directory import DcpDirectory
from ckpt_tasks.checkpoint.transfer.importing.plan import ImportPlan
from ckpt_tasks.checkpoint.transfer.importing.sources import Source
from ckpt_tasks.checkpoint.transfer.importing.taking import Taken, seeded_streams
from ckpt_tasks.checkpoint.transfer.publishing import new_directory
from ckpt_tasks.errors import ConfigError, UnsupportedStateError
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.format.saved_kinds import RNG
from ckpt_tasks.format.tree import decode, tensor_refs
from ckpt_tasks.integrations.dcp.dcp_names import ROOT, groups_of, name_all
from ckpt_tasks.integrations.dcp.reader import CkptReader
from ckpt_tasks.integrations.dcp.writer import step_of
from ckpt_tasks.state.tensors.packing import pack
from ckpt_tasks.state.tensors.tensors import TensorSet

# torch 2.6 has no such option: there a conversion needs a process without a process group.
_ALONE: dict[str, Any] = {"no_dist": True} if "no_dist" in signature(load).parameters else {}


def plan_directory(path: str | os.PathLike[str], *, step: int | None = None) -> ImportPlan:
    """Plan the import of a DCP directory, written by any number of ranks; write nothing.

    `step` defaults to the number at the end of the directory's name, else 0. Raises IntegrityError if the directory is
    damaged or contradicts itself.
    """
    opened = DcpDirectory(Path(path).resolve())
    values = dict(opened.values)
    naming = name_all({name: isinstance(value, torch.Tensor) for name, value in values.items()}, opened.paths)
    tensors, packed = TensorSet(None), {}
    for name, value in values.items():
        place = naming.keys.get(name) or "/".join(map(str, (naming.places[name][0], *naming.places[name][1])))
        try:
            packed[name] = pack(value, place, tensors)
        except UnsupportedStateError as error:
            opened.left[name] = error.message
    groups = groups_of(naming, packed)
    taken = tuple(_taken(name, group, tensors.tensors) for name, group in groups.items())
    groups[RNG], streams = seeded_streams()
    source = Source(opened.name, "DCP checkpoint", values, (opened,), opened.left)
    return ImportPlan(
        source=source,
        step=(step_of(path) or 0) if step is None else step,
        groups=groups,
        tensors={**tensors.tensors, **streams},
        taken=taken,
        left=opened.left,
        environment={ROOT: naming.root},
    )


def _taken(name: str, group: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Taken:
    keys = {ref.key for ref in tensor_refs(decode(group["tree"]))}
    return Taken(name, name, group["kind"], len(keys), sum(tensors[key].nbytes for key in keys))


def export_directory(
    place: str, run: Run, checkpoint: Checkpoint, out: str | os.PathLike[str], groups: Iterable[str] | None
) -> ExportReport:
    """Write a checkpoint of the run at `place` as a DCP directory, by torch; `out` appears when it is complete.

    The whole checkpoint is verified, and is in memory meanwhile. If `groups` has one name, only that group's keys are
    written, without the group's name. Raises ConfigError, IntegrityError and StoreError.
    """
    named = [*(groups or ())]
    if len(named) > 1:
        raise ConfigError("a DCP directory holds all groups, or one", hint="Name one group, or none.")
    reader = CkptReader(place, step=checkpoint.step, group=named[0] if named else None)
    metadata = reader.read_metadata()
    state: dict[str, Any] = {}
    for name, described in metadata.state_dict_metadata.items():
        value = None
        if isinstance(described, TensorStorageMetadata):
            value = torch.empty(described.size, dtype=described.properties.dtype)
        set_element(state, (metadata.planner_data or {}).get(name, (name,)), value)
    flat = metadata.planner_data is not None
    with warnings.catch_warnings(), new_directory(Path(out).absolute()) as directory:
        warnings.simplefilter("ignore")  # DCP warns that nothing is distributed here.
        load(state, storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=flat), **_ALONE)
        writer, planner = FileSystemWriter(directory), DefaultSavePlanner(flatten_state_dict=flat)
        save(state, storage_writer=writer, planner=planner, **_ALONE)
        files = [
            ExportedFile(str(Path(out) / path.name), 0, path.stat().st_size) for path in sorted(directory.iterdir())
        ]
    tensors = sum(isinstance(one, TensorStorageMetadata) for one in metadata.state_dict_metadata.values())
    files[0] = files[0]._replace(tensors=tensors)
    return ExportReport(
        run_key=run.run_key or "",
        step=checkpoint.step,
        manifest_digest=checkpoint.manifest_digest,
        groups=tuple(named) or tuple(dict.fromkeys(name.partition(".")[0] for name in metadata.state_dict_metadata)),
        files=tuple(files),
    )
