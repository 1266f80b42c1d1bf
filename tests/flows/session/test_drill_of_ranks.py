"""A restore drill of a run of several ranks: as many fresh processes, each of which restores its part."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tasks import open_run
from ckpt_tasks.flows.session.drill import drill_run
from ckpt_tasks.run.report.words import check_words
from ckpt_tasks.storage.locations import Location
from tests.support.agents import config_of, train
from tests.support.cli_runs import flip

PROGRAM = "tests.support.parallel:Unbuilt"


@pytest.mark.usefixtures("forked")
def test_a_drill_has_as_many_ranks_as_the_run(run_dir: Path, tmp_path: Path) -> None:
    """Both ranks restore their part, values by rank too; damage of the second rank's part is a fault of the drill.

    Where only the second rank cannot build its program, the drill ends with that: rank 0 does not wait for it.
    """
    params = {"kind": "fsdp", "plan": [[0, 1, "raise"]], "folder": str(tmp_path)}
    assert train(config_of(run_dir), params, 5) == []
    place = Location(str(run_dir))
    assert drill_run(place, PROGRAM).fault == "RuntimeError: injected in step 0"
    drill = drill_run(place, PROGRAM)
    assert (drill.fault, drill.figures["step"], drill.figures["ranks"]) == (None, 5, 2)
    assert open_run(str(run_dir)).head().state.checks == (drill,)
    assert check_words(drill).endswith(", on 2 ranks.")
    for shard in run_dir.glob("checkpoint_000000000005/*/rng-00001-of-00002-0.safetensors"):
        shard.chmod(0o644)
        flip(shard, -1)
    failed = drill_run(place, PROGRAM)
    assert failed.fault is not None
    assert "IntegrityError" in failed.fault
    assert open_run(str(run_dir)).head().state.checks == (drill, failed)
