"""`prove_resume`: what goes on bit for bit is proved, and what does not is named."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from ckpt_tasks.cli import app
from ckpt_tasks.cli.proving.proof import prove_resume, unequal_values
from ckpt_tasks.cli.proving.script import may_differ, verify_script
from ckpt_tasks.errors import ConfigError, ProgramError
from tests.support.cli_runs import started
from tests.support.sweeps import quick_first
from tests.support.waiting import until

PROGRAMS = "tests.cli.proving.programs"


@pytest.mark.usefixtures("forked")
def test_a_forgotten_counter_is_named() -> None:
    """P73: the first step that differs is the first after the resume, and the program's attribute is the cause."""
    done = CliRunner().invoke(app, ["verify-resume", f"{PROGRAMS}:Counting", "--steps", "6", "--json"])
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert not found["good"]
    assert found["killed_within"] == [4, 6]
    assert (found["difference"]["step"], found["difference"]["after_kills"]) == (3, 1)
    assert found["difference"]["what"][0] == "metric loss"
    assert "program.seen" in found["difference"]["cause"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_program_that_fails_after_a_resume() -> None:
    """P50: the error says in which step it failed, and that it did not without a break."""
    with pytest.raises(ProgramError, match="failed in step 3, after the first resume; without a break it did not") as e:
        prove_resume(f"{PROGRAMS}:FailingLater", steps=6)
    assert "the stream is exhausted" in str(e.value)


@pytest.mark.slow
def test_a_whole_state_is_proved() -> None:
    """P73: killed within two steps and resumed twice, every value of every step is equal; the status is 0."""
    done = CliRunner().invoke(app, ["verify-resume", f"{PROGRAMS}:Whole", "--steps", "9", "--param", "lr=0.1"])
    assert done.exit_code == 0, done.output
    assert "Every step is equal bit for bit" in done.stdout


class Found(NamedTuple):
    """What `prove_resume` says of a program: the first value that differs, its cause, and what the state leaves out.

    `real`: its processes have to be interpreters of their own, which takes long.
    """

    program: str
    first: str | None
    cause: str = ""
    outside: tuple[str, ...] | None = None
    params: dict[str, Any] = {}  # noqa: RUF012 (not changed)
    real: bool = False


LATE = "program.schedules[0] (MultiStepLR)"
QUICK = {"Unchanged"}
FOUND = [
    Found("BegunAnew", "data/", "call it once for each epoch"),
    Found("LateSchedule", LATE, outside=(LATE,)),
    Found("Averaging", "evaluation norm", outside=(), params={"suites": ["quick"]}),
    Found("Averaging", None, outside=("program.averaged",)),
    Found("Unchanged", None, outside=()),
    Found("OfASet", "metric loss", outside=(), real=True),
    Found("OwnGenerator", "metric loss", "program.noise (Generator)", real=True),
    Found("NoOptimizer", "model", "program.optimizer (AdamW)", real=True),
    Found("Unseeded", "metric loss", "not deterministic", real=True),
    Found("Drawing", "rng/torch", "global random stream", real=True),
]


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row.program in QUICK else pytest.mark.slow) for row in FOUND]
)
def test_what_is_outside_of_the_state_is_named(row: Found, request: pytest.FixtureRequest) -> None:
    """P73: objects, generators, a late schedule, an average that the evaluation reads, chance, a draw at the start.

    They are told apart, also where all steps are equal; what is alike is quiet.
    """
    if not row.real:
        request.getfixturevalue("forked")
    proof = prove_resume(f"{PROGRAMS}:{row.program}", row.params, steps=6)
    assert (proof.difference is None) == (row.first is None)
    if proof.difference is not None:
        assert proof.difference.what[0].startswith(str(row.first))
        assert row.cause in proof.difference.cause
        assert proof.difference.after_kills == (row.program != "Unseeded") or not row.cause
    assert row.outside in (None, proof.outside)


def test_the_first_value_is_named() -> None:
    """P73: streams come before metrics and weights, which they change; a value of one side alone differs."""
    values = {"model/a": "1", "rng/torch": "2", "model/b": "3"}
    other = {"values": {"model/a": "1", "rng/torch": "9"}, "metrics": {"loss": 2}}
    assert unequal_values({"values": values, "metrics": {"loss": 1}}, other) == ["rng/torch", "metric loss", "model/b"]


@pytest.mark.usefixtures("forked")
def test_bad_orders_are_refused() -> None:
    """P50: too few steps, and a program that is not there, are errors that say so."""
    with pytest.raises(ConfigError, match="from 6 on"):
        prove_resume(f"{PROGRAMS}:Whole", steps=5)
    with pytest.raises(ProgramError, match="Absent"):
        prove_resume(f"{PROGRAMS}:Absent", steps=6)


