"""Copy a state while training goes on, and prove that the copy is of one moment: that of the call to start().

Parameters and what an optimizer keeps for them change in its step, so they may be copied late, during the next forward
and backward. Everything else is copied at once: buffers (a forward changes them), random streams, whatever no optimizer
knows, parameters without gradients.

What proves it

1. Before any optimizer of torch takes a step, the copy is finished, and before one of the state's own does, it is
   checked, in the thread that is about to take it. However a step writes, it comes after: fused kernels and `.data`
   move no counter (2).
2. An operation of torch on a tensor, on a view of it or on what detach() returned moves its version counter. A counter
   that has moved by the time of the check condemns the snapshot. An operation writes first and counts then, so the
   check is made on the side that trains, between its operations, never by the thread that copies.
3. One spot of every large tensor, 64 bytes in its middle, has the same bytes before, afterwards and in the copy.

On a CUDA device (device.py) copies, writes and looks at spots are queued in streams, in the order of the host's calls
wherever an event says so. "At once" is: before anything that is queued after start(). (1) is: before anything that is
queued after the hook has returned, in the streams that are current in the thread that is about to step; the host goes
on. (2) holds as it stands: an operation moves its counter in the call that queues it. One that was called before the
check, and so may write beside the copy, has moved it by then; one that is called later is queued behind the copy. (3)
is looked at in the order of the streams, where start() and the check are, and compared once it has come to the host;
every late tensor there has a spot, small ones too, since a CUDA graph that is replayed calls no hook and moves no
counter. A stream of the user's that writes what is saved must wait for the current one, as it must for the forward.

What it does not see are writes outside of a step that are not counted and miss the spot: a row of an embedding through
`.data`, NumPy, DLPack or C code, by a collective, by torch._fused_adamw_ called by hand. (Whoever writes over a whole
large tensor in one of these ways is found by its spot.) Where training does that, or frees the memory of parameters
between steps (untyped_storage().resize_, as FSDP 1 does), capture eagerly. Neither kind of capture keeps other
processes and threads from writing while it copies.

What changed is taken again, but not at the same moment: the old value is gone. wait() then says False, the snapshot
must not be used, and the caller takes an eager one at the next boundary of steps. `moved` says what it was; what moves
between steps (nn.Embedding with max_norm, a weight that is perturbed) does so again, so it belongs in `at_once` then.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt_tasks.errors import StateError
from ckpt_tasks.state.copying import LARGE_BYTES, THREADS, copy_tensors, is_plain
from ckpt_tasks.state.device import DeviceCopy, Devices
from ckpt_tasks.state.niceness import be_nice

__all__ = ["OverlappedCopy"]

_PIECE_BYTES = 2 << 20  # 0.2 ms, the longest that a step waits for a thread which others keep from its core
_SMALL_TOGETHER = 1024
_ONE_THREAD_ELEMENTS = 32768  # torch copies more than these in several threads, which wait for each other
_SPOT_BYTES = 64
_LOOK_S = 1.0  # how often whoever waits looks whether the thread that trains is still there

_Pair = tuple[torch.Tensor, torch.Tensor]
_Late = tuple[int, torch.Tensor, torch.Tensor]  # the number of a pair, its place, its live tensor
_Piece = tuple[Callable[..., object], tuple[Any, ...]]

# The copies that are not settled or have not arrived yet, whoever made them: _before_step asks each.
_running: set[OverlappedCopy] = set()


class OverlappedCopy:
    """Copy live tensors to their places in an image while training goes on, and prove that nothing was torn.

    `pairs` are (place in the image, live tensor), fit for copy_tensors(). Late are those that `optimizers` change in
    their steps, but none whose number is in `at_once`; without late ones this is an eager copy. `devices` copy what is
    on a CUDA device. One object takes one snapshot. `moved`, after wait() or settle(): the numbers of the pairs that
    changed too early.
    """

    def __init__(
        self,
        pairs: Sequence[_Pair],
        optimizers: Sequence[Optimizer],
        *,
        at_once: Collection[int] = (),
        devices: Devices | None = None,
    ):
        self.moved: frozenset[int] = frozenset()
        self._pairs = pairs
        self._optimizers = tuple(optimizers)
        self._at_once = frozenset(at_once)
        self._devices = Devices() if devices is None else devices
        self._from_devices: list[DeviceCopy] = []
        self._spots = _DeviceSpots(())
        self._owner: threading.Thread | None = None
        self._watch = _Watch()
        self._pieces: deque[_Piece] = deque()
        self._count = -1
        self._done: list[None] = []  # one for each piece; appending is atomic
        self._errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._settling = threading.RLock()  # a signal handler of the same thread may come here too
        self._settled = threading.Event()
        self._good = False

    def start(self) -> None:
        """Copy what must be copied now and begin with the rest; the copy will be of the state as it is in this call.

        Call it between operations of training, in the thread that trains. Raises RuntimeError the second time.
        """
        if self._owner is not None:
            raise RuntimeError("an OverlappedCopy takes one snapshot, and this one has been started")
        self._owner = threading.current_thread()
        pairs, self._pairs = self._pairs, ()
        there, notes, at_once = self._devices.present, self._watch.notes, self._at_once
        kept = {tensor.data_ptr(): tensor for tensor in _kept_by(self._optimizers) if _may_wait(tensor, there)}
        late: list[_Late] = []
        late_there: list[_Late] = []
        at_once_there: list[_Pair] = []
        into, out_of = [], []
        for number, (place, live) in enumerate(pairs):
            address = live.data_ptr()
            own = kept.get(address) if address else None  # what is empty has none
            if own is not None and number not in at_once and _may_wait(live, there):
                notes.append((number, live, live._version, own, own._version, address))
                (late_there if there and live.is_cuda else late).append((number, place, live))
            elif there and live.is_cuda:
                at_once_there.append((place, live))
            else:
                into.append(place)
                out_of.append(live)
        if at_once_there or late_there:
            self._start_devices(at_once_there, late_there)  # first: they go on by themselves
        copy_tensors(into, out_of)
        self._pieces.extend(_pieces(late, self._watch))
        self._count = len(self._pieces)
        if not self._count and not late_there:
            self._conclude()
            return
        _guard_steps()
        _running.add(self)
        if self._count:
            self._start_thread("ckpt-overlap", nice=True)

    def settle(self) -> bool:
        """Finish the copy now and check it; True: it is the moment of start(), False: it is torn and must not be used.

        For whoever trains, between its operations: the caller answers for it that nobody changes the state meanwhile.
        Raises what went wrong while copying, StateError where a device did, and RuntimeError before start().
        """
        if self._owner is None:
            raise RuntimeError("an OverlappedCopy must be started before it can be settled")
        self._conclude()
        return self._verdict()

    def wait(self) -> bool:
        """Say what settle() says: in the thread that called start() by settling, in others once training has settled.

        Training settles in the next step of an optimizer or in settle(), or its thread has ended.
        """
        if self._owner in (None, threading.current_thread()):
            return self.settle()
        while not self._settled.wait(_LOOK_S):
            if self._owner is not None and not self._owner.is_alive():
                return self.settle()
        return self._verdict()

    def before_step(self, optimizer: Optimizer) -> None:
        """Settle, where the optimizer that is about to take a step is the state's own; errors are for wait().

        Another one may have the same parameters, or be another thread's, whose word on this state is worth nothing: it
        steps after the copy, and the check comes later.
        """
        if optimizer in self._optimizers and not self._settled.is_set():
            self._conclude()
        else:
            with self._settling:
                self._finish()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _start_devices(self, at_once: Sequence[_Pair], late: Sequence[_Late]) -> None:
        self._spots = _DeviceSpots(late)
        first = self._devices.start(at_once, self._spots.live)
        self._from_devices.append(first)
        first.hold_back()
        self._spots.seen.append(first.read)
        self._from_devices.append(self._devices.start([(place, live) for _, place, live in late]))

    def _conclude(self) -> None:
        with self._settling:
            if not self._settled.is_set():
                self._finish()
                self._look_again()
            if not self._settled.is_set():  # a signal handler may have been here
                complete = len(self._done) == self._count and not self._errors
                self.moved = self._watch.moved() if complete else frozenset()
                self._good = complete and not self.moved
                if not self._spots.live:
                    _running.discard(self)
                self._watch = _Watch()
                self._settled.set()

    def _finish(self) -> None:
        """Copy what no thread has come to yet, as fast as an eager copy would, and let every thread end."""
        for _ in range(min(THREADS - 1, len(self._pieces) // 4)):
            self._start_thread("ckpt-overlap-rest", nice=False)
        self._copy(nice=False)
        for thread in self._threads:
            if thread.ident is not None:  # an interrupt may have come before its start
                thread.join()
        for copy in self._from_devices:
            self._hold_back(copy)

    def _hold_back(self, copy: DeviceCopy) -> None:
        try:
            copy.hold_back()
        except StateError as error:
            self._errors.append(error)

    def _look_again(self) -> None:
        """Have the spots on devices read once more, before anything that is queued from now on."""
        if self._spots.live:
            try:
                last = self._devices.start((), self._spots.live)
            except StateError as error:
                self._errors.append(error)
                return
            self._from_devices.append(last)
            self._hold_back(last)
            self._spots.seen.append(last.read)

    def _arrive(self) -> None:
        """Wait until what devices copy has arrived, and compare its spots; only here a host waits for a device."""
        spots = self._spots
        try:
            for copy in self._from_devices:
                copy.wait()
            if self._good and spots.live:
                moved = spots.moved()
                self.moved, self._good = moved, not moved
        finally:
            _running.discard(self)
            self._spots = _DeviceSpots(())

    def _start_thread(self, name: str, *, nice: bool) -> None:
        # Not by an executor: these refuse work when the interpreter is about to exit.
        thread = threading.Thread(target=self._copy, args=(nice,), name=name)
        self._threads.append(thread)
        thread.start()

    @torch.no_grad()
    def _copy(self, nice: bool) -> None:
        if nice:
            be_nice()
        try:
            for move, arguments in iter(self._next_piece, None):
                move(*arguments)
                self._done.append(None)
        except Exception as error:  # noqa: BLE001 (kept for wait(), which raises it)
            self._errors.append(error)

    def _next_piece(self) -> _Piece | None:
        with suppress(IndexError):
            return self._pieces.popleft()
        return None

    def _verdict(self) -> bool:
        self._arrive()  # first of all: until then nobody may touch the image
        if self._errors:
            raise self._errors[0]
        return self._good


class _Watch:
    """Note how late tensors are, so that it can be told later which of them have moved."""

    def __init__(self) -> None:
        # Number, live tensor, its version, the optimizer's own tensor (which may be another one in the same memory, and
        # then has a counter of its own), its version, the address.
        self.notes: list[tuple[int, torch.Tensor, int, torch.Tensor, int, int]] = []
        self._spots: list[tuple[int, int, int, bytes]] = []
        self._held: list[torch.UntypedStorage] = []

    def note_spot(self, number: int, live: torch.Tensor, copied: int, source: int) -> None:
        """Note a few bytes of a tensor that is copied byte by byte, and hold on to its memory; takes two addresses."""
        self._spots.append((number, copied, source, _spot(source)))
        self._held.append(live.untyped_storage())  # who assigns to `.data` lets go of memory that is being copied

    def moved(self) -> frozenset[int]:
        """Return the numbers of those that are not as they were, or not as in their copies."""
        counted = {
            number
            for number, live, version, own, own_version, address in self.notes
            if live._version != version or own._version != own_version or live.data_ptr() != address
        }
        touched = {number for number, place, live, spot in self._spots if not spot == _spot(live) == _spot(place)}
        return frozenset(counted | touched)


class _DeviceSpots:
    """The middles of late tensors on devices, `live`, and what was `seen` there: at the start, and at the check."""

    def __init__(self, late: Sequence[_Late]):
        self._late = [(number, place) for number, place, _ in late]
        self.live = [_middle(live) for _, _, live in late]
        self.seen: list[list[torch.Tensor]] = []

    def moved(self) -> frozenset[int]:
        """Return the numbers of those that are not as they were, or not as in their copies."""
        first, *later = self.seen  # more than one where an interrupt came in between
        return frozenset(
            number
            for (number, place), before, after in zip(self._late, first, later[-1], strict=True)
            if not (torch.equal(before, after) and torch.equal(before, _middle(place)))
        )


@cache
def _guard_steps() -> None:
    """Have every optimizer of the process wait for copies before it steps, from now on.

    One hook for all that stays, not one for each snapshot: to take one away while torch goes through them (within a
    step, or in another thread) is an error; it comes before those of the user's, which may change parameters; and an
    optimizer that is not in the state may share them.
    """
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    for copy in tuple(_running):
        copy.before_step(optimizer)


def _kept_by(optimizers: Sequence[Optimizer]) -> Iterator[torch.Tensor]:
    """Yield what optimizers change in their steps. Parameters without gradients are changed elsewhere, if at all."""
    for optimizer in optimizers:
        if getattr(type(optimizer).step, "hooked", False):
            for group in optimizer.param_groups:
                yield from (parameter for parameter in group["params"] if parameter.requires_grad)
            for kept in optimizer.state.values():
                if isinstance(kept, dict):
                    yield from (value for value in kept.values() if isinstance(value, torch.Tensor))


def _may_wait(live: torch.Tensor, devices: bool) -> bool:
    # Inference tensors have no version counter, and what is on a device and not in C order has no middle.
    return (live.is_cpu or (devices and live.is_cuda and live.is_contiguous())) and not live.is_inference()


def _pieces(late: Iterable[_Late], watch: _Watch) -> Iterator[_Piece]:
    """Cut copies into calls: each runs without the GIL, and not for long."""
    small: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for number, place, live in late:
        size_bytes = live.nbytes
        if size_bytes < LARGE_BYTES:
            small[0].append(place)
            small[1].append(live)
            if len(small[0]) == _SMALL_TOGETHER:
                yield torch._foreach_copy_, small
                small = ([], [])
        elif place.dtype == live.dtype and is_plain(place) and is_plain(live):
            to, source = place.data_ptr(), live.data_ptr()
            watch.note_spot(number, live, to + size_bytes // 2, source + size_bytes // 2)
            for at in range(0, size_bytes, _PIECE_BYTES):
                yield ctypes.memmove, (to + at, source + at, min(_PIECE_BYTES, size_bytes - at))
        else:
            yield _copy_by_rows, (place, live)
    if small[0]:
        yield torch._foreach_copy_, small


def _copy_by_rows(place: torch.Tensor, live: torch.Tensor) -> None:
    """Copy by torch what is transposed or the like, so little at once that it takes one thread for it."""
    rows = max(1, _ONE_THREAD_ELEMENTS * len(live) // live.numel())
    for at in range(0, len(live), rows):
        place[at : at + rows].copy_(live[at : at + rows])


def _spot(address: int) -> bytes:
    return ctypes.string_at(address, _SPOT_BYTES)


def _middle(tensor: torch.Tensor) -> torch.Tensor:
    """View the bytes in the middle of a tensor in C order."""
    count = min(tensor.numel(), _SPOT_BYTES // tensor.itemsize)
    begin = tensor.storage_offset() + (tensor.numel() - count) // 2
    return tensor.as_strided((count,), (1,), begin).view(torch.uint8)
