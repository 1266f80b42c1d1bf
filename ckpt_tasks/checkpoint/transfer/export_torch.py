"""Export a checkpoint as one torch.save file, which `torch.load(weights_only=True)` reads.

First torch.save writes a file in memory without the bytes of the tensors (`torch.serialization.skip_data`): it leaves
gaps, which take no memory. Then `export.py` writes the bytes between the gaps to the target, and copies the verified
bytes of the tensors into the gaps.

If torch would refuse to read a value, the export raises an error with the value's path; it never replaces the value.
"""

from __future__ import annotations

import codecs
import math
import mmap
import os
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ckpt_tasks.checkpoint.transfer.export import (
    ExportedFile,
    ExportPlan,
    ExportReport,
    Shard,
    check_out,
    choose_groups,
    origin_of,
)
from ckpt_tasks.checkpoint.transfer.placing import lay_out, regions_of
from ckpt_tasks.errors import ConfigError, StoreError, UnsupportedStateError
from ckpt_tasks.format.layout.image import STORED_DTYPES
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.format.saved_kinds import KINDS
from ckpt_tasks.format.tree import TensorRef, Typed
from ckpt_tasks.run.opening import Opened, SavedGroup, open_checkpoint
from ckpt_tasks.state.kinds.optimizers import numbered, parameters_in
from ckpt_tasks.state.tensors.value_kinds import build
from ckpt_tasks.storage.port import Store

_KINDS = tuple(name for name, kind in KINDS.items() if kind.exports)
_ABOUT = "ckpt_tasks"
_MAX_INT_BYTES = 255  # torch reads no opcode for longer integers.
_NO_RESERVE = 0x4000  # MAP_NORESERVE, for which Python has no name: the mapping may be larger than the memory.


def plan_torch_export(
    store: Store,
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    *,
    groups: Iterable[str] | None = None,
    overwrite: bool = False,
) -> ExportPlan:
    """Plan an export to the file `out`; write nothing.

    If `groups` has one name, the file holds that group in the form of its state_dict. Otherwise the file holds a dict
    of groups (None: all except random streams) by name, with an entry `ckpt_tasks` that identifies the checkpoint.
    Raises ConfigError for invalid arguments, UnsupportedStateError for a value that torch would not read, and
    IntegrityError if the checkpoint is damaged.
    """
    named = tuple(groups or ())
    target = check_out(store, out, overwrite, one_file=True)
    opened = open_checkpoint(store, checkpoint)
    chosen = choose_groups(opened, named, _KINDS)
    values = {group: _value(group, opened.groups[group]) for group in chosen}
    alone = len(named) == 1
    tensors = _Hollow(opened)
    try:
        value = values[chosen[0]] if alone else _with_about(values, opened, checkpoint)
        frame = frame_of(live_value(value, tensors.tensor, chosen[0] if alone else ""))
    except UnsupportedStateError as error:
        error.hint = "Name the groups to export with --group, or take it out of the state."
        raise
    begins = dict(zip(tensors.storages, frame.begins, strict=True))
    places, gathered = lay_out(regions_of(opened, begins), begins)
    shard = Shard(target.name, frame.pieces, places, gathered, (*begins,), frame.size_bytes, frame.sums)
    report = ExportReport(
        **origin_of(opened, checkpoint),
        groups=chosen,
        files=(ExportedFile(str(target), len(begins), frame.size_bytes),),
        left_out=() if named else tuple(name for name in opened.groups if name not in chosen),
    )
    return ExportPlan(out=target, overwrite=overwrite, report=report, opened=opened, shards=(shard,), index=None)


class Frame(NamedTuple):
    """A torch file without the bytes of its tensors.

    `pieces` are the bytes around the tensors, with their offsets. `begins` has the offset of each storage's bytes, in
    the order in which storages appear in the value. `sums` maps spans of bytes to the offsets of their CRC-32.
    """

    pieces: tuple[tuple[int, bytes], ...]
    begins: tuple[int, ...]
    sums: Mapping[tuple[int, int], tuple[int, ...]]
    size_bytes: int


def frame_of(value: Any) -> Frame:
    """Return the file that torch.save would write for a value, without the bytes of its tensors.

    Raises StoreError if the system allows no file of this size.
    """
    with os.fdopen(os.memfd_create("ckpt-export"), "w+b") as file:
        try:
            with torch.serialization.skip_data():
                torch.save(value, file)
        except (OSError, RuntimeError) as error:
            raise StoreError(f"torch cannot make a file of this size: {error!r:.200}") from error
        with zipfile.ZipFile(file) as archive:
            entries, at = archive.infolist(), archive.start_dir
        sums: dict[tuple[int, int], tuple[int, ...]] = {}
        numbered_begins: dict[int, int] = {}
        for entry in entries:
            begin = entry.header_offset + 30 + sum(struct.unpack("<HH", _bytes(file, entry.header_offset + 26, 4)))
            if "/data/" in entry.filename:
                end = begin + entry.file_size
                sums[begin, end] = (at + 16, end + 4)  # The CRC is in the central directory, and behind the bytes.
                numbered_begins[int(entry.filename.rpartition("/")[2])] = begin
            at += 46 + sum(struct.unpack("<3H", _bytes(file, at + 28, 6)))
        size_bytes = file.seek(0, os.SEEK_END)
        edges = [(0, 0), *sums, (size_bytes, size_bytes)]
        pieces = tuple((end, _bytes(file, end, begin - end)) for (_, end), (begin, _) in pairwise(edges))
    begins = tuple(begin for _, begin in sorted(numbered_begins.items()))  # Older torch sorts the numbers as texts.
    return Frame(pieces, begins, sums, size_bytes)


