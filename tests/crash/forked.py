"""Children that are forked from a training process: what they try, what they have of it, and what its run must be."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.checkpoint.pausing import hold_signals
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.state.tensors.tensors import same_bits
from ckpt_tasks.testing import images_of

SIZE = 1 << 20

Phase = tuple[Any, str]


def state_at(value: float) -> dict[str, Any]:
    """Return a state whose every number is `value`: large, small and transposed tensors."""
    return {
        "large": torch.full((SIZE,), value),
        "across": torch.full((300, 200), value).t(),
        "small": [torch.full((7,), value) for _ in range(50)],
    }


def training(run_dir: Path, memory: Path | None, **options: Any) -> Checkpointer:
    options = {"step_interval": 1, "keep_every_n_steps": 1, "max_num_checkpoints": 2, **options}
    memory_dir = None if memory is None else str(memory)
    return Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=memory_dir, **options))


def forked(work: Callable[[], Any]) -> Callable[[], Any]:
    """Fork a child that does `work`; return what waits for it and says what it has returned."""
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = json.dumps(work())
        except BaseException as error:  # noqa: BLE001 (a child of a test must not come back as a second pytest)
            said = json.dumps({"failed": repr(error)})
        os.write(here, said.encode())
        os._exit(0)
    os.close(here)

    def answer() -> Any:
        with open(there, encoding="utf-8") as said:
            watch = threading.Timer(60, os.kill, (pid, signal.SIGKILL))  # a child that hangs says nothing
            watch.start()
            text = said.read()
            watch.cancel()
        assert os.waitpid(pid, 0)[1] == 0, f"the child did not end well, and said {text!r}"
        return json.loads(text)

    return answer


def tried(ckpt: Checkpointer) -> dict[str, str]:
    """Try everything that reads or writes a run, as its owner could; return how each of it was refused."""
    other = state_at(-1.0)
    verbs: dict[str, Callable[[], object]] = {
        "restore": lambda: ckpt.restore(other),
        "step": lambda: ckpt.step(90, other),
        "save": lambda: ckpt.save(91, other),
        "wait": ckpt.wait,
        "pin": lambda: ckpt.pin(1),
        "unpin": lambda: ckpt.unpin(1),
        "note": lambda: ckpt.note("child"),
        "prune": ckpt.prune,
        "dry run": lambda: ckpt.prune(dry_run=True),
        "with": ckpt.__enter__,
    }
    answers = {}
    for name, verb in verbs.items():
        try:
            answers[name] = f"returned {verb()!r}"
        except ConfigError as error:
            answers[name] = str(error)
    hold_signals(ckpt, True)
    ckpt.close()
    ckpt.__exit__(SystemExit, SystemExit(3), None)
    return answers


def inherited(directory: Path | None) -> list[str]:
    """List what this process maps and has open in a directory."""
    opened = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            opened.append(os.readlink(f"/proc/self/fd/{fd}"))
    lines = [*opened, *Path("/proc/self/maps").read_text().splitlines()]
    return [line for line in lines if directory is not None and f"{directory}/" in line]


def mapped(addresses: list[int]) -> list[int]:
    """Return which of these addresses this process has memory at."""
    spans = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
    ]
    return [address for address in addresses if any(begin <= address < end for begin, end in spans)]


def addresses_of(ckpt: Checkpointer) -> list[int]:
    views = [view for images in images_of(ckpt).values() for image in images for view in image.views.values()]
    return [view.data_ptr() for view in views if view.nbytes > 1 << 16]


def child_of(ckpt: Checkpointer, memory: Path | None, before: Any) -> dict[str, Any]:
    """Do in a child what a child may do wrong; return what it saw."""
    return {
        # First, before what is tried makes memory of the child's own where the parent has its images.
        "mapped": mapped(addresses_of(ckpt)),
        "inherited": inherited(memory),
        "tried": tried(ckpt),
        "handler": signal.getsignal(signal.SIGTERM) == before,
    }


def check_child(said: dict[str, Any], pid: int) -> None:
    assert "failed" not in said, said
    assert len(said["tried"]) == 10
    for name, answer in said["tried"].items():
        assert f"belongs to process {pid}," in answer, f"{name}: {answer}"
    assert {name: said[name] for name in ("inherited", "mapped", "handler")} == {
        "inherited": [],
        "mapped": [],
        "handler": True,
    }


def check_run(run_dir: Path, steps: list[int], owners: int = 1) -> None:
    """Compare every checkpoint with its step, and the history with that of owners which nothing disturbed."""
    run = open_run(str(run_dir))
    assert [checkpoint.step for checkpoint in reversed(run.checkpoints())] == steps
    for checkpoint in run.checkpoints():
        state, expected = state_at(-2.0), state_at(float(checkpoint.step))
        run.restore(checkpoint, state)
        for name in ("large", "across"):
            assert same_bits(state[name], expected[name]), (checkpoint.step, name)
        assert all(map(same_bits, state["small"], expected["small"])), checkpoint.step
    events = [run.history.read_entry(n)[0].event for n in range(run.head().next_n)]
    owned = [(event["kind"], event.get("pid")) for event in events if event["kind"] in ("owner", "release", "note")]
    assert owned == [("owner", os.getpid()), ("release", None)] * owners


class Forking:
    """Fork a child from another thread when the next call of a function of ours begins, and go on when it is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, phase: Phase, work: Callable[[], Any]) -> None:
        owner, name = phase
        target = sys.modules[owner] if isinstance(owner, str) else owner
        original = getattr(target, name)
        self.answers: list[Callable[[], Any]] = []
        self.armed = False

        @functools.wraps(original)
        def reached(*args: Any, **kwargs: Any) -> Any:
            if not self.answers and self.armed:
                self.armed = False
                thread = threading.Thread(target=lambda: self.answers.append(forked(work)))
                thread.start()
                thread.join()
            return original(*args, **kwargs)

        monkeypatch.setattr(target, name, reached)

    def answer(self) -> Any:
        (answer,) = self.answers
        return answer()
