"""`python -m flows.train` as a person uses it: complete, stopped, killed, started again; and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from ckpt_tasks import open_run
from ckpt_tasks.cli import app
from ckpt_tasks.errors import CheckpointNotFoundError
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.ownership import acquire, identify
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.system import process_start
from tests.servers.process import free_port
from tests.support import processes
from tests.support.ledgers import is_released
from tests.support.sweeps import quick_first
from tests.support.waiting import until

PATIENCE_S = 300.0  # nothing here is about speed


class Runs:
    """Start `python -m flows.…` in processes of their own, and see to it that none is left."""

    def __init__(self, place: Path):
        self.run_dir = place / "run"
        own = {"PYTHONPATH": str(Path(__file__).parents[2]), "PREFECT_HOME": str(place), "OMP_DISPLAY_ENV": "verbose"}
        self._environment = {**os.environ, **own}
        self._environment.pop("OMP_WAIT_POLICY", None)  # a shell has none
        self._place = place
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        usual = ("--run-key", "tiny", "--checkpoint-dir", str(self.run_dir), "--program", "tests.support.tiny:Tiny")
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.train", *usual, *arguments],
            cwd=self._place,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def finish(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        said, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, said

    def wait_for_step(self, step: int) -> None:
        """Return when a checkpoint of this step or a later one is committed; fail where no process is left to do it."""

        def committed() -> bool:
            ended = [process for process in self._started if process.poll() is not None]
            assert len(ended) < len(self._started), ended[-1].communicate()[0]
            return bool(self.steps()) and self.steps()[0] >= step

        until(committed, PATIENCE_S)

    def steps(self) -> list[int]:
        try:
            return [one.step for one in open_run(str(self.run_dir)).checkpoints()]
        except CheckpointNotFoundError:
            return []

    def servers(self) -> list[int]:
        """Return the ids of the servers that live in our Prefect home."""
        ours = processes.with_variable(f"PREFECT_HOME={self._place}")
        return [pid for pid, command in ours.items() if "create_app" in command]

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
        processes.kill(self.servers())  # before communicate: an orphan may hold the pipe
        for process in self._started:
            process.communicate()


@pytest.fixture
def embedded(tmp_path: Path, prefect_home: Path) -> Iterator[Runs]:
    """Return runs without a configured server."""
    shutil.copytree(prefect_home, tmp_path, dirs_exist_ok=True)
    runs = Runs(tmp_path)
    yield runs
    runs.end()


def answer_without_password(server: int) -> int:
    words = Path(f"/proc/{server}/cmdline").read_bytes().decode().split("\0")
    return httpx.get(f"{next(word for word in words if word.startswith('http://'))}/admin/version").status_code


@pytest.mark.slow
def test_killed_with_an_embedded_server_nothing_is_left_and_it_goes_on(embedded: Runs) -> None:
    """SIGKILL leaves no server behind, nor an open pipe; the same command goes on, completes, and says so once more.

    The server answers nobody else.
    """
    arguments = ("--steps", "60", "--step-interval", "10", "--batch-steps", "20", "--params", '{"step_s": 0.05}')
    process = embedded.start(*arguments)
    embedded.wait_for_step(20)
    (server,) = embedded.servers()
    assert answer_without_password(server) == 401  # other users of this host can reach the port
    process.kill()
    process.communicate(timeout=PATIENCE_S)  # it would wait for ever for an orphan that holds the pipe
    until(lambda: embedded.servers() == [])

    status, said = embedded.finish(*arguments)
    assert status == 0, said
    assert re.search(rf"Resumed from step \d+ of {embedded.run_dir}, saved .*, from (memory|storage)", said), said
    assert embedded.steps()[0] == 60
    assert "heldout loss" in said
    assert "--steps 120" in said
    assert "GOMP_SPINCOUNT = '0'" in said  # started from a shell that sets nothing, no thread of OpenMP spins
    assert "INFO" not in said
    until(lambda: embedded.servers() == [])  # the server looks for its parent and shuts down

    status, said = embedded.finish(*arguments)
    assert status == 0
    assert "is complete: step 60 of 60" in said
    assert "Starting Prefect" not in said
    assert "heldout loss" in said


@pytest.mark.slow
def test_killed_while_the_server_starts_nothing_is_left(embedded: Runs) -> None:
    """SIGKILL in the seconds in which the embedded server comes up leaves no server behind."""
    process = embedded.start("--steps", "9")
    until(lambda: embedded.servers() != [], PATIENCE_S)
    time.sleep(0.3)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    until(lambda: embedded.servers() == [])


@pytest.mark.parametrize(
    ("name", "status"),
    [("SIGINT", 130), *(pytest.param(name, 143, marks=pytest.mark.slow) for name in ("SIGTERM", "SIGHUP"))],
)
def test_a_signal_to_the_whole_group_ends_at_a_step_with_a_commit(embedded: Runs, name: str, status: int) -> None:
    """P69: Ctrl-C, `timeout` and a closed terminal signal our whole process group: it commits the step, and we end.

    The embedded server outlives the signal, so that nothing waits for it, and it is told how the flow run ended.
    """
    process = embedded.start("--steps", "9999", "--step-interval", "10", "--params", '{"step_s": 0.02}')
    embedded.wait_for_step(10)
    os.killpg(process.pid, signal.Signals[name])
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status, said
    assert f"Stopped; step {embedded.steps()[0]} is committed" in said
    with closing(sqlite3.connect(embedded.run_dir.parent / "prefect.db")) as database:
        assert database.execute("select state_type from flow_run").fetchall() == [("CRASHED",)]
    assert is_released(embedded.run_dir)
    until(lambda: embedded.servers() == [])


def here(flow: str, run_dir: Path, *arguments: str) -> int:
    """Run a command line in this process."""
    usual = ("--run-key", "tiny", "--checkpoint-dir", str(run_dir), "--program", "tests.support.tiny:Tiny")
    with pytest.raises(SystemExit) as ended:
        app([flow, *usual, *arguments])
    return int(ended.value.code or 0)


@pytest.mark.usefixtures("harness")
@pytest.mark.parametrize(
    ("option", "value", "says"),
    quick_first([("--steps", "0", "--steps"), ("--batch-steps", "0", "batch_steps"), ("--run-key", "../x", "run_key")]),
)
def test_errors_of_the_flow_are_one_line(
    run_dir: Path, capfd: pytest.CaptureFixture[str], option: str, value: str, says: str
) -> None:
    """What the flow refuses ends with status 1 and one line that names it, without a traceback, and nothing is made."""
    assert here("train", run_dir, option, value) == 1
    said = "".join(capfd.readouterr())
    assert f"error: {says}" in said
    assert said.count("error: ") == 1
    assert "Traceback" not in said
    assert not run_dir.exists()


@pytest.fixture
def no_server() -> Iterator[None]:
    """Name a server that does not answer: what is said before it is asked is said all the same."""
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{free_port()}/api"}):
        yield


@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize("flow", quick_first(["train", "evaluate"]))
def test_a_server_that_does_not_answer_is_one_line(flow: str, run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """P73: after `ckpt down` the shell still names its server; what to do is said, instead of Prefect's traceback.

    A class without train_step and evaluate is seen before that.
    """
    assert here(flow, run_dir) == 1
    said = "".join(capfd.readouterr())
    assert "error: no server answers at http://127.0.0.1:" in said
    assert "unset PREFECT_API_URL" in said
    assert "Traceback" not in said
    assert here(flow, run_dir, "--program", "collections:Counter") == 1
    said = "".join(capfd.readouterr())
    assert "error: collections:Counter is not a program: it has no train_step and no evaluate" in said


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this system that lives."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.mark.usefixtures("no_server")
def test_a_run_that_a_live_process_trains_is_refused_before_a_server_starts(
    run_dir: Path, other: subprocess.Popen[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    """P33: who types the command a second time is refused at once, without a word about taking the run over."""
    history = History(LocalStore(run_dir))
    history.create("tiny")
    owner = replace(identify("its flow run"), pid=other.pid, process_start=process_start(other.pid) or "")
    acquire(history, owner, take_over=False, timeout_s=120.0)
    assert here("train", run_dir) == 1
    said = "".join(capfd.readouterr())
    assert f"error: the run directory is held by process {other.pid} on this host since " in said
    assert "resumes it when that has ended" in said
    assert "take_over" not in said


@pytest.mark.slow
@pytest.mark.usefixtures("harness")
def test_what_the_commands_say(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A start says from which step, saved when and where; a retry shows why the attempt failed, in one line.

    Nothing else of Prefect's log is shown.

    An evaluation is recorded once, and says when it was recorded before. Another program with the same key and
    directory is an error that names both, not "complete".
    """

    def said(flow: str, *arguments: str, status: int = 0) -> str:
        assert here(flow, run_dir, *arguments) == status
        return "".join(capfd.readouterr())

    params = json.dumps({"fail_at": 2, "failures": str(run_dir.parent / "failures")})
    trained = said("train", "--steps", "3", "--params", params)
    assert "Attempt 1 failed at step 1: RuntimeError: injected in step 2\n" in trained
    assert "Traceback" not in trained
    assert "INFO" not in trained
    assert re.search(r"^step 3/3 · loss .* · committed 3, waited", trained, re.MULTILINE)
    assert f"\nTraining begins at step 0: {run_dir} has no checkpoint\nStep 0 is saved in {run_dir}\n" in trained
    resumed = said("train", "--steps", "4", "--params", params)
    assert re.search(
        rf"^Resumed from step 3 of {run_dir}, saved .* \(.*\), from (memory|storage)", resumed, re.MULTILINE
    )
    assert "has no checkpoint" not in resumed
    for says in (
        "Evaluation of step 3, evaluation set full: recorded\n",
        "evaluation set full: recorded before, nothing was",
    ):
        assert says in said("evaluate", "--which", "3", "--suite", "full")
    other = said("train", "--steps", "3", "--program", "tests.support.forks:Scheduled", status=1)
    assert "error: the run trains tests.support.tiny:Tiny, not tests.support.forks:Scheduled" in other
    assert "complete" not in other


@pytest.mark.usefixtures("harness")
def test_a_program_that_raises_on_import_is_named(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is the module's own last line, with its file and line, and no frame of ours."""
    (tmp_path / "broken_program.py").write_text("import os\nlimit = int('many')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match="1"):
        app(["train", "broken_program:Program", "--checkpoint-dir", str(run_dir)])
    said = "broken_program:Program cannot be imported: ValueError: invalid literal for int() with base 10: 'many'"
    assert capsys.readouterr().err == f"error: {said} (at {tmp_path / 'broken_program.py'}, line 2)\n"
