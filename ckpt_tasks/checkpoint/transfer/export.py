"""Export a checkpoint to one safetensors file, or to shards with an index in the layout of Hugging Face.

Invariants

1. Every exported byte of a tensor is verified against its digest, after the read and before `out` gets its name.
2. A new `out` appears whole and durable, or not at all: it is written and fsynced under another name, then renamed. In
   an existing directory (`overwrite`) the old index is removed first, and the new index is moved there last.
3. An export needs memory for one read of 16 MiB, and for one whole tensor if ranks have cut that tensor across its
   rows. An export to safetensors does not import torch.

File names and ties follow huggingface_hub (save_torch_state_dict) and safetensors (save_model). `plan_export` reads
only the manifest and the index, and decides what to write. `write_export` executes the plan.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpt_tasks.checked import checked
from ckpt_tasks.checkpoint.transfer.placing import gather, lay_out, regions_of, verified_runs
from ckpt_tasks.checkpoint.transfer.publishing import check_free, new_file, staged_directory, staged_file
from ckpt_tasks.checkpoint.transfer.transfer import OnProgress
from ckpt_tasks.errors import ConfigError, UnsupportedStateError
from ckpt_tasks.format.layout.image import (
    STORED_DTYPES,
    ImageLayout,
    TensorSpec,
    header_of,
    plan_image,
    plan_parts,
)
from ckpt_tasks.format.layout.index import IndexRow
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.format.tree import TensorRef, tensor_refs
from ckpt_tasks.run.opening import READ_BYTES, Opened, SavedGroup, check_header, open_checkpoint
from ckpt_tasks.storage.local_fs import write_at
from ckpt_tasks.storage.port import Store

MAX_SHARD_BYTES = 5 * 10**9  # huggingface_hub has the same limit.
_SUFFIX = ".safetensors"
_INDEX = "model.safetensors.index.json"
# An export deletes old files with these names, which huggingface_hub also uses: readers would load their tensors, too.
_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?", re.ASCII)
_METADATA = "__metadata__"  # A safetensors header has metadata under this name, which no tensor can have.
# The dtype of each code. A file also stores tensors of other dtypes under these codes, as views.
_MEANT = {"F64": "float64", "F16": "float16", "U8": "uint8"}


class ExportedFile(NamedTuple):
    """One file of an export, with the number of its tensors; an index has 0."""

    path: str
    tensors: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """The results of an export.

    If two names share a tensor, `tied` maps the second name to the first, under which the tensor is stored. `dtypes`
    maps tensors that are stored as views, because safetensors lacks their dtype, to torch's name of that dtype.
    `left_out` names what the files omit: entries of modules that are not tensors; in a PEFT export all entries that are
    not the adapter's tensors; in a torch export whole groups.
    """

    run_key: str
    step: int
    manifest_digest: str
    groups: tuple[str, ...]
    files: tuple[ExportedFile, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def tensors(self) -> int:
        """The number of exported tensors."""
        return sum(file.tensors for file in self.files)

    @property
    def size_bytes(self) -> int:
        """The total size of all exported files."""
        return sum(file.size_bytes for file in self.files)


class Shard(NamedTuple):
    """One file to write; all offsets are in this file.

    `pieces` are the bytes between the tensors, with their offsets. `places` has the offset of each region. `gathered`
    has the tensors to assemble in memory from their regions first, with the offset of each whole tensor. `sums` maps
    spans of bytes to the offsets at which to write their CRC-32.
    """

    name: str
    pieces: Sequence[tuple[int, bytes]]
    places: Mapping[IndexRow, int]
    gathered: Sequence[tuple[Sequence[IndexRow], int]]
    tensors: tuple[str, ...]
    size_bytes: int
    sums: Mapping[tuple[int, int], Sequence[int]] = MappingProxyType({})

    @property
    def rows(self) -> list[IndexRow]:
        """The regions of all tensors in this file."""
        return [*self.places, *(row for rows, _ in self.gathered for row in rows)]


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """The files that `write_export` will write, and the report that it will return; a single file has no `index`."""

    out: Path
    overwrite: bool
    report: ExportReport
    opened: Opened = field(repr=False)
    shards: tuple[Shard, ...] = field(repr=False)
    index: bytes | None = field(repr=False)
    index_name: str = _INDEX  # `write_export` writes this file last.
    replaces: re.Pattern[str] = _WEIGHTS

    @property
    def read_bytes(self) -> int:
        """The number of bytes that the export will read: the sum of all sizes that `on_progress` gets."""
        return sum(row.end - row.begin for shard in self.shards for row in shard.rows)


@dataclass(frozen=True)
class _Selection:
    """The tensors to export (specs and regions by full key), the names tied to them, and the entries left out."""

    specs: dict[str, TensorSpec]
    rows: Mapping[str, Sequence[IndexRow]]
    tied: dict[str, str]
    left_out: tuple[str, ...]
    origin: Mapping[str, Any]

    @property
    def dtypes(self) -> dict[str, str]:
        coded = ((spec, STORED_DTYPES[spec.dtype].code) for spec in self.specs.values())
        return {spec.name: spec.dtype for spec, code in coded if _MEANT.get(code, spec.dtype) != spec.dtype}

    def of(self, keys: Iterable[str]) -> _Selection:
        """Return a selection of only the tensors with these keys."""
        specs = {key: self.specs[key] for key in keys}
        names = {spec.name for spec in specs.values()}
        tied = {name: kept for name, kept in self.tied.items() if kept in names}
        return _Selection(specs, self.rows, tied, (), self.origin)

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of the export: the source checkpoint, ties and dtypes."""
        return {**self.origin, "tied": self.tied, "dtypes": self.dtypes}


