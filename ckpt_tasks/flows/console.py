"""The flows in a terminal: one live line, a table at the end, an exit status, and no log of Prefect."""

from __future__ import annotations

import logging
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, NoReturn

import httpx
import torch
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import Abort, ParameterTypeError, TerminationSignal
from prefect.flow_engine import run_flow
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import get_current_settings
from rich.console import Console

from ckpt_tasks.checkpoint.acquiring import await_store_of
from ckpt_tasks.checkpoint.interrupt import taking_stop_signals
from ckpt_tasks.checkpoint.restore.reading import run_of
from ckpt_tasks.errors import CheckpointNotFoundError, CkptError, ConfigError, OwnedError, ProgramError, SiteError
from ckpt_tasks.flows.evaluate import evaluate, evaluate_in
from ckpt_tasks.flows.gang.launched import LaunchedPlace, launched
from ckpt_tasks.flows.prefect.config import BatchLength, check_ranks, position_of_run
from ckpt_tasks.flows.prefect.embedded import begin_embedded_server, start_embedded_server
from ckpt_tasks.flows.prefect.endings import CrashError
from ckpt_tasks.flows.prefect.evaluate import EvaluationResult, Evaluator, recorded_evaluation
from ckpt_tasks.flows.prefect.starts import flow_run_to_go_on
from ckpt_tasks.flows.screen import EvaluationLine, LiveLine, Screen, print_evaluation, print_evaluations, print_run
from ckpt_tasks.flows.session.forked import check_program, fork_run, recorded_params
from ckpt_tasks.flows.session.local_session import END_SUITE, find_program
from ckpt_tasks.flows.session.parameters import effective_params
from ckpt_tasks.flows.session.session import ProgramSession, at_end
from ckpt_tasks.flows.train import train
from ckpt_tasks.format.records import Owner
from ckpt_tasks.logs import TOLD, shown_meanwhile
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.ownership import identify, lives_here
from ckpt_tasks.run.opening import ranks_of
from ckpt_tasks.run.report.words import ranks_words, when
from ckpt_tasks.storage.secrets import without_secrets

_ENDING_S = 5.0  # After a signal to stop, a process ends its step, commits and releases the run within this time.
_POLL_S = 0.25
_PREFECT_LOGS = ("prefect", "EventsWorker", "APILogWorker")


