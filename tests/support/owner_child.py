"""Another process with a Checkpointer on the same directory, which does what it is told."""

from __future__ import annotations

import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import CkptError
from tests.support.interpreters import Process


class OwnerChild:
    """Start a process; `tell` and `ask` send it a verb: acquire, restore, save N, step N, measure N, sleep S, close."""

    def __init__(self, root: Path, flow_run_id: str = "", timeout_s: float = 120.0, take_over: bool = False):
        self._pipe, theirs = Pipe()
        arguments = (theirs, str(root), flow_run_id or None, timeout_s, take_over)
        self.process = Process(_obey, arguments)
        self.process.start()
        theirs.close()

    def tell(self, line: str) -> None:
        self._pipe.send(line)

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.answer()

    def answer(self) -> str:
        assert self._pipe.poll(120), "the child does not answer"
        return str(self._pipe.recv())

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _obey(pipe: Connection, root: str, flow_run_id: str | None, timeout_s: float, take_over: bool) -> None:
    config = CheckpointConfig(checkpoint_dir=root, owner_timeout_s=timeout_s)
    ckpt = Checkpointer(config, flow_run_id=flow_run_id, take_over=take_over)
    state = {"x": 1}
    while True:
        verb, _, rest = pipe.recv().partition(" ")
        try:
            answer = _do(ckpt, state, verb, rest)
        except CkptError as error:
            answer = type(error).__name__
        if answer:
            pipe.send(answer)


def _do(ckpt: Checkpointer, state: dict[str, Any], verb: str, rest: str) -> str:
    if verb == "acquire":
        ckpt.acquire()
    if verb == "restore":
        return f"ok {ckpt.restore(state)} {state['x']}"
    if verb == "save":
        state["x"] = int(rest)
        return f"ok {ckpt.save(int(rest), state).step}"
    if verb == "step":
        ckpt.step(int(rest), state)
    if verb == "measure":
        ckpt.step(int(rest), state, metrics={"loss": 1 / int(rest)})
    if verb == "sleep":
        time.sleep(float(rest))
        return ""
    if verb == "close":
        ckpt.close()
    return "ok"
