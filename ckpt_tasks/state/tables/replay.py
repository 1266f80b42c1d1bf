"""A replay buffer: a ring of rows with named columns, whose saves write the rows that were added since the last save.

Row n, counted from the first that was ever added, is at index n modulo the capacity. A file has consecutive rows; in
the order of their numbers, each of a buffer's files begins where the one before ends, and the last one ends with the
newest row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ckpt_tasks.checked import checked
from ckpt_tasks.errors import ConfigError, IntegrityError
from ckpt_tasks.state.kinds.differences import Differences
from ckpt_tasks.state.kinds.group_parts import GroupKind, Guard
from ckpt_tasks.state.kinds.names import Scope
from ckpt_tasks.state.tables.table_files import Chain, FileBytes, TableFile
from ckpt_tasks.state.tables.table_kind import TableCapture, read_file
from ckpt_tasks.state.tables.table_rows import read_columns, write_columns
from ckpt_tasks.state.tensors.tensor_sources import Maker
from ckpt_tasks.state.tensors.tensors import RankRule, TensorSet

_MOST_ROWS = 1 << 40
_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_PARTS = 16  # Files are merged up to this part of the capacity, so that no later save copies much of the buffer.

_Arrays = dict[str, npt.NDArray[Any]]


class ReplayBuffer:
    """Keep the newest `capacity` rows in host memory: a new row overwrites the oldest.

    A column is a dtype of torch or NumPy (bool, uint8, int8 to int64, float16 to float64), or a pair of dtype and
    shape. A save writes the rows that were added since the last one::

        replay = ReplayBuffer(100_000, observation=(torch.float32, (4,)), action=torch.int64, reward=torch.float32)
        state = {"model": model, "optimizer": optimizer, "replay": replay}

    A checkpoint with another capacity or other columns is refused. Each of many ranks has its own buffer, which another
    number of ranks cannot restore. Raises ConfigError for another dtype, and if memory is short.
    """

    @checked
    def __init__(self, capacity: int, **columns: Any):
        self.capacity = int(capacity)
        if not 1 <= self.capacity <= _MOST_ROWS or not columns:
            hint = "ReplayBuffer(1000, observation=(torch.float32, (4,)), reward=torch.float32)"
            raise ConfigError(f"a buffer has columns, and 1 to {_MOST_ROWS} rows", key="capacity", hint=hint)
        self.columns = sorted(columns)
        self.dtype = np.dtype([(name, _dtype(name, columns[name])) for name in self.columns], align=True)
        self.added = 0  # The number of rows that were ever added.
        self.chain = Chain()
        self.values = _empty(self.capacity, self.dtype)

    def __len__(self) -> int:
        """Return the number of rows in the buffer."""
        return min(self.added, self.capacity)

    def append(self, /, **row: Any) -> None:
        """Add a row: one number, array or tensor for each column.

        Raises ConfigError, and adds nothing, if a column is missing or unknown, or cannot hold its value: the shape
        differs, or the column would change the number by more than the rounding of floats.
        """
        self._add({name: values[None] for name, values in self._arrays(row).items()})

    def extend(self, /, **rows: Any) -> None:
        """Add many rows, the oldest first: arrays with one more dimension than in `append`."""
        self._add(self._arrays(rows))

    @checked
    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> dict[str, torch.Tensor]:
        """Draw rows with replacement, each with the same probability; return copies on the CPU, by column.

        Draws from `generator`, which belongs into the state, or from torch's stream on the CPU, which every checkpoint
        has. Raises ConfigError if the buffer is empty, or if the generator is on another device.
        """
        if not len(self) or batch_size < 1 or (generator is not None and generator.device.type != "cpu"):
            why = "sample needs a row in the buffer, a batch size of 1 or more, and a generator on the CPU"
            raise ConfigError(why, key="batch_size")
        drawn = torch.randint(len(self), (int(batch_size),), generator=generator, device="cpu").numpy()
        return {name: torch.from_numpy(self.values[name][drawn]) for name in self.columns}

    def _arrays(self, given: Mapping[str, Any]) -> _Arrays:
        """Return each column's value as an array of its dtype; raise ConfigError if the column cannot hold it."""
        if given.keys() != {*self.columns}:
            raise ConfigError(f"got the columns {sorted(given)}; the buffer has {self.columns}", key="columns")
        arrays: _Arrays = {}
        for name, value in given.items():
            dtype = self.dtype[name].base
            try:
                array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
                with np.errstate(all="ignore"):
                    arrays[name] = array if array.dtype == dtype else array.astype(dtype)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise ConfigError(f"{value!r:.80} cannot be {dtype}: {error}", key=name) from error
            rounds = dtype.kind == "f" and array.dtype.kind in "biuf"
            if not (array.dtype == dtype or rounds or np.array_equal(arrays[name], array)):
                raise ConfigError(f"{value!r:.80} would become another number as {dtype}", key=name)
        return arrays

    def _add(self, rows: _Arrays) -> None:
        for name, values in rows.items():
            here, there = self.values[name].shape[1:], values.shape[1:]
            if not values.ndim or here != there:
                raise ConfigError(f"a row of shape {[*there]}, where the buffer's rows have {[*here]}", key=name)
        counts = {len(values) for values in rows.values()}
        if len(counts) > 1:
            raise ConfigError(f"columns of {sorted(counts)} rows: give equally many of each", key="columns")
        self.added += max(counts)
        kept = min(self.capacity, *counts)
        at = np.arange(self.added - kept, self.added) % self.capacity
        for name, values in rows.items():
            self.values[name][at] = values[len(values) - kept :]


