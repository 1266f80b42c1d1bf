"""Whatever becomes of the reader of our output, training goes on: each way × each entry point."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from ckpt_tasks import open_run
from tests.crash.chatty import STEPS
from tests.support.interpreters import python

WAYS = ("its reader left", "its disk is full", "its descriptor is closed", "it is closed", "there is none")
ENTRIES = ("with", "close", "alone")
LOGS = ("nowhere", "stderr", "rich")
QUICK = (("its reader left", "with", "rich"), ("it is closed", "alone", "nowhere"))
ALL = [pytest.param(*c, marks=() if c in QUICK else pytest.mark.slow) for c in product(WAYS, ENTRIES, LOGS)]


def check(run_dir: Path, way: str, entry: str, log: str, environment: dict[str, str] | None = None) -> None:
    done = python("-m", "tests.crash.chatty", run_dir, way, entry, log, environment=environment)
    run = open_run(str(run_dir))
    owner = run.head().state.owner
    assert run.find("latest").step == STEPS, done.stderr
    assert owner is not None
    assert owner.released, done.stderr


@pytest.mark.parametrize(("way", "entry", "log"), ALL)
def test_a_plain_loop_trains_to_its_end(run_dir: Path, way: str, entry: str, log: str) -> None:
    """Every step is committed and the run is released, although no line that is logged can be written."""
    check(run_dir, way, entry, log)


@pytest.mark.parametrize("way", [WAYS[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])])
def test_a_flow_trains_to_its_end(run_dir: Path, server: dict[str, str], way: str) -> None:
    """The same where Prefect logs, whose console ends the process when its reader has left."""
    check(run_dir, way, "flow", "nowhere", server)


def test_the_last_line_of_a_process_may_be_unread() -> None:
    """What is not committed at the end of the interpreter is reported on stderr; a closed one, or none, is no error."""
    code = """
import sys
from ckpt_tasks.saving.ending import report_lost
sys.stderr.close()
report_lost(ValueError("x"), kept=False)
sys.stderr = None
report_lost(ValueError("x"), kept=False)
"""
    assert python("-c", code).returncode == 0
