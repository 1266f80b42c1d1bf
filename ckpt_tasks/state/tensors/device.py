"""Copies from CUDA devices into an image, and from pinned buffers onto devices, while devices and host continue.

Each device copies on its own stream. Events order two streams: one stream records the event, the other waits for it,
and the host continues at once.

Invariants

1. A copy sees all work that was queued before start() in the streams that are current then, and none that is queued
   after it. A user's own stream that writes saved tensors must synchronise with the current stream, as for the forward
   pass.
2. No thread reads an image before wait(). Only wait() blocks the host, and only for these copies.
3. DeviceCopy holds the tensors' memory until wait() has returned. The image's memory stays mapped while a copy is under
   way: it is first unpinned, then unmapped.

A device writes directly to pinned pages (cudaHostRegister, also of shared memory, as the StateDictStager of
torch.distributed.checkpoint does). It writes to other pages through the driver: correct, but slower, and start() may
block (CUDA Runtime API, "API synchronization behavior"). So this module need not know which pages are pinned.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

from ckpt_tasks.errors import StateError, StoreError
from ckpt_tasks.process import finalize_here, start_thread

_RELAXED = 2  # This is cudaStreamCaptureModeRelaxed.
_PORTABLE = 1  # This is cudaHostRegisterPortable: pinned for every device of the process.
_log = logging.getLogger("ckpt_tasks")


class DeviceCopy:
    """Copies that devices are making."""

    def __init__(self, cuda: Any, held: Sequence[Any]):
        self._cuda = cuda
        self._held = held
        self._ends: list[tuple[torch.device, Any]] = []  # Each device with the event after its copies.

    def add(self, device: torch.device, event: Any) -> None:
        """Add the event that a device reaches when it has made all its copies."""
        self._ends.append((device, event))

    def wait(self) -> None:
        """Wait until all copies are made; raise StateError if a device failed: the image must not be used."""
        with _device_errors(), _beside_captures():
            for device, event in self._ends:
                with self._cuda.device(device):  # A new thread would use device 0.
                    event.synchronize()
        self._held = ()


_Pair = tuple[torch.Tensor, torch.Tensor]


class Devices:
    """Copies tensors from and to the CUDA devices of this process; `cuda` is torch.cuda."""

    def __init__(self, cuda: Any = torch.cuda):
        self._cuda = cuda
        self._streams: dict[torch.device, Any] = {}
        self._warned = False

    @torch.no_grad()
    def start(self, pairs: Sequence[_Pair]) -> DeviceCopy:
        """Queue a copy from the second tensor of every pair into the first.

        Work that this thread queues later, in the current stream of each device, runs after these copies. Raises
        StateError if a device refuses them.
        """
        copy = DeviceCopy(self._cuda, pairs)
        with _device_errors():
            for device, (into, out_of) in _by_device(pairs).items():
                current = self._cuda.current_stream(device)
                self._stream(device).wait_stream(current)
                event = self._enqueue(device, into, out_of)
                current.wait_event(event)
                copy.add(device, event)
        return copy

    def settle(self, device: torch.device) -> None:
        """Wait until a device has done the work in this thread's current stream; raise StateError if it failed."""
        self._stream(device)  # Make our stream before threads call `bring`.
        event = self._cuda.Event(blocking=True)
        event.record(self._cuda.current_stream(device))
        reached = DeviceCopy(self._cuda, ())
        reached.add(device, event)
        reached.wait()

    @torch.no_grad()
    def bring(self, into: torch.Tensor, out_of: torch.Tensor) -> DeviceCopy:
        """Queue a copy from host memory into a tensor on a device after `settle`; raise StateError if it fails.

        The copy does not wait for work that threads have queued since `settle`.
        """
        copy = DeviceCopy(self._cuda, (into, out_of))
        with _device_errors():
            copy.add(into.device, self._enqueue(into.device, [into], [out_of]))
        return copy

    def pin(self, memory: memoryview, owner: object, device: torch.device) -> Callable[[], object]:
        """Pin memory for copies while `owner`, which keeps it mapped, exists; return a function that unpins it earlier.

        If pinning fails, logs one warning and does nothing else. Pinning takes as long as touching every page.
        """
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        failures: list[str] = []
        # Use another thread: CUDA keeps a failure as the thread's last error, and torch would raise it at the thread's
        # next kernel launch, perhaps in training.
        try:
            start_thread(self._register, address, len(memory), device, failures, name="ckpt-pin").join()
        except StoreError as error:
            failures.append(str(error))
        if failures and not self._warned:
            self._warned = True
            _log.warning(
                "%d bytes of memory cannot be pinned (%s): copies between %s and the host take several times as long, "
                "and training waits for a save; see whether the host limits locked memory",
                len(memory),
                failures[0],
                device,
            )
        # The finalizer unpins the memory before it is unmapped: it runs while `owner` still holds the mapping.
        return finalize_here(owner, self._let_go, None if failures else address, device)

    # ── private helpers ──────────────────────────────────────────────────────────────────────────────────────

    def _enqueue(self, device: torch.device, into: list[torch.Tensor], out_of: list[torch.Tensor]) -> Any:
        """Queue copies in our stream of a device; return the event after them."""
        stream = self._stream(device)
        with self._cuda.stream(stream):
            # This call copies tensor after tensor in C++; it first makes a contiguous copy of a tensor that is not in C
            # order.
            torch._foreach_copy_(into, out_of, non_blocking=True)
            # A thread that waits for a blocking event sleeps, and leaves the core to training.
            event = self._cuda.Event(blocking=True)
            event.record(stream)
        return event

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = self._cuda.Stream(device)
        return self._streams[device]

    def _register(self, address: int, size_bytes: int, device: torch.device, failures: list[str]) -> None:
        try:
            with self._cuda.device(device), _beside_captures():
                cudart = self._cuda.cudart()
                code = cudart.cudaHostRegister(address, size_bytes, _PORTABLE)
                if int(code):
                    failures.append(f"cudaHostRegister: {cudart.cudaGetErrorString(code)}")
        except RuntimeError as error:
            failures.append(str(error))

    def _let_go(self, address: int | None, device: torch.device) -> None:
        with suppress(RuntimeError), _beside_captures():  # A failed device writes nothing, and wait() has raised.
            for stream in tuple(self._streams.values()):
                stream.synchronize()
        if address is not None:
            with self._cuda.device(device), _beside_captures():
                code = self._cuda.cudart().cudaHostUnregister(address)
            if int(code):
                _log.warning("Memory of a snapshot could not be unpinned: cudaHostUnregister gave %d", int(code))


def _by_device(pairs: Sequence[_Pair]) -> dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    shares: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for place, live in pairs:
        into, out_of = shares.setdefault(live.device, ([], []))
        into.append(place)
        out_of.append(live)
    return shares


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Allow this thread to wait and pin while another thread captures a CUDA graph.

    By default CUDA forbids both in every thread during a capture, and the capture fails (CUDA Runtime API,
    cudaThreadExchangeStreamCaptureMode). The code in the block must not use a stream that is being captured.
    """
    exchange = _exchange()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # The call puts the previous mode into `mode`.
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@cache
def _exchange() -> Callable[..., int] | None:
    """Return cudaThreadExchangeStreamCaptureMode of torch's CUDA runtime; None if it is missing or static."""
    if torch.version.cuda is None:
        return None
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:  # The runtime is linked into torch: a save can then break a capture.
        return None
    exchange: Callable[..., int] = runtime.cudaThreadExchangeStreamCaptureMode
    return exchange


@contextmanager
def _device_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise StateError(
            f"the state could not be copied between its device and the host: {error}",
            hint="A kernel's error is reported after its launch: CUDA_LAUNCH_BLOCKING=1 shows which kernel it was.",
        ) from error
