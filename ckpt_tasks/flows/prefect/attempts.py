"""Hooks around every attempt of a task: restore before it, commit after it, discard its changes when it fails.

The hooks run inside the attempt, in its thread: if a hook fails, the attempt fails, and Prefect retries it. Prefect's
own state hooks cannot do this: they swallow exceptions, and run a second time on a crash.

Invariants

1. A task's body runs only if the live state is the state at the session's position.
2. An attempt succeeds only after the state that it produced is committed.
3. The first body of a run begins only after a checkpoint exists, so that a retry can restore.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.logging import get_logger, get_run_logger

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import (
    CkptError,
    ConfigError,
    FormatVersionError,
    NoGoodCheckpointError,
    NoProgressError,
    OwnerError,
    RunMismatchError,
    StateError,
)
from ckpt_tasks.flows.prefect.console_log import keep_log_readers_out
from ckpt_tasks.flows.prefect.isolation import keep_prefect_out_of_forks, keep_threads_out_of_streams
from ckpt_tasks.flows.prefect.starts import let_workers_take_it
from ckpt_tasks.flows.session.local_session import StateSession
from ckpt_tasks.flows.session.session import Session
from ckpt_tasks.state.tensors.random_streams import OwnStreams
from ckpt_tasks.storage.answers import causes_of

P = ParamSpec("P")
R = TypeVar("R")
RetryCondition = Callable[[Any, TaskRun, State[Any]], bool]

# A retry after one of these errors would fail in the same way, or must not happen.
PERMANENT = (
    ConfigError,
    StateError,
    RunMismatchError,
    FormatVersionError,
    NoGoodCheckpointError,
    OwnerError,
    NoProgressError,
)

_LONGEST_DELAY_S = 60.0
_MOST_RETRIES = 50  # Prefect's limit for a list of delays.


@dataclass(frozen=True)
class TaskAttempt:
    """The argument of a hook: the attempt's number (from 1), the completed steps, why the previous attempt failed.

    `failure` is None if the previous attempt did not fail in this process. `after_failure` gets the failure of the
    attempt that just failed.
    """

    number: int
    position: int
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class AttemptHooks:
    """A user's functions around every attempt of a resumable task; if one raises, the attempt fails.

    `before_attempt` is called after the restore, `after_attempt` after the commit, and `after_failure` after a failed
    attempt was discarded and recorded.
    """

    before_attempt: Callable[[TaskAttempt], object] | None = None
    after_attempt: Callable[[TaskAttempt], object] | None = None
    after_failure: Callable[[TaskAttempt], object] | None = None


class Attempts:
    """Runs a task's body between the hooks, attempt by attempt.

    If `counted`, an attempt whose body reports no step through `ckpt.step()` counts as one step.
    """

    def __init__(self, session: Session, *, counted: bool, max_stalled: int, hooks: AttemptHooks | None = None):
        self.session = session
        self._hooks = hooks or AttemptHooks()
        self._counted = counted
        self._max_stalled = max_stalled
        self._failure: str | None = None
        self._started = False
        self._streams = OwnStreams()

    def run(self, body: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Make one attempt with training's random streams; raises what the body, a hook, a restore or a save raises.

        Raises NoProgressError after `max_stalled` starts and failures in a row without a new committed step.
        """
        keep_threads_out_of_streams()
        keep_log_readers_out()
        with self._streams.inside():
            return self._run(body, *args, **kwargs)

    def _run(self, body: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        number = _attempt_number()
        attempt = TaskAttempt(number, self.session.position, self._failure if number > 1 else None)
        try:
            attempt = self._before(attempt)
            result = body(*args, **kwargs)
            if isinstance(result, State) and result.is_failed():
                self._failed(attempt, f"the task returned {result!r}")
            else:
                self._after(attempt)
        except Exception as error:
            self._failed(attempt, f"{type(error).__name__}: {error}", error)
            raise
        except BaseException:
            self.session.clean = False  # An interruption may leave a step half done.
            raise
        return result

    def _before(self, attempt: TaskAttempt) -> TaskAttempt:
        self.session.hold_signals(True)
        if not self._started:
            let_workers_take_it()
            self._started = True
        if not self.session.clean:  # A clean session has just committed, so it made progress.
            self.session.restore()
            self._check_progress()
        attempt = replace(attempt, position=self.session.position)
        _call(self._hooks.before_attempt, attempt)
        return attempt

    def _check_progress(self) -> None:
        stalled = self.session.head().state.stalled_attempts
        if stalled >= self._max_stalled:
            raise NoProgressError(
                f"{stalled} starts and failures in a row, and no new step was committed",
                step=self.session.position,
                hint=f"The last one ended with: {self._failure or 'the end of its process'}.",
            )

    def _after(self, attempt: TaskAttempt) -> None:
        position = self.session.position
        moved = position != attempt.position
        if moved or self._counted:
            self.session.save(position if moved else position + 1)
        self._failure = None
        _call(self._hooks.after_attempt, replace(attempt, position=self.session.position))

    def _failed(self, attempt: TaskAttempt, why: str, error: Exception | None = None) -> None:
        self._failure = why
        if error is not None:
            _clear_frames(error)
        self.session.discard()
        if is_retryable(error):
            log = get_run_logger() if TaskRunContext.get() else get_logger(__name__)
            log.warning("Attempt %d failed at step %d: %s", attempt.number, self.session.position, why)
        if not isinstance(error, OwnerError):  # A fenced process must not write, not even its failure.
            self._note(attempt, why, error)
        _call(self._hooks.after_failure, replace(attempt, position=self.session.position, failure=why))
        self.session.hold_signals(False)  # The next attempt may be a minute away, and nothing trains until then.

    def _note(self, attempt: TaskAttempt, why: str, error: Exception | None) -> None:
        try:
            self.session.record_failure(attempt=attempt.number, step=self.session.position, why=why[:2000])
        except CkptError as record_error:
            if error is not None:
                error.add_note(f"The failure could not be recorded in the ledger: {record_error}")


def resumable_task(
    ckpt: Checkpointer,
    state: dict[str, Any],
    *,
    retries: int = 3,
    retry_delay_seconds: float = 2.0,
    retry_condition_fn: RetryCondition | None = None,
    max_stalled_attempts: int = 10,
    hooks: AttemptHooks | None = None,
    **options: Any,
) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Turn a function into a Prefect task that continues where its last committed attempt ended.

    The task restores `state` before the first attempt in this process and after a failed attempt, and commits it after
    an attempt: at the step that the body reported through `ckpt.step()`, else at position + 1. It records a failed
    attempt in the ledger. `hooks` run after the restore, the commit and a failure. The first retry comes at once, the
    second after `retry_delay_seconds`, each further one after twice the delay (at most 60 s), with jitter. A failure
    that no retry can repair (`PERMANENT`) is not retried. `options` are passed to `prefect.task`.

    Raises ConfigError for a function that cannot be resumed, or an option that prevents it.
    """
    attempts = Attempts(_session_of(ckpt, state), counted=True, max_stalled=max_stalled_attempts, hooks=hooks)
    retrying: dict[str, Any] = {"retry_delay_seconds": retry_delay_seconds, "retry_condition_fn": retry_condition_fn}

    def decorate(function: Callable[P, R]) -> Task[P, R]:
        if not _is_plain(function):
            raise ConfigError(
                f"{function!r} cannot be a resumable task", hint="Use a plain def: not async, not a generator."
            )

        @wraps(function)
        def attempted(*args: P.args, **kwargs: P.kwargs) -> R:
            return attempts.run(function, *args, **kwargs)

        return attempted_task(attempted, retries=retries, **retrying, **options)

    return decorate


def attempted_task(
    function: Callable[P, R],
    *,
    retries: int,
    retry_delay_seconds: float,
    retry_condition_fn: RetryCondition | None = None,
    **options: Any,
) -> Task[P, R]:
    """Make a Prefect task that runs its body on every attempt: no cache, no stored result, growing delays with jitter.

    The first retry waits for nothing: what was killed has only to start again, and what fails again then waits.

    Raises ConfigError for options of Prefect's cache or retries, and for retries or a delay out of range.
    """
    unfit = sorted(name for name in options if name.startswith(("cache_", "retry_", "refresh_")))
    if unfit:
        raise ConfigError(
            f"{', '.join(unfit)}: not allowed for a resumable task", hint="A cached result would skip its body."
        )
    if not 0 <= retries <= _MOST_RETRIES or retry_delay_seconds < 0:
        raise ConfigError(f"{retries} retries after {retry_delay_seconds} s: use 0 to {_MOST_RETRIES}, and 0 s or more")
    keep_prefect_out_of_forks()
    # Prefect's exponential_backoff has no limit: the tenth delay would be half an hour.
    delays = [min(retry_delay_seconds * 2 ** (n - 1), _LONGEST_DELAY_S) if n else 0.0 for n in range(retries)]
    decorate = task(
        retries=retries,
        retry_delay_seconds=delays or None,
        retry_jitter_factor=1.0,
        retry_condition_fn=_retry_condition(retry_condition_fn),
        cache_policy=NO_CACHE,  # The default policy hashes every argument, even if no result is stored.
        **{"persist_result": False, **options},
    )
    return decorate(function)


def _retry_condition(of_user: RetryCondition | None) -> RetryCondition:
    """Return a plain function that allows a retry if both our condition and the user's allow it."""
    if of_user is None:
        return _allow_retry
    if not _is_plain(of_user):
        raise ConfigError(
            f"retry_condition_fn must be a plain function, not {of_user!r:.200}",
            hint="Prefect ignores any other callable, and would never retry.",
        )

    def both(task: Any, task_run: TaskRun, state: State[Any]) -> bool:
        return _allow_retry(task, task_run, state) and of_user(task, task_run, state)

    return both


def _allow_retry(task: Any, task_run: TaskRun, state: State[Any]) -> bool:
    return is_retryable(state.data)


def is_retryable(error: object) -> bool:
    """Return True if a retry may help: after any error but a `PERMANENT` one, and after an error that `rolls_back`."""
    causes = [*causes_of(error)] if isinstance(error, Exception) else []
    return not any(isinstance(cause, PERMANENT) and not getattr(cause, "rolls_back", False) for cause in causes)


_SESSIONS: WeakKeyDictionary[Checkpointer, StateSession] = WeakKeyDictionary()


def _session_of(ckpt: Checkpointer, state: dict[str, Any]) -> StateSession:
    """Return the session that all tasks of a Checkpointer share: if one task fails, the next one must restore."""
    session = _SESSIONS.get(ckpt)
    if session is None:
        session = _SESSIONS[ckpt] = StateSession(ckpt, state)
    if session.state is not state:
        raise ConfigError(
            "this Checkpointer already has tasks with another state", hint="Give the same dict to all tasks of a run."
        )
    return session


def _call(hook: Callable[[TaskAttempt], object] | None, attempt: TaskAttempt) -> None:
    if hook is not None:
        hook(attempt)


def _is_plain(function: Any) -> bool:
    special = inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function)
    return inspect.isfunction(function) and not special and not inspect.isasyncgenfunction(function)


def _attempt_number() -> int:
    context = TaskRunContext.get()
    return context.task_run.run_count if context else 1


def _clear_frames(error: BaseException) -> None:
    """Clear the frames in an error's tracebacks, which hold batches, activations and models in memory."""
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        current = todo.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        todo += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            todo += current.exceptions
