"""A rank of a gang: a process that connects to the other ranks, builds the program and carries out orders."""

from __future__ import annotations

import faulthandler
import fcntl
import logging
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from queue import SimpleQueue
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.pausing import remember
from ckpt_tasks.checkpoint.ranks.connection import open_store
from ckpt_tasks.checkpoint.save.listening import Listener
from ckpt_tasks.flows.gang.joining import take_device
from ckpt_tasks.flows.gang.messages import (
    Begin,
    Channel,
    Done,
    Logged,
    Order,
    RankFailed,
    RankMoved,
    Stepped,
    Stop,
    Told,
    read_config,
    write_progress,
)
from ckpt_tasks.flows.gang.parallel import RankSession, check_parallel
from ckpt_tasks.flows.session.session import Progress, watcher
from ckpt_tasks.format.records import checkpoint_item, read_checkpoint
from ckpt_tasks.process import start_thread
from ckpt_tasks.storage.port import watching

STACKS = signal.SIGUSR1  # On this signal a rank writes the stacks of its threads.
_JOIN_S = 120.0
_TELL_EVERY_S = 0.05
_MOVED_EVERY_S = 1.0
_SIOCGIFADDR = 0x8915  # The ioctl's number on Linux.
_log = logging.getLogger("ckpt_tasks")


class StoppedError(BaseException):
    """A signal was delivered: the step is committed, and the run is released."""


def raise_stopped(number: int, frame: FrameType | None) -> NoReturn:
    """Raise StoppedError with a signal's number; used as a signal handler."""
    raise StoppedError(number)


def main(rank: int, agent_fd: int, stacks_fd: int, listening_fd: int | None = None) -> None:
    """Run a rank until the agent ends it; on the socket `listening_fd` rank 0 listens for the other ranks."""
    faulthandler.enable(stacks_fd)
    faulthandler.register(STACKS, stacks_fd, all_threads=True)
    channel = Channel(socket.socket(fileno=agent_fd))
    os.register_at_fork(after_in_child=channel.close)  # A DataLoader's worker would hide this rank's end.
    _Rank(rank, channel).be(listening_fd)


