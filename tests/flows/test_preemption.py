"""Preemption through the real entry points: a real server and real processes; what was committed and released."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled, Cancelling, Suspended
from prefect.utilities import engine

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.checkpoint.pausing import hold_signals
from ckpt_tasks.flows.train import train
from tests.flows.gated import delayed, own, retried, timed
from tests.support import processes
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
PREFECT = str(Path(sys.prefix, "bin", "prefect"))
HEARD_S = 15.0  # Prefect's engine asks every 10 s whether its flow run is suspended; the batches here take milliseconds
FOREVER = 10**7
AT, STEPS, TOTAL = 3, 6, 12  # where a process is acted upon; the end of its batch; the end of the run
PLACES = {"step": AT, "save": AT, "retry": 0, "build": 0, "rank": AT}  # where it is, and the step that it commits


def places(*names: str) -> list[Any]:
    """Give all places; `make test-all` has these, and every place of a SIGTERM."""
    return [pytest.param(place, marks=() if place in names else pytest.mark.soak) for place in PLACES]


class Attempt:
    """A flow run with the program Gated, and the process that executes it."""

    def __init__(self, client: SyncPrefectClient, server: dict[str, str], folder: Path, place: str, **options: Any):
        self.client, self.folder, self.place = client, folder, place
        self.environment = {
            **server,
            "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR": "reschedule",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.prefix, 'bin')}{os.pathsep}{os.environ['PATH']}",
            "PREFECT_LOGGING_HANDLERS_CONSOLE_CLASS": "ckpt_tasks.flows.prefect.console_log.UnreadConsole",
        }
        here = {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}
        flow = options.pop("flow", train)
        names = {timed: "timed", retried: "retried", delayed: "delayed", own: "own"}
        entrypoint = f"tests/flows/gated.py:{names[flow]}" if flow in names else "flows/train.py:train"
        deployment = client.create_deployment(
            client.create_flow(flow), folder.name, entrypoint=entrypoint, pull_steps=[here]
        )
        parameters = {
            "run_key": "gated",
            "total_steps": TOTAL,
            "program": f"tests.flows.gated:{'GatedPair' if place == 'rank' else 'Gated'}",
            "ranks": 2 if place == "rank" else 1,
            "params": {"folder": str(folder), "place": place, "at": AT},
            "batch_steps": STEPS,
            "retry_delay_seconds": 600.0,
            **options,
            "checkpoint": {"checkpoint_dir": str(folder / "run"), "step_interval": AT if place == "save" else 100},
        }
        if flow is own:
            parameters = {name: parameters[name] for name in ("total_steps", "params", "checkpoint")}
        self.run = client.create_flow_run_from_deployment(deployment, parameters=parameters).id
        self.process: subprocess.Popen[bytes] | None = None
        self._started = 0

    def start(self, *, unread: bool = False) -> None:
        """Start the process; it and what it starts are a session of its own. `unread`: a pipe has what it prints."""
        self._started += 1
        self._reader, writing = os.pipe()
        with (self.folder / f"{self._started}.log").open("wb") as file, os.fdopen(writing, "wb") as pipe:
            log = pipe if unread else file
            command = [PREFECT, "flow-run", "execute", str(self.run)]
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def until_there(self) -> None:
        """Wait until the process is where it is to be acted upon."""
        if self.place == "delay":
            self.until(lambda: "AwaitingRetry" in self.states(), "the retry of the flow is waited for")
        elif self.place == "retry":  # the engine's own word: before it the failed attempt is still tidied up
            self.until(lambda: "Retry 2/" in self.output(), "the retry is waited for")
        else:
            self.until((self.folder / "at").exists, "the program is there")

    def stop_reading(self) -> None:
        """Let the reader of what the process prints be gone, as a worker that was killed."""
        os.close(self._reader)

    def terminate(self) -> None:
        """Send SIGTERM to the process, as a preempted host does."""
        assert self.process is not None
        self.process.terminate()

    def go(self) -> None:
        """Let the program go on, now and in every later process."""
        (self.folder / "go").touch()

    def ended(self) -> int:
        """Wait until the process and all that it started have ended; return its exit code."""
        process = self.process
        assert process is not None
        self.until(lambda: process.poll() is not None, "the process ends")
        self.until(lambda: not self.engines(), "the engine ends")
        return int(process.returncode)

    def until(self, true: Callable[[], object], what: str) -> None:
        """Wait until something is true."""
        try:
            until(true, 600, pause_s=0.1)
        except AssertionError as error:
            error.add_note(f"{what}\n{self.output()}")
            raise

    def states(self) -> list[str]:
        """List the names of the flow run's states, in order."""
        states = sorted(self.client.read_flow_run_states(self.run), key=lambda one: one.timestamp)
        return [str(one.name) for one in states]

    def output(self) -> str:
        """Return what the processes have printed."""
        return "".join(log.read_text() for log in sorted(self.folder.glob("*.log")))

    def engines(self) -> list[int]:
        """List the processes of this flow run."""
        return [*processes.with_variable(f"PREFECT__FLOW_RUN_ID={self.run}")]

    @property
    def trained(self) -> list[int]:
        """List the steps that were trained, in order, those that were lost too."""
        return [int(line) for line in (self.folder / "steps").read_text().split()]

    def check_saved(self, step: int) -> None:
        """The step is committed, the directory is released, and no failure is counted but the injected ones."""
        run = open_run(str(self.folder / "run"))
        state = run.head().state
        if self.place == "rank" and step == AT:  # ranks agree on a step from this one on
            step = max(self.trained)
        assert max((one.step for one in run.checkpoints()), default=0) == step, self.output()
        assert state.owner is not None
        assert state.owner.released, self.output()
        events = [run.history.read_entry(n)[0].event for n in range(1, run.head().next_n)]
        assert [event.get("note") for event in events].count("failure") == 2 * (self.place == "retry")
        # The stop is taken for the end of an attempt: of two failures in a row one is left, and none behind a commit.
        assert state.stalled_attempts == int(self.place == "retry" and step == 0)

    def kill(self) -> None:
        """End what is left."""
        pids = self.engines()
        if self.process is not None and self.process.poll() is None:
            pids.append(self.process.pid)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Start(Protocol):
    def __call__(self, place: str, **options: Any) -> Attempt: ...


