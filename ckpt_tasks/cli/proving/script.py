"""Run a user's own command without a break, and again with two kills; compare what the two runs committed.

The command gets the directory for its run from the environment variable CKPT_RUN, or from {run} in its words. It is
killed from outside, with all processes that it has started, at a random time up to one interval between saves after a
commit. So a kill can come between saves, during a save, or during a commit.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

from ckpt_tasks.checkpoint.restore.reading import Run, open_run
from ckpt_tasks.checkpoint.transfer.comparison import compare_checkpoints
from ckpt_tasks.cli.proving.proof import CAUSES, DOING, FirstDifference, Proof
from ckpt_tasks.errors import CheckpointNotFoundError, ConfigError, ProgramError
from ckpt_tasks.run.ledger.curve import CurveStep
from ckpt_tasks.run.ledger.timeline import Moment, read_timeline

_PLACE, _VARIABLE = "{run}", "CKPT_RUN"
_MAY_DIFFER = re.compile(r"rng/(\d+/)?(python|numpy)/|trainer/.*/log_history/\d+/\w+_(runtime|per_second)$")
_LEAST_COMMITS = 3
LOOK_S = 0.02
_HINT = f"Put {_PLACE} where the command takes the run directory, or read {_VARIABLE} from the environment."


def may_differ(place: str) -> bool:
    """Return True if a value may differ between two equal trainings: unseeded streams, and logged durations.

    A script that draws nothing from the streams of Python and NumPy seldom seeds them; a draw would show in the
    weights. With several ranks, the names of streams have the rank's number.
    """
    return _MAY_DIFFER.match(place) is not None


def verify_script(command: Sequence[str], say: Callable[[str], object] = lambda doing: None) -> Proof:
    """Run a command twice, once with two kills; return the comparison of the two runs.

    Metrics of every step, every value of the last checkpoint and torch's random streams are compared. Calls
    `say` with each of DOING as it begins. Raises ConfigError if the command makes no run in the given directory, or
    saves too seldom to be killed in between, and ProgramError if it fails.
    """
    with exits_on_signals(), tempfile.TemporaryDirectory(prefix="verify-resume-") as folder:
        twin, other = (Script(command, Path(folder, name)) for name in ("twin", "killed"))
        whole, *killed, rest = DOING
        say(whole)
        commits, gap_s = twin.trained()
        last, kills = len(commits) - 1, []
        for k, doing in enumerate(killed, 1):
            say(doing)
            kills.append(other.killed_after(commits[last * k // 3].step or 0, gap_s))
        say(rest)
        other.end()
        return compared_runs(twin.run(), other.run(), kills)


@contextmanager
def exits_on_signals() -> Iterator[None]:
    """Exit on SIGTERM and SIGHUP as on an error, so that the running command is killed and its directory removed."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signals = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, leave) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Script:
    """One run of a command, in its own directory."""

    def __init__(self, command: Sequence[str], place: Path):
        self._command = [word.replace(_PLACE, str(place)) for word in command]
        self._place = place
        self.said = place.with_suffix(".log")

    def run(self) -> Run:
        try:
            return open_run(self._place)
        except CheckpointNotFoundError:
            raise ConfigError("the command has made no run in the directory that it was told", hint=_HINT) from None

    def commits(self) -> list[Moment]:
        return [one for one in read_timeline(self.run().history).moments if one.kind == "commit"]

    def end(self) -> None:
        """Let the command run to its end."""
        process = self.start()
        try:
            status = process.wait()
        finally:
            kill(process)
        if status:
            raise self.failed(status)

    def trained(self) -> tuple[list[Moment], float]:
        """Let the command run to its end; return its commits, and the median seconds between two of them.

        Raises ConfigError if there are too few commits for a kill between them.
        """
        self.end()
        commits = self.commits()
        if len(commits) < _LEAST_COMMITS:
            raise ConfigError(
                f"the command has saved {len(commits)} times, and {_LEAST_COMMITS} are needed to kill it in between",
                hint="Let it save more often (step_interval), or train for longer.",
            )
        return commits, median(b.at_s - a.at_s for a, b in pairwise(commits))

    def killed_after(self, step: int, gap_s: float) -> tuple[int, float]:
        """Kill the command some time after a step's commit; return the last committed step and the time of the kill."""
        process = self.start()
        try:
            while self.newest_step() < step:
                self._check(process)
                time.sleep(LOOK_S)
            time.sleep(random.uniform(0, gap_s))
            self._check(process)
            now = time.time()
        finally:
            kill(process)
        return self.newest_step(), now

    def newest_step(self) -> int:
        try:
            return max((one.step for one in open_run(self._place).checkpoints()), default=0)
        except CheckpointNotFoundError:
            return 0

    def _check(self, process: subprocess.Popen[bytes]) -> None:
        status = process.poll()
        if status:
            raise self.failed(status)
        if status == 0:
            raise ConfigError("the command ended before it could be killed", hint="Let it train for longer.")

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command; its output goes to a file. Raises ProgramError if it cannot start."""
        with self.said.open("ab") as said:
            try:
                return subprocess.Popen(
                    self._command,
                    env={**os.environ, _VARIABLE: str(self._place)},
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ProgramError(f"{self._command[0]} cannot be started: {error.strerror}") from error

    def failed(self, status: int) -> ProgramError:
        said = self.said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return ProgramError(f"{shlex.join(self._command)} failed: {said[-1] if said else f'exit status {status}'}")


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process with all processes that it has started."""
    others = [*started_by(process.pid)]
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in others:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def started_by(pid: int) -> Iterator[int]:
    """Yield all descendants of a process, also in other sessions: torchrun gives each rank its own session."""
    for children in Path("/proc", str(pid), "task").glob("*/children"):
        with suppress(OSError):  # The process has ended.
            for child in map(int, children.read_text(encoding="ascii").split()):
                yield child
                yield from started_by(child)


