"""SIGTERM and Ctrl-C in mid-upload: what was saved is committed, or the next start aborts what is left of it."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from tests.crash import zombie
from tests.support.chaos import Chaos
from tests.support.interpreters import Forked
from tests.support.places import S3Place
from tests.support.rules import Fault, Gate
from tests.support.runs import UNTOUCHED, opened, run_of
from tests.support.waiting import until


@contextmanager
def in_mid_upload(place: S3Place, chaos: Chaos, output: Path, *more: str) -> Iterator[tuple[Forked, Gate]]:
    """Run a trainer until the second part of its second checkpoint is on its way, and held there."""
    gate = Gate()
    chaos.on(Fault(hold_request=gate), operation="UploadPart", key="checkpoint_000000000002", skip=1, times=1)
    options = place.through(chaos.endpoint).options_json
    command = [sys.executable, "-m", "tests.crash.zombie", place.url, "--storage-options", options]
    command += ["--ballast-bytes", str(zombie.LARGE), *more]
    with output.open("wb") as file, Forked(command, stderr=file) as process:
        try:
            until(lambda: gate.reached.is_set() or process.poll() is not None, 60)
            assert process.poll() is None
            yield process, gate
        finally:
            gate.open()
            process.kill()


TERM, CTRL_C = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    "end",  # the signals, whether the block is entered, and whether they wait
    [
        ([TERM], True, True),
        pytest.param(([TERM], False, False), marks=pytest.mark.slow),
        pytest.param(([CTRL_C], False, True), marks=pytest.mark.slow),
        pytest.param(([CTRL_C], True, True), marks=pytest.mark.slow),
        pytest.param(([CTRL_C, CTRL_C], False, False), marks=pytest.mark.slow),
    ],
)
def test_a_signal_waits_for_the_upload_or_the_next_start_aborts_it(
    s3_place: S3Place, chaos: Chaos, tmp_path: Path, end: tuple[list[signal.Signals], bool, bool]
) -> None:
    """P67, P69, P72: within `with` a signal waits for the commit, and so does Ctrl-C at the interpreter's end.

    What SIGTERM, or a second Ctrl-C, leaves of an upload is gone once the next process has committed.
    """
    numbers, entered, waits = end
    more = ["--entered"] if entered else []
    with in_mid_upload(s3_place, chaos, tmp_path / "output", *more) as (process, gate):
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.5)
        if waits:
            assert process.poll() is None
            gate.open()
            assert process.wait(60) == -numbers[0], (tmp_path / "output").read_text()
        assert process.wait(60) != 0
    run = run_of(s3_place)
    assert [c.step for c in run.checkpoints()] == ([2, 1] if waits else [1])
    owner = run.head().state.owner
    assert owner is not None
    assert owner.released == waits
    assert len(s3_place.uploads()) == (not waits)
    if not waits:
        with opened(s3_place) as ckpt:
            state = zombie.laden(UNTOUCHED, zombie.LARGE)
            assert ckpt.restore(state) == 1
            zombie.check_laden(state, 1)
            ckpt.save(2, zombie.laden(2, zombie.LARGE))
    found = verify_run_directory(run_of(s3_place).history)
    assert (found.good, found.orphans, s3_place.uploads()) == (True, (), [])
