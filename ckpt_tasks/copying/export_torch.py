"""Export a checkpoint as one file of torch.save, which `torch.load(weights_only=True)` reads.

Invariants

1. Every byte of a tensor has been verified against its digest, after it was read and before `out` has its name.
2. `out` appears whole and durable, or not at all.
3. It needs memory for one read of 16 MiB, for names and plain values, and for one tensor if ranks have cut it across
   its rows. It does not need torch.
4. A value that torch would refuse to read is never replaced: the export is refused, with the value's path.

The file is a zip file of stored entries, as torch writes it: `data.pkl`, and one entry for each tensor, which begins
at a multiple of 64 bytes. Source: caffe2/serialize/inline_container.h of pytorch.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from ckpt_tasks.copying.export import ExportedFile, ExportReport, check_out, choose_groups
from ckpt_tasks.copying.placing import bytes_before, gather, verified_runs
from ckpt_tasks.copying.transfer import OnProgress
from ckpt_tasks.errors import ConfigError, UnsupportedStateError
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.format.torch_pickle import Storage, dump
from ckpt_tasks.layout.image import STORED_DTYPES
from ckpt_tasks.layout.index import IndexRow
from ckpt_tasks.reading.opening import Opened, SavedGroup, check_header, open_checkpoint
from ckpt_tasks.storage.port import Store
from ckpt_tasks.storage.publishing import staged_file

__all__ = ["TorchPlan", "plan_torch_export", "write_torch_export"]

_KINDS = ("module", "optimizer", "stateful", "plain")  # random streams are useful only to a restore
_ABOUT = "ckpt_tasks"
_ARCHIVE = "archive"
_ALIGNMENT = 64
_LARGE_BYTES = 1 << 30  # far below the 4 GiB at which a zip file needs its other form of sizes
_PADDING, _SIZES_BYTES = b"FB", 20
_BEFORE_ANY_CLOCK = (1980, 1, 1, 0, 0, 0)  # the same checkpoint gives the same file


@dataclass(frozen=True, kw_only=True)
class TorchPlan:
    """What `write_torch_export` will do, and its report, except the size of the file."""

    out: Path
    overwrite: bool
    report: ExportReport
    opened: Opened = field(repr=False)
    pickle: bytes = field(repr=False)
    storages: Mapping[str, Storage] = field(repr=False)
    rows: Mapping[str, Sequence[IndexRow]] = field(repr=False)

    @property
    def read_bytes(self) -> int:
        """The sum of all sizes that `on_progress` gets."""
        return sum(row.end - row.begin for rows in self.rows.values() for row in rows)


def plan_torch_export(
    store: Store,
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    *,
    groups: Iterable[str] | None = None,
    overwrite: bool = False,
) -> TorchPlan:
    """Plan an export to the file `out`; write nothing.

    A single group in `groups` is the whole content of the file, in the form of its state_dict. Several groups (without
    `groups` all but random streams) become a dict by name, with an entry `ckpt_tasks` that says where they are from.
    Raises ConfigError for invalid arguments, UnsupportedStateError for a value that torch would not read, and
    IntegrityError if the checkpoint is damaged.
    """
    named = tuple(groups or ())
    target = check_out(store, out, overwrite, one_file=True)
    opened = open_checkpoint(store, checkpoint)
    chosen = choose_groups(opened, named, _KINDS)
    values = {group: _value(group, opened.groups[group]) for group in chosen}
    alone = len(named) == 1
    value = values[chosen[0]] if alone else _with_about(values, opened, checkpoint)
    storages: dict[str, Storage] = {}

    def storage_of(key: str) -> Storage:
        if key not in storages:
            dtype, shape = opened.tensors[key]
            size_bytes = STORED_DTYPES[dtype].nbytes * math.prod(shape)
            storages[key] = Storage(len(storages), dtype, shape, size_bytes)
        return storages[key]

    try:
        pickle = dump(value, storage_of, chosen[0] if alone else "")
    except UnsupportedStateError as error:
        error.hint = "Name the groups to export with --group, or take it out of the state."
        raise
    rows: dict[str, list[IndexRow]] = {key: [] for key in storages}
    for row in opened.rows:
        if row.full_key in rows and row.end > row.begin:
            rows[row.full_key].append(row)
    report = ExportReport(
        run_key=opened.manifest.run_key,
        step=checkpoint.step,
        manifest_digest=checkpoint.manifest_digest,
        groups=chosen,
        files=(ExportedFile(str(target), len(storages), 0),),
        tied={},
        dtypes={},
        left_out=() if named else tuple(name for name in opened.groups if name not in chosen),
    )
    return TorchPlan(
        out=target, overwrite=overwrite, report=report, opened=opened, pickle=pickle, storages=storages, rows=rows
    )


def write_torch_export(store: Store, plan: TorchPlan, on_progress: OnProgress | None = None) -> ExportReport:
    """Execute a plan and return the report; `on_progress` gets the size in bytes of every read.

    Raises IntegrityError if bytes are damaged and StoreError if a read or a write fails.
    """
    objects = {row.object for rows in plan.rows.values() for row in rows}
    for record in plan.opened.manifest.objects:
        if record.name in objects:
            check_header(store, record)
    with staged_file(plan.out, overwrite=plan.overwrite) as fd:
        with os.fdopen(fd, "wb", closefd=False) as file, zipfile.ZipFile(file, "w") as archive:
            for name, data in (
                ("data.pkl", plan.pickle),
                (".format_version", b"1"),
                (".storage_alignment", b"%d" % _ALIGNMENT),
                ("byteorder", b"little"),
            ):
                _add(archive, name, len(data), [data])
            pieces = _pieces(store, plan, on_progress or (lambda size_bytes: None))
            for key, group in groupby(pieces, key=lambda piece: piece[0]):
                storage = plan.storages[key]
                _add(archive, f"data/{storage.number}", storage.size_bytes, (data for _, data in group))
            _add(archive, "version", 2, [b"3\n"])
        size_bytes = os.fstat(fd).st_size
    (made,) = plan.report.files
    return replace(plan.report, files=(made._replace(size_bytes=size_bytes),))


def _pieces(store: Store, plan: TorchPlan, on_progress: OnProgress) -> Iterator[tuple[str, bytes | memoryview]]:
    """Yield the bytes of each tensor in C order; a yielded buffer is valid until the next one."""
    in_order: list[IndexRow] = []
    others: list[Sequence[IndexRow]] = []
    for key, rows in plan.rows.items():
        if not rows:
            yield key, b""
        elif _in_order(rows):
            in_order += rows
        else:
            others.append(rows)
    for run, data in verified_runs(store, in_order):
        for row in run:
            yield row.full_key, data[row.begin - run[0].begin : row.end - run[0].begin]
        on_progress(len(data))
    for rows in others:
        places = [(bytes_before(row), row) for row in rows]
        if any(place is None for place, _ in places):
            yield rows[0].full_key, gather(store, rows)
            on_progress(sum(row.end - row.begin for row in rows))
            continue
        for _, row in sorted(places, key=lambda place: place[0] or 0):
            for _, data in verified_runs(store, [row]):
                yield row.full_key, data
                on_progress(len(data))


def _in_order(rows: Sequence[IndexRow]) -> bool:
    """Say whether these regions are contiguous in one object, and hold the tensor in C order."""
    at, first = 0, rows[0]
    for row in rows:
        if (row.object, row.begin) != (first.object, first.begin + at) or bytes_before(row) != at:
            return False
        at += row.end - row.begin
    return True


def _add(archive: zipfile.ZipFile, name: str, size_bytes: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write one entry with its data at a multiple of 64 bytes."""
    entry = zipfile.ZipInfo(f"{_ARCHIVE}/{name}", _BEFORE_ANY_CLOCK)
    large = size_bytes >= _LARGE_BYTES
    begin = archive.start_dir + 30 + len(entry.filename) + 4 + _SIZES_BYTES * large
    padding = -begin % _ALIGNMENT
    entry.extra = _PADDING + padding.to_bytes(2, "little") + b"Z" * padding
    entry.file_size = size_bytes
    with archive.open(entry, "w", force_zip64=large) as file:
        for data in pieces:
            file.write(data)


