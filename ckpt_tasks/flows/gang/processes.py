"""Start the processes of a gang, receive their messages, notice their end, and end them: the work of an agent.

Invariants

1. No rank outlives its agent: ranks and fork server end when the agent's ends of their sockets close, and the kernel
   kills the ranks when the fork server ends.
2. When `kill` returns, no rank runs any more, so another process may own the run.
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO

from ckpt_tasks.errors import RankError
from ckpt_tasks.flows.gang.engine import Heard, RankProcess
from ckpt_tasks.flows.gang.messages import Begin, Channel, Message
from ckpt_tasks.flows.gang.reporting import oom_kills
from ckpt_tasks.process import fill_standard_descriptors

# Use the agent's sys.path in the fork server, so that a rank finds the same modules.
_SERVER = """
import json, sys
sys.path[:] = json.loads(sys.argv[3])
from ckpt_tasks.flows.gang.fork_server import main
main(int(sys.argv[1]), bound=sys.argv[2] == "bound")
"""
_START_S = 300.0  # A busy machine imports torch slowly.
_END_S = 30.0
_STATUS_S = 1.0
_CAUSES_S = 0.05


@dataclass(eq=False, kw_only=True)
class _Rank(RankProcess):
    channel: Channel
    stacks: IO[bytes]

    def look(self) -> None:
        """Check whether SIGSTOP or a debugger has stopped the rank, and which stacks the rank has written."""
        with suppress(OSError):
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            self.is_stopped = self.status is None and state in "Tt"
        self.stacks.seek(0)
        self.written = self.stacks.read().decode(errors="replace").strip()


def _written(ranks: Sequence[RankProcess]) -> list[str]:
    return [rank.written for rank in ranks]


@dataclass
class _Server:
    process: subprocess.Popen[bytes]
    end: socket.socket
    rest: bytes = b""
    said: list[tuple[str, int, int]] = field(default_factory=list)


class Gang:
    """The `Engine` of one host, for a whole gang or a gang's ranks on one node. `close` ends all processes."""

    def __init__(self) -> None:
        self.ranks: list[_Rank] = []
        self._server: _Server | None = None
        self._oom_kills = 0

    def prepare(self) -> None:
        """Start the fork server, if it does not run; do not wait until it has imported torch."""
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

    def await_server(self) -> None:
        """Wait until the fork server has imported torch; call this only while there are no ranks."""
        self._ask("reap", 0, [])
        self._answer("gone", _START_S)

    def start(self, begin: Begin) -> int:
        """Start the ranks that a Begin names; return the port of rank 0. Raises RankError if the fork server fails.

        Rank 0 listens only at the address `begin.host`, on `begin.port` (0: on any free port).
        """
        self.prepare()
        self._oom_kills = oom_kills()
        with socket.socket() as listening:
            if begin.first_rank == 0:
                listening.bind((begin.host, begin.port))
                listening.listen()
                begin = replace(begin, port=listening.getsockname()[1])
            for rank in range(begin.first_rank, begin.first_rank + begin.local_size):
                self._fork(rank, listening)
        self.tell(self.ranks, begin)
        return begin.port

    def _fork(self, rank: int, listening: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        stacks = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the rank's process)
        passed = [theirs.fileno(), stacks.fileno(), *([listening.fileno()] if rank == 0 else [])]
        self.ranks.append(_Rank(rank=rank, pid=0, channel=Channel(ours), stacks=stacks))
        with theirs:
            self._ask("fork", rank, passed)
            self.ranks[-1].pid = self._answer("forked", _START_S)

    def has_more(self) -> bool:
        """Return False: on one host all requested ranks are started."""
        return False

    def keep_to(self, ranks: int | None) -> bool:
        """Return False: the number of ranks never changes."""
        return False

    def has_room(self) -> bool:
        """Return True: on one host the ranks are started at once."""
        return True

    def tell(self, ranks: Sequence[RankProcess], message: Message) -> None:
        """Send a message to some of the ranks."""
        wanted = {rank.rank for rank in ranks}
        for rank in self.ranks:
            if rank.rank in wanted:
                rank.channel.send(message)

    def hear(self, timeout_s: float) -> Heard:
        """Return messages since the last call, and None for each rank that has ended; wait at most `timeout_s`."""
        assert self._server is not None
        channels = {rank.channel.fileno(): rank for rank in self.ranks if not rank.channel.closed}
        ready = wait([*channels, self._server.end], timeout_s)
        if self._server.end in ready:
            self._listen()
        heard: Heard = []
        for descriptor, rank in channels.items():
            if descriptor in ready:
                heard += [(rank, message) for message in rank.channel.receive()]
        for rank in self.ranks:
            if rank.channel.closed or rank.status is not None:
                heard.append((rank, None))
        return heard

    def hear_causes(self) -> Heard:
        """Wait 50 ms, and return messages: the end of a rank arrives before the failures that it causes."""
        return self.hear(_CAUSES_S)

    def look(self) -> None:
        """Check every rank; wait at most 1 s for the exit statuses of ended ranks."""
        end_s = time.monotonic() + _STATUS_S
        while self._server is not None and any(rank.channel.closed and rank.status is None for rank in self.ranks):
            left_s = end_s - time.monotonic()
            if left_s <= 0 or (wait([self._server.end], left_s) and not self._listen()):
                break
        for rank in self.ranks:
            rank.look()
            rank.out_of_memory = rank.status == -signal.SIGKILL and oom_kills() > self._oom_kills

    def write_stacks(self, timeout_s: float) -> None:
        """Have every rank write its stacks; wait only for running ranks: a stopped rank writes when it continues."""
        self.look()
        for rank in self.ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)
        end_s, before, running = time.monotonic() + timeout_s, None, [r for r in self.ranks if not r.is_stopped]
        while time.monotonic() < end_s and not (all(rank.written for rank in running) and before == _written(running)):
            # A file that has not grown since the last check is complete.
            before = _written(running)
            time.sleep(_CAUSES_S)
            self.look()

    def kill(self) -> None:
        """Kill every rank, and return when all have ended."""
        if not self.ranks:
            return
        for rank in self.ranks:
            if rank.pid and rank.status is None:
                # The rank runs, or is a zombie that the fork server has not reaped yet, or ended with the fork server.
                with suppress(ProcessLookupError):
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
        with suppress(OSError):  # If the fork server has ended, `_answer` raises an error.
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
        """Receive from the fork server; return False if the fork server has ended, and all ranks with it."""
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
                self.ranks[rank - self.ranks[0].rank].status = number
            else:
                server.said.append((what, rank, number))
        if not data:
            for each in self.ranks:
                each.lost = "the fork server, which holds them, has ended"
                each.status = -signal.SIGKILL if each.status is None else each.status
        return bool(data)

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        server.end.close()  # The fork server then ends, and kills all remaining ranks.
        try:
            server.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
