"""End a training whose flow run is cancelled, even where Prefect's own signal does not reach it.

A worker sends SIGTERM to the command of its job. Where that is `prefect flow-run execute`, the engine that trains is a
child with a session of its own: on a busy machine the worker kills the command before it has told the engine, Prefect
shows "Cancelled", and the engine trains on.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from uuid import UUID

import httpx
from prefect.client.schemas.objects import StateType
from prefect.exceptions import Abort, PrefectException, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled

from ckpt_tasks.orchestration.endings import end_flow_run
from ckpt_tasks.orchestration.events import client_without_retries
from ckpt_tasks.process.processes import start_thread

_LOOK_S, _ANSWER_S = 10.0, 5.0
_CANCELLED = (StateType.CANCELLING, StateType.CANCELLED)
_WHY = "The flow run was cancelled; its training ended after a step, with a commit."


@contextmanager
def ends_when_cancelled() -> Iterator[None]:
    """End the block as by SIGTERM within 10 s if its flow run is cancelled, then end this process by Prefect's Abort.

    Does nothing outside the main thread, which alone gets signals.
    """
    if not flow_run.id or threading.current_thread() is not threading.main_thread():
        yield
        return
    over, cancelled = threading.Event(), threading.Event()
    look = copy_context().run  # The client's settings are in this context.
    start_thread(look, _watch, UUID(flow_run.id), over, cancelled, name="ckpt-cancelled")
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


def _watch(run: UUID, over: threading.Event, cancelled: threading.Event) -> None:
    """Ask for the flow run's state until the block is over; send this process SIGTERM, once, if it is cancelled."""
    while not over.wait(_LOOK_S):
        with suppress(httpx.HTTPError, PrefectException), client_without_retries(_ANSWER_S) as client:
            state = client.read_flow_run(run).state
            if state is not None and state.type in _CANCELLED and not over.is_set():
                cancelled.set()
                os.kill(os.getpid(), signal.SIGTERM)
                return
