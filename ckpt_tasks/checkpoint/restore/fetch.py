"""The tensors of a checkpoint in a store: read into place, in pieces that are digested while the cache holds them.

A restore reads every byte once, straight into the live tensors. So it needs no memory beside the state, and touches no
new pages (which would cost several times a copy). Tensors on a CUDA device are read into pinned buffers, and the device
copies them from there (staging.py).

Where damage may not be found too late, a pass before it digests every byte in a buffer that stays in the processor's
cache. With many ranks, the ranks of a host divide this pass among themselves (sharing.py). Then each rank reads the
regions that it needs; if it needs only a part of a region, it reads the whole region into a buffer to digest it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import NamedTuple, TypeVar

import torch

from ckpt_tasks.checkpoint.ranks.exchange import ALONE, Together
from ckpt_tasks.checkpoint.restore.boxes import Piece, box_of, boxes_in_order, meets, pieces, within
from ckpt_tasks.checkpoint.restore.sharing import share_reads
from ckpt_tasks.errors import IntegrityError, ObjectNotFoundError, StoreError
from ckpt_tasks.format.digests import Digest
from ckpt_tasks.format.layout.index import IndexRow
from ckpt_tasks.format.layout.regions import Box
from ckpt_tasks.process import in_threads
from ckpt_tasks.run.opening import READ_BYTES, change, changes_in, merge_runs
from ckpt_tasks.state.tensors.memcpy import THREADS, is_plain
from ckpt_tasks.state.tensors.placements import local_of
from ckpt_tasks.state.tensors.staging import STAGED_BYTES, Staging, byte_view, can_stage
from ckpt_tasks.state.tensors.tensors import copy_all, tensor_at, without_values
from ckpt_tasks.storage.port import ReadableStore
from ckpt_tasks.system import system

_PIECE_BYTES = 2 << 20  # A piece of this size stays in a core's cache between read and digest.
_DIRECT_BYTES = 256 << 10  # Smaller tensors are read together, and then copied.

_Pair = tuple[torch.Tensor, str]
_Job = Callable[[], None]
_Where = Callable[[int, int], AbstractContextManager[memoryview]]
_T = TypeVar("_T")


class _Direct(NamedTuple):
    """A region that is read into `into`, whose first byte is the object's byte `begin`."""

    row: IndexRow
    into: torch.Tensor
    begin: int

    @property
    def size_bytes(self) -> int:
        return self.row.end - self.row.begin


