"""Trainings in a framework that takes seconds to import: it is imported once, and every leg is a fork of that process.

A leg is one process of a training that is killed, or ends. What a job records goes to a file line by line, so a killed
leg has recorded what it did.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tests.support.children import Child

Lines = list[list[Any]]  # [what, step, value]
Moment = tuple[Literal["step", "after_s", "steps", "files"], float]


class Warned(logging.Handler):
    """Records what a leg is warned of."""

    def __init__(self, leg: Leg):
        super().__init__(logging.WARNING)
        self._leg, self._count = leg, 0

    def emit(self, record: logging.LogRecord) -> None:
        self._count += 1
        self._leg.record("warned", self._count, record.getMessage())


class Leg:
    """What a job is told: where its run is, what to train, and when to kill itself.

    A moment is a step that is in hand, with all saves committed ("step"); or, whatever is under way then: the n-th step
    of this leg ("steps"), the n-th time that it opens, renames, links or removes a file below its folder ("files"),
    which is in a save if not in a restore; or some seconds after its start ("after_s": somebody else kills it).
    """

    def __init__(self, folder: Path, log: Path, options: Mapping[str, Any], moment: Moment | None, number: int):
        self.folder = folder
        self.options = options
        self.label = ""  # ends the names of what is recorded, where several record alike
        self._log = log.open("a")
        self._kind = moment[0] if moment else None
        self._at = self._left = moment[1] if moment else 0
        self._number = number
        self.settle: Callable[[], Any] = lambda: None
        if self._kind == "files":
            sys.addaudithook(self._touched)

    def __deepcopy__(self, memo: Any) -> Leg:
        return self  # an average of weights copies the module that holds it

    def record(self, what: str, step: int, value: float | str) -> None:
        """Record a value, bit for bit."""
        self._log.write(
            json.dumps([what + self.label, step, value.hex() if isinstance(value, float) else value]) + "\n"
        )
        self._log.flush()

    def within(self, step: int) -> None:
        """Be killed (or sent a signal) here, if this is the step: called in the middle of a step.

        It waits for saves on their way first (`settle`), so that the next leg begins exactly here.
        """
        if self._kind == "step" and self._at == step:
            self.settle()
            self._kind = None
            os.kill(os.getpid(), self._number)
        elif self._kind == "steps":
            self._count()

    def spare(self) -> None:
        """Let this process live: another one of the leg is killed."""
        self._kind = None

    def _touched(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in {"open", "os.rename", "os.link", "os.remove"} and str(arguments[0]).startswith(f"{self.folder}/"):
            self._count()

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self._number)

    def end(self, step: int, tensors: Iterable[torch.Tensor]) -> None:
        """Record every bit of some tensors, and of the random streams."""
        seen = hashlib.sha256(repr((random.getstate(), np.random.get_state(legacy=False))).encode())  # noqa: NPY002
        for tensor in (*tensors, torch.get_rng_state()):
            seen.update(tensor.detach().numpy().tobytes())
        self.record("end", step, seen.hexdigest())


def compared(
    job: str,
    folder: Path,
    options: Mapping[str, Any],
    moments: Sequence[Moment],
    *,
    number: signal.Signals = signal.SIGKILL,
) -> tuple[Lines, list[Lines], list[int]]:
    """Train without a stop; train again, stopped at each of the moments, and to the end.

    The folder of each has an empty `memory`. Returns the lines of the first, those of each leg of the second, and the
    legs' statuses; no leg may fail by itself.
    """
    call = [job, str(folder), json.dumps(options), json.dumps([*moments]), str(int(number))]
    with Child(main, call, folder / "said") as child:
        status = child.wait(600)
        said = child.said()
        assert status == 0, said
    reference, legs, statuses = json.loads((folder / "found.json").read_text())
    assert not {*statuses} - {0, -number, -signal.SIGKILL}, said[-6000:]
    return reference, legs, statuses


def assert_equal(reference: Lines, legs: Sequence[Lines]) -> None:
    """Every value that any leg recorded is that of the training without a stop, and nothing is missing.

    What it was warned of is another matter: on a busy machine something may be late.
    """
    reference, *legs = ([line for line in lines if not line[0].startswith("warned")] for lines in (reference, *legs))
    expected = {(what, step): value for what, step, value in reference}
    assert len(expected) == len(reference)
    seen: set[tuple[str, int]] = set()
    for n, lines in enumerate(legs):
        for what, step, value in lines:
            if not what.startswith("begin"):
                assert value == expected.get((what, step)), f"leg {n} differs in {what} of step {step}"
                seen.add((what, step))
    missing = {key for key in expected if not key[0].startswith("begin")} - seen
    assert not missing, f"never trained: {sorted(missing)}"


def within(steps: Iterable[int]) -> list[Moment]:
    """Return a moment in each of some steps, the ones before being committed."""
    return [("step", step) for step in steps]


def random_moments(seed: int, kills: int = 8) -> list[Moment]:
    """Draw moments in steps, in saves and anywhere, that together are about one training of 36 steps."""
    chance = random.Random(seed)
    kinds: list[Callable[[], Moment]] = [
        lambda: ("steps", chance.randint(1, 9)),
        lambda: ("files", chance.randint(1, 500)),  # some 40 in a save, 100 in a restore
        lambda: ("after_s", chance.uniform(0.05, 0.8)),
    ]
    return [chance.choice(kinds)() for _ in range(kills)]


def begins(legs: Sequence[Lines]) -> list[int]:
    """Return at which step each leg began."""
    return [next(step for what, step, _ in lines if what == "begin") for lines in legs]


def main(arguments: Sequence[str]) -> None:
    """Run all legs in forks of this process, which imports the job's module once."""
    name, where, options, moments, number = arguments
    module, _, attribute = name.partition(":")
    os.environ |= json.loads(options).get("environment", {})  # before the module's imports, which may read it
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as in a script; a child of a fork server has its own
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # loaders have workers
    job = getattr(import_module(module), attribute)
    gc.collect()
    gc.freeze()  # or each leg goes through what the framework has imported, again and again
    folder = Path(where)
    plan = [("reference", None), *(("killed", moment) for moment in json.loads(moments)), ("killed", None)]
    logs: list[Lines] = []
    statuses = []
    for n, (which, moment) in enumerate(plan):
        log = folder / f"{n}.log"
        home = folder / which
        (home / "memory").mkdir(parents=True, exist_ok=True)
        statuses.append(_fork(job, partial(Leg, home, log, json.loads(options), moment, int(number)), moment))
        lines = log.read_text().rpartition("\n")[0] if log.exists() else ""  # a kill may come before the first one
        logs.append([json.loads(line) for line in lines.splitlines()])
    (folder / "found.json").write_text(json.dumps([logs[0], logs[1:], statuses]))


def _fork(job: Any, leg: Callable[[], Leg], moment: Moment | None) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            made = leg()
            logging.getLogger("ckpt_tasks").addHandler(Warned(made))
            job(made)
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:  # noqa: BLE001 (the test reads it)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    timer = None
    if moment is not None and moment[0] == "after_s":
        timer = threading.Timer(moment[1], os.kill, (pid, signal.SIGKILL))
    if timer:
        timer.start()
    _, waited = os.waitpid(pid, 0)
    if timer:
        timer.cancel()
        time.sleep(0)
    return os.waitstatus_to_exitcode(waited)
