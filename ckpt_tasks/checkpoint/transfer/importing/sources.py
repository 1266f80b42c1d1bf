"""Foreign files to import: torch.save and safetensors files, Hugging Face directories, Lightning's checkpoints.

Invariants

1. Nothing in a file is executed or imported: `unpickling.py` reads pickles. If a pickle has a name that torch.save
   never writes, the pickle is refused by an error with that name.
2. A bad file is refused before the import writes anything. Sizes, offsets, names, and the numbers of values and bytes
   are checked before they are used for memory, paths or loops.
3. Tensors are views of the mapped files, so a file of any size needs little memory; `source_file.py` reads the bytes.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ckpt_tasks.checkpoint.transfer.importing.source_file import SourceFile
from ckpt_tasks.checkpoint.transfer.importing.unpickling import MAX_DEPTH, MAX_VALUES, unpickle
from ckpt_tasks.errors import CheckpointNotFoundError, CkptError, ConfigError, IntegrityError
from ckpt_tasks.format.layout.image import MAX_HEADER_BYTES, STORED_DTYPES, parse_header
from ckpt_tasks.format.parsing import MALFORMED, parse_json, well_formed

_MAX_PICKLE_BYTES = 256 << 20  # The limit for a file's pickle, which does not contain the bytes of tensors.
_MAX_INDEX_BYTES = 64 << 20
_FREE_TEXT_BYTES = 32 << 20  # Texts, counted each time a value uses them, may exceed the file's size by this much.
_LIGHTNING = "pytorch-lightning_version"
_OURS = "ckpt_tasks"
# If several dtypes have the same code, the code means the first of them: U8 is uint8.
_DTYPES = {stored.code: name for name, stored in [*STORED_DTYPES.items()][::-1] if not stored.suffix}
_SHARD = re.compile(r"-\d{5,}-of-\d{5,}\.")
# In order of preference: a directory may have the same weights both as safetensors and in another format.
_WEIGHTS = (".safetensors.index.json", ".safetensors", ".bin.index.json", ".bin", ".ckpt", ".pt", ".pth")
_OF_TRAINER = re.compile(
    r"(optimizer|scheduler|scaler|rng_state\w*|random_states\w*)\.(pt|pth|bin|pkl)|training_args\.bin"
)


class SourceTensor(NamedTuple):
    """A tensor of a safetensors file: torch's name of the dtype, the shape, and where its bytes are, in C order."""

    dtype: str
    shape: tuple[int, ...]
    file: SourceFile
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return self.end - self.begin


