"""Foreign files to import: torch.save and safetensors files, Hugging Face directories, Lightning's checkpoints.

Invariants

1. Nothing in a file is executed or imported: only torch's weights-only unpickler reads a pickle. A pickle with a name
   that this unpickler does not know is refused, and the error has the name.
2. A file is refused before anything is written. Sizes, offsets, names, and the number of values and bytes are checked
   before they become memory, paths or loops.
3. Tensors are views of the mapped files, so a file of any size needs little memory.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ckpt_tasks.errors import CheckpointNotFoundError, ConfigError, IntegrityError, UnsupportedStateError
from ckpt_tasks.format.image import MAX_HEADER_BYTES, STORED_DTYPES, parse_header
from ckpt_tasks.format.parsing import MALFORMED, parse_json

__all__ = ["Source", "SourceTensor", "open_source"]

_MAX_PICKLE_BYTES = 256 << 20  # per file, without the tensors
_MAX_INDEX_BYTES = 64 << 20
_MAX_ENTRIES = 1 << 20  # in a zip file: one for each tensor
_MAX_VALUES = 1 << 21
_LIGHTNING = "pytorch-lightning_version"
_OURS = "ckpt_tasks"
# Of several dtypes with the same code the first: U8 is uint8.
_DTYPES = {stored.code: name for name, stored in [*STORED_DTYPES.items()][::-1] if not stored.suffix}
_GLOBAL = re.compile(r"GLOBAL ([\w.]{1,200})")
_SHARD = re.compile(r"-\d{5,}-of-\d{5,}\.")
# In this order: a directory that has its weights twice has them as safetensors, too.
_WEIGHTS = (".safetensors.index.json", ".safetensors", ".bin.index.json", ".bin", ".ckpt", ".pt", ".pth")
_OF_TRAINER = re.compile(
    r"(optimizer|scheduler|scaler|rng_state\w*|random_states\w*)\.(pt|pth|bin|pkl)|training_args\.bin"
)


class SourceTensor(NamedTuple):
    """A tensor of a safetensors file: torch's name of the dtype, the shape, and the bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True)
class Source:
    """The contents of a file or a directory: tensors and values by name.

    `values` has torch tensors, or SourceTensors; names that share a tensor have the same object. `left` maps names of
    what cannot be taken to the reason; `files` are the files that were opened, `size_bytes` is their size in all.
    """

    name: str
    kind: str
    values: Mapping[Any, Any]
    size_bytes: int
    files: tuple[str, ...]
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_lightning(self) -> bool:
        """Whether Lightning's Trainer wrote it."""
        return _LIGHTNING in self.values and "state_dict" in self.values

    @property
    def about(self) -> Mapping[str, Any] | None:
        """What an export of ours says of a torch.save file: step, kinds of groups, names of parameters."""
        about = self.values.get(_OURS)
        is_ours = isinstance(about, Mapping) and all(isinstance(about.get(n), Mapping) for n in ("kinds", "parameters"))
        return about if is_ours else None


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a file, or a directory of weights; its tensors are read when they are used.

    Raises CheckpointNotFoundError if there is none, ConfigError for another format, IntegrityError if it is damaged or
    contradicts itself, and UnsupportedStateError for a pickle that names anything but tensors and plain values.
    """
    place = Path(os.path.abspath(os.path.expanduser(path)))
    if not place.exists():
        raise CheckpointNotFoundError(f"there is no file {place}", hint="Check its name.")
    try:
        return _directory(place) if place.is_dir() else _file(place)
    except OSError as error:
        raise IntegrityError(f"{place.name} cannot be read: {error.strerror or error}") from error


def _file(path: Path) -> Source:
    head, size_bytes = _head(path)
    if head[:2] == b"PK":
        values = _torch_values(path)
        source = Source(path.name, "torch.save file", values, size_bytes, (path.name,))
        return (
            Source(path.name, "Lightning checkpoint", values, size_bytes, (path.name,))
            if source.is_lightning
            else source
        )
    if len(head) > 8 and head[8:9] == b"{":
        values, left = _safetensors(path)
        return Source(path.name, "safetensors file", values, size_bytes, (path.name,), left)
    if head[:1] == b"\x80":
        raise ConfigError(
            f"{path.name} was written in the format of torch before 1.6, which cannot be mapped",
            hint="Write it again where you trust it: torch.save(torch.load(name), new_name).",
        )
    raise ConfigError(
        f"{path.name} is neither a torch.save file nor a safetensors file",
        hint="Name one, or a directory that holds one and its index.",
    )


def _head(path: Path) -> tuple[bytes, int]:
    """Return the first bytes of a regular file, and its size; raise ConfigError for anything else, such as a pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is not a regular file")
        return os.pread(fd, 16, 0), status.st_size
    finally:
        os.close(fd)