def _dtype(name: str, column: Any) -> np.dtype[Any]:
    """Return a column's dtype, with the shape of a value in it."""
    kind, shape = column if isinstance(column, tuple) and len(column) == 2 else (column, ())
    try:
        base = np.dtype(str(kind).removeprefix("torch.") if isinstance(kind, torch.dtype) else kind).name
        dtype = np.dtype((base, shape))
    except (TypeError, ValueError, OverflowError):
        dtype = np.dtype("V")
    if dtype.base.name not in _DTYPES or not dtype.itemsize:
        hint = f"Give a dtype or (dtype, shape), with one of {', '.join(_DTYPES)}."
        raise ConfigError(f"a column cannot be {column!r:.80}", key=name, hint=hint)
    return dtype


def _empty(capacity: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Allocate all rows; the system gives a row memory when it is first written."""
    try:
        return np.empty(capacity, dtype)
    except (MemoryError, ValueError) as error:
        raise ConfigError(f"no memory for {capacity} rows: {error}", key="capacity") from error


def _settings(replay: ReplayBuffer) -> dict[str, Any]:
    """Return what a buffer must have in common with a checkpoint."""
    dtypes = [(name, replay.dtype[name]) for name in replay.columns]
    columns = [[name, dtype.base.name, [*dtype.shape]] for name, dtype in dtypes]
    return {"capacity": replay.capacity, "columns": columns}


def _rows(replay: ReplayBuffer, begin: int, end: int) -> list[npt.NDArray[Any]]:
    """Copy the rows `begin` to `end`, column by column."""
    rows = np.take(replay.values, np.arange(begin, end) % replay.capacity)
    return [np.ascontiguousarray(rows[name]) for name in replay.columns]


def _following(replay: ReplayBuffer, parent: str | None) -> Chain:
    """Return the files for the next save, the last of which may have no contents yet; change nothing.

    A new file takes in the files before it that have no more rows than itself: there are few files, and each row is
    written a few times. Files of overwritten rows are left out.
    """
    added, oldest = replay.added, max(0, replay.added - replay.capacity)
    files = [file for file in replay.chain.files if file.begin + file.count > oldest]
    if not all(file.is_kept(parent) for file in files):
        files = []
    begin = files[-1].begin + files[-1].count if files else oldest
    if begin < added:
        while files and files[-1].count <= added - begin and added - files[-1].begin <= replay.capacity // _PARTS:
            begin = files.pop().begin
        number = replay.chain.files[-1].number + 1 if replay.chain.files else 0
        begin = max(begin, oldest)
        files.append(TableFile(number, added - begin, begin=begin))
    return Chain(files)


def _capture(replay: ReplayBuffer, group: str, scope: Scope, tensors: TensorSet, draws: bool) -> dict[str, Any]:
    """Return a buffer's tree, which refers to each file of its chain."""
    chain, settings = _following(replay, scope.home), _settings(replay)

    def copy() -> None:
        for file in (file for file in chain.files if file.is_new):
            rows = _rows(replay, file.begin, file.begin + file.count)
            file.contents = FileBytes(partial(write_columns, settings["columns"], rows))

    def whole() -> bytes:
        return b"".join(column.tobytes() for column in _rows(replay, replay.added - len(replay), replay.added))

    rank, ranks = (0, 1) if tensors.world is None else (tensors.world.rank, tensors.world.size)
    captured = TableCapture(group, replay, chain, rank, ranks, copy, whole)
    tensors.files.append(captured)
    return settings | {"added": replay.added, "files": captured.refs}


class _ReplayPart:
    """Restores one replay buffer; the next save continues the files of `home`, if that is a committed checkpoint."""

    guard: Guard | None = None

    def __init__(self, replay: ReplayBuffer, name: str, tree: Mapping[str, Any], home: str | None):
        self._replay, self._name, self._tree, self._home = replay, name, tree, home
        self._values, self._chain = replay.values, replay.chain

    def compare(self, differences: Differences) -> None:
        """Record another capacity, and other columns."""
        for what, here in _settings(self._replay).items():
            if here != (there := self._tree[what]):
                differences.differ(self._name, f"{what} {here} here, {there} in the checkpoint")

    def prepare(self, make: Maker) -> None:
        """Read the verified files into new rows; raise IntegrityError if one is malformed, or if rows are missing."""
        end, capacity, files = self._tree["added"], self._replay.capacity, list[TableFile]()
        oldest, self._values = max(0, end - capacity), _empty(capacity, self._replay.dtype)
        for ref in reversed(self._tree["files"]):
            number, data = read_file(make, ref)
            columns = read_columns(data, self._tree["columns"], ref.key)
            begin = end - len(columns[0])
            at = np.arange(max(begin, oldest), end)
            for (name, *_), rows in zip(self._tree["columns"], columns, strict=True):
                self._values[name][at % capacity] = rows[len(rows) - len(at) :]
            files.insert(0, TableFile(number, end - begin, [str(self._home)], begin))
            end = begin
        if not 0 <= end <= oldest:
            raise IntegrityError("the files have other rows than the buffer", key=self._name)
        self._chain = Chain(files)

    def write(self) -> None:
        """Replace the buffer's rows by the new rows."""
        self._replay.values, self._replay.added, self._replay.chain = self._values, self._tree["added"], self._chain


REPLAY = GroupKind(
    ReplayBuffer,
    _capture,
    lambda v, name, tree, at, copies, kept: _ReplayPart(v, name, tree, at.home),
    RankRule.BY_RANK,
    moving=lambda replay: replay.added,
)
