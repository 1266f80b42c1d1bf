"""Actions of a flow on a run, apart from training: forks, rollbacks, and the record of program and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.restore.reading import open_run, run_of
from ckpt_tasks.checkpoint.rollback import parse_skip
from ckpt_tasks.checkpoint.transfer.fork import checked_params, find_source, plan_fork, run_fork
from ckpt_tasks.errors import CheckpointNotFoundError, ConfigError, RunMismatchError, StateError
from ckpt_tasks.format.ledger import State
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.targets import split_target
from ckpt_tasks.storage.locations import Location

_ABSENT = object()
_MOVED = {"flows.programs.byte_lm:ByteLM": "ckpt_tasks.programs.byte_lm:ByteLM"}  # Old runs have the first name.


def fork_run(source: str, config: CheckpointConfig, params: Mapping[str, Any] | None = None) -> None:
    """Make the run of `config` a fork of `source` ("DIR@STEP"); do nothing if it is already a fork.

    The fork gets new values for the `params` that differ from the source's recorded parameters. Raises ConfigError if
    the run exists and is not a fork, and what `plan_fork` and `run_fork` raise.
    """
    target = config.location.resolve(config.run_key)
    history = History(target.open())
    if _is_forked(history):
        return
    directory, which = split_target(source)
    alike = directory.partition("://")[0] == config.location.url.partition("://")[0]
    run = open_run(Location(directory, storage_options=config.location.storage_options if alike else None))
    recorded = run.head().state.params or {}
    changed = {name: value for name, value in (params or {}).items() if recorded.get(name, _ABSENT) != value}
    checkpoint = find_source(run, which, history.store)
    try:
        plan = plan_fork(run, checkpoint, history.store, changed, config.run_key)
        run_fork(run, history.store, plan, single_writer=target.single_writer)
    except StateError:
        if not _is_forked(history):  # Another process of the same flow run may have made the fork meanwhile.
            raise


def roll_back(config: CheckpointConfig, step: int | None, skip_batches: str | None, flow_run_id: str | None) -> None:
    """Roll the run back to the checkpoint of `step`, if that is not None; once per flow run, even if started again.

    `skip_batches` is "401-410" or "10", as for `ckpt rollback`. Raises what `Checkpointer.rollback` raises.
    """
    if step is None:
        return
    with Checkpointer(config, flow_run_id=flow_run_id) as ckpt:
        done = ckpt.run.head().state.rollback
        if flow_run_id is None or done is None or done.by != flow_run_id:
            ckpt.acquire()
            ckpt.rollback(step, skip_batches=parse_skip(skip_batches, step), reason="a parameter of the flow run")


def recorded_params(config: CheckpointConfig) -> Mapping[str, Any] | None:
    """Return the parameters with which the run's program was built last; None if there is no run, or no record."""
    try:
        return run_of(config).head().state.params
    except CheckpointNotFoundError:
        return None


def params_in_ledger(ckpt: Checkpointer) -> Mapping[str, Any] | None:
    """Return the parameters that `recorded_params` returns, for a run that this process owns."""
    return ckpt.run.head().state.params


def check_program(config: CheckpointConfig, program: str) -> None:
    """Raise RunMismatchError if the run belongs to another program; a run without a record takes any program."""
    with suppress(CheckpointNotFoundError):
        _check_program(run_of(config).head().state, program)


def record_program(ckpt: Checkpointer, program: str, params: Mapping[str, Any]) -> None:
    """As the owner, record the run's program and its parameters; write nothing if they are recorded already.

    Raises RunMismatchError if the run belongs to another program, ConfigError if the parameters are not JSON.
    """
    wanted, state = checked_params(params), ckpt.run.head().state
    _check_program(state, program)
    if program == state.program and wanted == (state.params or {}):
        return
    ckpt.record_program(program, wanted)


def params_before_fork(ckpt: Checkpointer) -> Mapping[str, Any] | None:
    """Return the source's parameters if the last restore took the checkpoint from which the run was forked.

    Return None after any other restore: later checkpoints have the changed values.
    """
    state, restored = ckpt.run.head().state, ckpt.last_restore
    if state.origin is None or restored is None:
        return None
    forked = state.by_identity.get(state.origin.identity)
    if forked is None or not restored.source.endswith("/" + forked.manifest.rpartition("/")[0]):
        return None
    return state.origin.params or {}


def trains(state: State, program: str) -> bool:
    """Return True if a run trains this program; a run without a record may train any program."""
    return state.program is None or _MOVED.get(state.program, state.program) == _MOVED.get(program, program)


def _check_program(state: State, program: str) -> None:
    forked = state.origin is not None and all(c.manifest_digest == state.origin.identity for c in state.live)
    if not trains(state, program) and not forked:
        raise RunMismatchError(
            f"the run trains {state.program}, not {program}",
            hint="Give the other program a run_key and directory of its own; to continue it from here, fork the run.",
        )


def _is_forked(history: History) -> bool:
    state = history.head().state
    if state.live and state.origin is None:
        raise ConfigError(
            f"{history.store.url} is a run that began by itself",
            hint="Fork into another directory, or continue with it.",
        )
    return bool(state.live)