class _Rank:
    def __init__(self, rank: int, channel: Channel):
        self._rank = rank
        self._channel = channel
        self._orders: SimpleQueue[Order] = SimpleQueue()
        self._steps: list[dict[str, Any]] = []
        self._told_s = self._moved_s = 0.0

    def be(self, listening_fd: int | None) -> None:
        """Carry out orders; send an exception to the agent, which then kills this process."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # The agent handles a terminal's Ctrl-C.
        signal.signal(signal.SIGTERM, raise_stopped)
        [begin, *more] = self._channel.receive()
        assert isinstance(begin, Begin)
        sys.orig_argv[:] = begin.command  # Checkpoints name the command that has started all this.
        watcher.set(self._watch)
        logging.getLogger().addHandler(_Forward(self._rank, self._channel))
        _log.setLevel(logging.INFO if self._rank == 0 else logging.WARNING)
        start_thread(self._listen, more, name="ckpt-orders")
        try:
            _join(self._rank, begin, listening_fd)
            config, flow_run_id = read_config(begin.config), begin.flow_run_id
            with watching(self._moved), Checkpointer(config, flow_run_id=flow_run_id) as ckpt:
                if self._rank == 0:
                    ckpt.listen(self._listener())
                self._serve(RankSession(ckpt, begin.program, begin.params), begin.size)
            dist.destroy_process_group()
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 (sent to the agent; also a program's SystemExit)
            self._fail(error, 0)
        self._channel.send(Done(position=0))

    def _serve(self, session: RankSession, size: int) -> None:
        """Carry out orders up to "close"; then raise StoppedError if the snapshots in memory must be kept."""
        carried_out: dict[str, Callable[..., Any]] = {
            "restore": lambda back: self._restore(session, size, back),
            "run": session.run,
            "save": session.save,
            "note": lambda what, fields: session.note(what, **fields),
            "evaluate": lambda checkpoint, suite: session.evaluate(read_checkpoint(checkpoint), suite),
        }
        while True:
            order = self._orders.get()
            if order.name == "close":
                if order.arguments["keep"]:
                    raise StoppedError
                return
            stopped, answer, began = None, None, (time.perf_counter(), time.thread_time())
            try:
                answer = carried_out[order.name](**order.arguments)
            except StoppedError as stop:
                stopped = int(stop.args[0])
            except BaseException as error:  # noqa: BLE001 (sent to the agent)
                # Do not leave the Checkpointer's block: its end would wait for the other ranks.
                self._fail(error, session.position)
            self._tell_steps()
            commit, report = session.last_commit, session.ckpt.last_restore
            took_s = max(time.perf_counter() - began[0], 1e-9)
            self._channel.send(
                Done(
                    position=session.position,
                    metrics=session.metrics,
                    step_s=session.step_s,
                    commit=checkpoint_item(commit) if commit else None,
                    stopped=stopped,
                    busy=min(1.0, (time.thread_time() - began[1]) / took_s),
                    source=report.source if report and order.name == "restore" else "",
                    measured=answer if answer and order.name == "evaluate" else {},
                )
            )

    def _restore(self, session: RankSession, size: int, back: Mapping[str, Any]) -> None:
        if size > 1:
            check_parallel(session.program, size)
        remember(session.ckpt, back)
        session.restore()

    def _fail(self, error: BaseException, step: int) -> NoReturn:
        """Send the error to the agent, and wait until the agent kills this process."""
        self._channel.send(RankFailed.of(error, step))
        while True:
            with suppress(StoppedError):
                signal.pause()

    def _listen(self, messages: list[Any]) -> None:
        """Receive orders, in a thread of its own; kill this process when the agent has ended."""
        while not self._channel.closed:
            for message in messages:
                if isinstance(message, Stop):
                    # Send SIGTERM to the main thread: the signal interrupts a blocked call and runs the handler.
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
                else:
                    self._orders.put(message)
            messages = self._channel.receive()
        os.kill(os.getpid(), signal.SIGKILL)

    def _watch(self, progress: Progress) -> None:
        """Tell the agent about completed steps, at most every 50 ms."""
        if self._rank != 0:
            self._steps.clear()
        self._steps.append(write_progress(progress))
        if time.monotonic() - self._told_s > _TELL_EVERY_S:
            self._tell_steps()

    def _tell_steps(self) -> None:
        if self._steps:
            self._channel.send(Stepped(steps=self._steps))
        self._steps, self._told_s = [], time.monotonic()

    def _moved(self) -> None:
        """Tell the agent, from any thread, that the store moves bytes, so that this rank does not count as hung."""
        if time.monotonic() - self._moved_s > _MOVED_EVERY_S:
            self._moved_s = time.monotonic()
            self._channel.send(RankMoved())

    def _listener(self) -> Listener:
        def tell(event: str, value: dict[str, Any]) -> None:
            self._channel.send(Told(event=event, value=value))

        return Listener(
            committed=lambda checkpoint: tell("committed", checkpoint_item(checkpoint)),
            failed=lambda step, why: tell("failed", asdict(RankFailed.of(why, step))),
            restored=lambda report: tell("restored", asdict(report)),
        )


class _Forward(logging.Handler):
    """Sends this rank's log to the agent; all ranks except 0 add their number."""

    def __init__(self, rank: int, channel: Channel):
        super().__init__()
        self._prefix = f"rank {rank}: " if rank else ""
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; do nothing in a forked child, where the channel is closed."""
        if not self._channel.closed:
            text = self._prefix + self.format(record)
            self._channel.send(Logged(logger=record.name, level=record.levelno, text=text))


def _join(rank: int, begin: Begin, listening_fd: int | None) -> None:
    """Join the process group of the ranks: NCCL if each rank of this host has a device, else Gloo."""
    local = {"LOCAL_RANK": rank - begin.first_rank, "LOCAL_WORLD_SIZE": begin.local_size}
    place = {"RANK": rank, "WORLD_SIZE": begin.size, **local, "MASTER_ADDR": begin.host, "MASTER_PORT": begin.port}
    os.environ |= {name: str(value) for name, value in place.items()}
    if interface := _interface_of(begin.host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # Gloo would use the host name's interface.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // begin.local_size))
    backend = take_device(rank - begin.first_rank, begin.local_size)
    at = begin.host, begin.port, begin.size
    store = open_store(*at, holds=rank == 0, join_s=_JOIN_S, listening_fd=listening_fd)
    own = dist.PrefixStore(begin.secret, store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=own, rank=rank, world_size=begin.size)


def _interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 address; None if no interface has it."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