def compared_runs(twin: Run, other: Run, kills: Sequence[tuple[int, float]]) -> Proof:
    """Compare two runs of a command; `kills` has the last committed step and the time in seconds of each kill."""
    expected, resumed = _steps(twin), _steps(other)
    ends = twin.find("latest"), other.find("latest")
    comparison = compare_checkpoints(twin.history.store, ends[0], other.history.store, ends[1])
    values = sum(one.tensors + one.values for one in comparison.groups.values())
    values += sum(len(one.metrics) for one in expected.values())
    difference = _first(expected, resumed, kills)
    if difference is None and ends[0].step != ends[1].step:
        difference = FirstDifference(min(end.step for end in ends), ("the last step",), len(kills), CAUSES["hidden"])
    places = [one.place for one in comparison.differences if not may_differ(one.place)]
    if difference is None and places:
        places.sort(key=lambda place: not place.startswith("rng/"))
        cause = CAUSES["streams" if places[0].startswith("rng/") else "hidden"]
        difference = FirstDifference(ends[0].step, tuple(places), len(kills), cause)
    return Proof(ends[0].step, tuple(step for step, _ in kills), values, difference)


def _steps(run: Run) -> dict[int, CurveStep]:
    return {one.step: one for one in run.curve().steps if not one.abandoned}


def _first(
    expected: Mapping[int, CurveStep], resumed: Mapping[int, CurveStep], kills: Sequence[tuple[int, float]]
) -> FirstDifference | None:
    """Return the first step whose metrics differ; its `at_s` shows how many kills came before its training."""
    for step in sorted(expected.keys() & resumed.keys()):
        one, other = expected[step].metrics, resumed[step].metrics
        names = sorted(n for n in one.keys() | other.keys() if repr(one.get(n)) != repr(other.get(n)))
        if names:
            after = sum(killed_s < resumed[step].at_s for _, killed_s in kills)
            cause = CAUSES["hidden" if after else "kernel"]
            return FirstDifference(step, tuple(f"metric {name}" for name in names), after, cause)
    return None
