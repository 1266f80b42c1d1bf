"""Sessions in this process: for a state that the caller made, and for a program that is built on demand."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

import torch

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.pausing import hold_signals
from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.errors import CkptError, ConfigError, ProgramError
from ckpt_tasks.flows.session.forked import params_before_fork, params_in_ledger, record_program
from ckpt_tasks.flows.session.hyperparameters import Settings, alike, apply_settings, changed_settings, settings_of
from ckpt_tasks.flows.session.parameters import params_before
from ckpt_tasks.flows.session.session import Progress, watcher
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.ledger.history import Head
from ckpt_tasks.run.opening import ranks_of
from ckpt_tasks.run.report.words import ranks_words
from ckpt_tasks.state.groups import flat, objects_of
from ckpt_tasks.state.tensors.random_streams import OwnStreams, preserved_rng, seed_streams

_PACE_STEPS = 20
END_SUITE = "quick"  # The evaluation at the end of a training uses this suite.
_log = logging.getLogger("ckpt_tasks")
_INITIALISED = "Ranks are initialised before: if not dist.is_initialized(): dist.init_process_group()."
_NEEDS = "A program has `state`, a dict, `train_step()` and `evaluate(suite)`."


class Program(Protocol):
    """The user's part of a training: a plain class with a state, one train step and one evaluation.

    `state` is a dict of what is saved (modules, optimizer, scheduler, sampler …). `train_step` makes one optimizer step
    on the next data and returns metrics. One metric may be the amount of data used: its name is the program's attribute
    `unit`, or "samples" without this attribute. `evaluate` must change nothing and must not draw from the training's
    random streams. `reduce`, if present, says how the metrics of several ranks become one: `{"correct": "sum"}`.
    `recorded_params`, if present, names parameters that may come from the run's ledger although they are
    texts or objects; a path or a host name belongs in the deployment instead.
    """

    state: dict[str, Any]

    def train_step(self) -> Mapping[str, float]: ...

    def evaluate(self, suite: str) -> Mapping[str, float]: ...


def find_program(name: str, params: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Import "module:Factory" and return the factory without calling it.

    Raises ProgramError if nothing has this name, the factory does not accept `params` (None: unknown), or it is a class
    without the attributes of a program.
    """
    factory = find_named(name, what="program", kind="Factory", error=ProgramError)
    try:
        if params is not None:
            inspect.signature(factory).bind(**params)
    except (TypeError, ValueError) as error:  # A builtin without a signature raises ValueError.
        hint = "They are the run's recorded ones, and over them those that were given: is it the run's own program?"
        raise ProgramError(f"{name} cannot be called with these parameters: {error}", hint=hint) from error
    if inspect.isclass(factory):
        _check_methods(name, factory)
    return factory


def build_program(name: str, params: Mapping[str, Any] | None = None) -> Program:
    """Import "module:Factory" and call the factory with `params`.

    Raises ProgramError if nothing has this name, the factory does not accept the parameters, or its result is not a
    program. Other errors of the factory pass through: a retry may help.
    """
    factory = find_program(name, params)
    try:
        program = factory(**(params or {}))
    except (TypeError, ValueError) as error:
        if isinstance(error, CkptError):
            raise
        hint = _INITIALISED if "process group twice" in str(error) else None
        raise ProgramError(f"{name} cannot be built: {error}", hint=hint) from error
    _check_methods(name, program)
    if not isinstance(getattr(program, "state", None), dict):
        raise ProgramError(
            f"{name} made an object of type {type(program).__name__} without `state`, a dict", hint=_NEEDS
        )
    built: Program = program
    return built


def build_from_seed(name: str, params: Mapping[str, Any]) -> Program:
    """Seed all random streams of the process with the parameter `seed` (default 0), then build the program.

    So even a program that does not seed every stream begins the same way in every process.
    """
    seed = params.get("seed")
    seed_streams(seed if isinstance(seed, int) and seed >= 0 else 0)
    return build_program(name, params)


def measure(
    run: Run,
    checkpoint: Checkpoint,
    program: str,
    params: Mapping[str, Any],
    suite: str,
    *,
    of_all_ranks: Callable[[Program, dict[str, float]], dict[str, float]] = lambda program, own: own,
) -> dict[str, float]:
    """Restore a checkpoint's modules into a fresh program (its whole state if it has none), and evaluate it.

    Uses separate random streams, which begin in the same state in every process. They belong to the process, so only
    one thread may call this at a time. Raises ProgramError for a program without `evaluate`.
    """
    with OwnStreams().inside():
        fresh = build_from_seed(program, params)
        if not callable(getattr(fresh, "evaluate", None)):
            raise ProgramError(
                f"{program} has no evaluate(suite)", hint="It returns metrics by name, for every evaluation set."
            )
        modules = {name: value for name, value in flat(fresh.state).items() if isinstance(value, torch.nn.Module)}
        run.restore(checkpoint, modules or fresh.state, partial=True)
        own = {str(name): float(value) for name, value in fresh.evaluate(suite).items()}
        return of_all_ranks(fresh, own)