class StoredTensors:
    """The tensors of `rows`, read from a store; see `TensorSource`. All ranks must call `fetch`.

    A tensor may be stored as boxes that many ranks wrote; a DTensor takes this rank's box.
    """

    def __init__(self, store: ReadableStore, rows: Iterable[IndexRow], together: Together | None = None):
        self._store = store
        self._together = together or Together(ALONE)
        self._rows = _by_key(rows)
        self._cut = {key for key, rows in self._rows.items() if not boxes_in_order(rows)}
        self._fills: list[_Pair] = []
        self._verified = False
        self._scratch = system().local()

    def like(self, key: str) -> torch.Tensor:
        row = self._rows[key][0]
        return without_values(row.dtype, row.tensor_shape)

    def read(self, key: str) -> torch.Tensor:
        row = self._rows[key][0]
        tensor = torch.empty(row.tensor_shape, dtype=getattr(torch, row.dtype))
        self._read([(tensor, key)])
        return tensor

    def fill(self, into: torch.Tensor, key: str) -> None:
        self._fills.append((into, key))

    def fetch(self, pairs: Sequence[_Pair] = (), *, verify: bool = True) -> None:
        fills, self._fills = self._fills, []
        self._read(fills, self._checks(fills, pairs) if verify else [])
        self._verified = verify

    def _checks(self, fills: Sequence[_Pair], pairs: Sequence[_Pair]) -> list[_Job]:
        """Return jobs that verify this rank's share of all regions but those of `fills`."""
        filled = {key for _, key in fills}
        boxes: dict[str, list[Box]] = {}
        for into, key in pairs:
            if not self._is_whole(into, key):
                boxes.setdefault(key, []).append(box_of(into, key))
        rest = [row for key, rows in self._rows.items() if key not in filled for row in rows]
        rest = [row for row in rest if row.full_key not in boxes or meets(row, boxes[row.full_key])]
        shared = share_reads(self._together, rest, kept=False)
        rest = rest if shared is None else shared.mine(rest)
        return [partial(self._check, runs) for runs in _dealt(merge_runs(rest, _PIECE_BYTES), _run_bytes)]

    def copy(self, pairs: Sequence[_Pair]) -> None:
        try:
            self._read(pairs)
        except (IntegrityError, ObjectNotFoundError) as error:
            if not self._verified:
                raise
            # The bytes were good a moment ago, so try no older checkpoint: a retry verifies again, and may fall back.
            raise StoreError(
                f"{self._store.url} gave other bytes than a moment ago; the state is half restored ({error})",
                key=error.key,
                hint="Restore again before anything else is done with this state.",
            ) from error

    # ── private helpers ──────────────────────────────────────────────────────────────────────────────────────

    def _is_whole(self, into: torch.Tensor, key: str) -> bool:
        """Return True if a target needs all stored bytes of a tensor, in their order."""
        return key not in self._cut and local_of(into).shape == self._rows[key][0].tensor_shape

    def _read(self, pairs: Sequence[_Pair], checks: Iterable[_Job] = ()) -> None:
        """Read the stored values into the tensors of `pairs`, and run the `checks` at the same time."""
        direct: list[_Direct] = []
        rest: list[_Pair] = []
        parts: dict[IndexRow, list[Piece]] = {}
        for into, key in pairs:
            rows = self._rows[key]
            if not self._is_whole(into, key):
                for piece in pieces(into, key, rows):
                    if piece.is_whole and _is_direct(piece.into, piece.row):
                        direct.append(_Direct(piece.row, piece.into, piece.row.begin))
                    else:
                        parts.setdefault(piece.row, []).append(piece)
            elif _is_direct(local := local_of(into), rows[0]):
                direct += [_Direct(row, local, rows[0].begin) for row in rows]
            else:
                rest.append((local, key))
        runs = merge_runs(parts, _PIECE_BYTES)
        devices = [local_of(into).device for into, _ in pairs if into.is_cuda]
        staged_bytes = sum(one.size_bytes for one in direct if one.into.is_cuda)
        with Staging(devices, staged_bytes, THREADS) as staging:
            jobs: list[_Job] = [
                *(partial(self._read_direct, some, staging) for some in _dealt(direct, lambda one: one.size_bytes)),
                *(
                    partial(self._read_windows, windows)
                    for windows in _dealt(self._windows(rest), lambda window: sum(into.nbytes for into, _ in window))
                ),
                *(partial(self._read_parts, parts, some) for some in _dealt(runs, _run_bytes)),
                *checks,
            ]
            in_threads(lambda job: job(), jobs, THREADS, "ckpt-restore")

    def _windows(self, pairs: Sequence[_Pair]) -> Iterator[list[_Pair]]:
        """Group tensors that are adjacent in a file into one read each."""
        window: list[_Pair] = []
        first: IndexRow | None = None
        last: IndexRow | None = None
        for pair in sorted(pairs, key=lambda pair: (self._rows[pair[1]][0].object, self._rows[pair[1]][0].begin)):
            rows = self._rows[pair[1]]
            follows = first and last and last.object == rows[0].object and last.end == rows[0].begin
            if not (follows and first and rows[-1].end - first.begin <= _PIECE_BYTES):
                if window:
                    yield window
                window, first = [], rows[0]
            window.append(pair)
            last = rows[-1]
        if window:
            yield window

    def _read_parts(self, parts: Mapping[IndexRow, Sequence[Piece]], runs: Iterable[list[IndexRow]]) -> None:
        for run in runs:
            begin = run[0].begin
            buffer, aligned = self._read_run(run)
            copy_all(
                (
                    piece.into,
                    within(
                        tensor_at(buffer, row.dtype, row.box.shape, aligned + row.begin - begin), piece.box, row.box
                    ),
                )
                for row in run
                for piece in parts[row]
            )

    def _read_run(self, run: Sequence[IndexRow]) -> tuple[bytearray, int]:
        """Read and verify contiguous regions; return a buffer, and the offset of the first region in it."""
        begin, end = run[0].begin, run[-1].end
        aligned = begin % 16  # A view must be aligned for its dtype.
        buffer = self._buffer(aligned + end - begin)
        data = memoryview(buffer)[aligned : aligned + end - begin]
        self._store.read(run[0].object, begin, data)
        _good(run, data)
        return buffer, aligned

    def _read_direct(self, rows: Iterable[_Direct], staging: Staging) -> None:
        for row, into, begin in rows:
            at = row.begin - begin
            if into.is_cuda:
                there = byte_view(into)[at : at + row.end - row.begin]
                self._read_large(row, _onto(there, staging), STAGED_BYTES)
            else:
                self._read_large(row, _inside(_memory(into)[at : at + row.end - row.begin]))
            torch.autograd.graph.increment_version(into.detach())  # autograd does not notice the kernel's writes.

    def _read_windows(self, windows: Iterable[list[_Pair]]) -> None:
        for window in windows:
            rows = [row for _, key in window for row in self._rows[key]]
            begin = rows[0].begin
            buffer, aligned = self._read_run(rows)
            first = ((into, self._rows[key][0]) for into, key in window)
            copy_all(
                (into, tensor_at(buffer, row.dtype, row.tensor_shape, aligned + row.begin - begin))
                for into, row in first
            )

    def _check(self, runs: Iterable[list[IndexRow]]) -> None:
        buffer = memoryview(self._buffer(_PIECE_BYTES))
        for run in runs:
            begin, end = run[0].begin, run[-1].end
            if end - begin <= _PIECE_BYTES:
                self._store.read(run[0].object, begin, buffer[: end - begin])
                _good(run, buffer[: end - begin])
            else:
                self._read_large(run[0], lambda begin, end: nullcontext(buffer[: end - begin]))

    def _read_large(self, row: IndexRow, where: _Where, piece_bytes: int = _PIECE_BYTES) -> None:
        """Read a large region in pieces, each into the buffer `where(piece)`; digest each while the cache has it."""
        digest = Digest()
        size_bytes = row.end - row.begin
        for begin in range(0, size_bytes, piece_bytes):
            with where(begin, min(begin + piece_bytes, size_bytes)) as piece:
                self._store.read(row.object, row.begin + begin, piece)
                digest.update(piece)
        if digest.digest() != row.digest:
            raise IntegrityError(change(row))

    def _buffer(self, size_bytes: int) -> bytearray:
        buffer: bytearray | None = getattr(self._scratch, "buffer", None)
        if buffer is None or len(buffer) < size_bytes:
            buffer = self._scratch.buffer = bytearray(max(size_bytes, _PIECE_BYTES + 16))
        return buffer