@dataclass(frozen=True)
class Source:
    """The contents of a file or a directory to be imported: tensors and values by name.

    Tensors in `values` are torch tensors or SourceTensors; names that share a tensor have the same object. `left` maps
    the names of entries that cannot be imported to the reasons. `opened` has the open files.
    """

    name: str
    kind: str
    values: Mapping[Any, Any]
    opened: tuple[SourceFile, ...]
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files of this source."""
        return tuple(file.name for file in self.opened)

    @property
    def size_bytes(self) -> int:
        """The size of all files of this source."""
        return sum(file.size_bytes for file in self.opened)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Read a mapped tensor's bytes; return any other tensor as it is. Raises IntegrityError if a file was cut."""
        return next((copy for file in self.opened if (copy := file.copied(tensor)) is not None), tensor)

    @property
    def is_lightning(self) -> bool:
        """Whether Lightning's Trainer wrote the file."""
        return _LIGHTNING in self.values and "state_dict" in self.values

    @property
    def about(self) -> Mapping[str, Any] | None:
        """Our own export's entry in a torch.save file: step, kinds, names of parameters; None for any other file."""
        about = self.values.get(_OURS)
        is_ours = isinstance(about, Mapping) and all(isinstance(about.get(n), Mapping) for n in ("kinds", "parameters"))
        return about if is_ours else None


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a file, or a directory of weights, without reading its tensors.

    Raises CheckpointNotFoundError if `path` does not exist, ConfigError for another format, IntegrityError if a file is
    damaged or contradicts itself, and UnsupportedStateError for a pickle with other names than those of tensors and
    plain values.
    """
    place = Path(os.path.abspath(os.path.expanduser(path)))
    try:
        if not place.exists():
            raise CheckpointNotFoundError(f"there is no file {place}", hint="Check its name.")
        return _directory(place) if place.is_dir() else _file(place)
    except OSError as error:
        raise IntegrityError(f"{place.name} cannot be read: {error.strerror or error}") from error


def _file(path: Path) -> Source:
    file = SourceFile(path)
    head = bytes(file.read(0, min(16, file.size_bytes)))
    if head[:2] == b"PK":
        source = Source(path.name, "torch.save file", _torch_values(file), (file,))
        return replace(source, kind="Lightning checkpoint") if source.is_lightning else source
    if len(head) > 8 and head[8:9] == b"{":
        values, left = _safetensors(file)
        return Source(path.name, "safetensors file", values, (file,), left)
    if head[:1] == b"\x80":
        raise ConfigError(
            f"{path.name} was written in the format of torch before 1.6, which cannot be mapped",
            hint="Write it again where you trust it: torch.save(torch.load(name), new_name).",
        )
    raise ConfigError(
        f"{path.name} is neither a torch.save file nor a safetensors file",
        hint="Name one, or a directory that holds one and its index.",
    )


# ── directories ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _directory(directory: Path) -> Source:
    names = sorted(os.listdir(directory))
    chosen = _weights(directory, names)
    is_index = chosen.endswith(".index.json")
    source = _shards(directory, chosen) if is_index else _file(directory / chosen)
    others = {name: "only weights are taken from a directory" for name in names if _OF_TRAINER.fullmatch(name)}
    return replace(source, name=directory.name, kind="directory of weights", left={**source.left, **others})


def _weights(directory: Path, names: Iterable[str]) -> str:
    for suffix in _WEIGHTS:
        files = [n for n in names if n.endswith(suffix) and not _OF_TRAINER.fullmatch(n)]
        if len(files) == 1:
            return files[0]
        if files and all(_SHARD.search(name) for name in files):
            raise IntegrityError(
                f"{directory} holds {len(files)} shards of a model, and no index says which tensor is where",
                hint=f"Put the index beside them: {_SHARD.split(files[0])[0]}{suffix}.index.json.",
            )
        if files:
            raise ConfigError(
                f"{directory} has {len(files)} files of weights: {', '.join(files[:5])}", hint="Name one of them."
            )
    raise ConfigError(f"{directory} holds no weights", hint="Name a file, or a directory with a model in it.")


def _shards(directory: Path, index_name: str) -> Source:
    """Read the weights from the shards that an index names.

    Raises IntegrityError if the index is malformed, or a file or a tensor is not where the index says.
    """
    index = SourceFile(directory / index_name)
    if index.size_bytes > _MAX_INDEX_BYTES:
        raise IntegrityError(f"the index has {index.size_bytes} bytes, more than {_MAX_INDEX_BYTES}", key=index_name)
    with well_formed("the index", index_name):
        body = parse_json(index.read(0, index.size_bytes).tobytes(), encoding="utf-8")
        weight_map = {str(name): str(file) for name, file in body["weight_map"].items()}
        about = body.get("metadata") or {}
        tied, dtypes = _about(about, about.get(_OURS))
    files = tuple(dict.fromkeys(weight_map.values()))
    for file in files:
        # A name with a slash could lead to any file of this machine.
        if os.path.basename(file) != file or file in ("", ".", "..") or "\0" in file:
            raise IntegrityError(f"the index names {file!r:.200}, which is not a file beside it", key=index_name)
        if not (directory / file).is_file():
            raise IntegrityError(f"the index names {file}, which is not there", key=index_name)
    sources = {file: _file(directory / file) for file in files}
    left: dict[str, str] = {}
    for source in sources.values():
        left |= source.left
        left |= {str(name): f"{index_name} does not name it" for name in source.values if name not in weight_map}
    for name, file in weight_map.items():
        if name not in sources[file].values:
            raise IntegrityError(f"{file} does not hold the tensor that the index says it does", key=name)
    ordered = {name: sources[file].values[name] for name, file in weight_map.items()}
    opened = tuple(file for source in sources.values() for file in source.opened)
    return Source(index_name, "", _with_views(ordered, tied, dtypes, index_name), opened, left)


# ── safetensors ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _safetensors(file: SourceFile) -> tuple[dict[str, Any], dict[str, str]]:
    (length,) = struct.unpack("<Q", file.read(0, 8))
    if length > MAX_HEADER_BYTES:
        raise IntegrityError(
            f"the safetensors header claims {length} bytes, more than {MAX_HEADER_BYTES}", key=file.name
        )
    prefix = file.read(0, min(8 + length, file.size_bytes)).tobytes()
    try:
        entries = parse_header(prefix, file.size_bytes)
        metadata: dict[str, str] = parse_json(prefix[8:], encoding="utf-8").get("__metadata__") or {}
        ours = parse_json(metadata[_OURS].encode(), encoding="utf-8") if _OURS in metadata else None
        tied, dtypes = _about(metadata, ours)
    except IntegrityError as error:
        error.key = error.key or file.name
        raise
    except MALFORMED as error:
        raise IntegrityError(f"the metadata is malformed: {error!r:.200}", key=file.name) from error
    values = {
        name: SourceTensor(_DTYPES[code], shape, file, begin, end)
        for name, (code, shape, begin, end) in entries.items()
    }
    return _with_views(values, tied, dtypes, file.name), {}


def _about(metadata: dict[str, str], ours: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return tied names (name → stored name) and dtypes of views (name → dtype); `ours`: our own export's metadata."""
    if ours is None:
        return metadata, {}
    return {str(n): str(kept) for n, kept in ours["tied"].items()}, {str(n): str(d) for n, d in ours["dtypes"].items()}