SCRIPT = [sys.executable, str(Path(__file__).with_name("script.py"))]


def test_a_script_that_makes_no_run_there_is_told_how() -> None:
    """P50: a command that ignores where its run is to be, one that fails, and options of a program."""
    with pytest.raises(ConfigError, match="has made no run") as error:
        verify_script(["true"])
    assert "{run}" in str(error.value)
    assert "CKPT_RUN" in str(error.value)
    with pytest.raises(ProgramError, match="no such step"):
        verify_script(["sh", "-c", "echo no such step; exit 3"])
    done = CliRunner().invoke(app, ["verify-resume", "--steps", "9", "--", "python", "train.py"])
    assert done.exit_code == 1
    assert "--steps, --param and --ranks are for a program" in done.output


@pytest.mark.slow
def test_a_script_goes_on_bit_for_bit() -> None:
    """P73: a plain script, killed from outside twice: metrics of all steps and the last checkpoint are equal."""
    done = CliRunner().invoke(app, ["verify-resume", "--", *SCRIPT])
    assert done.exit_code == 0, done.output
    assert "killed after the commits of" in " ".join(done.output.split())
    assert "equal bit for bit" in " ".join(done.output.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forgets", "kills", "first", "named"),
    [
        (["generator"], {1, 2}, "metric loss", "outside of the state"),
        (["chance"], {0}, "metric loss", "without any kill"),
        (["generator", "quiet"], {2}, "model/", "outside of the state"),
    ],
)
def test_what_a_script_forgets_is_named(forgets: list[str], kills: set[int], first: str, named: str) -> None:
    """P73: a generator outside of the state, chance, and a script that reports no metrics."""
    found = verify_script([*SCRIPT, *forgets]).difference
    assert found is not None
    assert found.after_kills in kills
    assert found.what[0].startswith(first)
    assert named in found.cause


@pytest.mark.parametrize("number", quick_first([signal.SIGTERM, signal.SIGHUP, signal.SIGINT]))
def test_a_signal_ends_the_command_with_all_its_processes(tmp_path: Path, number: signal.Signals) -> None:
    """SIGTERM, SIGHUP or Ctrl-C to verify-resume leaves no process: torchrun's ranks have sessions of their own."""
    seen = tmp_path / "pid"
    rank = f"import os, time; open({str(seen)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
    with started(
        "verify-resume", "--", sys.executable, "-c", code, rank, environment={"TMPDIR": str(tmp_path)}
    ) as process:
        until(lambda: seen.exists() and seen.read_text())
        process.send(number)
        assert process.wait() != 0
    status = Path("/proc", seen.read_text(), "stat")
    until(lambda: not status.exists() or status.read_text().split()[2] == "Z")
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]


@pytest.mark.parametrize(
    ("place", "differs"),
    [
        ("rng/numpy/state/state/key", True),
        ("rng/00001/python/state/numbers", True),
        ("rng/00001/torch/state", False),
        ("trainer/of_ranks/0/progress/log_history/11/eval_runtime", True),
        ("trainer/of_ranks/0/progress/log_history/11/eval_steps_per_second", True),
        ("trainer/of_ranks/0/progress/log_history/11/eval_loss", False),
        ("model/runtime", False),
    ],
)
def test_what_every_process_has_of_its_own_is_no_difference(place: str, differs: bool) -> None:
    """Unseeded streams of any rank, and the times that Trainer logs, differ without a kill too."""
    assert may_differ(place) == differs


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_what_one_of_two_ranks_forgets_is_named() -> None:
    """P73: a sharded program is proved rank by rank; what one rank forgets is named, with the rank."""
    found = prove_resume("tests.cli.proving.gangs:Forgetful", steps=6, ranks=2).difference
    assert found is not None
    assert (found.step, found.after_kills) == (3, 1)
    assert "metric loss of rank 1" in found.what
    assert "program.seen" in found.cause
    with pytest.raises(ConfigError, match="ranks must be a whole number from 1 on"):
        prove_resume("tests.cli.proving.gangs:Sharded", ranks=0)


@pytest.mark.slow
def test_a_program_on_two_ranks() -> None:
    """P73: a sharded program with a whole state is equal; one that shares nothing between its ranks is refused."""
    done = CliRunner().invoke(app, ["verify-resume", "tests.cli.proving.gangs:Sharded", "--ranks", "2", "--steps", "6"])
    assert done.exit_code == 0, done.output
    assert "killed within steps 4 and 6, resumed twice" in done.stdout
    assert "Every step is equal bit for bit" in done.stdout
    with pytest.raises(ProgramError, match="holds no DistributedDataParallel, FSDP or DTensor"):
        prove_resume(f"{PROGRAMS}:Whole", ranks=2)
