"""`ckpt train` as the ranks of torchrun, against a real server: one flow run over all starts of the launcher."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from prefect import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort

from ckpt_tasks import open_run
from tests.servers.process import free_port
from tests.support.agents import MARK, REDUCING, left, trained
from tests.support.ledgers import is_released, newest_step
from tests.support.waiting import until
from tools.sources import ROOT

pytestmark = pytest.mark.usefixtures("harness")

TOTAL = 20


class Torchrun:
    """An agent of torchrun, which starts `ckpt train` in its ranks."""

    def __init__(self, run_dir: Path, server: dict[str, str], options: list[str], **params: Any):
        command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3", *options, "-m", "ckpt_tasks"]
        train = ["train", REDUCING, "--steps", str(TOTAL), "--batch-steps", "5", "--step-interval", "4"]
        train += ["--checkpoint-dir", str(run_dir), "--max-num-checkpoints", "none"]
        self.log = run_dir.with_name(f"agent-{time.monotonic_ns()}.log")
        environment = {**server, MARK: str(run_dir), "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *train, "--params", json.dumps(params)], env=environment, stdout=output, stderr=output
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> tuple[int, str]:
        """Wait for it; return its exit status, and what it and its ranks have printed."""
        status = self.process.wait(400)
        return status, self.log.read_text()


def flow_runs(run_dir: Path) -> list[tuple[FlowRun, list[str]]]:
    """Return the flow runs that have trained a run, each with the names of its states."""
    with get_client(sync_client=True) as client:
        found = [
            run
            for run in client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=200)
            if run.name.endswith(f" to {TOTAL}") and str(run_dir) in json.dumps(run.parameters)
        ]
        states = [sorted(client.read_flow_run_states(run.id), key=lambda state: state.timestamp) for run in found]
    return [(run, [state.name or "" for state in each]) for run, each in zip(found, states, strict=True)]


def until_nothing_is_left(run_dir: Path) -> None:
    until(lambda: not left(str(run_dir)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, server: dict[str, str]) -> tuple[Any, ...]:
    """Return what two ranks that nobody disturbs have trained, and what their launcher has printed."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    with Torchrun(run_dir, server, ["--nproc-per-node", "2"]) as launcher:
        status, said = launcher.end()
    assert status == 0, said
    return (*trained(run_dir), said, run_dir)


@pytest.mark.slow
def test_the_ranks_of_a_launcher_are_one_flow_run(whole: tuple[Any, ...]) -> None:
    """`torchrun -m ckpt_tasks train` trains on its ranks, evaluates on them together, and is one flow run."""
    step, _, curve, said, run_dir = whole
    assert (step, len(curve)) == (TOTAL, TOTAL)
    assert f"to step {TOTAL}, on 2 ranks" in said
    assert f"Training begins at step 0: {run_dir} has no checkpoint" in said
    assert "Evaluation of step 20, evaluation set quick" in said
    assert [each.metrics["total"] for each in open_run(str(run_dir)).evaluations()] == [3.0]
    until(lambda: flow_runs(run_dir)[0][1][-1] == "Completed")  # A busy server answers late.
    [(run, states)] = flow_runs(run_dir)
    assert (run.run_count, states) == (1, ["Pending", "Running", "Completed"])


@pytest.mark.slow
@pytest.mark.parametrize("broken", [0, 1])
def test_an_evaluation_that_fails_in_one_rank_ends_all_with_status_0(
    run_dir: Path, server: dict[str, str], broken: int
) -> None:
    """A rank that fails in `evaluate` while the other waits for it: the training is completed, and is not restarted."""
    with Torchrun(run_dir, server, ["--nproc-per-node", "2"], broken=broken) as launcher:
        status, said = launcher.end()
    assert (status, "Its evaluation has failed: " in said) == (0, True), said
    assert f"rank {broken}: the evaluation has failed: RuntimeError('injected in evaluate')" in said
    [(run, states)] = flow_runs(run_dir)
    assert (run.run_count, states) == (1, ["Pending", "Running", "Completed"])
    until_nothing_is_left(run_dir)


@pytest.mark.slow
def test_restarts_of_the_launcher_go_on_with_the_flow_run(
    run_dir: Path, server: dict[str, str], whole: tuple[Any, ...]
) -> None:
    """A rank raises, a rank and rank 0 are killed: each time torchrun starts all again, and one flow run goes on.

    It shows the rank's error; its last state is Completed; the end is bit-equal; no process is left.
    """
    plan = [(7, 1, "raise"), (12, 1, "kill"), (17, 0, "kill")]
    options = ["--nproc-per-node", "2"]
    with Torchrun(run_dir, server, options, plan=plan, folder=str(run_dir.parent)) as launcher:
        status, said = launcher.end()
    assert status == 0, said
    assert "error: rank 1 failed after step 6: RuntimeError: injected in step 7" in said
    assert trained(run_dir) == whole[:3]
    [(run, states)] = flow_runs(run_dir)
    assert (run.run_count, states[-1]) == (4, "Completed")
    assert states == ["Pending", "Running", "Crashed"] * 3 + ["Pending", "Running", "Completed"]
    owner = open_run(str(run_dir)).head().state.owner
    assert owner is not None
    assert (owner.epoch, owner.released) == (4, True)  # one for each start
    until_nothing_is_left(run_dir)


@contextmanager
def two_agents(run_dir: Path, server: dict[str, str], **params: Any) -> Iterator[list[Torchrun]]:
    """Start an agent of torchrun for each of two hosts, of which both are this one."""
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", run_dir.parent.name]
    meet += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    with ExitStack() as stack:
        yield [stack.enter_context(Torchrun(run_dir, server, meet, **params)) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_agents_end_and_the_next_ones_go_on(
    run_dir: Path, server: dict[str, str], whole: tuple[Any, ...], number: signal.Signals
) -> None:
    """An agent is killed, or told to end, in the middle: no rank is left, and new agents go on with the flow run.

    Told to end, its ranks and those of the other agent commit one step, and release the run.
    """
    with two_agents(run_dir, server, step_s=0.2) as agents:
        while newest_step(run_dir) < 5:
            assert all(agent.process.poll() is None for agent in agents), [agent.log.read_text() for agent in agents]
            time.sleep(0.05)
        agents[0].process.send_signal(number)
        agents[0].end()
        if number == signal.SIGTERM:
            assert is_released(run_dir)
        agents[1].process.terminate()  # as the scheduler of a job that has lost a host
        agents[1].end()
    until_nothing_is_left(run_dir)
    assert 5 <= newest_step(run_dir) < TOTAL
    with two_agents(run_dir, server, step_s=0.2) as agents:
        ends = [agent.end() for agent in agents]
    assert [status for status, _ in ends] == [0, 0], ends
    assert trained(run_dir) == whole[:3]
    [(run, states)] = flow_runs(run_dir)
    assert (run.run_count, states[-1]) == (2, "Completed")
