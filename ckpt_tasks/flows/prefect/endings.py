"""End a flow run: as if it were cancelled, without a state if another process owns the run, crashed without a store.

Prefect may start a flow run twice: a preempted flow run before its old process has ended, a resumed one during the
pause, a crashed one that two watchers report. The ledger lets one of these processes train. If the other process ended
the flow run as failed, Prefect would show it as failed although the first process completes it.

Prefect does not restart a failed flow run: a person must fix the program or the credentials. A store recovers without
a person. So if a store does not answer, the flow run ends as crashed, and the automations, or the flow `watch`, resume
it as often as they are configured to.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import Any
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.schemas import OrchestrationResult
from prefect.client.schemas.objects import State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, Pause, PrefectException, TerminationSignal
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled

from ckpt_tasks.checkpoint.restore.reading import run_of
from ckpt_tasks.errors import (
    CheckpointNotFoundError,
    CkptError,
    CommitUncertainError,
    ConfigError,
    FormatVersionError,
    NoGoodCheckpointError,
    NoProgressError,
    OwnerError,
    RunMismatchError,
    StateError,
    StoreError,
)
from ckpt_tasks.flows.prefect.blocks import api_is_away
from ckpt_tasks.flows.prefect.events import client_without_retries
from ckpt_tasks.process import start_thread
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.ownership import Signs, identify, why_free
from ckpt_tasks.storage.answers import answer_of, causes_of, is_expired

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


@contextmanager
def ends_quietly_for_a_sibling(config: CheckpointConfig, flow_run_id: str | None) -> Iterator[None]:
    """Leave the flow run's state unchanged if another process of the same flow run has taken over the run.

    The block then ends with Prefect's Abort, which sets no state. Any other OwnerError passes through.
    """
    try:
        yield
    except OwnerError as error:
        if not _held_by(config, flow_run_id):
            raise
        get_run_logger().warning("Another process continues with this flow run, and this one ends: %s", error)
        raise Abort(f"another process continues with this flow run: {error}") from error


def end_flow_run(state: State[Any]) -> None:
    """Set the flow run's state, then raise Prefect's Pause or Abort, which end this process and set no other state.

    Returns if the server does not accept the state. A resume starts a new process.
    """
    with get_client(sync_client=True) as client:
        answer: OrchestrationResult[Any] = client.set_flow_run_state(UUID(flow_run.id), state)
    if answer.status == SetStateStatus.ACCEPT:
        raise Pause(state=answer.state) if state.is_paused() else Abort(str(state.message))


def skip_while_the_run_trains(config: CheckpointConfig) -> None:
    """Cancel a scheduled flow run as "Skipped" while another flow run trains the run."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None or not run.auto_scheduled:
        return
    with suppress(CheckpointNotFoundError):
        history, me = run_of(config).history, identify(str(run.id))
        owner = history.head().state.owner
        if owner is None or owner.flow_run_id in (None, me.flow_run_id):
            return
        timeout_s = config.owner_timeout_s
        if why_free(owner, me, Signs(history, timeout_s).silent_s(owner), timeout_s) is None:
            why = f"The run trains already: process {owner.pid} on {owner.host} holds it since {owner.taken_at}."
            end_flow_run(Cancelled(name="Skipped", message=why))


def _held_by(config: CheckpointConfig, flow_run_id: str | None) -> bool:
    try:
        run = run_of(config)
        owner = run.head().state.owner
    except CkptError:  # The owner is unknown: report the original error.
        return False
    return flow_run_id is not None and owner is not None and owner.flow_run_id == flow_run_id


_FULL = 507


class CrashError(BaseException):
    """Makes Prefect mark the flow run as crashed, as for every error that is not an Exception."""


@contextmanager
def crashes_while_the_store_is_away(*, reached: bool) -> Iterator[None]:
    """End a deployment's flow run as crashed if the block fails because the store is overloaded or does not answer.

    `reached`: the store has answered this process before. If not, the first start of a flow run fails, since its
    endpoint may be misspelled. The flow run also fails after an error that a person must fix (expired credentials, a
    full store), and if it has no deployment, since no automation resumes it then.
    """
    try:
        yield
    except CkptError as error:
        if not (_is_away(error) and _will_be_resumed(reached)):
            raise
        raise CrashError(f"the store is away: {error}") from error