class StateSession:
    """Holds a state that the caller made; the next restore overwrites the values of a failed attempt."""

    def __init__(self, ckpt: Checkpointer, state: dict[str, Any]):
        self.ckpt = ckpt
        self.clean = False
        self._state = state
        self._metrics: Mapping[str, float] | None = None

    @property
    def state(self) -> dict[str, Any]:
        """The state that this session saves and restores."""
        return self._state

    @property
    def position(self) -> int:
        """The number of completed steps: as restored, or as last reported."""
        return self.ckpt.position

    def head(self) -> Head:
        """Return the head of the ledger of the run that this session trains."""
        return self.ckpt.run.head()

    def record_failure(self, **fields: Any) -> None:
        """Record a failed attempt in the run's history."""
        self.ckpt.record_failure(**fields)

    def hold_signals(self, hold: bool) -> None:
        """Hold SIGTERM and Ctrl-C back until the next step, or deliver them, including a pending one."""
        hold_signals(self.ckpt, hold)

    def restore(self) -> int:
        """Restore the newest good checkpoint into the live state; without one, save the live state as the first."""
        step = self.ckpt.restore(self.state)
        if not self.ckpt.checkpoints():
            self.ckpt.wait()  # A snapshot from memory may be on its way to storage: it is the first checkpoint then.
            if not self.ckpt.checkpoints():
                self.ckpt.save(step, self.state)
        self.clean = True
        return step

    def save(self, step: int) -> None:
        """Commit the live state as `step`, if that step is not committed yet."""
        self.ckpt.wait()
        last = self.ckpt.last_commit
        if last is None or last.step != step:
            # step() has already saved the state if a save was due.
            self.ckpt.save(step, self.state, metrics=self._metrics, interim=step == self.ckpt.position)

    def discard(self) -> None:
        """Discard the gradients; the next restore overwrites the live values."""
        self.clean = False
        for value in objects_of(self.state):
            if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
                # A restore sets no gradients: the failed step's gradients would be added to the retry's.
                value.zero_grad(set_to_none=True)


