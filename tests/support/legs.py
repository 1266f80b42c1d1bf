"""Trainings in a framework that takes seconds to import: each test process imports it once, and forks are the rest.

A leg is one process of a training that is killed, or ends. What a job records goes to a file line by line, so a killed
leg has recorded what it did.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from tests.support.interpreters import Process

ROOT = Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1
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
        self.about = [str(folder), str(log), {**options}, moment, number]  # makes it again in another process
        self.folder = folder
        self.options = options
        self.label = ""  # ends the names of what is recorded, where several record alike
        self._log = log.open("a")
        self._kind = moment[0] if moment else None
        self._at = self._left = moment[1] if moment else 0
        self._number, self._is_killed = number, True
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
            if self._is_killed:
                os.kill(os.getpid(), self._number)
        elif self._kind == "steps":
            self._count()

    @property
    def is_last(self) -> bool:
        """True if nobody kills this leg."""
        return self._kind is None

    def spare(self, *, settles: bool = False) -> None:
        """Let this process live: another one of the leg is killed.

        `settles`: this one waits for saves there as well, or its next step's snapshot would replace the one that the
        killed one waits for, and nothing of the step before would be committed.
        """
        self._is_killed = False
        if not (settles and self._kind == "step"):
            self._kind = None

    @contextmanager
    def ranks_end(self) -> Iterator[None]:
        """End as the killed rank did: the launcher names that rank, or the other one, which has lost its peer."""
        try:
            yield
        except (ProcessExitedException, ProcessRaisedException) as error:
            if isinstance(error, ProcessRaisedException) and "Connection closed by peer" not in str(error):
                raise
            os.kill(os.getpid(), signal.SIGKILL)

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
    module: str = "",
) -> tuple[Lines, list[Lines], list[int]]:
    """Train without a stop; train again, stopped at each of the moments, and to the end.

    The folder of each has an empty `memory`. `module` is imported once for all, if it is not the job's. Returns the
    lines of the first, those of each leg of the second, and the legs' statuses; no leg may fail by itself.
    """
    call = [job, str(folder), json.dumps(options), json.dumps([*moments]), str(int(number))]
    said = hosted(module or job.partition(":")[0], options.get("environment", {}), main, call, folder / "said")
    reference, legs, statuses = json.loads((folder / "found.json").read_text())
    ends = signal.SIGTERM if number is signal.SIGUSR1 else number  # the signal before the end of a job is as SIGTERM
    assert not {*statuses} - {0, -ends, -signal.SIGKILL}, said[-6000:]
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


def page(leg: Leg) -> None:
    """Run the block of a page, which may call `leg.within`, as a program in the leg's folder."""
    os.chdir(leg.folder)
    exec(leg.options["block"], {"__name__": "__main__", "leg": leg})


def assert_page_goes_on(name: str, module: str, folder: Path, dying: Callable[[str], str], **options: Any) -> None:
    """Assert that a block of docs/, killed once as `dying` changes it, makes the run of no kill.

    `name` is of a page and a heading, KERAS.md#jax: the first block below the heading is taken.

    The two runs are `folder`/reference/runs/first and `folder`/killed/runs/first.
    """
    page, heading = name.split("#")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    _, text = re.split(rf"(?im)^## {heading}$", text, maxsplit=1)
    block = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0]
    options = {**options, "block": dying(block)}
    _, _, statuses = compared("tests.support.legs:page", folder, options, [("steps", 13)], module=module)
    assert statuses == [0, -9, 0]


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


class _Host:
    """A process that has imported a module, and calls functions in forks of itself, one after the other."""

    def __init__(self, module: str, environment: Mapping[str, str]):
        self.has = module, environment
        self._calls, theirs = multiprocessing.Pipe()
        self._process = Process(_serve, (module, {**environment}, theirs))
        self._process.start()
        theirs.close()

    def call(self, function: Callable[[Sequence[str]], None], arguments: Sequence[str], output: Path) -> int:
        self._calls.send((function, [*arguments], output))
        assert self._calls.poll(600), output.read_text()
        status: int = self._calls.recv()
        return status

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._calls.close()


_MOST_HOSTS = 2  # A framework takes half a gigabyte.
_hosts: list[_Host] = []  # The one that was used last comes last.


def hosted(
    module: str,
    environment: Mapping[str, str],
    function: Callable[[Sequence[str]], None],
    arguments: Sequence[str],
    output: Path,
) -> str:
    """Call a function in a fork of a process that has imported a module; return what it said, which goes to `output`.

    `environment` is set before the import, which may read it. The function may not fail.
    """
    _hosts.sort(key=lambda host: host.has == (module, environment))
    if not _hosts or _hosts[-1].has != (module, environment):
        while len(_hosts) >= _MOST_HOSTS:
            _hosts.pop(0).end()
        _hosts.append(_Host(module, environment))
    try:
        status = _hosts[-1].call(function, arguments, output)
    except BaseException:  # whatever it was: the next test gets another one
        _hosts.pop().end()
        raise
    said = output.read_text()
    assert status == 0, said
    return said


def _serve(module: str, environment: Mapping[str, str], calls: Connection) -> None:
    """Import a module, and fork for each call."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.environ |= environment
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as in a script; a child of a fork server has its own
    import_module(module)
    gc.collect()
    gc.freeze()  # or each leg goes through what the framework has imported, again and again
    while True:
        try:
            function, arguments, output = calls.recv()
        except EOFError:
            return
        calls.send(_in_fork(partial(_said, function, arguments, output)))


def _said(function: Callable[[Sequence[str]], None], arguments: Sequence[str], output: Path) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(arguments)


def main(arguments: Sequence[str]) -> None:
    """Run all legs in forks of this process, which has imported the job's module."""
    name, where, options, moments, number = arguments
    module, _, attribute = name.partition(":")
    job = getattr(import_module(module), attribute)
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
    def run() -> None:
        made = leg()
        logging.getLogger("ckpt_tasks").addHandler(Warned(made))
        job(made)

    return _in_fork(run, moment[1] if moment is not None and moment[0] == "after_s" else None)


def _in_fork(run: Callable[[], None], killed_after_s: float | None = None) -> int:
    """Call a function in a fork of this process, and return how that ended."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            run()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:  # noqa: BLE001 (the test reads it)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    timer = threading.Timer(killed_after_s, os.kill, (pid, signal.SIGKILL)) if killed_after_s is not None else None
    if timer:
        timer.start()
    _, waited = os.waitpid(pid, 0)
    if timer:
        timer.cancel()
        time.sleep(0)
    return os.waitstatus_to_exitcode(waited)
