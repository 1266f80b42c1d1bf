"""How mistakes that people make are made really (mistake_list.py), and what is printed of them.

`printed` makes one and returns what a person sees. docs/MISTAKES.md is written from it (`python -m
tools.pages.mistakes`), so that the page says what is printed today.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import CkptError
from tests.support.answers import error

__all__ = [
    "MISTAKES",
    "Careless",
    "Failing",
    "Mistake",
    "answering",
    "config",
    "mistake",
    "printed",
    "resume",
    "run",
    "stepped",
    "training",
]

State = dict[str, Any]
Made = Callable[[Path], str | None]


@dataclass(frozen=True)
class Mistake:
    """A mistake in words, how it is made in an empty directory, and patterns of what must be said: what, what to do."""

    words: str
    make: Made
    says: str
    do: str
    slow: bool = False

    @property
    def name(self) -> str:
        return self.make.__name__


MISTAKES: list[Mistake] = []


def mistake(words: str, *, says: str, do: str, slow: bool = False) -> Callable[[Made], Made]:
    """Add a mistake to the list; what it returns is what a command printed."""

    def add(make: Made) -> Made:
        MISTAKES.append(Mistake(words, make, says, do, slow))
        return make

    return add


def printed(one: Mistake, place: Path) -> str:
    """Make a mistake and return what is printed: warnings, then the error or what the command says."""
    with _log() as lines:
        try:
            said = one.make(place)
        except CkptError as error:
            said = f"{type(error).__name__}: {error}"
    return _steady("\n".join([*lines, *([said] if said else [])]), place)


@contextmanager
def _log() -> Iterator[list[str]]:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname}: {record.getMessage()}")

    logger, handler = logging.getLogger("ckpt_tasks"), Lines(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def _steady(text: str, place: Path) -> str:
    """Replace what differs from one machine, process and moment to another."""
    text = text.replace(f"{place}/", "").replace(str(place), "runs")
    text = text.replace(socket.gethostname(), "node-3")
    text = re.sub(r"process \d+", "process 4711", text)
    text = re.sub(r"127\.0\.0\.1:\d+", "s3.example.org", text)
    text = re.sub(r"e\d{6}-[0-9a-f]{16}", "e000002-0a61d1ef0888eacf", text)
    return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:[\d.]+\+00:00", "2026-11-25T09:30:00.000+00:00", text).strip()


# ── a training of the user's ─────────────────────────────────────────────────────────────────────────────────────


def training(width: int = 4, lr: float = 0.1, **more: Any) -> State:
    """Return a state that has trained one step, so that its optimizer has moments."""
    model = nn.Sequential()
    model.add_module("body", nn.Linear(3, width))
    model.add_module("head", nn.Linear(width, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    return {"model": model, "optimizer": optimizer, **more}


def stepped(state: State) -> State:
    state["model"](torch.ones(1, 3)).sum().backward()
    state["optimizer"].step()
    return state


def config(place: Path, name: str = "lm-7", **options: Any) -> CheckpointConfig:
    return CheckpointConfig(checkpoint_dir=str(place / name), **{"memory_dir": None, **options})


def run(place: Path, state: State, step: int = 3, **options: Any) -> None:
    """Train a run up to a step, and let it end."""
    with Checkpointer(config(place, **options)) as ckpt:
        if ckpt.checkpoints():
            ckpt.restore(state)
        ckpt.save(step, state)


def resume(place: Path, state: State, **options: Any) -> None:
    """Start the run again."""
    with Checkpointer(config(place, **options)) as ckpt:
        ckpt.restore(state)


class Careless:
    """A program that draws from a generator which is not in its state."""

    def __init__(self, lr: float = 0.1):
        self.state = training(lr=lr)
        self.noise = np.random.default_rng(0)

    def train_step(self) -> dict[str, float]:
        batch = torch.from_numpy(self.noise.random((1, 3), dtype=np.float32))
        loss = self.state["model"](batch).square().sum()
        self.state["optimizer"].zero_grad()
        loss.backward()
        self.state["optimizer"].step()
        return {"loss": float(loss.detach())}

    def evaluate(self, suite: str) -> dict[str, float]:
        return {}


@contextmanager
def answering(status: int, code: str) -> Iterator[str]:
    """Run a server that gives every request of S3 this answer; give its address."""
    answer = error(status, code)

    class Answering(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.send_response(answer.status)
            for name, value in (*answer.fields, ("Content-Length", str(len(answer.document)))):
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.document)

        do_GET = do_HEAD = do_PUT = do_DELETE = answer  # noqa: N815 (the names of http.server)

        def log_message(self, *arguments: Any) -> None:
            """Say nothing of requests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Failing:
    """The system's calls, one of which fails, as on a disk that is full or read-only."""

    def __init__(self, name: str, number: int):
        self._name, self._number = name, number

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        if name != self._name:
            return call

        def fail(*arguments: Any, **named: Any) -> Any:
            raise OSError(self._number, os.strerror(self._number))

        return fail
