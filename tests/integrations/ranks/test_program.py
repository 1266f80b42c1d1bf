"""A Trainer as a program of `ckpt train`: killed anywhere, it ends as in a script that is not killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks import open_run
from tests.integrations.ranks.checks import begun_otherwise, sampled_otherwise
from tests.integrations.ranks.test_trainer import FSDP2
from tests.support.legs import Lines, assert_equal, begins, compared, within

pytestmark = pytest.mark.framework
JOB = "tests.integrations.ranks.huggingface_program_job:job"


def trained(
    server: dict[str, str], folder: Path, stops: list[int], legs: list[tuple[int, int]], **options: Any
) -> tuple[Lines, list[Lines], list[int]]:
    """Train as a script, and in legs of `ckpt train`, each of (steps, ranks), which are killed at `stops`."""
    prefect = {name: server[name] for name in ("PREFECT_HOME", "PREFECT_API_URL")}
    return compared(JOB, folder, {**options, "program": True, "prefect": prefect, "legs": legs}, within(stops))


def test_killed_twice_a_program_ends_as_a_script(server: dict[str, str], tmp_path: Path) -> None:
    """P73: killed before the first commit after step 0 and later on, each bit is that of a script without a kill.

    These are losses, samples, weights and moments, the metrics in the ledger, and what `ckpt evaluate` measures.
    """
    reference, legs, statuses = trained(server, tmp_path, [2, 6], [(18, 1)] * 3)
    assert (statuses, begins(legs)) == ([0, -9, -9, 0], [0, 0, 4])
    assert_equal(reference, legs)
    script, program = (open_run(str(tmp_path / name / "run")).curve() for name in ("reference", "killed"))
    assert [one.metrics for one in program.steps] == [one.metrics for one in script.steps]


@pytest.mark.parametrize(
    ("stop", "options"),
    [
        (2, {"args": FSDP2}),
        pytest.param(6, {"args": FSDP2, "lost": 2}, marks=[pytest.mark.slow, pytest.mark.soak]),
        pytest.param(6, {"lost": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_ranks_of_a_program_end_as_a_script(
    stop: int, options: dict[str, Any], server: dict[str, str], tmp_path: Path
) -> None:
    """P73: a rank killed before the first commit, and the flow with its ranks: each bit is that of a script's ranks.

    One rank continues with the same weights and moments, and trains exactly the next samples.
    """
    reference, legs, statuses = trained(server, tmp_path, [stop, 99], [(12, 2), (12, 2), (18, 1)], **options)
    assert (statuses, begins(legs)) == ([0, -9, 0, 0], [0, stop // 4 * 4, 12])
    assert [step for what, step, _ in legs[0] if what == "begin"] == [0] * (1 + ("lost" in options))
    assert_equal([line for line in reference if line[1] < 12 + (not line[0].startswith("samples"))], legs[:2])
    assert begun_otherwise(reference, legs[1], legs[2]) == []
    assert sampled_otherwise(reference, legs[2]) == []
