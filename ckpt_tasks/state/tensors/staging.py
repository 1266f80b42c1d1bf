"""Copies from host memory onto CUDA devices, through a few pinned buffers.

A device reads pinned memory at the speed of its bus, while the host goes on. The driver first copies other memory in
the calling thread, at a third of that speed, and pinning that memory takes longer than copying it once. So threads fill
pinned buffers, while the device reads buffers that were filled before.

Invariants

1. A thread fills a buffer only after the device has read its earlier contents.
2. The block begins after the devices have done all work in this thread's current streams, so older work cannot
   overwrite the copies.
3. When the block ends, also by an exception, no copy is under way: the caller may use or free the tensors.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import torch

from ckpt_tasks.errors import StateError
from ckpt_tasks.state.tensors.device import DeviceCopy, Devices

STAGED_BYTES = 8 << 20  # The calls for a smaller piece cost more than its bytes.


class Staging:
    """A block in which up to `threads` threads copy `size_bytes` onto `devices`.

    Other code must not use the tensors while the block runs.
    """

    def __init__(self, devices: Iterable[torch.device], size_bytes: int, threads: int):
        self._devices = Devices()
        self._free: SimpleQueue[tuple[memoryview, DeviceCopy | None]] = SimpleQueue()
        # A device reads a buffer ten times as fast as a thread fills it, so few spare buffers suffice.
        self._count = min(threads + threads // 4 + 1, -(-size_bytes // STAGED_BYTES))
        there = list(dict.fromkeys(devices))
        for device in there:
            self._devices.settle(device)
        if self._count:
            # The attribute keeps the memory mapped until it is unpinned.
            self._memory = memoryview(mmap.mmap(-1, self._count * STAGED_BYTES))
            self._unpin = self._devices.pin(self._memory, self, there[0])  # This pins for all devices.
            for begin in range(0, len(self._memory), STAGED_BYTES):
                self._free.put((self._memory[begin : begin + STAGED_BYTES], None))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failures: list[StateError] = []
        for _ in range(self._count):
            _, copy = self._free.get()
            try:
                _wait(copy)
            except StateError as failure:
                failures.append(failure)
        if self._count:
            self._unpin()
        if failures and error is None:
            raise failures[0]

    @contextmanager
    def piece(self, into: torch.Tensor) -> Iterator[memoryview]:
        """Yield a buffer on the host for the bytes of `into`; the end of the block queues the copy to the device.

        `into` has at most STAGED_BYTES. If the block raises, nothing is copied. Raises StateError if the device failed.
        """
        buffer, copy = self._free.get()
        try:
            _wait(copy)
            data = buffer[: into.nbytes]
            yield data
            copy = self._devices.bring(into, torch.frombuffer(data, dtype=torch.uint8))
        finally:
            self._free.put((buffer, copy))


def can_stage(into: torch.Tensor) -> bool:
    """Return True if a tensor is on a CUDA device, and its memory is exactly its values in C order."""
    return into.is_cuda and in_c_order(into)


def in_c_order(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's memory, on any device, is exactly its values in C order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def byte_view(into: torch.Tensor) -> torch.Tensor:
    """View the memory of a tensor in C order as bytes."""
    return into.detach().reshape(-1).view(torch.uint8)


def _wait(copy: DeviceCopy | None) -> None:
    if copy is not None:
        copy.wait()
