"""`ckpt bisect`: the first checkpoint at which a test fails, and the first step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import CheckpointNotFoundError
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.proving.bisect import bisect_run
from ckpt_tasks.reading.reading import Run
from ckpt_tasks.session.local import LocalSession
from tests.proving import programs
from tests.support.cli_runs import ckpt

SOUND = f"{programs.__name__}:is_sound"
PROGRAM = f"{programs.__name__}:Poisoned"
# Reads the header and the bytes of an export with nothing of ours: the status is 1 where a weight is spoilt.
COMMAND = """
import struct, sys, json, array, os
data = open(sys.argv[1], "rb").read()
size, = struct.unpack("<Q", data[:8])
names = json.loads(data[8:8 + size])
assert os.environ["CKPT_CHECKPOINT"] == sys.argv[2]
begin, end = names["model.2.weight" if "model.2.weight" in names else "2.weight"]["data_offsets"]
sys.exit(max(map(abs, array.array("f", data[8 + size + begin:8 + size + end]))) > 1e3)
"""


def trained(run_dir: Path, at: int, *, total: int = 48, interval: int = 5) -> Run:
    config = CheckpointConfig(checkpoint_dir=run_dir, step_interval=interval, max_num_checkpoints=None, memory_dir=None)
    with Checkpointer(config) as ckpt:
        session = LocalSession(ckpt, PROGRAM, {"at": at})
        for step in range(session.restore() + 1, total + 1):
            session.run(step)
            ckpt.wait()
    return open_run(str(run_dir))


def tried(answer: Any) -> list[tuple[int, bool]]:
    return [(one["step"], one["passes"]) for one in answer.data["tests"]]


@pytest.mark.parametrize("at", [1, 17, 20, 21, 45])
def test_the_first_failing_checkpoint_is_found_in_few_tries(run_dir: Path, at: int) -> None:
    """Of ten checkpoints at most six are tried, both ends first; the neighbours are named, and no lease is left."""
    run = trained(run_dir, at)
    answer = ckpt("bisect", run_dir, "--test", SOUND, "--json")
    first = -(-at // 5) * 5
    assert (answer.data["good_step"], answer.data["bad_step"]) == (first - 5, first)
    assert tried(answer)[:2] == [(0, True), (45, False)]
    assert len(tried(answer)) <= 6
    assert all(passes == (step < at) for step, passes in tried(answer))
    assert run.head().state.leases == ()


def test_a_replay_names_the_step(run_dir: Path) -> None:
    """Between two checkpoints the steps are trained again in a copy; the run gets nothing but leases."""
    run = trained(run_dir, 23)
    before = [one.step for one in run.checkpoints()]
    answer = ckpt("bisect", run_dir, "--test", SOUND, "--replay", "--json")
    assert (answer.data["good_step"], answer.data["bad_step"], answer.data["exact"]) == (22, 23, True)
    assert [one.step for one in run.checkpoints()] == before
    owner = run.head().state.owner
    assert owner is not None
    assert owner.released
    said = ckpt("bisect", run_dir, "--test", SOUND).out
    assert "The test passes at step 20 and fails at step 25. --replay names the step between them." in said


def test_a_command_gets_the_checkpoint_and_its_export(run_dir: Path, tmp_path: Path) -> None:
    """{export} is a safetensors file of the weights, {checkpoint} DIR@STEP; a replay works with a command, too."""
    trained(run_dir, 12)
    script = tmp_path / "test.py"
    script.write_text(COMMAND)
    words: list[str | Path] = ["--", sys.executable, script, "{export}", "{checkpoint}"]
    answer = ckpt("bisect", run_dir, "--json", "--replay", *words)
    assert (answer.data["good_step"], answer.data["bad_step"]) == (11, 12)


def test_what_cannot_be_searched_is_said(run_dir: Path) -> None:
    """Ends that do not differ, a test that gives no verdict, two tests, none, and one checkpoint end with an error."""
    trained(run_dir, 10**6)
    assert "the test passes at the newest checkpoint, step 45" in ckpt("bisect", run_dir, "--test", SOUND).err
    assert "fails at the oldest checkpoint already, step 0" in ckpt("bisect", run_dir, "--", "false").err
    answer = ckpt("bisect", run_dir, "--", sys.executable, "-c", "raise SystemExit(125)")
    assert answer.status == 1
    assert "ended with 125, which is no verdict" in answer.err
    assert "cannot be started" in ckpt("bisect", run_dir, "--", "no-such-command").err
    none = f"{programs.__name__}:none_of_it"
    assert "returned None, and not True or False" in ckpt("bisect", run_dir, "--test", none).err
    for words in ([], ["--test", SOUND, "--", "true"]):
        assert "a test is wanted, and only one" in ckpt("bisect", run_dir, *words).err
    trained(run_dir.with_name("one"), 5, total=1)
    assert "the run has 1 checkpoint" in ckpt("bisect", run_dir.with_name("one"), "--", "true").err
    assert json.dumps([]) == json.dumps(list(open_run(str(run_dir)).head().state.leases))


def test_what_is_tried_is_not_pruned_and_what_was_pruned_is_passed_over(run_dir: Path) -> None:
    """A prune in the middle of a search takes nothing that was tried, and the search goes on with what is left."""
    run = trained(run_dir, 33)
    seen: list[int] = []

    def passes(run: Run, checkpoint: Checkpoint) -> bool:
        seen.append(checkpoint.step)
        if len(seen) == 3:
            config = CheckpointConfig(checkpoint_dir=run_dir, max_num_checkpoints=2, memory_dir=None)
            with Checkpointer(config) as ckpt:
                ckpt.acquire()
                ckpt.prune()
        assert checkpoint.step in [one.step for one in run.checkpoints()]
        return checkpoint.step < 33

    found = bisect_run(run, passes)
    left = [one.step for one in run.checkpoints()]
    assert {*seen} <= {*left}
    assert 30 not in left
    assert found.good_step < 33 <= found.bad_step
    with pytest.raises(CheckpointNotFoundError):
        run.find(30)