class LocalSession(StateSession):
    """Holds a program's live state; builds the program on first use, and again after a failure."""

    def __init__(self, ckpt: Checkpointer, program: str, params: Mapping[str, Any] | None = None):
        super().__init__(ckpt, {})
        self._name = program
        self._params = dict(params or {})
        self._program: Program | None = None
        self._fresh: Settings | None = None
        self._step_s: deque[float] = deque(maxlen=_PACE_STEPS)
        self.ranks, self.gangs = 1, tuple[Mapping[str, str], ...]()
        self.config, self.checkpoints = ckpt.config, ckpt.checkpoints
        self.note, self.listen = ckpt.note, ckpt.listen

    @property
    def program(self) -> Program:
        """The live program."""
        if self._program is None:
            self._program = build_from_seed(self._name, self._params)
            self._fresh = settings_of(self._program.state)
        return self._program

    @property
    def state(self) -> dict[str, Any]:
        """The live program's state, which this session saves and restores."""
        return self.program.state

    @property
    def step_s(self) -> float | None:
        """The median seconds of the last steps, without saves; None before the first step."""
        return sorted(self._step_s)[len(self._step_s) // 2] if self._step_s else None

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the last step."""
        return self._metrics or {}

    @property
    def last_commit(self) -> Checkpoint | None:
        """The checkpoint that was committed last."""
        return self.ckpt.last_commit

    def restore(self) -> int:
        """Restore as any session does, and record the program and its parameters.

        After a restore of the checkpoint from which the run was forked, apply changed parameters to optimizers and
        schedules; raises StateMismatchError if they do not fit. After any other restore, raises ConfigError if a
        changed parameter sets values that a restore brings back: the change would be lost.
        """
        step = super().restore()
        self.clean = False
        if self.ckpt.last_restore is not None and self.ckpt.last_restore.derived_streams:
            run = self.ckpt.run
            _log.info("%s", ranks_words(step, ranks_of(run.history.store, run.find(step)), self.ranks))
        before = params_before_fork(self.ckpt)
        if before is None and self.ckpt.last_restore is not None:
            self._refuse_changes()
        record_program(self.ckpt, self._name, self._params)
        if before is not None and before != self._params:
            self._change(before)
        self.clean = True
        return step

    def run(self, until: int) -> None:
        """Train from the position to step `until`; report every step to the Checkpointer and to the watcher."""
        program, watch = self.program, watcher.get()
        self.ckpt.wait()  # Do not count the time between two batches as a step's.
        unit = str(getattr(program, "unit", "samples"))
        while self.ckpt.position < until:
            started = time.perf_counter()
            metrics = self._of_all_ranks(program, self.take_step(program))
            step_s = time.perf_counter() - started
            amount = metrics.pop(unit, 0.0)
            self._step_s.append(step_s)
            self._metrics = metrics
            step = self.ckpt.position + 1
            self.ckpt.step(step, program.state, metrics=metrics)
            if watch:
                commit = self.ckpt.last_commit
                watch(Progress(step=step, metrics=metrics, step_s=step_s, amount=amount, unit=unit, commit=commit))

    def evaluate(self, checkpoint: Checkpoint, suite: str) -> Mapping[str, float]:
        """Discard the live state, which leaves room for a fresh program, and measure a checkpoint with that."""
        self.discard()
        return measure(self.ckpt.run, checkpoint, self._name, self._params, suite, of_all_ranks=self._of_all_ranks)

    def discard(self) -> None:
        """Drop the program; the next restore builds a new one."""
        self.clean = False
        self._program = None
        self._metrics = None
        gc.collect()  # Modules and optimizers refer to each other, which would delay the release of their memory.
        torch.cuda.empty_cache()

    def _change(self, before: Mapping[str, Any]) -> None:
        """Apply to the restored state what has changed in the program's parameters since `before`."""
        state, new = self.state, self._fresh
        assert new is not None
        old = self._settings_with(before)
        apply_settings(state, changed_settings(settings_of(state), old, new))

    def _refuse_changes(self) -> None:
        """Raise ConfigError if a changed parameter changes optimizers or schedules: the restore has undone that."""
        recorded = params_in_ledger(self.ckpt)
        own = recorded or {}
        changed = sorted(name for name, value in self._params.items() if name not in own or own[name] != value)
        if not changed:
            return
        try:
            old = self._settings_with(own)
        except ProgramError:
            if recorded is None:
                return  # No flow started the run: its parameters are unknown.
            raise
        assert self._fresh is not None
        if not alike(old, self._fresh):
            raise ConfigError(
                f"another {', '.join(changed)} than the run's would be lost: a restore brings back what it sets",
                hint="To change learning rates and the like, fork the run: ckpt fork DIR NEW --param NAME=VALUE.",
            )

    def _settings_with(self, recorded: Mapping[str, Any]) -> Settings:
        """Build the program with the recorded parameters and return its settings: nothing else shows their effect."""
        with preserved_rng():
            try:
                before = params_before(find_program(self._name), recorded, self._params)
                settings = settings_of(build_program(self._name, before).state)
            except ProgramError as error:
                hint = "What a change of parameters does is seen by building the program with those of before, too."
                raise ProgramError(f"with the parameters of before: {error}", hint=hint) from error
        gc.collect()  # Free the program's memory now, as in `discard`.
        return settings

    def _of_all_ranks(self, program: Program, own: dict[str, float]) -> dict[str, float]:
        """Return the metrics of all ranks together: here of the only one."""
        return own

    def take_step(self, program: Program) -> dict[str, float]:
        """Make one step of the program; return its metrics as numbers. Raises ProgramError if they are none."""
        metrics = program.train_step()
        if not isinstance(metrics, Mapping):
            raise ProgramError(
                f"{self._name}.train_step() returned a value of type {type(metrics).__name__}, not metrics by name"
            )
        return {str(name): _number(value) for name, value in metrics.items()}


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _check_methods(name: str, program: Any) -> None:
    missing = [method for method in ("train_step", "evaluate") if not callable(getattr(program, method, None))]
    if missing:
        raise ProgramError(f"{name} is not a program: it has no {' and no '.join(missing)}", hint=_NEEDS)


def find_named(name: str, *, what: str, kind: str, error: type[CkptError]) -> Callable[..., Any]:
    """Import "package.module:attribute" and return the attribute; raise `error` if there is none.

    `what` and `kind` describe the attribute in the message. The working directory is searched first, as with `python
    -m`.
    """
    module_name, _, attribute = name.partition(":")
    if not (attribute and all(part.isidentifier() for part in module_name.split("."))) or module_name.endswith(".py"):
        script = " A script of your own comes after --: ckpt verify-resume -- python train.py." if ".py" in name else ""
        raise error(f"{name!r:.200} names no {what}", hint=f'Write it as "package.module:{kind}".{script}')
    # The path of a console script and of Prefect's engine lacks the working directory.
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except ImportError as missing:
        raise error(
            f"{name} cannot be imported: {missing}", hint="Is its folder the working directory, or on PYTHONPATH?"
        ) from missing
    named: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(named):
        raise error(f"{module_name} has no {kind.lower()} {attribute!r}")
    return named