# ── directories ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _directory(directory: Path) -> Source:
    names = sorted(os.listdir(directory))
    chosen = _weights(directory, names)
    if chosen.endswith(".index.json"):
        values, left, files = _shards(directory, chosen)
    else:
        source = _file(directory / chosen)
        values, left, files = dict(source.values), dict(source.left), (chosen,)
    left |= {name: "only weights are taken from a directory" for name in names if _OF_TRAINER.fullmatch(name)}
    size_bytes = sum(os.stat(directory / name).st_size for name in files)
    return Source(directory.name, "directory of weights", values, size_bytes, files, left)


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


def _shards(directory: Path, index_name: str) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    """Read the weights that an index names; return them by name, reasons for what is left, and the opened files.

    Raises IntegrityError if the index is malformed, or a file or a tensor is not where it says.
    """
    _, size_bytes = _head(directory / index_name)
    if size_bytes > _MAX_INDEX_BYTES:
        raise IntegrityError(f"the index has {size_bytes} bytes, more than {_MAX_INDEX_BYTES}", key=index_name)
    try:
        body = parse_json((directory / index_name).read_bytes(), encoding="utf-8")
        weight_map = {str(name): str(file) for name, file in body["weight_map"].items()}
        about = body.get("metadata") or {}
        tied, dtypes = _about(about, about.get(_OURS))
    except MALFORMED as error:
        raise IntegrityError(f"the index is malformed: {error!r:.200}", key=index_name) from error
    files = tuple(dict.fromkeys(weight_map.values()))
    for file in files:
        # A name with a slash could be any file of this machine.
        if os.path.basename(file) != file or file in ("", ".", "..") or "\0" in file:
            raise IntegrityError(f"the index names {file!r:.200}, which is not a file beside it", key=index_name)
        if not (directory / file).is_file():
            raise IntegrityError(f"the index names {file}, which is not there", key=index_name)
    tensors: dict[str, Any] = {}
    left: dict[str, str] = {}
    for file in files:
        source = _file(directory / file)
        left |= source.left
        for name in (name for name, of in weight_map.items() if of == file):
            if name not in source.values:
                raise IntegrityError(f"{file} does not hold the tensor that the index says it does", key=name)
            tensors[name] = source.values[name]
        left |= {str(name): f"{index_name} does not name it" for name in source.values if name not in weight_map}
    ordered = {name: tensors[name] for name in weight_map}
    return _with_views(ordered, tied, dtypes, index_name), left, files


# ── safetensors ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        (length,) = struct.unpack("<Q", file.read(8))
        if length > MAX_HEADER_BYTES:
            raise IntegrityError(
                f"the safetensors header claims {length} bytes, more than {MAX_HEADER_BYTES}", key=path.name
            )
        prefix = struct.pack("<Q", length) + file.read(length)
        try:
            entries = parse_header(prefix, size_bytes)
            metadata = parse_json(prefix[8:], encoding="utf-8").get("__metadata__") or {}
            ours = parse_json(metadata[_OURS].encode(), encoding="utf-8") if _OURS in metadata else None
            tied, dtypes = _about(metadata, ours)
        except IntegrityError as error:
            error.key = error.key or path.name
            raise
        except MALFORMED as error:
            raise IntegrityError(f"the metadata is malformed: {error!r:.200}", key=path.name) from error
        data = memoryview(mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ))
    values = {
        name: SourceTensor(_DTYPES[code], shape, data[begin:end]) for name, (code, shape, begin, end) in entries.items()
    }
    return _with_views(values, tied, dtypes, path.name), {}


