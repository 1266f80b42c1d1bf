"""`ckpt chaos`: a user's script goes through faults, and its end is compared with that of a run without any."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckpt_tasks.cli import app
from ckpt_tasks.errors import ConfigError, ProgramError, StoreError
from ckpt_tasks.proving.chaos import FAULTS, chaos
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.port import DisturbedStore
from ckpt_tasks.system import Disturbed

INSIDE = ("slow store", "failing store", "clock ahead", "clock back")
SEED = 4  # It draws commits in the first half of the training.
SCRIPT = [sys.executable, str(Path(__file__).with_name("script.py"))]


@pytest.mark.slow
def test_a_right_script_ends_equal_after_every_fault() -> None:
    """P73: after each kind of fault, each as it must be, it ends bit-equal and undamaged."""
    verdict = chaos([*SCRIPT, "longer"], seed=1)
    assert verdict.good, verdict
    ends = {hit.fault: hit.status for hit in verdict.hits}
    assert {*ends} == {*FAULTS}
    assert (ends["kill"], ends["terminate"], ends["pause"]) == (-9, -15, None)
    assert ends["full disk"] == 1  # on_flush_failure="raise"
    assert all(ends[fault] is None for fault in INSIDE)
    assert verdict.proof.values > 0


def test_a_script_that_forgets_is_found() -> None:
    """P73: killed once, a script whose generator is outside of its state ends with other metrics."""
    verdict = chaos([*SCRIPT, "generator"], seed=SEED, rounds=1, kinds=["kill"])
    assert [(hit.fault, hit.status) for hit in verdict.hits] == [("kill", -9)]
    assert verdict.proof.difference is not None
    assert verdict.proof.difference.what == ("metric loss",)
    assert not verdict.good


@pytest.mark.slow
def test_the_seed_is_said() -> None:
    """P73: the command's status is 1 where there is a difference; it tells the faults and the seed, also as JSON."""
    command = ["chaos", "--seed", "31", "--rounds", "1"]
    said, facts = (
        CliRunner().invoke(app, [*command, *more, "--", *SCRIPT, "generator", "long"]) for more in ([], ["--json"])
    )
    assert said.exit_code == facts.exit_code == 1
    words = " ".join(said.output.split())
    assert "Different from step" in words
    assert "--seed 31 draws the same faults" in words
    assert all(f"{hit['fault']} after step" in words for hit in json.loads(facts.stdout)["hits"])


@pytest.mark.slow
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "kill"])
def test_a_script_that_is_wrong_after_one_kind_of_fault_is_found_by_it(fault: str) -> None:
    """P73: it computes something else once it has met this kind, which is drawn; so the kind has reached it."""
    verdict = chaos([*SCRIPT, "long", fault], seed=SEED, rounds=1, kinds=[fault])
    assert [hit.fault for hit in verdict.hits] == [fault]
    assert verdict.proof.difference is not None
    assert verdict.proof.difference.what == ("metric loss",)


@pytest.mark.slow
def test_a_script_that_notices_a_fault_which_does_not_come_is_right() -> None:
    """P73: what the tests of the kinds find is the fault, and not the script that looks for it."""
    assert chaos([*SCRIPT, "long", "pause"], seed=SEED, rounds=1, kinds=["kill"]).good


class Slept(Disturbed):
    """A Disturbed that notes how long it is asked to wait."""

    def __init__(self, place: str):
        super().__init__(place)
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)


def test_a_slow_store_waits_before_each_request(tmp_path: Path) -> None:
    """As long as the file says, counted as a hit; then the request is done."""
    file = tmp_path / "faults"
    file.write_text(json.dumps({"delay_s": 0.3, "failing": 0.0, "jump_s": 0.0}))
    slept = Slept(str(file))
    store = DisturbedStore(LocalStore(tmp_path / "run"), slept)
    store.put("checkpoint_000000000001/a", [b"body"])
    assert store.get("checkpoint_000000000001/a", 9) == b"body"
    assert slept.waits == [0.3, 0.3]
    assert Path(f"{file}.hits").stat().st_size == 2


def test_a_disturbed_store_and_clock_do_what_the_file_says(tmp_path: Path) -> None:
    """Half of the failing requests are done, and all say whether they were; each hit is counted."""
    file = tmp_path / "faults"
    file.write_text(json.dumps({"delay_s": 0.0, "failing": 1.0, "jump_s": -3600.0}))
    disturbed = Disturbed(str(file))
    inner = LocalStore(tmp_path / "run")
    store, done = DisturbedStore(inner, disturbed), {True: 0, False: 0}
    for number in range(40):
        with pytest.raises(StoreError) as raised:
            store.put(f"checkpoint_{number:012}/a", [b"body"])
        assert raised.value.transient
        there = bool(inner.names(f"checkpoint_{number:012}/"))
        assert there != raised.value.refused
        done[there] += 1
    assert all(done.values())
    assert 3590 < time.time() - disturbed.time() < 3610
    assert Path(f"{file}.hits").stat().st_size == 41
    file.write_text(json.dumps({"delay_s": 0.0, "failing": 0.0, "jump_s": 0.0}))
    store.put("checkpoint_000000000099/a", [b"body"])
    assert store.get("checkpoint_000000000099/a", 9) == b"body"


def test_a_command_that_cannot_be_tried_is_an_error() -> None:
    """P50: one that makes no run, one that fails by itself, and no rounds."""
    with pytest.raises(ConfigError, match="has made no run"):
        chaos(["true"], seed=0)
    with pytest.raises(ProgramError, match="no such step"):
        chaos(["sh", "-c", "echo no such step; exit 3"], seed=0)
    with pytest.raises(ConfigError, match="rounds must be a whole number"):
        chaos(["true"], seed=0, rounds=0)