def _with_views(
    values: dict[str, Any], tied: Mapping[str, str], dtypes: Mapping[str, str], where: str
) -> dict[str, Any]:
    """Give views their own dtypes, and add tied names; raise IntegrityError if a tensor is not a view of its dtype."""
    for name, dtype in dtypes.items():
        tensor, stored = values.get(name), STORED_DTYPES.get(dtype)
        if tensor is None or tensor.dtype == dtype:
            continue  # The tensor is in another shard, or its own file's metadata has set the dtype already.
        cut = len(tensor.shape) - len(stored.suffix) if stored else 0
        if stored is None or _DTYPES[stored.code] != tensor.dtype or tensor.shape[max(cut, 0) :] != stored.suffix:
            raise IntegrityError(
                f"the metadata says that it is {dtype:.40}, and its bytes are not", key=f"{where}: {name}"
            )
        values[name] = tensor._replace(dtype=dtype, shape=tensor.shape[:cut])
    return values | {name: values[kept] for name, kept in tied.items() if kept in values and name not in values}


# ── torch.save ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _torch_values(file: SourceFile) -> Mapping[Any, Any]:
    """Read a torch.save file of a dict; its tensors are views of the file."""
    value = torch_value(file)
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{file.name} holds a value of type {type(value).__name__}, and not a dict of tensors and values",
            hint="Save a state_dict, or a dict that holds some.",
        )
    return value


def torch_value(file: SourceFile) -> Any:
    """Read a torch.save file; its tensors are views of the file. Raises IntegrityError and UnsupportedStateError."""
    records = file.records()
    if not {"data.pkl", "version"} <= records.keys():
        raise IntegrityError("the zip file is not one that torch.save writes", key=file.name)
    if records["data.pkl"].nbytes > _MAX_PICKLE_BYTES:
        raise IntegrityError(f"its pickle has more than {_MAX_PICKLE_BYTES} bytes, without the tensors", key=file.name)
    order = file.record("byteorder").decode("latin1") if "byteorder" in records else "little"
    if order not in ("little", "big"):
        raise IntegrityError("its byte order is neither little nor big", key=file.name)
    storages: dict[str, torch.UntypedStorage] = {}

    def storage_of(key: str, dtype: torch.dtype, elements: int) -> torch.UntypedStorage:
        record, size_bytes = records.get(f"data/{key}"), elements * dtype.itemsize
        if record is None or record.nbytes != size_bytes:
            raise IntegrityError(f"a tensor's bytes are not the {size_bytes} that its pickle says", key=file.name)
        if key not in storages:
            storages[key] = file.mapped(record.begin, record.end)
            if order != sys.byteorder:
                data = file.read(record.begin, record.end)
                storages[key] = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
                storages[key].byteswap(dtype)  # type: ignore[no-untyped-call]
        return storages[key]

    try:
        value = unpickle(file.record("data.pkl"), storage_of, file.size_bytes)
    except CkptError as error:
        error.key = error.key or file.name
        raise
    except Exception as error:  # For foreign bytes torch raises all kinds of errors.
        raise IntegrityError(f"the pickle is malformed: {error!r:.300}", key=file.name) from error
    _check_values(value, file)
    return value


def _check_values(value: Any, file: SourceFile) -> None:
    """Raise IntegrityError for too many or too deep values, or too much text; count a repeated value each time."""
    count, text, waiting = 0, 0, [iter([value])]
    while waiting:
        item = next(waiting[-1], _END)
        if item is _END:
            waiting.pop()
            continue
        count += 1
        text += len(item) if isinstance(item, str | bytes | bytearray) else 0
        if count > MAX_VALUES or len(waiting) > MAX_DEPTH or text > file.size_bytes + _FREE_TEXT_BYTES:
            raise IntegrityError(f"there are more than {MAX_VALUES} values, or a cycle of them", key=file.name)
        if isinstance(item, Mapping):
            waiting += [iter(item.values()), iter(item)]
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting.append(iter(item))


_END: Any = object()