def _about(metadata: Mapping[str, Any], ours: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return tied names (name → stored name) and the dtypes of views (name → dtype), as an export wrote them."""
    if ours is None:
        return {str(name): value for name, value in metadata.items() if isinstance(value, str)}, {}
    return {str(n): str(kept) for n, kept in ours["tied"].items()}, {str(n): str(d) for n, d in ours["dtypes"].items()}


def _with_views(
    values: dict[str, Any], tied: Mapping[str, str], dtypes: Mapping[str, str], where: str
) -> dict[str, Any]:
    """Return the values with views in their own dtypes, and tied names; raise IntegrityError if one is not a view."""
    for name, dtype in dtypes.items():
        tensor, stored = values.get(name), STORED_DTYPES.get(dtype)
        if tensor is None or tensor.dtype == dtype:
            continue  # in another shard; or its own file has said so
        cut = len(tensor.shape) - len(stored.suffix) if stored else 0
        if stored is None or _DTYPES[stored.code] != tensor.dtype or tensor.shape[max(cut, 0) :] != stored.suffix:
            raise IntegrityError(
                f"the metadata says that it is {dtype:.40}, and its bytes are not", key=f"{where}: {name}"
            )
        values[name] = SourceTensor(dtype, tensor.shape[:cut], tensor.data)
    return values | {name: values[kept] for name, kept in tied.items() if kept in values and name not in values}


# ── torch.save ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _torch_values(path: Path) -> Mapping[Any, Any]:
    """Read a torch.save file with the weights-only unpickler; its tensors are views of the file."""
    _check_zip(path)
    try:
        forbidden = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        if forbidden:
            raise _forbidden(path, forbidden)
        value = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except UnsupportedStateError:
        raise
    except Exception as error:  # foreign bytes make torch raise all kinds of errors
        text = str(error)
        if refused := _GLOBAL.search(text):
            raise _forbidden(path, [refused[1]]) from error
        first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
        raise IntegrityError(f"torch cannot read the file: {first:.300}", key=path.name) from error
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{path.name} holds a value of type {type(value).__name__}, and not a dict of tensors and values",
            hint="Save a state_dict, or a dict that holds some.",
        )
    _check_values(value, path.name)
    return value


def _forbidden(path: Path, names: list[str]) -> UnsupportedStateError:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return UnsupportedStateError(
        f"the pickle names {', '.join(names[:5])}{more}, and only tensors and plain values are unpickled",
        key=path.name,
        hint="Where you trust the file, load it and save its state_dicts alone: torch.save({'model': …}, name).",
    )


def _check_zip(path: Path) -> None:
    """Raise if the file is not a whole zip file of stored entries: a compressed one could inflate without limit."""
    size_bytes = os.stat(path).st_size
    try:
        with zipfile.ZipFile(path) as file:
            entries = file.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, UnicodeDecodeError) as error:
        raise IntegrityError(f"the file is cut or damaged: {error}", key=path.name) from error
    names = {entry.filename.partition("/")[2] for entry in entries}
    if "constants.pkl" in names:
        raise ConfigError(f"{path.name} is a TorchScript archive", hint="Save the module's state_dict() instead.")
    pickles = [entry for entry in entries if entry.filename.endswith("data.pkl")]
    if len(pickles) != 1 or len(entries) > _MAX_ENTRIES:
        raise IntegrityError("the zip file is not one that torch.save writes", key=path.name)
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
        raise IntegrityError("the zip file is compressed or encrypted, which torch.save never does", key=path.name)
    claimed = sum(entry.file_size for entry in entries)
    if claimed > size_bytes:
        raise IntegrityError(f"the zip file claims {claimed} bytes, and has {size_bytes}", key=path.name)
    if pickles[0].file_size > _MAX_PICKLE_BYTES:
        raise IntegrityError(f"its pickle has more than {_MAX_PICKLE_BYTES} bytes, without the tensors", key=path.name)


def _check_values(value: Any, name: str) -> None:
    """Raise IntegrityError if there are too many values, counted at every place: a pickle can repeat a value."""
    count, waiting = 0, [iter([value])]
    while waiting:
        item = next(waiting[-1], _END)
        if item is _END:
            waiting.pop()
            continue
        count += 1
        if count > _MAX_VALUES or len(waiting) > _MAX_DEPTH:
            raise IntegrityError(f"there are more than {_MAX_VALUES} values, or a cycle of them", key=name)
        if isinstance(item, Mapping):
            waiting.append(iter(item.values()))
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting.append(iter(item))


_END: Any = object()
_MAX_DEPTH = 200
