"""What stands for CUDA devices in tests: streams that go on when a test lets them, and tensors that say they are there.

What is queued in a stream of Cuda, which stands for torch.cuda, lies there until a test lets it go on, in any order
that events allow, or until somebody waits for it. The same tests on a device: test_device_cuda.py.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

Work = Callable[[], object]


class Mark:
    """A torch.cuda.Event: `done` once its stream has come to it."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.done, self.device = cuda, False, torch.device("cpu")

    def record(self, stream: Queue) -> None:
        self.device = stream.device
        stream.queue.append(lambda: setattr(self, "done", True))

    def synchronize(self) -> None:
        assert self.cuda.standing == self.device, "a thread that stands on no device makes a context on the first one"
        self.cuda.waited.append(threading.current_thread())
        self.cuda.gate.wait(60)
        if self.cuda.broken is not None:
            raise self.cuda.broken
        self.cuda.go_on(lambda: self.done)


class Queue:
    """A torch.cuda.Stream: `queue` is what it has to do, functions to call and events to wait for."""

    def __init__(self, cuda: Cuda, device: torch.device) -> None:
        self.cuda, self.device = cuda, device
        self.queue: deque[Work | Mark] = deque()
        cuda.streams.append(self)

    def wait_event(self, event: Mark) -> None:
        self.queue.append(event)

    def wait_stream(self, other: Queue) -> None:
        event = Mark(self.cuda)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.cuda.go_on(lambda: not self.queue)

    def step(self) -> bool:
        """Do the next piece of work; False where there is none, or none yet."""
        with self.cuda.lock:
            if not self.queue or (isinstance(self.queue[0], Mark) and not self.queue[0].done):
                return False
            work = self.queue.popleft()
            if not isinstance(work, Mark):
                work()
            return True


class Cuda:
    """What of torch.cuda is used, cudart included; nothing that waits for a whole device."""

    def __init__(self) -> None:
        self.streams: list[Queue] = []
        self.copying: list[Queue] = []  # those of them that our code made
        self.lock = threading.RLock()
        self.gate = threading.Event()  # closed: no event comes
        self.gate.set()
        self.broken: RuntimeError | None = None
        self.waited: list[threading.Thread] = []  # the threads that stood still
        self.code = 0  # what cudaHostRegister answers
        self.pinned: dict[int, int] = {}
        self.registered: list[tuple[int, int, int, threading.Thread]] = []
        self.faults: list[str] = []  # what was unregistered at a bad time
        self._current: dict[torch.device, Queue] = {}
        self._here = threading.local()  # a thread's device, and the stream that it is in

    @property
    def standing(self) -> torch.device | None:
        """The device that this thread has asked for."""
        return getattr(self._here, "device", None)

    def is_initialized(self) -> bool:
        return True

    def Stream(self, device: torch.device) -> Queue:  # noqa: N802 (torch's name)
        self.copying.append(Queue(self, device))
        return self.copying[-1]

    def Event(self, *, blocking: bool) -> Mark:  # noqa: N802 (torch's name)
        assert blocking, "whoever waits would keep a core busy"
        return Mark(self)

    def current_stream(self, device: torch.device) -> Queue:
        inside: Queue | None = getattr(self._here, "stream", None)
        if inside is not None and inside.device == device:
            return inside
        with self.lock:
            if device not in self._current:
                self._current[device] = Queue(self, device)
            return self._current[device]

    @contextmanager
    def stream(self, stream: Queue) -> Iterator[None]:
        before, self._here.stream = getattr(self._here, "stream", None), stream
        yield
        self._here.stream = before

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self._here.device = self.standing, device
        yield
        self._here.device = before

    def cudart(self) -> Cuda:
        assert self.standing is not None, "a call of cudart from no device makes a context on the first one"
        return self

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802 (CUDA's name)
        self.registered.append((address, size_bytes, flags, threading.current_thread()))
        if not self.code:
            assert address not in self.pinned
            self.pinned[address] = size_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 (CUDA's name)
        size_bytes = self.pinned.pop(address)
        if not is_mapped(address, size_bytes):
            self.faults.append("unmapped before")
        if any(stream.queue for stream in self.copying):
            self.faults.append("still being written")
        return 0

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802 (CUDA's name)
        return f"error {code}"

    def go_on(self, until: Callable[[], bool]) -> None:
        while not until():
            moved = [stream.step() for stream in [*self.streams]]
            assert any(moved) or until(), "the streams wait for each other"


def stand_for_cuda(patch: pytest.MonkeyPatch) -> Cuda:
    """Have a Cuda stand for torch.cuda as long as the patch lasts."""
    cuda = There.stand_in = Cuda()
    for name in ("is_initialized", "Stream", "Event", "current_stream", "stream", "device", "cudart"):
        patch.setattr(torch.cuda, name, getattr(cuda, name))
    return cuda


def is_mapped(address: int, size_bytes: int) -> bool:
    with open("/proc/self/maps", encoding="ascii", errors="replace") as lines:
        spans = [[int(end, 16) for end in line.split(maxsplit=1)[0].split("-")] for line in lines]
    return any(begin <= address and address + size_bytes <= end for begin, end in spans)


class Still(torch.Tensor):
    """A tensor that says that it is on the first device; what is done with it is done at once."""

    ordinal = 0
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    device = property(lambda self: torch.device("cuda", self.ordinal))


class There(Still):
    """A tensor on the first device of the `stand_in`: what our code does with it is queued in the current stream."""

    stand_in: Cuda

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ == "_foreach_copy_":
            for place, live in zip(*args, strict=True):
                (there,) = (type(one) for one in (place, live) if isinstance(one, There))
                there.queue(partial(plain(place).copy_, plain(live)))
                if not (kwargs or {}).get("non_blocking"):
                    cls.stand_in.current_stream(torch.device("cuda", there.ordinal)).synchronize()
            return None
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def queue(cls, work: Work) -> None:
        cls.stand_in.current_stream(torch.device("cuda", cls.ordinal)).queue.append(work)


class Elsewhere(There):
    """A tensor on the second device."""

    ordinal = 1


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory with a version counter of its own: what a kernel writes moves none when it runs."""
    return tensor.detach().as_subclass(torch.Tensor).data


def write(live: torch.Tensor, value: float) -> None:
    """Queue a kernel that fills a tensor, as training would."""
    assert isinstance(live, There)
    memory = plain(live)
    live.queue(lambda: memory.fill_(value))


def is_all(tensor: torch.Tensor, value: float) -> bool:
    return bool((plain(tensor) == value).all())


def on(kind: type[torch.Tensor], *shape: int, value: float = 1.0) -> torch.Tensor:
    return torch.full(shape, value).as_subclass(kind)


def pairs_of(live: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.full(tensor.shape, -1.0), tensor.detach()) for tensor in live]
