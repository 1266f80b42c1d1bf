"""A directory that any number of ranks wrote by torch's DCP: `.metadata`, and files of concatenated torch.save data.

Invariants

1. As for every source, nothing is imported or executed (`metadata_pickle.py`, `unpickling.py`), and an import compares
   all bytes with their CRCs before it writes anything.
2. A tensor in `values` is a placeholder without memory: nothing reads its values. `copied` reads the tensor's parts.
3. The parts of a tensor tile it exactly, each has the shape that the metadata says, and no two share bytes of a file.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt_tasks.checkpoint.transfer.importing.metadata_pickle import Pickled, read_objects
from ckpt_tasks.checkpoint.transfer.importing.source_file import SourceFile
from ckpt_tasks.checkpoint.transfer.importing.sources import torch_value
from ckpt_tasks.errors import CkptError, IntegrityError
from ckpt_tasks.format.layout.image import STORED_DTYPES
from ckpt_tasks.format.layout.tiling import untiled
from ckpt_tasks.format.parsing import well_formed

METADATA = ".metadata"
_MAX_METADATA_BYTES = 256 << 20
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class _Part(NamedTuple):
    """A part of a stored tensor: its first index and its shape in the tensor, its file, and its byte range there.

    The shape is empty until `_tiling` has found it.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: SourceFile
    begin: int
    end: int