@contextmanager
def crashes_while_the_api_is_away() -> Iterator[None]:
    """End a deployment's flow run as crashed if the block fails because Prefect's API is overloaded or does not answer.

    Even the first start counts as crashed: a worker started the process, so the API's address is right.
    """
    try:
        yield
    except httpx.HTTPError as error:
        if api_is_away(error) and _will_be_resumed(reached=True):
            raise CrashError(f"Prefect's API is away: {error!r}") from error
        raise


@contextmanager
def crashes_for_its_launcher() -> Iterator[None]:
    """End the flow run as crashed if the block fails: a launcher starts the process again and continues the flow run.

    An error that a new start cannot repair passes through.
    """
    try:
        yield
    except Exception as error:
        if not is_retryable(error):
            raise
        raise CrashError(str(error)) from error


def is_retryable(error: object) -> bool:
    """Return True if a retry may help: after any error but a `PERMANENT` one, and after an error that `rolls_back`."""
    causes = [*causes_of(error)] if isinstance(error, Exception) else []
    return not any(isinstance(cause, PERMANENT) and not getattr(cause, "rolls_back", False) for cause in causes)


def _is_away(error: CkptError) -> bool:
    if isinstance(error, CommitUncertainError):
        return True
    needs_person = is_expired(error) or answer_of(error)[0] == _FULL
    return isinstance(error, StoreError) and error.transient and not needs_person


def _will_be_resumed(reached: bool) -> bool:
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    return run is not None and run.deployment_id is not None and (reached or run.run_count > 1)


_LOOK_S, _ANSWER_S = 10.0, 5.0
_CANCELLED = (StateType.CANCELLING, StateType.CANCELLED)
_WHY = "The flow run was cancelled; its training ended after a step, with a commit."
_watching: list[str] = []  # The flow run whose state a thread of this process asks for.
_looks = [time.monotonic()]  # When one has asked last.


@contextmanager
def ends_when_cancelled() -> Iterator[None]:
    """End the block as by SIGTERM within 10 s if its flow run is cancelled, then end this process by Prefect's Abort.

    A worker sends SIGTERM to the command of its job. Where that is `prefect flow-run execute`, the engine that trains
    is a child with a session of its own: on a busy machine the worker kills the command before it has told the engine,
    Prefect shows "Cancelled", and the engine would train on. Does nothing outside the main thread, which gets signals,
    and inside another such block. Blocks that follow each other look every 10 s in all, however short they are.
    """
    if not flow_run.id or _watching or threading.current_thread() is not threading.main_thread():
        yield
        return
    over, cancelled = threading.Event(), threading.Event()
    look = copy_context().run  # The client's settings are in this context.
    start_thread(look, _watch, UUID(flow_run.id), over, cancelled, name="ckpt-cancelled")
    _watching.append(flow_run.id)
    try:
        yield
    except TerminationSignal as error:
        if not cancelled.is_set():
            raise
        with suppress(httpx.HTTPError, PrefectException):  # Prefect calls it cancelling, or cancelled, already.
            end_flow_run(Cancelled(message=_WHY))
        raise Abort(_WHY) from error
    finally:
        over.set()
        _watching.clear()


def _watch(run: UUID, over: threading.Event, cancelled: threading.Event) -> None:
    """Ask for the flow run's state until the block is over; send this process SIGTERM, once, if it is cancelled."""
    while not over.wait(max(0.0, _looks[-1] + _LOOK_S - time.monotonic())):
        _looks[:] = [time.monotonic()]
        with suppress(httpx.HTTPError, PrefectException), client_without_retries(_ANSWER_S) as client:
            state = client.read_flow_run(run).state
            if state is not None and state.type in _CANCELLED and not over.is_set():
                cancelled.set()
                os.kill(os.getpid(), signal.SIGTERM)
                return
