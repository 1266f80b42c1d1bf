"""The processes of a gang, as its agent sees them: start them, hear them, see them end, end them.

Invariants

1. No rank outlives its agent: the ranks and the fork server see end of file, and the kernel kills what does not.
2. `kill` returns when no rank runs any more, so that what follows may own the run.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO

from ckpt_tasks.errors import RankError
from ckpt_tasks.gang.messages import HOST, Channel, Message
from ckpt_tasks.process.processes import fill_standard_descriptors

__all__ = ["Gang", "RankProcess"]

# The agent's path, so that a rank finds what the agent would.
_SERVER = """
import json, sys
sys.path[:] = json.loads(sys.argv[3])
from ckpt_tasks.gang.fork_server import main
main(int(sys.argv[1]), bound=sys.argv[2] == "bound")
"""
_START_S = 300.0  # to import torch, on a busy machine
_END_S = 30.0
_STATUS_S = 1.0


@dataclass(eq=False)
class RankProcess:
    """A rank's process: what it says, where it writes its stacks, how it has ended (None: not known), its last step."""

    rank: int
    pid: int
    channel: Channel
    stacks: IO[bytes]
    status: int | None = None
    step: int = 0

    @property
    def is_stopped(self) -> bool:
        """Whether SIGSTOP or a debugger holds it."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        return False

    def written_stacks(self) -> str:
        """Return the stacks that it has written."""
        self.stacks.seek(0)
        return self.stacks.read().decode(errors="replace").strip()


@dataclass
class _Server:
    process: subprocess.Popen[bytes]
    end: socket.socket
    rest: bytes = b""
    said: list[tuple[str, int, int]] = field(default_factory=list)


class Gang:
    """Up to one gang at a time, of `size` ranks. `close` ends all of it."""

    def __init__(self, size: int):
        self.size = size
        self.ranks: list[RankProcess] = []
        self._server: _Server | None = None

    def prepare(self) -> None:
        """Start the fork server, if there is none; do not wait until it has imported torch."""
        if self._server is not None and self._server.process.poll() is None:
            return
        self._end_server()
        fill_standard_descriptors()
        ours, theirs = socket.socketpair()
        bound = "bound" if threading.current_thread() is threading.main_thread() else "free"
        command = [sys.executable, "-c", _SERVER, str(theirs.fileno()), bound, json.dumps(sys.path)]
        with theirs:
            process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), start_new_session=True, stdin=subprocess.DEVNULL
            )
        self._server = _Server(process, ours)

    def start(self) -> int:
        """Start the ranks; return the port at which rank 0 listens. Raises RankError if the fork server does not."""
        self.prepare()
        with socket.socket() as listening:
            listening.bind((HOST, 0))
            listening.listen()
            for rank in range(self.size):
                self._fork(rank, listening)
            return int(listening.getsockname()[1])

    def _fork(self, rank: int, listening: socket.socket) -> None:
        assert self._server is not None
        ours, theirs = socket.socketpair()
        stacks = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the rank's process)
        passed = [theirs.fileno(), stacks.fileno(), *([listening.fileno()] if rank == 0 else [])]
        self.ranks.append(RankProcess(rank, 0, Channel(ours), stacks))
        with theirs:
            self._ask("fork", rank, passed)
            self.ranks[rank].pid = self._answer("forked", _START_S)

    def hear(self, timeout_s: float) -> list[tuple[RankProcess, Message | None]]:
        """Return what the ranks have said since, and None for each that has ended; wait `timeout_s` at most."""
        assert self._server is not None
        channels = {rank.channel.fileno(): rank for rank in self.ranks if not rank.channel.closed}
        ready = wait([*channels, self._server.end], timeout_s)
        if self._server.end in ready:
            self._listen()
        heard: list[tuple[RankProcess, Message | None]] = []
        for descriptor, rank in channels.items():
            if descriptor in ready:
                heard += [(rank, message) for message in rank.channel.receive()]
        for rank in self.ranks:
            if rank.channel.closed or rank.status is not None:
                heard.append((rank, None))
        return heard

    def await_status(self, rank: RankProcess) -> int | None:
        """Return how a rank that has ended did: its exit status, or minus the number of a signal; None: not known."""
        end_s = time.monotonic() + _STATUS_S
        while rank.status is None and self._server is not None and (left_s := end_s - time.monotonic()) > 0:
            if wait([self._server.end], left_s) and not self._listen():
                break
        return rank.status

    def kill(self) -> None:
        """Kill every rank, and return when all have ended."""
        if not self.ranks:
            return
        for rank in self.ranks:
            if rank.pid and rank.status is None:
                with suppress(ProcessLookupError):  # it is a zombie until the fork server is asked, or gone with it
                    os.kill(rank.pid, signal.SIGKILL)
        try:
            self._ask("reap", 0, [])
            self._answer("gone", _END_S)
        except RankError:
            self._end_server()
        for rank in self.ranks:
            rank.channel.close()
            rank.stacks.close()
        self.ranks = []

    def await_end(self, timeout_s: float) -> None:
        """Wait until every rank has ended by itself, or for `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while any(rank.status is None for rank in self.ranks) and time.monotonic() < end_s:
            if self._server is None or (wait([self._server.end], 1.0) and not self._listen()):
                return

    def close(self) -> None:
        """Kill the ranks and the fork server."""
        self.kill()
        self._end_server()

    def _ask(self, what: str, rank: int, descriptors: list[int]) -> None:
        if self._server is None:
            raise RankError("the fork server of the ranks is gone")
        with suppress(OSError):  # it is gone: there will be no answer
            socket.send_fds(self._server.end, [json.dumps([what, rank]).encode()], descriptors)

    def _answer(self, what: str, timeout_s: float) -> int:
        server, end_s = self._server, time.monotonic() + timeout_s
        assert server is not None
        while not server.said or server.said[-1][0] != what:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or (wait([server.end], left_s) and not self._listen()):
                raise RankError(
                    "the fork server of the ranks has ended, or says nothing", hint="Its own words are in the log."
                )
        return server.said.pop()[2]

    def _listen(self) -> bool:
        """Take what the fork server says; return False if it has ended, and all ranks with it."""
        server = self._server
        assert server is not None
        try:
            data = server.end.recv(1 << 16)
        except ConnectionError:
            data = b""
        *lines, server.rest = (server.rest + data).split(b"\n")
        for line in lines:
            what, rank, number = json.loads(line)
            if what == "ended":
                self.ranks[rank].status = number
            else:
                server.said.append((what, rank, number))
        if not data:
            for each in self.ranks:
                each.status = -signal.SIGKILL if each.status is None else each.status
        return bool(data)

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        server.end.close()  # it ends, and kills what is left
        try:
            server.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
