"""What tests put between a store and the operating system: calls that are recorded, cut short, refused or fatal."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Literal

Mode = Literal["refused", "landed", "killed before", "killed after"]


class WatchedCalls:
    """Pass every call on to `os` and write down what was done to which path; reads are not written down."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.paths: dict[int, str] = {}

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        reads = not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_DIRECTORY)
        do = self.read if reads else self.do
        fd: int = do("open", str(path), lambda: os.open(path, flags, mode))
        self.paths[fd] = str(path)
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)  # not counted: it changes nothing on the disk

    def pwrite(self, fd: int, piece: Any, at: int) -> int:
        count: int = self.do("pwrite", self.paths[fd], lambda: os.pwrite(fd, self.cut(fd, piece), at))
        return count

    def fsync(self, fd: int) -> None:
        self.do("fsync", self.paths[fd], lambda: os.fsync(fd))

    def link(self, old: Any, new: Any) -> None:
        self.do("link", str(new), lambda: os.link(old, new))

    def replace(self, old: Any, new: Any) -> None:
        self.do("replace", str(new), lambda: os.replace(old, new))

    def unlink(self, path: Any) -> None:
        self.do("unlink", str(path), lambda: os.unlink(path))

    def mkdir(self, path: Any, mode: int) -> None:
        self.do("mkdir", str(path), lambda: os.mkdir(path, mode))

    def preadv(self, fd: int, buffers: Any, at: int) -> int:
        count: int = self.read("preadv", self.paths[fd], lambda: os.preadv(fd, buffers, at))
        return count

    def scandir(self, path: Any) -> Any:
        return self.read("scandir", str(path), lambda: os.scandir(path))

    def read(self, name: str, path: str, call: Callable[[], Any]) -> Any:
        return call()

    def cut(self, fd: int, piece: Any) -> Any:
        """Say how much of a piece one write takes: all of it."""
        return piece

    def do(self, name: str, path: str, call: Callable[[], Any]) -> Any:
        result = call()
        self.log.append((name, path))
        return result


class ShortWrites(WatchedCalls):
    """Let no write take more than `most` bytes."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def cut(self, fd: int, piece: Any) -> Any:
        return piece[: self.most]


class FailingCalls(WatchedCalls):
    """Let the n-th call fail: refused, or done and then reported as failed, or with the process killed at it.

    `only` counts calls of one name, `below` those with this text in their path. `reached` says whether it came to the
    n-th, `where` which call that was.
    """

    def __init__(self, n: int, mode: Mode, *, error: int = errno.EIO, only: str | None = None, below: str = ""):
        super().__init__()
        self.reached = False
        self.where = ""
        self._left, self._mode, self._error, self._only, self._below = n, mode, error, only, below
        self._lock = threading.Lock()

    def do(self, name: str, path: str, call: Callable[[], Any]) -> Any:
        with self._lock:  # the store is used by several threads
            if self._only in (None, name) and self._below in path:
                self._left -= 1
            now = self._left == 0 and not self.reached
            self.reached = self.reached or now
        if not now:
            return super().do(name, path, call)
        self.where = f"{name} {path}"
        if self._mode == "killed before":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._mode in ("landed", "killed after"):
            result = super().do(name, path, call)
            if self._mode == "killed after":
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "open":
                os.close(result)  # the caller never learned of it
        raise OSError(self._error, f"{os.strerror(self._error)} (call {name}, on purpose)")


class FailingReads(WatchedCalls):
    """Let the n-th read below a path fail with EIO, or with `forever` every read from the n-th on.

    `reached` says whether it came to the n-th, `where` which call that was.
    """

    def __init__(self, n: int, *, forever: bool = False, below: str = "/"):
        super().__init__()
        self.reached = False
        self.where = ""
        self._left, self._forever, self._below = n, forever, below
        self._lock = threading.Lock()

    def read(self, name: str, path: str, call: Callable[[], Any]) -> Any:
        with self._lock:
            self._left -= self._below in path
            now = self._below in path and (self._left == 0 or (self._forever and self._left < 0))
            if now and not self.reached:
                self.reached, self.where = True, f"{name} {path}"
        if now:
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} (call {name}, on purpose)")
        return call()
