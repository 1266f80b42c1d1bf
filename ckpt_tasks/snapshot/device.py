"""Copy tensors from CUDA devices to their places in an image, while the device goes on and no host waits.

Each device copies on a stream of its own. What comes first between two streams is said by an event: one stream
records it, the other one waits for it, and the host that says so goes on at once.

Invariants

1. A copy has what was queued before start(), in the streams that are current then, and nothing of what is queued in
   them after it. A stream of the user's that writes what is saved must wait for the current one, as for the forward.
2. No thread reads a place before wait(). It is the only call that blocks the host, and only for these copies.
3. The memory of the tensors is held until wait() has returned, and that of a place for as long as anything is under
   way: it is unpinned first and unmapped then.

A device writes by itself to pages that are pinned (cudaHostRegister: also to those of shared memory, as the
StateDictStager of torch.distributed.checkpoint does it). To others it writes through the driver: as right, but slower,
and start() may stand still for it (CUDA Runtime API, "API synchronization behavior"). So nothing here asks which
pages are which.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ckpt_tasks.errors import StateError
from ckpt_tasks.state.processes import finalize_here

__all__ = ["DeviceCopy", "Devices"]

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_log = logging.getLogger("ckpt_tasks")


class DeviceCopy:
    """Copies under way from devices."""

    def __init__(self, cuda: Any, held: Sequence[Any]):
        self._cuda = cuda
        self._held = held
        self._ends: list[tuple[torch.device, Any]] = []  # of each device, and the event that says it

    def add(self, device: torch.device, event: Any) -> None:
        """Say that a device has copied everything when an event has come."""
        self._ends.append((device, event))

    def wait(self) -> None:
        """Return when everything is in its place; raises StateError if a device failed, and then nothing is."""
        with _told():
            for device, event in self._ends:
                with self._cuda.device(device):  # a new thread stands on the first one, which others may be using
                    event.synchronize()
        self._held = ()


_Pair = tuple[torch.Tensor, torch.Tensor]


class Devices:
    """The CUDA devices of this process, as far as copying needs them; `cuda` is torch.cuda."""

    def __init__(self, cuda: Any = torch.cuda):
        self._cuda = cuda
        self._streams: dict[torch.device, Any] = {}
        self._warned = False

    @torch.no_grad()
    def start(self, pairs: Sequence[_Pair]) -> DeviceCopy:
        """Queue copies of the second of every pair into the first.

        Work that this thread queues later, in the current stream of each device, runs after them. Raises StateError
        if a device cannot take them.
        """
        copy = DeviceCopy(self._cuda, pairs)
        with _told():
            for device, (into, out_of) in _by_device(pairs).items():
                stream = self._stream(device)
                current = self._cuda.current_stream(device)
                stream.wait_stream(current)
                with self._cuda.stream(stream):
                    # One by one, in C++. What is not in C order is first made so on the device, in memory of its own.
                    torch._foreach_copy_(into, out_of, non_blocking=True)
                    event = self._cuda.Event(blocking=True)  # a waiting thread sleeps and leaves the core to training
                    event.record(stream)
                current.wait_event(event)
                copy.add(device, event)
        return copy

    def pin(self, memory: memoryview, owner: object, device: torch.device) -> None:
        """Pin memory for copies from devices until `owner`, which keeps it mapped, is no more.

        Where it cannot be pinned, that is said once and nothing else changes. It takes as long as touching every page.
        """
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        failures: list[str] = []
        # In a thread of its own: CUDA keeps a failure as the last error of the thread that met it, and torch would
        # raise it from the next kernel that this thread launches, which may be training's.
        thread = threading.Thread(target=self._register, args=(address, len(memory), device, failures), name="ckpt-pin")
        thread.start()
        thread.join()
        if failures and not self._warned:
            self._warned = True
            _log.warning(
                "%d bytes of memory for snapshots cannot be pinned (%s): saving the state of %s takes several times as "
                "long, and training waits for it; see whether the host limits locked memory",
                len(memory),
                failures[0],
                device,
            )
        # It comes before the memory is unmapped: what finalize calls, it calls while `owner` still holds what it holds.
        finalize_here(owner, self._let_go, None if failures else address, device)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = self._cuda.Stream(device)
        return self._streams[device]

    def _register(self, address: int, size_bytes: int, device: torch.device, failures: list[str]) -> None:
        try:
            with self._cuda.device(device):
                cudart = self._cuda.cudart()
                code = cudart.cudaHostRegister(address, size_bytes, _PORTABLE)
                if int(code):
                    failures.append(f"cudaHostRegister: {cudart.cudaGetErrorString(code)}")
        except RuntimeError as error:
            failures.append(str(error))

    def _let_go(self, address: int | None, device: torch.device) -> None:
        with suppress(RuntimeError):  # a failed device writes no more, and its wait() has raised
            for stream in tuple(self._streams.values()):
                stream.synchronize()
        if address is not None:
            with self._cuda.device(device):
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
def _told() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise StateError(
            f"the state could not be copied from its device: {error}",
            hint="A kernel's error is reported after its launch: CUDA_LAUNCH_BLOCKING=1 shows which kernel it was.",
        ) from error
