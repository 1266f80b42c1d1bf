"""Run a user's own command through random faults, and compare its result with that of a run without faults.

Most faults come from outside: a kill, SIGTERM, a pause of all its processes, and a disk that takes no more bytes (the
soft limit for the size of a file, which needs no privilege). ckpt-tasks inside the command makes the other faults
(`Disturbed` in system.py): requests to the real store are slow or fail, as with a server in trouble, or the wall clock
that the protocol reads is an hour off from then on. A command that a fault has ended is started again.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO

from ckpt_tasks.errors import ConfigError, ProgramError
from ckpt_tasks.proving.proof import Proof
from ckpt_tasks.proving.script import LOOK_S, Script, compared, exits_on_signals, kill, started_by
from ckpt_tasks.system import CHAOS
from ckpt_tasks.upkeep.upkeep import verify_run_directory

# Faults inside the command's process, and the values that each sets while it lasts. A clock stays off after its jump.
_INSIDE = {
    "slow store": {"delay_s": 0.3},
    "failing store": {"failing": 0.6},
    "clock ahead": {"jump_s": 3600.0},
    "clock back": {"jump_s": -3600.0},
}
_CALM = {"delay_s": 0.0, "failing": 0.0}
FAULTS = ("kill", "terminate", "pause", "full disk", *_INSIDE)
_END_S = 120.0  # A command that has not ended this long after SIGTERM is killed.
# A disk stays full for _FULL_GAPS intervals between saves, but at least for _FULL_S seconds.
_FULL_GAPS, _FULL_S = 10.0, 5.0
# A fault inside lasts for this many intervals between saves, and until it has hit a request or a reading of the clock.
_INSIDE_GAPS = 3.0


@dataclass(frozen=True)
class Hit:
    """One fault: its kind, the committed step before it, and the command's exit status (None: it continued).

    `requests` counts the requests to the store, or the readings of the clock, that a fault inside has hit.
    """

    fault: str
    step: int
    status: int | None
    requests: int = 0


@dataclass(frozen=True)
class Verdict:
    """The faults that the command met, how its run compares with the other run, and the damage in it."""

    seed: int
    hits: tuple[Hit, ...]
    proof: Proof
    damaged: tuple[str, ...]

    @property
    def good(self) -> bool:
        """True if the run is equal to the run without faults, and undamaged."""
        return self.proof.good and not self.damaged


def chaos(
    command: Sequence[str],
    *,
    seed: int,
    rounds: int = len(FAULTS),
    kinds: Sequence[str] = FAULTS,
    on_hit: Callable[[Hit], None] = lambda hit: None,
) -> Verdict:
    """Run a command twice in scratch directories, once through `rounds` faults; compare the two runs.

    Each of `kinds` occurs once before any occurs again. Raises ConfigError if the command makes no run, saves too
    seldom, or ends before any fault, and ProgramError if it fails although no fault has hit its process.
    """
    if type(rounds) is not int or rounds < 1:
        raise ConfigError(f"rounds must be a whole number from 1 on, not {rounds!r}", key="rounds")
    dice = random.Random(seed)
    faults = [name for _ in range(-(-rounds // len(kinds))) for name in dice.sample(kinds, len(kinds))][:rounds]
    with exits_on_signals(), tempfile.TemporaryDirectory(prefix="ckpt-chaos-") as folder:
        twin, other = (Victim(command, Path(folder, name)) for name in ("twin", "hit"))
        commits, gap_s = twin.trained()
        steps = sorted(commits[dice.randrange(len(commits) - 1)].step or 0 for _ in faults)
        hits, kills = [], []
        try:
            for fault, step in zip(faults, steps, strict=True):
                if not other.reaches(step):
                    break  # The command has already ended.
                time.sleep(dice.uniform(0, gap_s))
                if other.process is not None and other.process.poll() == 0:
                    break
                kills.append((other.newest_step(), time.time()))
                status, requests = other.suffer(fault, gap_s)
                hits.append(Hit(fault, kills[-1][0], status, requests))
                on_hit(hits[-1])
            other.reaches(math.inf)
        finally:
            other.stop()
        if not hits:
            raise ConfigError("the command ended before a fault could hit it", hint="Let it train for longer.")
        damage = verify_run_directory(other.run().history, whole=True)
        wrong = [fault for _, faults in damage.checkpoints.values() for fault in faults]
        proof = compared(twin.run(), other.run(), kills)
    return Verdict(seed, tuple(hits), proof, (*wrong, *damage.damaged))


class Victim(Script):
    """A command that is started again when a fault has ended it."""

    process: subprocess.Popen[bytes] | None = None
    was_hit = False
    _copying: Thread | None = None

    def __init__(self, command: Sequence[str], place: Path):
        super().__init__(command, place)
        self._faults, self._file = {**_CALM, "jump_s": 0.0}, place.with_suffix(".faults")

    def reaches(self, step: float) -> bool:
        """Let the command train until this step is committed; return False if it ends earlier without an error.

        Raises ProgramError if it fails, and no fault has hit this process.
        """
        while self.newest_step() < step:
            status = self.process.poll() if self.process is not None else None
            if status == 0:
                return False
            if status is not None and not self.was_hit:
                raise self.failed(status)
            if self.process is None or status is not None:
                self.restart()
            time.sleep(LOOK_S)
        return True

    def suffer(self, fault: str, gap_s: float) -> tuple[int | None, int]:
        """Hit all processes of the command; return its status (None: it continues), and the hits of a fault inside."""
        if self.process is None:
            self.restart()
        assert self.process is not None
        pids = [self.process.pid, *started_by(self.process.pid)]
        self.was_hit, before = True, self._count()
        if fault in _INSIDE:
            self._disturb(_INSIDE[fault])
            began_s = time.monotonic()
            while self.process.poll() is None and time.monotonic() - began_s < _END_S:
                if time.monotonic() - began_s > _INSIDE_GAPS * gap_s and self._count() > before:
                    break
                time.sleep(LOOK_S)
            self._disturb(_CALM)
        elif fault == "kill":
            kill(self.process)
        elif fault == "terminate":
            _each(pids, lambda pid: os.kill(pid, signal.SIGTERM))
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_S)
        elif fault == "pause":
            _each(pids, lambda pid: os.kill(pid, signal.SIGSTOP))
            time.sleep(gap_s)
            _each(pids, lambda pid: os.kill(pid, signal.SIGCONT))
        else:
            _each(pids, lambda pid: _limit(pid, 0))
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(max(_FULL_S, _FULL_GAPS * gap_s))
            _each(pids, lambda pid: _limit(pid, None))
        return self.process.poll(), self._count() - before

    def _disturb(self, faults: Mapping[str, float]) -> None:
        """Set the faults inside the command from now on."""
        self._faults |= faults
        written = self._file.with_suffix(".next")
        written.write_text(json.dumps(self._faults))
        written.replace(self._file)

    def _count(self) -> int:
        """Return how many requests and readings of the clock faults have hit inside."""
        hits = Path(f"{self._file}.hits")
        return hits.stat().st_size if hits.exists() else 0

    def restart(self) -> None:
        """Start the command; its output goes to a pipe, which a limit on its files does not affect."""
        self.stop()
        self._disturb({})
        self.environment[CHAOS] = str(self._file)
        self.process, self.was_hit = self.start(subprocess.PIPE), False
        self._copying = Thread(target=_copy, args=(self.process.stdout, self.said), daemon=True)
        self._copying.start()

    def failed(self, status: int) -> ProgramError:
        """Return the error for a command that has ended, with the last line of its output."""
        if self._copying is not None:
            self._copying.join(_END_S)
        return super().failed(status)

    def stop(self) -> None:
        """End the process and all that it has started."""
        if self.process is not None:
            kill(self.process)


def _copy(pipe: IO[bytes], place: Path) -> None:
    with pipe, place.open("ab") as file:
        shutil.copyfileobj(pipe, file)


def _limit(pid: int, size_bytes: int | None) -> None:
    """Limit the size of files that a process writes; None: no limit, as before."""
    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size_bytes is None else size_bytes, hard))


def _each(pids: Sequence[int], hit: Callable[[int], None]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # The process has ended.
            hit(pid)