def _bytes(file: Any, begin: int, size_bytes: int) -> bytes:
    file.seek(begin)
    data: bytes = file.read(size_bytes)
    return data


class _Hollow:
    """Makes placeholders for a checkpoint's tensors, without bytes; `storages` has the storage of each key."""

    def __init__(self, opened: Opened):
        self.storages: dict[str, torch.UntypedStorage] = {}
        self._tensors = opened.tensors
        size_bytes = sum(STORED_DTYPES[dtype].nbytes * math.prod(shape) for dtype, shape in opened.tensors.values())
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._memory = mmap.mmap(-1, max(size_bytes, 1), flags=flags)
        self._used_bytes = 0

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        """Return the placeholder for the tensor that a reference names."""
        dtype, shape = self._tensors[ref.key]
        if ref.key not in self.storages:
            size_bytes = STORED_DTYPES[dtype].nbytes * math.prod(shape)
            self.storages[ref.key] = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
            if size_bytes:
                begin, bits = self._used_bytes, torch.uint8
                bytes_ = torch.frombuffer(self._memory, dtype=bits, count=size_bytes, offset=begin)
                self.storages[ref.key] = bytes_.untyped_storage()
                self._used_bytes += size_bytes
        strides = torch.empty(shape, device="meta").stride()
        hollow = torch.empty(0, dtype=getattr(torch, dtype)).set_(self.storages[ref.key], 0, shape, strides)
        return hollow.requires_grad_(ref.requires_grad)


class _NoBytes:
    """Pickles empty bytes as a call of `codecs.encode`; pickle itself would call `bytes`, which torch.load refuses."""

    def __reduce__(self) -> tuple[Any, ...]:
        return codecs.encode, ("", "latin-1")


def live_value(value: Any, tensor_of: Callable[[TensorRef], torch.Tensor], path: str = "") -> Any:
    """Turn a tree into a value for torch.save; raise UnsupportedStateError with the path if torch cannot read it."""

    def items(values: Iterable[Any]) -> list[Any]:
        return [live_value(item, tensor_of, f"{path}/{n}") for n, item in enumerate(values)]

    def pairs() -> Iterable[tuple[Any, Any]]:
        for key, item in value.items():
            name = live_value(key, tensor_of, f"{path}/<key {key!r:.60}>")
            yield name, live_value(item, tensor_of, f"{path}/{key}" if path else str(key))

    kind = type(value)
    if kind in (type(None), bool, float, str, complex):
        return value
    if kind is bytes:
        return value or _NoBytes()
    if kind is int:
        size_bytes = (value if value >= 0 else ~value).bit_length() // 8 + 1
        if size_bytes > _MAX_INT_BYTES:
            raise _refusal(f"a number of {size_bytes} bytes", path)
        return value
    if kind in (list, tuple, set):
        return kind(items(value))
    if kind in (dict, OrderedDict, Counter):
        return kind(dict(pairs()))
    if kind is Typed and value.tag == "~torch":
        return build(value, {}, None)
    if kind is TensorRef and not value.array:
        return tensor_of(value)
    raise _refusal("a NumPy array" if kind is TensorRef else f"a value of type {_name(value)}", path)


def _name(value: Any) -> str:
    kind = type(value)
    if kind is not Typed or value.tag == "~numpy":
        return "NumPy scalar" if kind is Typed else kind.__qualname__
    return f"{value.tag[1:]} {value.head[0]!r:.60}" if value.head else value.tag[1:]


def _refusal(what: str, path: str) -> UnsupportedStateError:
    return UnsupportedStateError(f"{what} cannot be written for torch.load(weights_only=True)", key=path or None)


def _value(group: str, saved: SavedGroup) -> Any:
    trees = saved.trees if saved.kind in _KINDS else []
    if len(trees) != 1:
        why = "each rank has its own" if trees else "these are random streams"
        raise ConfigError(f"the group {group} cannot be one value of a torch file: {why}", hint="Leave it out.")
    return numbered(trees[0]) if saved.kind == "optimizer" else trees[0]


def _with_about(values: Mapping[str, Any], opened: Opened, checkpoint: Checkpoint) -> dict[str, Any]:
    if _ABOUT in values:
        raise ConfigError(f"a group has the name {_ABOUT}, which says where a file is from", hint="Export it alone.")
    kinds = {group: opened.groups[group].kind for group in values}
    about = {
        **origin_of(opened, checkpoint),
        "kinds": kinds,
        "parameters": {
            group: parameters_in(opened.groups[group].tree) for group, kind in kinds.items() if kind == "optimizer"
        },
    }
    return {**values, _ABOUT: about}