class _Slice(SourceFile):
    """The bytes of one torch.save in a DCP file, in memory."""

    def __init__(self, name: str, data: memoryview):
        self.name, self._data, self.size_bytes = name, data, data.nbytes
        self._records = {}

    def read(self, begin: int, end: int) -> memoryview:
        if not 0 <= begin <= end <= self.size_bytes:
            raise IntegrityError(f"the file ends before byte {end}", key=self.name)
        return self._data[begin:end]

    def mapped(self, begin: int, end: int) -> torch.UntypedStorage:
        view: torch.UntypedStorage = torch.frombuffer(self._data, dtype=torch.uint8).untyped_storage()[begin:end]
        return view

    def _archive(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(io.BytesIO(self._data))


class DcpDirectory(SourceFile):
    """An open DCP directory; raises IntegrityError if the directory contradicts itself.

    `values` has tensors and plain values by DCP's names. `paths` maps these names to their paths in the saved dict;
    None if DCP recorded no paths. `left` has the reason for each value that cannot be read.
    """

    def __init__(self, directory: Path):
        self.name = directory.name
        metadata = SourceFile(directory / METADATA)
        if metadata.size_bytes > _MAX_METADATA_BYTES:
            raise IntegrityError(f"its metadata has {metadata.size_bytes} bytes", key=METADATA)
        self._files = {METADATA: metadata}
        self._directory = directory
        self.values: dict[str, Any] = {}
        self.left: dict[str, str] = {}
        self._tensors: dict[int, tuple[str, list[_Part]]] = {}  # The key is a tensor's data_ptr().
        self._values: dict[str, _Part] = {}
        with well_formed("its metadata", METADATA):
            self._read(read_objects(metadata.read(0, metadata.size_bytes).tobytes()))
        self.size_bytes = sum(file.size_bytes for file in self._files.values())

    def check(self, on_progress: Callable[[int], None]) -> None:
        """Read every part of every tensor; raise IntegrityError if a CRC, a dtype or a shape is wrong."""
        for name, parts in self._tensors.values():
            for part in parts:
                self._part(name, part)
                on_progress(part.end - part.begin)

    def has_changed(self) -> bool:
        """Return True if one of the files has been written since it was opened."""
        return any(file.has_changed() for file in self._files.values())

    def copied(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Read the parts of a tensor and return the whole tensor; return None for a tensor of another source."""
        name, parts = self._tensors.get(tensor.data_ptr(), ("", []))
        if not name or tensor.shape != self.values[name].shape:
            return None
        whole = torch.zeros_like(tensor)
        for part in parts:
            into, values = whole, self._part(name, part)
            for axis, (begin, extent) in enumerate(zip(part.offset, values.shape, strict=True)):
                into = into.narrow(axis, begin, extent)
            into.copy_(values)
        return whole

    def _read(self, metadata: Any) -> None:
        places: dict[str, list[_Part]] = {}
        for index, info in metadata["storage_data"].items():
            begin, length = int(info["offset"]), int(info["length"])
            offset = tuple(map(int, index.attributes.get("offset") or ()))
            part = _Part(offset, (), self._file(info["relative_path"]), begin, begin + length)
            places.setdefault(index["fqn"], []).append(part)
        _check_apart([part for parts in places.values() for part in parts])
        described = metadata["state_dict_metadata"]
        self.paths = None if metadata["planner_data"] is None else _paths(metadata["planner_data"], len(described))
        sizes = {name: _described(one) for name, one in described.items() if one.name.endswith("TensorStorageMetadata")}
        nbytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in sizes.values())
        if nbytes > 8 * sum(file.size_bytes for file in self._files.values()):
            raise IntegrityError(f"its tensors claim {nbytes} bytes, more than its files have", key=METADATA)
        memory = mmap.mmap(-1, nbytes + 64 * len(sizes) + 64, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        at = 0
        for name, one in described.items():
            if name in sizes:
                dtype, shape = sizes[name]
                at += -at % 64
                self.values[name] = torch.empty(shape, dtype=dtype)
                if self.values[name].nbytes:
                    count = math.prod(shape)
                    self.values[name] = torch.frombuffer(memory, dtype=dtype, count=count, offset=at).reshape(shape)
                    self._tensors[self.values[name].data_ptr()] = name, _tiling(name, one, places.get(name, []))
                at += self.values[name].nbytes
            else:
                self._read_value(name, places[name][0])

    def _read_value(self, name: str, part: _Part) -> None:
        try:
            self.values[name] = torch_value(self._slice(name, part))
        except CkptError as error:
            self.left[name] = error.message

    def _file(self, name: Any) -> SourceFile:
        if type(name) is not str or os.path.basename(name) != name or name in ("", ".", ".."):
            raise IntegrityError(f"its metadata names {name!r:.80}, which is no file beside it", key=METADATA)
        if name not in self._files:
            self._files[name] = SourceFile(self._directory / name)
        return self._files[name]

    def _slice(self, name: str, part: _Part) -> _Slice:
        file = _Slice(name, part.file.read(part.begin, part.end))
        file.records()
        file.check(lambda size_bytes: None)
        return file

    def _part(self, name: str, part: _Part) -> torch.Tensor:
        values = torch_value(self._slice(name, part))
        if not isinstance(values, torch.Tensor) or (values.dtype, tuple(values.shape)) != (
            self.values[name].dtype,
            part.shape,
        ):
            raise IntegrityError("a part is not what its metadata says", key=name)
        return values


def _described(described: Pickled) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape of a tensor from DCP's metadata."""
    properties = described["properties"].attributes
    dtype = (properties["dtype"] if isinstance(properties, dict) else properties[0]).name.removeprefix("torch.")
    if dtype not in STORED_DTYPES:
        raise IntegrityError(f"it holds the dtype {dtype:.40}", key=METADATA)
    shape = tuple(map(int, described["size"]))
    if any(extent < 0 for extent in shape):
        raise IntegrityError(f"it holds the shape {shape}", key=METADATA)
    return getattr(torch, dtype), shape


def _tiling(name: str, described: Pickled, parts: list[_Part]) -> list[_Part]:
    """Return the parts of a tensor with their shapes; raise IntegrityError if they do not tile the tensor exactly."""
    full = tuple(map(int, described["size"]))
    chunks = [(tuple(map(int, one["offsets"])), tuple(map(int, one["sizes"]))) for one in described["chunks"]]
    chunks = [(offset, shape) for offset, shape in chunks if math.prod(shape)]
    here = {part.offset or (0,) * len(full): part for part in parts}
    if all(len(offset) == len(shape) == len(full) for offset, shape in chunks) and chunks:
        columns = (np.array(column, np.int64).reshape(len(chunks), len(full)) for column in zip(*chunks, strict=True))
        tensor = np.zeros(len(chunks), np.int64)
        if not len(untiled(tensor, np.tile(np.array(full, np.int64), (len(chunks), 1)), *columns)):
            with suppress(KeyError):
                return [here[offset]._replace(offset=offset, shape=shape) for offset, shape in chunks]
    raise IntegrityError("its parts do not make up the tensor", key=name)


def _check_apart(parts: list[_Part]) -> None:
    """Raise IntegrityError if two parts share bytes of a file: one of them would be another tensor's."""
    placed = sorted((part.file.name, part.begin, part.end) for part in parts)
    for (file, _, end), (other, begin, _) in pairwise(placed):
        if file == other and begin < end:
            raise IntegrityError(f"two parts share the bytes {begin} to {end} of {file}", key=METADATA)


def _paths(paths: Mapping[Any, Any], most: int) -> dict[str, tuple[str | int, ...]]:
    """Return the path of each of DCP's names; raise IntegrityError if an index in a path would make too long a list."""
    checked = {}
    for name, path in paths.items():
        if not path or not all(isinstance(one, str) or 0 <= one <= most + 1024 for one in path):
            raise IntegrityError(f"it holds the path {path!r:.80}", key=METADATA)
        checked[str(name)] = tuple(path)
    return checked