@dataclass(frozen=True, kw_only=True)
class TerminalTraining:
    """A request of the command line: train a program until step `steps`, in tasks of `batch_steps` steps or of 30 s.

    `place` describes rank 0 among the ranks that another launcher has started; None without a launcher.
    """

    program: str
    config: CheckpointConfig
    steps: int
    params: Mapping[str, Any]
    batch_steps: int | None = None
    ranks: int = 1
    engine: str = "local"
    min_ranks: int | None = None
    fork_from: str | None = None
    place: LaunchedPlace | None = None

    def check(self) -> None:
        """Check without a server: find the program, compare it with the run's program, and check its parameters.

        Raises CkptError. Also makes the fork if `fork_from` names a checkpoint.
        """
        BatchLength(steps=self.batch_steps)
        check_ranks(self.ranks, self.engine, self.min_ranks)
        await_store_of(self.config)
        check_program(self.config, self.program)
        factory = _import_program(self.program)
        if self.fork_from is not None:
            fork_run(self.fork_from, self.config, self.params)
        find_program(self.program, effective_params(factory, recorded_params(self.config), self.params))

    def run(self) -> None:
        """Run the flow; if a launcher has started this process again, continue the flow run of its last start."""
        parameters: dict[str, Any] = {
            "run_key": str(self.config.run_key),
            "total_steps": self.steps,
            "checkpoint": self.config,
            "program": self.program,
            "params": dict(self.params),
            "batch_steps": self.batch_steps,
            "ranks": self.ranks,
            "engine": self.engine,
            "min_ranks": self.min_ranks,
        }
        launched.set(self.place)
        before = self.place and flow_run_to_go_on(self.config, train.serialize_parameters(parameters))
        if before:
            run_flow(train, flow_run=before, parameters=parameters)
        else:
            train(**parameters)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended: its exit status (130 and 143 after a signal), the run's step, and its evaluations."""

    status: int
    step: int
    evaluations: tuple[EvaluationResult, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Return the facts that --json prints."""
        return {
            "status": self.status,
            "step": self.step,
            "evaluations": [asdict(result) for result in self.evaluations],
        }


def train_in_terminal(training: TerminalTraining, *, again: str, stderr: bool = False) -> Ended:
    """Train a run and evaluate its newest checkpoint, with output for people; `again` is the command that resumes it.

    Raises CkptError, if possible before it starts a server.
    """
    results: list[EvaluationResult] = []
    out, config = Screen(stderr=stderr), training.config
    with _exit_status() as status:
        with shown_meanwhile(f"Importing {training.program} …", out.file):
            training.check()
        start = position_of_run(config, training.steps)
        if start < training.steps:
            _check_owner(config)
        result = _announce(out, training, start)
        if result is not None and training.place:
            training.place.dismiss(config)
        failure: Exception | None = None
        if result is None:
            with _prefect(out):
                result, failure = _train(training, out)
        print_run(out, config)
        if result is not None:
            print_evaluation(out, result)
            results = [result]
        else:
            out.print(f"The training is complete. Its evaluation has failed: {failure}", style="yellow", soft_wrap=True)
    step = position_of_run(config, training.steps)
    if status[0]:
        committed = f"step {step} is committed" if step else "no step is committed yet"
        out.print(f"Stopped; {committed}. The same command resumes it:\n  {again}", soft_wrap=True)
    return Ended(status=status[0], step=step, evaluations=tuple(results))


def _train(training: TerminalTraining, out: Screen) -> tuple[EvaluationResult | None, Exception | None]:
    """Train, and evaluate the newest checkpoint: in the ranks that have trained, or else in this process.

    Returns the evaluation's result, or why it has failed; raises what the training raises.
    """
    done: list[EvaluationResult] = []
    failures: list[Exception] = []
    config = training.config
    asked: dict[str, Any] = {"program": training.program, "params": dict(training.params)}

    def in_ranks(session: ProgramSession) -> None:
        if training.ranks > 1 or training.engine != "local":
            collect(lambda: evaluate_in(session, evaluator))

    def collect(measure: Callable[[], EvaluationResult]) -> None:
        try:
            done.append(measure())
        except Exception as error:  # noqa: BLE001 (shown: the training is complete)
            failures.append(error)

    holder = "the evaluation after a training"
    key, place = str(config.run_key), config.location
    evaluator = Evaluator(run_key=key, location=place, suite=END_SUITE, holder=holder, **asked)
    token = at_end.set(in_ranks)
    try:
        with LiveLine(out, training.steps) as line:
            training.run()
            line.finish(run_of(config).find("latest"))
    finally:
        at_end.reset(token)
    if not (done or failures):
        collect(lambda: evaluate(run_key=key, checkpoint_dir=place, **asked)[0])
    return next(iter(done), None), next(iter(failures), None)


def evaluate_in_terminal(
    config: CheckpointConfig, program: str, *, stderr: bool = False, suite: str, which: str, **asked: Any
) -> Ended:
    """Evaluate committed checkpoints, with output for people; raises CkptError."""
    results: list[EvaluationResult] = []
    out = Screen(stderr=stderr)
    with _exit_status() as status:
        await_store_of(config)
        _import_program(program)
        with _prefect(out), EvaluationLine(out):
            where: dict[str, Any] = {"run_key": str(config.run_key), "checkpoint_dir": config.location}
            results = evaluate(**where, program=program, suite=suite, which=which, **asked)
        if which == "pending" or not results:
            print_evaluations(out, suite, results)
        else:
            recorded = "recorded" if results[0].new else "recorded before, nothing was changed"
            print_evaluation(out, results[0], f": {recorded}")
    return Ended(status=status[0], step=max((result.step for result in results), default=0), evaluations=tuple(results))


def _import_program(name: str) -> Callable[..., Any]:
    """Import a program; raise ProgramError with the last line of what its module raises, and where it was raised."""
    try:
        return find_program(name)
    except CkptError:
        raise
    except Exception as error:
        frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith("<frozen")]
        said = traceback.format_exception_only(error)[-1].strip()
        where = f"{frames[-1].filename}, line {frames[-1].lineno}"
        raise ProgramError(f"{name} cannot be imported: {said}", key=where) from error


def _announce(out: Console, training: TerminalTraining, start: int) -> EvaluationResult | None:
    """Print the run's position; if the run is complete, return the recorded evaluation of its newest checkpoint."""
    run_key = training.config.run_key
    if start < training.steps:
        on = f", on {training.ranks} ranks" if training.ranks > 1 else ""
        out.print(f"Run {run_key}: to step {training.steps}{on}.")
        run = run_of(training.config) if start else None
        if run is not None and (was := ranks_of(run.history.store, run.find(start))) != training.ranks:
            out.print(ranks_words(start, was, training.ranks), soft_wrap=True)
        return None
    out.print(f"Run {run_key} is complete: step {start} of {training.steps} is committed.")
    run = run_of(training.config)
    return recorded_evaluation(run, run.find("latest"), END_SUITE)


def _check_owner(config: CheckpointConfig) -> None:
    """Raise OwnedError if a live process of this system trains the run; without this check, users would wait 20 s."""
    patient_until_s = time.monotonic() + _ENDING_S
    while (owner := _live_owner(config)) is not None:
        if time.monotonic() > patient_until_s:
            raise OwnedError(
                f"the run directory is held by process {owner.pid} on this host since {when(owner.taken_at)}",
                hint="That process trains the run. The same command resumes it when that has ended.",
            )
        time.sleep(_POLL_S)


def _live_owner(config: CheckpointConfig) -> Owner | None:
    """Return the owner if it is the process of a flow run, and certainly lives on this system; None otherwise."""
    try:
        owner = run_of(config).head().state.owner
    except CheckpointNotFoundError:
        return None
    held = owner is not None and owner.flow_run_id is not None and lives_here(owner, identify(None))
    return owner if held else None


def _check_server(url: str) -> None:
    """Raise SiteError if no server answers at the API that the settings name."""
    with get_client(sync_client=True) as client:
        error = client.api_healthcheck()
        if error is None:
            _check_password(client, url)
    if isinstance(error, httpx.TransportError):
        unset = "unset" if "PREFECT_API_URL" in os.environ else "prefect config unset"
        raise SiteError(
            f"no server answers at {without_secrets(url)}, which PREFECT_API_URL names",
            hint=f"Start it (`ckpt up`), or train without it: `{unset} PREFECT_API_URL`.",
        )


def _check_password(client: SyncPrefectClient, url: str) -> None:
    """Raise SiteError if the server needs a password that the settings lack; the health check needs no password."""
    try:
        client.request("GET", "/admin/version")
    except httpx.HTTPStatusError as error:
        if error.response.status_code in (401, 403):
            raise SiteError(
                f"the server at {without_secrets(url)} does not take our password",
                hint="Set PREFECT_API_AUTH_STRING; `ckpt up` says how for the server that it has started.",
            ) from None


@contextmanager
def _prefect(out: Console) -> Iterator[None]:
    """Start the embedded server if needed; in the block print only our start and warnings of tasks of Prefect's log.

    If the user has set Prefect's log level, Prefect's log stays as it is.
    """
    quiet = "level" not in get_current_settings().logging.model_fields_set
    for handler in logging.getLogger().handlers if quiet else ():
        if isinstance(handler, PrefectConsoleHandler):  # Prefect's pages still get these records.
            handler.addFilter(_is_for_people)  # Never remove this filter, since Prefect logs more at exit.
    if begin_embedded_server():
        text = "Starting Prefect's embedded server …"
        if not out.is_terminal:
            out.print(text)
        with shown_meanwhile(text, out.file):
            torch.optim.SGD([torch.zeros(1)])  # A process's first optimizer imports torch's compiler: do it meanwhile.
            start_embedded_server()
    elif url := get_current_settings().api.url:
        _check_server(url)
    if not quiet:
        yield
        return
    shown = [_Printed(out, "prefect.task_runs", logging.WARNING, "yellow"), _Printed(out, TOLD, logging.INFO, "")]
    for one in shown:
        one.source.addHandler(one)
    try:
        yield
    finally:
        for one in shown:
            one.source.removeHandler(one)


def _is_for_people(record: logging.LogRecord) -> bool:
    """Return False, as a log filter, for Prefect's own records and for our INFO records, which the screen shows."""
    if record.name.startswith("ckpt_tasks"):
        return record.levelno > logging.INFO
    return not record.name.startswith(_PREFECT_LOGS)


class _Printed(logging.Handler):
    """Prints the records of one logger and one level: warnings such as failed attempts, and the lines of a start."""

    def __init__(self, out: Console, source: str, level: int, style: str):
        super().__init__(level)
        self.source, self._out, self._style = logging.getLogger(source), out, style

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == self.level:
            self._out.print(record.getMessage(), style=self._style, markup=False, soft_wrap=True)


class _StoppedError(BaseException):
    """Raised for a SIGTERM that comes before or after the flow."""


def _raise_stopped(number: int, frame: FrameType | None) -> NoReturn:
    raise _StoppedError


@contextmanager
def _exit_status() -> Iterator[list[int]]:
    """Yield a list whose item becomes the exit status: 130 or 143 after a signal, else 0.

    Turns an Abort, failed evaluations and wrong parameters into a CkptError, and a CrashError into its cause.
    """
    status = [0]
    # Prefect forwards SIGTERM to the previous handler. The default handler would end the process at once and leave the
    # embedded server running.
    before = signal.signal(signal.SIGTERM, _raise_stopped)
    try:
        with taking_stop_signals():
            yield status
    except KeyboardInterrupt:
        status[0] = 130
    except (TerminationSignal, _StoppedError):
        status[0] = 143
    except CrashError as error:
        raise error.__cause__ or error from error
    except Abort as error:  # Another process continues the flow run, or Prefect's server does not answer.
        raise CkptError(str(error)) from error
    except ExceptionGroup as errors:  # Several evaluations have failed.
        raise CkptError(errors.message) from errors
    except ParameterTypeError as error:
        raise ConfigError(str(error)) from error
    finally:
        signal.signal(signal.SIGTERM, before)