def _by_key(rows: Iterable[IndexRow]) -> dict[str, list[IndexRow]]:
    """Return every tensor's regions, in order."""
    regions: dict[str, list[IndexRow]] = {}
    for row in sorted(rows, key=attrgetter("object", "begin")):
        regions.setdefault(row.full_key, []).append(row)
    return regions


def _is_direct(into: torch.Tensor, row: IndexRow) -> bool:
    if into.nbytes < _DIRECT_BYTES or into.dtype != getattr(torch, row.dtype):
        return False
    return is_plain(into) or can_stage(into)


def _dealt(items: Iterable[_T], size_bytes: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Split work into jobs of about 16 MiB: with smaller jobs, threads would mostly wait for each other."""
    job: list[_T] = []
    left = READ_BYTES
    for item in items:
        job.append(item)
        left -= size_bytes(item)
        if left <= 0:
            yield job
            job, left = [], READ_BYTES
    if job:
        yield job


def _run_bytes(run: Sequence[IndexRow]) -> int:
    return run[-1].end - run[0].begin


def _good(run: Sequence[IndexRow], data: memoryview) -> None:
    faults = changes_in(run, data)
    if faults:
        raise IntegrityError(faults[0])


def _inside(memory: memoryview) -> _Where:
    return lambda begin, end: nullcontext(memory[begin:end])


def _onto(there: torch.Tensor, staging: Staging) -> _Where:
    return lambda begin, end: staging.piece(there[begin:end])


def _memory(tensor: torch.Tensor) -> memoryview:
    """View a tensor's bytes; the caller must keep the tensor alive."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