@pytest.fixture
def start(client: SyncPrefectClient, server: dict[str, str], tmp_path: Path) -> Iterator[Start]:
    """Start a flow run, and wait until its process is at the given place."""
    made: list[Attempt] = []

    def one(place: str, *, unread: bool = False, **options: Any) -> Attempt:
        made.append(Attempt(client, server, tmp_path, place, **options))
        made[-1].start(unread=unread)
        made[-1].until_there()
        return made[-1]

    yield one
    for attempt in made:
        attempt.kill()


def test_prefect_takes_our_handler_for_its_own(run_dir: Path) -> None:
    """P69: the engine acknowledges what it is to do while we hold SIGTERM; then Prefect's handler is back.

    Also where a flow within the flow looks for Prefect's handler.
    """
    prefects = engine._prefect_sigterm_handler
    said: list[str] = []

    def hold() -> None:
        config = CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=None)
        with engine.capture_sigterm(), Checkpointer(config) as ckpt:
            ckpt.save(1, {"weights": torch.zeros(2)})
            assert signal.getsignal(signal.SIGTERM) is not prefects
            assert engine.commit_control_intent_and_ack(
                lambda: said.append("intent"), said.clear, lambda: said.append("acknowledged")
            )
            with engine.capture_sigterm():
                signal.raise_signal(signal.SIGTERM)
            said.append("held back")
            hold_signals(ckpt, False)
            said.append("lost")

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(TerminationSignal):
            hold()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert said == ["intent", "acknowledged", "held back"]
    assert engine._prefect_sigterm_handler is prefects


@pytest.mark.slow
def test_sigterm_when_nobody_reads_the_output(start: Start) -> None:
    """P69: below a worker that was killed, which read what the flow run prints, a step is committed all the same."""
    run = start("step", unread=True)
    run.stop_reading()
    run.terminate()
    run.until(lambda: "AwaitingRetry" in run.states(), "the flow run is scheduled again")
    run.go()
    run.ended()
    run.check_saved(AT)
    assert run.states()[-1] in {"AwaitingRetry", "Crashed"}  # the automations resume that, too


@pytest.mark.slow
@pytest.mark.parametrize("twice", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["once", "twice"])
@pytest.mark.parametrize("place", PLACES)
def test_sigterm_to_flow_run_execute(start: Start, place: str, twice: bool) -> None:
    """P69: the step ends and is committed, the directory is released, and the flow run is scheduled again.

    Schedulers send several, to a process and all that it started: the first one's work is done all the same.
    """
    run = start(place)
    run.terminate()
    run.until(lambda: "AwaitingRetry" in run.states(), "the flow run is scheduled again")
    for pid in run.engines() if twice else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    run.go()
    assert run.ended() == 0
    run.check_saved(PLACES[place] and max(run.trained))  # Prefect may pass the signal on after the step that follows.
    assert run.states()[-2:] == ["Running", "AwaitingRetry"]


