"""Find the first checkpoint at which a test fails, by binary search; then the first step, by a replay.

The search leases every checkpoint that it tries, so that no prune removes it meanwhile. A replay trains from the last
good checkpoint in a scratch copy, with a checkpoint after each step, and searches these checkpoints.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.copying.export import export_checkpoint
from ckpt_tasks.copying.fork import plan_fork, run_fork
from ckpt_tasks.errors import CheckpointNotFoundError, ConfigError, ProgramError
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.ledger.config import CheckpointConfig
from ckpt_tasks.proving.script import exits_on_signals
from ckpt_tasks.reading.leasing import leased
from ckpt_tasks.reading.reading import Run, open_run
from ckpt_tasks.session.local import LocalSession, build_from_seed, find_named, find_program
from ckpt_tasks.session.parameters import effective_params
from ckpt_tasks.storage.locations import location_of

_CHECKPOINT, _EXPORT, _VARIABLE = "{checkpoint}", "{export}", "CKPT_CHECKPOINT"
_HOLDER = "ckpt bisect"
# As in `git bisect run`: 125 means "cannot be tested"; a shell returns 126 and 127 for a command that cannot run.
_LAST_VERDICT = 124

Test = Callable[[Run, Checkpoint], bool]
OnTried = Callable[[int, bool], None]
Built = tuple[str, Mapping[str, Any]]  # A program's name and its parameters.


@dataclass(frozen=True)
class Bisection:
    """The last step that passes, the first that fails, and what was tried: (step, whether it passes)."""

    good_step: int
    bad_step: int
    tried: tuple[tuple[int, bool], ...]

    @property
    def exact(self) -> bool:
        """True if the two steps are also neighbours in the training."""
        return self.bad_step == self.good_step + 1


def bisect_run(run: Run, passes: Test, on_tried: OnTried = lambda step, good: None) -> Bisection:
    """Find the first checkpoint that fails a test, among the live checkpoints that are not abandoned.

    The search assumes one change from good to bad: a test that passes after a failure may hide that failure. Raises
    ConfigError if the oldest checkpoint fails or the newest one passes, and what the test raises.
    """
    with exits_on_signals(), ExitStack() as held:
        return _search(run, passes, on_tried, held)


def _search(run: Run, passes: Test, on_tried: OnTried, held: ExitStack) -> Bisection:
    line = sorted((one for one in run.checkpoints() if not one.abandoned), key=lambda one: one.step)
    tried: list[tuple[int, bool]] = []

    def try_one(at: int) -> bool | None:
        try:
            held.enter_context(leased(run, line[at], _HOLDER))
        except CheckpointNotFoundError:
            return None  # It was pruned after the list was read.
        good = passes(run, line[at])
        tried.append((line[at].step, good))
        on_tried(*tried[-1])
        return good

    if len(line) < 2:
        raise ConfigError(f"the run has {len(line)} checkpoints, and a search needs 2")
    if not try_one(0):
        raise ConfigError(f"the test fails at the oldest checkpoint already, step {line[0].step}")
    if try_one(len(line) - 1) is not False:
        raise ConfigError(f"the test passes at the newest checkpoint, step {line[-1].step}")
    low, high = 0, len(line) - 1
    while high - low > 1:
        middle = (low + high) // 2
        good = try_one(middle)
        if good is None:
            del line[middle]
            high -= 1
        elif good:
            low = middle
        else:
            high = middle
    return Bisection(line[low].step, line[high].step, tuple(tried))


def replay(run: Run, between: Bisection, program: Built, passes: Test, on_tried: OnTried) -> Bisection:
    """Train the steps between a good and a bad checkpoint again, in a scratch copy, and search its checkpoints.

    The copy is in the system's directory for temporary files, with a checkpoint for each step. Raises ConfigError if
    the replay does not fail the test where the run did: then the program is not reproducible.
    """
    with exits_on_signals(), tempfile.TemporaryDirectory(prefix="ckpt-bisect-") as folder, ExitStack() as held:
        place, good = Path(folder, "run"), run.find(between.good_step)
        target = location_of(str(place)).open()
        held.enter_context(leased(run, good, _HOLDER))
        run_fork(run, target, plan_fork(run, good, target, {}))
        config = CheckpointConfig(checkpoint_dir=place, step_interval=1, max_num_checkpoints=None, memory_dir=None)
        with Checkpointer(config) as ckpt:
            session = LocalSession(ckpt, *program)
            for step in range(session.restore() + 1, between.bad_step + 1):
                session.run(step)
                ckpt.wait()  # Otherwise a newer snapshot could replace one that waits for its flush.
        try:
            return _search(open_run(place), passes, on_tried, held)
        except ConfigError as error:
            raise ConfigError(
                f"the replay of steps {between.good_step} to {between.bad_step} ends otherwise than the run: {error}",
                hint="The program does not repeat itself, or its data has changed: ckpt verify-resume tries it.",
            ) from error


def program_of(run: Run, name: str | None, params: Mapping[str, Any]) -> Built:
    """Return the program to build (without a name, the run's own) and its parameters; raise ConfigError if unknown."""
    state = run.head().state
    named = state.program if name is None else name
    if named is None:
        raise ConfigError("the run does not name its program", hint="Name it: --program MODULE:PROGRAM.")
    return named, effective_params(find_program(named), state.params, params)


def function_test(name: str, program: Built) -> Test:
    """Return a test that restores a checkpoint into a new program, and calls "module:function" with it.

    Raises ConfigError if there is no such function; the test raises it if the function returns neither True nor False.
    """
    function = find_named(name, what="test", kind="function", error=ConfigError)

    def passes(run: Run, checkpoint: Checkpoint) -> bool:
        built = build_from_seed(*program)
        run.restore(checkpoint, built.state)
        answer = function(built)
        if not isinstance(answer, bool):
            raise ConfigError(f"{name} returned {answer!r:.80}, and not True or False")
        return answer

    return passes


def command_test(words: Sequence[str]) -> Test:
    """Return a test that runs a command, which passes with the status 0 and fails with any other up to 124.

    In its words, {checkpoint} is replaced by DIR@STEP, and {export} by the path of a safetensors file; the environment
    variable CKPT_CHECKPOINT is DIR@STEP, too.
    The test raises ProgramError if the command cannot be started, or gives no verdict.
    """

    def passes(run: Run, checkpoint: Checkpoint) -> bool:
        which = f"{run.history.store.url}@{checkpoint.step}"
        with tempfile.TemporaryDirectory(prefix="ckpt-bisect-") as folder:
            file = Path(folder, "model.safetensors")
            if any(_EXPORT in word for word in words):
                export_checkpoint(run.history.store, checkpoint, file)
            command = [word.replace(_CHECKPOINT, which).replace(_EXPORT, str(file)) for word in words]
            try:
                status = subprocess.run(command, env={**os.environ, _VARIABLE: which}, check=False).returncode
            except OSError as error:
                raise ProgramError(f"{command[0]} cannot be started: {error.strerror}") from error
        if not 0 <= status <= _LAST_VERDICT:
            raise ProgramError(f"{shlex.join(command)} ended with {status}, which is no verdict", step=checkpoint.step)
        return status == 0

    return passes