def _value(group: str, saved: SavedGroup) -> Any:
    trees = saved.trees if saved.kind in _KINDS else []
    if len(trees) != 1:
        why = "each rank has its own" if trees else "these are random streams"
        raise ConfigError(f"the group {group} cannot be one value of a torch file: {why}", hint="Leave it out.")
    return _numbered(trees[0]) if saved.kind == "optimizer" else trees[0]


def _numbered(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state in the form of its state_dict: parameters by number, in the order of their groups."""
    numbers = {name: n for n, name in enumerate(_parameters(tree))}
    state = {numbers[name]: entry for name, entry in tree["state"].items()} | tree["shared"]
    groups = [
        {**members["options"], "params": [numbers[name] for name in members["params"]]}
        for members in tree["param_groups"]
    ]
    return {"state": state, "param_groups": groups, **tree["other"]}


def _parameters(tree: Mapping[str, Any]) -> list[str]:
    return [name for members in tree["param_groups"] for name in members["params"]]


def _with_about(values: Mapping[str, Any], opened: Opened, checkpoint: Checkpoint) -> dict[str, Any]:
    if _ABOUT in values:
        raise ConfigError(f"a group has the name {_ABOUT}, which says where a file is from", hint="Export it alone.")
    kinds = {group: opened.groups[group].kind for group in values}
    about = {
        "run_key": opened.manifest.run_key,
        "step": checkpoint.step,
        "manifest_digest": checkpoint.manifest_digest,
        "kinds": kinds,
        "parameters": {
            group: _parameters(opened.groups[group].tree) for group, kind in kinds.items() if kind == "optimizer"
        },
    }
    return {**values, _ABOUT: about}