@pytest.mark.slow
def test_a_worker_takes_a_preempted_flow_run_that_prefect_has_retried(start: Start) -> None:
    """P69: a retry of the whole flow in its process has begun; a preemption then leaves nothing to wait for."""
    run = start("again", flow=retried, retries=0)
    assert run.client.read_flow_run(run.run).run_count == 2  # Prefect has retried it
    run.terminate()
    run.until(lambda: run.states().count("AwaitingRetry") == 2, "the flow run is scheduled again")
    run.go()
    assert run.ended() == 0
    assert run.client.read_flow_run(run.run).empirical_policy.retry_type != "in_process"  # workers pass over those


@pytest.mark.slow
def test_a_worker_takes_a_flow_run_that_was_preempted_before_a_retry(start: Start) -> None:
    """P69: in the delay before a retry of the whole flow nothing trains; a preemption leaves nothing to wait for."""
    run = start("delay", flow=delayed, retries=0)
    before = run.client.read_flow_run(run.run)
    assert (before.run_count, before.empirical_policy.retry_type) == (1, "in_process")
    run.terminate()
    run.until(lambda: run.states().count("AwaitingRetry") == 2, "the flow run is scheduled again")
    run.ended()
    after = run.client.read_flow_run(run.run)
    assert before.next_scheduled_start_time is not None
    assert after.next_scheduled_start_time is not None
    assert after.empirical_policy.retry_type != "in_process"  # workers pass over those
    assert after.next_scheduled_start_time < before.next_scheduled_start_time


@pytest.mark.slow
@pytest.mark.parametrize("flow", [train, own], ids=["train", "own"])
def test_a_cancelled_training_ends_without_its_supervisor(flow: Any, start: Start) -> None:
    """P69: an engine whose supervisor was killed, of a flow run that is cancelled, commits a step and ends."""
    run = start("step", flow=flow, total_steps=FOREVER, batch_steps=FOREVER)
    assert run.process is not None
    run.process.kill()
    run.client.set_flow_run_state(run.run, Cancelled(), force=True)
    run.go()
    run.ended()
    saved = max(run.trained)
    assert AT <= saved < FOREVER
    run.check_saved(saved)
    assert run.states()[-1] == "Cancelled"


@pytest.mark.slow
@pytest.mark.parametrize("place", places("save", "rank"))
def test_cancel(start: Start, place: str) -> None:
    """P69: the step ends and is committed, the directory is released, and nothing comes back."""
    run = start(place)
    run.client.set_flow_run_state(run.run, Cancelling())
    run.go()
    assert run.ended() == 0
    assert run.states()[-1] == "Cancelled"
    assert not {"Crashed", "Failed", "AwaitingRetry"} & set(run.states())
    saved = max((one.step for one in open_run(str(run.folder / "run")).checkpoints()), default=0)
    run.check_saved(saved)  # the order comes by a websocket, at any step from this one on
    assert saved == max(run.trained, default=0) if place in {"step", "save", "rank"} else saved == PLACES[place]


@pytest.mark.slow
@pytest.mark.parametrize("place", places("step", "retry"))
def test_suspend(start: Start, place: str) -> None:
    """The batch ends and is committed, the directory is released, and a person resumes the run."""
    run = start(place, retry_delay_seconds=3.0)
    run.client.set_flow_run_state(run.run, Suspended(timeout_seconds=6000))
    time.sleep(HEARD_S)
    run.go()
    assert run.ended() == 0
    assert run.states()[-1] == "Suspended"
    run.check_saved(STEPS)
    run.client.resume_flow_run(run.run)
    run.start()
    assert run.ended() == 0
    assert run.states()[-1] == "Completed"
    run.check_saved(TOTAL)


@pytest.mark.slow
@pytest.mark.parametrize("place", places("build", "save"))
def test_a_flows_timeout(start: Start, place: str) -> None:
    """The step ends and is committed, the directory is released, and the flow run ends as timed out."""
    run = start(place, flow=timed)
    if place != "retry":
        run.until((run.folder / "alarm").exists, "the time is over")
        run.go()
    assert run.ended() == 0
    run.check_saved(PLACES[place])
    assert run.states()[-1] == "TimedOut"
