"""Copies of many tensors at the speed of memory, even if other processes use the cores."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from ckpt_tasks.errors import StoreError
from ckpt_tasks.process import in_threads, start_thread
from ckpt_tasks.state.tensors.staging import STAGED_BYTES, Staging, byte_view, can_stage, in_c_order

LARGE_BYTES = 64 << 10  # A smaller tensor does not get its own memcpy.
_PARALLEL_BYTES = 32 << 20
_PIECE_BYTES = 8 << 20
THREADS = max(
    2, min(8, os.cpu_count() or 2)
)  # Two threads nearly saturate a small machine's memory; a server can use more.

Move = tuple[int, int, int]  # A copy in memory: target address, source address, count of bytes.


@torch.no_grad()
def copy_tensors(into: Sequence[torch.Tensor], out_of: Sequence[torch.Tensor], moves: Iterable[Move] = ()) -> None:
    """Copy tensors of equal shapes pair by pair, and the bytes of `moves`.

    Our own threads copy large contiguous CPU tensors by memcpy: torch's copy waits for all of its threads at every
    tensor, and takes ten times as long if another process uses one of their cores (3 s instead of 0.2 s for 625 MiB).
    Large copies onto a CUDA device go through `Staging`. torch copies the rest; this thread copies all small tensors in
    one call, while the other threads copy.
    """
    moves = [*moves]
    onto: list[tuple[torch.Tensor, torch.Tensor]] = []
    small: list[tuple[torch.Tensor, torch.Tensor]] = []
    rest: list[tuple[torch.Tensor, torch.Tensor]] = []
    for to, source in zip(into, out_of, strict=True):
        if source.nbytes < LARGE_BYTES:
            small.append((to, source))
        elif is_plain(to) and is_plain(source) and to.dtype == source.dtype:
            moves.append((to.data_ptr(), source.data_ptr(), source.nbytes))
        elif can_stage(to) and is_plain(source) and to.dtype == source.dtype:
            onto.append((to, source))
        else:
            rest.append((to, source))
    with _helped(_cut(moves)) as pieces:
        _by_torch(small)
        _move(pieces)
    _by_torch(rest)
    _stage(onto)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's memory is exactly its values in C order."""
    return tensor.is_cpu and in_c_order(tensor)


@contextmanager
def _helped(moves: Sequence[Move]) -> Iterator[Iterator[Move]]:
    """Yield an iterator of moves; for many bytes, other threads also take moves from it until the block ends."""
    shared = iter(moves)
    if sum(size_bytes for _, _, size_bytes in moves) < _PARALLEL_BYTES:
        yield shared
        return
    started: list[threading.Thread] = []
    try:
        with suppress(StoreError):  # If no more threads can start, fewer threads copy all.
            for _ in range(THREADS - 1):
                thread = start_thread(_move, shared, name="ckpt-copy")
                started.append(thread)
        yield shared
    finally:
        for other in started:
            other.join()  # The caller may use the memory only after all threads have ended.


def _move(moves: Iterable[Move]) -> None:
    for to, source, size_bytes in moves:
        ctypes.memmove(to, source, size_bytes)  # This call releases the GIL.


def _stage(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy from host memory onto devices; let torch copy a few bytes, since pinning memory would take longer."""
    size_bytes = sum(source.nbytes for _, source in pairs)
    if size_bytes < _PARALLEL_BYTES:
        _by_torch(pairs)
        return
    with Staging((to.device for to, _ in pairs), size_bytes, THREADS) as staging:

        def bring(piece: tuple[torch.Tensor, int]) -> None:
            into, source = piece
            with staging.piece(into) as buffer:
                ctypes.memmove((ctypes.c_char * len(buffer)).from_buffer(buffer), source, len(buffer))

        pieces = [
            (part, source.data_ptr() + number * STAGED_BYTES)
            for to, source in pairs
            for number, part in enumerate(torch.split(byte_view(to), STAGED_BYTES))
        ]
        in_threads(bring, pieces, THREADS, "ckpt-copy")


def _by_torch(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        into, out_of = zip(*pairs, strict=True)
        torch._foreach_copy_(into, out_of)


def _cut(moves: Iterable[Move]) -> list[Move]:
    """Cut copies into pieces, so that one large tensor does not leave other threads idle."""
    return [
        (to + at, source + at, min(_PIECE_BYTES, size_bytes - at))
        for to, source, size_bytes in moves
        for at in range(0, size_bytes, _PIECE_BYTES)
    ]
