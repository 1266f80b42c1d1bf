"""Signals of a scheduler, and signals for a training in another thread: what is committed, and who ends."""

from __future__ import annotations

import os
import signal
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.checkpoint.interrupt import held_back
from tests.support.interpreters import Python
from tests.support.sweeps import quick_first

LOOP = """
import faulthandler, signal, sys, threading, time
import torch
from ckpt_tasks import CheckpointConfig, Checkpointer

own, thread, run = sys.argv[1:]
if own == "faulthandler":
    faulthandler.register(signal.SIGUSR1)
elif own == "handler":
    signal.signal(signal.SIGUSR1, lambda *_: print("the program's own", flush=True))
elif own == "returns":
    signal.signal(signal.SIGTERM, lambda *_: print("the program's own", flush=True))

def train():
    state = {"weights": torch.zeros(4)}
    ckpt.restore(state)
    for step in range(1, 2001):
        time.sleep(0.01)
        ckpt.step(step, state)
        print(f"step {step}", flush=True)

with Checkpointer(CheckpointConfig(checkpoint_dir=run, step_interval=10000, memory_dir=None)) as ckpt:
    if thread == "thread":
        trains = threading.Thread(target=train)
        trains.start()
        trains.join()
    else:
        train()
"""


def trained(
    run: Path, sent: signal.Signals, *, own: str = "none", thread: str = "main", until: str = ""
) -> tuple[int, str]:
    """Send a signal to a training at its third step; return its status and what it has printed.

    `until`: kill it after it has printed this and two more steps.
    """
    said: list[str] = []
    with Python("-c", LOOP, own, thread, run, whole_end=True) as process:
        for line in process.stdout:
            said.append(line)
            if line == "step 3\n":
                process.send(sent)
            if until and any(until in one for one in said[:-2]) and line.startswith("step"):
                process.send(signal.SIGKILL)
                break
        done = process.ends(60)
    return done.returncode, "".join(said) + done.stdout + done.stderr


def last_step(said: str) -> int:
    return max(int(line.split()[1]) for line in said.splitlines() if line.startswith("step "))


@pytest.mark.parametrize(
    ("sent", "named"),
    quick_first([(signal.SIGUSR1, ""), (signal.SIGUSR2, ""), (signal.SIGXCPU, "USR1,XCPU")]),
    ids=lambda one: getattr(one, "name", "named" if one else ""),
)
def test_a_schedulers_signal_ends_any_loop_as_sigterm_does(
    run_dir: Path, sent: signal.Signals, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's `--signal` reaches a plain loop: the step under way is committed, and the run is released.

    So does a signal that CKPT_STOP_SIGNALS names.
    """
    if named:
        monkeypatch.setenv("CKPT_STOP_SIGNALS", named)
    status, said = trained(run_dir, sent)
    run = open_run(str(run_dir))
    owner = run.head().state.owner
    assert status == -signal.SIGTERM, said
    assert [one.step for one in run.checkpoints()] == [last_step(said) + 1]
    assert owner is not None
    assert owner.released


@pytest.mark.parametrize(("own", "printed"), [("handler", "the program's own"), ("faulthandler", "most recent call")])
def test_a_signal_that_the_program_uses_stays_its_own(run_dir: Path, own: str, printed: str) -> None:
    """SIGUSR1 for which the program has a handler, in Python or below it, ends nothing and saves nothing."""
    end = printed if own == "handler" else "step 5\n"
    _, said = trained(run_dir, signal.SIGUSR1, own=own, until=end)
    assert printed in said
    assert last_step(said) > 4
    assert not open_run(str(run_dir)).checkpoints() if run_dir.exists() else True


def test_a_forked_child_leaves_a_schedulers_signal_to_its_parent(run_dir: Path) -> None:
    """P69: SIGUSR1 ends no worker that loads data for a training; a Checkpointer of the child's own takes it."""
    config = CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=None)
    with Checkpointer(config):
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGUSR1)
            with Checkpointer(CheckpointConfig(checkpoint_dir=f"{run_dir}-own", memory_dir=None)):
                signal.raise_signal(signal.SIGUSR1)
                os._exit(held_back() or 0)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == signal.SIGTERM


def test_a_training_in_another_thread_hears_sigterm(run_dir: Path) -> None:
    """The main thread holds the signal back, the thread that trains commits its step, and the process ends by it."""
    status, said = trained(run_dir, signal.SIGTERM, thread="thread")
    assert status == -signal.SIGTERM, said
    assert [one.step for one in open_run(str(run_dir)).checkpoints()] == [last_step(said) + 1]


def test_a_handler_that_returns_lets_training_in_another_thread_go_on(run_dir: Path) -> None:
    """The program's own handler of SIGTERM runs after a commit, in the main thread, and training continues."""
    _, said = trained(run_dir, signal.SIGTERM, own="returns", thread="thread", until="the program's own")
    (saved,) = (one.step for one in open_run(str(run_dir)).checkpoints())
    assert last_step(said) > saved


def test_checkpointers_that_end_in_any_order_leave_the_programs_handler(tmp_path: Path) -> None:
    """P69: the first of two Checkpointers ends before the second one, and SIGTERM then reaches the program once."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        first, second = (
            Checkpointer(CheckpointConfig(checkpoint_dir=f"{tmp_path}/{name}", memory_dir=None)) for name in "ab"
        )
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        signal.raise_signal(signal.SIGTERM)
        assert heard == []  # The second one holds it back.
        second.__exit__(None, None, None)
        assert heard == [signal.SIGTERM]
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


class Late(UserDict[str, float]):
    """Metrics that send this process SIGTERM as they are read: after `step` has asked whether a signal is pending."""

    def __iter__(self) -> Iterator[str]:
        signal.raise_signal(signal.SIGTERM)
        return super().__iter__()


def test_a_signal_that_comes_within_a_step_waits_for_the_next_one(run_dir: Path) -> None:
    """P69: SIGTERM that arrives while `step` works ends training after the next step, which is committed."""

    def ends(*_: object) -> None:
        raise KeyboardInterrupt

    config = CheckpointConfig(checkpoint_dir=str(run_dir), step_interval=100, memory_dir=None)

    def train() -> None:
        state = {"weights": torch.zeros(4)}
        with Checkpointer(config) as ckpt:
            ckpt.restore(state)
            for step in range(1, 10):
                state["weights"].fill_(step)
                ckpt.step(step, state, metrics=Late(loss=1.0) if step == 3 else {"loss": 1.0})

    before = signal.signal(signal.SIGTERM, ends)
    try:
        with pytest.raises(KeyboardInterrupt):
            train()
    finally:
        signal.signal(signal.SIGTERM, before)
    restored = {"weights": torch.zeros(4)}
    with Checkpointer(config) as ckpt:
        assert ckpt.restore(restored) == 4
    assert restored["weights"].tolist() == [4.0] * 4