@checked
def export_checkpoint(
    store: Store,
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    *,
    groups: Iterable[str] | None = None,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> ExportReport:
    """Write the tensors of `groups` (by default of all modules) to files that every safetensors reader can open.

    `out` is one file if its name ends in .safetensors, else a directory for shards of at most `max_shard_bytes` and
    their index. `on_progress` gets the size in bytes of every read. Raises ConfigError for invalid arguments,
    UnsupportedStateError if a file's header cannot hold so many names, IntegrityError if bytes are damaged, and
    StoreError if a read or a write fails.
    """
    plan = plan_export(store, checkpoint, out, groups=groups, max_shard_bytes=max_shard_bytes, overwrite=overwrite)
    return write_export(store, plan, on_progress)


def plan_export(
    store: Store,
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    *,
    groups: Iterable[str] | None = None,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
) -> ExportPlan:
    """Plan an export; write nothing. Takes the arguments and raises the errors of `export_checkpoint`."""
    one_file = Path(out).name.endswith(_SUFFIX)
    target = check_out(store, out, overwrite, one_file=one_file)
    if max_shard_bytes is not None and (one_file or max_shard_bytes <= 0):
        why = "one file is not cut into shards" if one_file else f"{max_shard_bytes} bytes are no size for a shard"
        raise ConfigError(why, hint=f"A name that does not end in {_SUFFIX} makes a directory of shards.")
    opened = open_checkpoint(store, checkpoint)
    chosen = choose_groups(opened, groups, ("module",))
    tensors = _of_groups(opened, chosen, checkpoint)
    shards = [shard(tensors, target.name)] if one_file else _shards(tensors, max_shard_bytes or MAX_SHARD_BYTES)
    index = None if one_file else _index(tensors, shards)
    place = str(target.parent if one_file else target)
    files = [ExportedFile(os.path.join(place, s.name), len(s.tensors), s.size_bytes) for s in shards]
    if index is not None:
        files.append(ExportedFile(os.path.join(place, _INDEX), 0, len(index)))
    report = ExportReport(
        **tensors.origin,
        groups=chosen,
        files=tuple(files),
        tied=tensors.tied,
        dtypes=tensors.dtypes,
        left_out=tensors.left_out,
    )
    return ExportPlan(out=target, overwrite=overwrite, report=report, opened=opened, shards=tuple(shards), index=index)


def write_export(store: Store, plan: ExportPlan, on_progress: OnProgress | None = None) -> ExportReport:
    """Execute a plan and return its report; calls `on_progress` and raises errors as `export_checkpoint` does."""
    objects = {row.object for shard in plan.shards for row in shard.rows}
    for record in plan.opened.manifest.objects:
        if record.name in objects:
            check_header(store, record)
    copy = partial(_copy, store, on_progress or (lambda size_bytes: None))
    if plan.index is None:
        with staged_file(plan.out, overwrite=plan.overwrite) as fd:
            copy(plan.shards[0], fd)
        return plan.report
    with staged_directory(
        plan.out, overwrite=plan.overwrite, replaces=plan.replaces, index=plan.index_name
    ) as directory:
        for shard in plan.shards:
            with new_file(directory / shard.name) as fd:
                copy(shard, fd)
        with new_file(directory / plan.index_name) as fd:
            write_at(fd, plan.index, 0)
    return plan.report


def _copy(store: Store, on_progress: OnProgress, shard: Shard, fd: int) -> None:
    """Write one file; verify every region after its read and before its write."""
    for at, piece in shard.pieces:
        write_at(fd, piece, at)
    for run, data in verified_runs(store, shard.places):
        for row in run:
            write_at(fd, data[row.begin - run[0].begin : row.end - run[0].begin], shard.places[row])
        on_progress(len(data))
    for rows, place in shard.gathered:
        write_at(fd, gather(store, rows), place)
        on_progress(sum(row.end - row.begin for row in rows))
    for (begin, end), ats in shard.sums.items():
        crc = 0
        for at in range(begin, end, READ_BYTES):
            crc = zlib.crc32(os.pread(fd, min(READ_BYTES, end - at), at), crc)
        for at in ats:
            write_at(fd, crc.to_bytes(4, "little"), at)


def check_out(store: Store, out: str | os.PathLike[str], overwrite: bool, *, one_file: bool) -> Path:
    """Return the absolute path of an export's file or directory; raise ConfigError if the export may not use it."""
    if "\0" in os.fspath(out):
        raise ConfigError(f"{out!r:.80} is not a path")
    target = Path(os.path.abspath(os.path.expanduser(out)))
    inside = Path(os.path.realpath(target)).is_relative_to(os.path.realpath(store.url))
    if inside and "://" not in store.url:
        raise ConfigError(
            f"{target} lies in the run directory", hint="Only the run itself writes there: choose another place."
        )
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is not a directory", hint="Create it first.")
    if os.path.lexists(target) and target.is_dir() == one_file:
        raise ConfigError(
            f"{target} is {'a directory' if one_file else 'a file'}",
            hint=f"A name that ends in {_SUFFIX} or .pt makes one file, any other a directory.",
        )
    check_free(target, overwrite)
    return target


def choose_groups(opened: Opened, groups: Iterable[str] | None, kinds: Sequence[str]) -> tuple[str, ...]:
    """Return `groups`, or all groups of these kinds if `groups` is empty; raise ConfigError if a group is missing."""
    wanted = tuple(dict.fromkeys(groups or ()))
    unknown = [group for group in wanted if group not in opened.groups]
    if unknown:
        raise ConfigError(
            f"the checkpoint has no group {unknown[0]!r:.80}", step=opened.manifest.step, hint=_what_there_is(opened)
        )
    chosen = wanted or tuple(name for name, saved in opened.groups.items() if saved.kind in kinds)
    if not chosen:
        hint = f"{_what_there_is(opened)} Name the groups to export."
        raise ConfigError(f"the checkpoint has no {kinds[0]}", step=opened.manifest.step, hint=hint)
    return chosen


def _what_there_is(opened: Opened) -> str:
    return f"It has {', '.join(f'{name} ({saved.kind})' for name, saved in opened.groups.items()) or 'no groups'}."


def _of_groups(opened: Opened, groups: Sequence[str], checkpoint: Checkpoint) -> _Selection:
    names: dict[str, str] = {}  # Maps every name in the export to the full key of its tensor.
    left_out = []
    for group in groups:
        saved = opened.groups[group]
        if not _is_state_dict(saved):
            names.update((ref.key, ref.key) for ref in tensor_refs(saved.tree))
            continue
        for name, value in saved.tree.items():
            if type(value) is TensorRef:
                names[name if len(groups) == 1 else f"{group}.{name}"] = value.key
            else:
                left_out.append(f"{group}/{name}")
    if not names:
        why = f"there are no tensors in {', '.join(groups)}"
        raise ConfigError(why, step=checkpoint.step, hint=_what_there_is(opened))
    return selection(opened, names, checkpoint, tuple(left_out))


def selection(
    opened: Opened, names: Mapping[str, str], checkpoint: Checkpoint, left_out: tuple[str, ...]
) -> _Selection:
    """Select the tensors to export; `names` maps each name in the export to the full key of its tensor."""
    stored: dict[str, str] = {}  # Maps a full key to its first name, in the order of the state.
    tied = {name: stored[key] for name, key in names.items() if stored.setdefault(key, name) != name}
    specs = {key: TensorSpec(name, *opened.tensors[key]) for key, name in stored.items()}
    return _Selection(specs, regions_of(opened, stored), tied, left_out, origin_of(opened, checkpoint))


def origin_of(opened: Opened, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the entries of an export's metadata that identify the exported checkpoint."""
    return {
        "run_key": opened.manifest.run_key,
        "step": checkpoint.step,
        "manifest_digest": checkpoint.manifest_digest,
    }


def _is_state_dict(saved: SavedGroup) -> bool:
    """Return True if a group is a module, or a dict of tensors that looks like a module's state_dict."""
    if not isinstance(saved.tree, dict) or not all(_is_name(name) for name in saved.tree):
        return False
    return saved.kind == "module" or all(type(value) is TensorRef for value in saved.tree.values())


def _is_name(name: Any) -> bool:
    # UTF-8 cannot encode half a surrogate pair. A group with such a name uses full keys, which any header can hold.
    return type(name) is str and name != _METADATA and name.encode(errors="ignore").decode() == name


def _shards(selection: _Selection, max_shard_bytes: int) -> list[Shard]:
    keys = {spec.name: key for key, spec in selection.specs.items()}
    parts = plan_parts([*selection.specs.values()], max_shard_bytes)
    return [
        shard(selection.of(keys[spec.name] for spec in part), f"model-{n:05d}-of-{len(parts):05d}{_SUFFIX}")
        for n, part in enumerate(parts, 1)
    ]


def shard(selection: _Selection, name: str) -> Shard:
    """Lay out one safetensors file with these tensors."""
    try:
        layout = plan_image(selection.specs.values())
        header = _header(layout, selection)
    except UnsupportedStateError as error:
        error.hint = "Export to a directory: it takes as many shards as are needed."
        raise
    moved = len(header) - len(layout.header)
    begins = {slot.spec.name: slot.begin + moved for slot in layout.slots}
    places, gathered = lay_out(selection.rows, {key: begins[spec.name] for key, spec in selection.specs.items()})
    return Shard(name, [(0, header)], places, gathered, (*begins,), layout.size_bytes + moved)


def _header(layout: ImageLayout, selection: _Selection) -> bytes:
    entries = json.loads(layout.header[8:])
    ours = json.dumps(selection.metadata(), separators=(",", ":"))  # Write ASCII: a run's key may be invalid UTF-8.
    # List ties as safetensors.torch.save_model does, and also in our own field, apart from all other metadata.
    entries[_METADATA] = {**selection.tied, **entries[_METADATA], "ckpt_tasks": ours}
    return header_of(entries)


def _index(selection: _Selection, shards: Iterable[Shard]) -> bytes:
    total_bytes = sum(spec.size_bytes for spec in selection.specs.values())
    metadata = {**selection.tied, "total_size": total_bytes, "ckpt_tasks": selection.metadata()}
    weight_map = {name: shard.name for shard in shards for name in shard.tensors}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2).encode() + b"\n"
