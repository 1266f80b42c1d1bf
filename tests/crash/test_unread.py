"""Whatever becomes of the reader of our output, training goes on: each way × each entry point."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from ckpt_tasks import open_run
from tests.crash.chatty import STEPS, WAYS
from tests.support.interpreters import python
from tests.support.sweeps import quick_first


@pytest.mark.parametrize(("way", "entry"), quick_first(product(WAYS, ("close", "alone"))))
def test_training_goes_on_to_its_end(run_dir: Path, way: str, entry: str) -> None:
    """Every step is committed and the run is released, although no line that is logged can be written."""
    done = python("-m", "tests.crash.chatty", run_dir, way, entry)
    run = open_run(str(run_dir))
    owner = run.head().state.owner
    assert run.find("latest").step == STEPS, done.stderr
    assert owner is not None
    assert owner.released, done.stderr
