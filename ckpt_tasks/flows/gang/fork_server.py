"""The fork server: a process that imports torch once, and forks a new rank within milliseconds.

Invariants

1. The server never uses a device and never starts a thread: otherwise the ranks that it forks could use neither.
2. When the agent closes its end of the socket, the server kills its ranks and ends. When the server ends, the kernel
   kills its ranks.
3. An ended rank stays a zombie until the agent sends "reap", so that no other process gets the rank's process id.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import wait
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PRELOADED = ("torch.distributed.fsdp", "torch._dynamo", "ckpt_tasks.flows.gang.rank")


def dies_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class _Server:
    def __init__(self, agent: socket.socket):
        self._agent = agent
        self._ranks: dict[int, int] = {}  # Maps a rank to its process id.
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> NoReturn:
        """Fork ranks, and tell the agent which ranks have ended, until the agent ends."""
        while True:
            ready = wait([self._agent, self._woken])  # select() takes no descriptor above 1,023.
            if self._woken in ready:
                self._woken.recv(1 << 12)
                self._tell_ended()
            if self._agent in ready:
                line, descriptors, _, _ = socket.recv_fds(self._agent, 1 << 12, 8)
                if not line:
                    self._kill()
                    os._exit(0)
                what, rank = json.loads(line)
                if what == "fork":
                    self._fork(rank, descriptors)
                else:
                    self._kill()
                    for pid in self._ranks.values():
                        os.waitpid(pid, 0)
                    self._ranks.clear()
                    self._say("gone", 0, 0)

    def _fork(self, rank: int, descriptors: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            self._become(rank, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._ranks[rank] = pid
        self._say("forked", rank, pid)

    def _become(self, rank: int, descriptors: list[int]) -> NoReturn:
        server = os.getppid()
        dies_with_parent()
        signal.set_wakeup_fd(-1)
        for end in (self._agent, self._woken, self._wakes):
            end.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if os.getppid() != server:
            os._exit(1)
        from ckpt_tasks.flows.gang.rank import main as be_rank

        be_rank(rank, *descriptors)
        sys.exit(0)

    def _kill(self) -> None:
        for pid in self._ranks.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _tell_ended(self) -> None:
        for rank, pid in self._ranks.items():
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self._say("ended", rank, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)

    def _say(self, what: str, rank: int, number: int) -> None:
        with suppress(OSError):  # If the agent has ended, the next read of its socket shows this.
            self._agent.sendall(json.dumps([what, rank, number]).encode() + b"\n")


def main(descriptor: int, *, bound: bool) -> NoReturn:
    """Import the modules that ranks need, then serve the agent through a socket.

    If `bound`, the kernel kills this server when the thread that started it ends: use a thread that ends last.
    """
    if bound:
        dies_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # The agent handles these signals, and tells the ranks.
        signal.signal(number, signal.SIG_IGN)
    for name in _PRELOADED:
        import_module(name)
    # Otherwise each rank would look through all of it several times, and copy its pages to do so: 1 s of its start.
    gc.collect()
    gc.freeze()
    _Server(socket.socket(fileno=descriptor)).serve()
