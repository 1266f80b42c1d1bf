"""`ckpt chaos`: a user's script goes through faults, and its end is compared with that of a run without any."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckpt_tasks.cli import app
from ckpt_tasks.errors import ConfigError, ProgramError
from ckpt_tasks.proving.chaos import FAULTS, chaos

SCRIPT = [sys.executable, str(Path(__file__).with_name("script.py"))]


@pytest.mark.slow
def test_a_right_script_ends_equal_after_every_fault() -> None:
    """P73: killed, told to end, paused and with a full disk, each as it must be, it ends bit-equal and undamaged."""
    verdict = chaos([*SCRIPT, "long"], seed=1, rounds=4)
    assert verdict.good, verdict
    ends = {hit.fault: hit.status for hit in verdict.hits}
    assert {*ends} == {*FAULTS}
    assert (ends["kill"], ends["terminate"], ends["pause"]) == (-9, -15, None)
    assert ends["full disk"] == 1  # on_flush_failure="raise"
    assert verdict.proof.values > 0


@pytest.mark.slow
def test_a_script_that_forgets_is_found_and_the_seed_is_said() -> None:
    """P73: a generator outside of the state shows; the same seed draws the same faults, and the status is 1."""
    done = [
        CliRunner().invoke(app, ["chaos", "--seed", "5", "--rounds", "2", *more, "--", *SCRIPT, "generator", "long"])
        for more in ([], ["--json"])
    ]
    assert [one.exit_code for one in done] == [1, 1]
    said = " ".join(done[0].output.split())
    assert "Different from step" in said
    assert "--seed 5 draws the same faults" in said
    facts = json.loads(done[1].stdout)
    assert not facts["good"]
    assert all(f"{hit['fault']} after step" in said for hit in facts["hits"])


def test_a_command_that_cannot_be_tried_is_an_error() -> None:
    """P50: one that makes no run, one that fails by itself, and no rounds."""
    with pytest.raises(ConfigError, match="has made no run"):
        chaos(["true"], seed=0)
    with pytest.raises(ProgramError, match="no such step"):
        chaos(["sh", "-c", "echo no such step; exit 3"], seed=0)
    with pytest.raises(ConfigError, match="rounds must be a whole number"):
        chaos(["true"], seed=0, rounds=0)
