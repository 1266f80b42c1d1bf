"""JAX's pytrees in runs. JAX does not go with forks, so all of it runs in processes of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_runs import ckpt
from tests.support.legs import (
    assert_equal,
    assert_page_goes_on,
    begins,
    check,
    compared,
    hosted,
    random_moments,
    within,
)

MODULE = "tests.integrations.jax_job"
JOB = f"{MODULE}:train"


def test_the_checks_of_values_meshes_and_refusals(tmp_path: Path) -> None:
    """Every test of jax_checks.py passes."""
    hosted(MODULE, {}, check, ["tests/integrations/jax_checks.py", str(tmp_path / "checks")], tmp_path / "said")


def test_the_page_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """P73: the page's block, killed in a step and started again, ends as it does without a kill."""
    assert_page_goes_on(
        "JAX.md", MODULE, tmp_path, lambda block: f"{block}        ckpt.wait()\n        leg.within(step)\n"
    )
    one, other = tmp_path / "reference/runs/first", tmp_path / "killed/runs/first"
    assert ckpt("diff", one, other, "--ignore", "rng").status == 0


ALL = [1, 12, 13, 30]
SLOW = [pytest.param(options, ALL, marks=pytest.mark.slow) for options in ({}, {"devices": 4})]


@pytest.mark.parametrize(("options", "stops"), [({"devices": 4}, [12, 30]), *SLOW], ids=str)
def test_killed_in_some_steps(options: dict[str, Any], stops: list[int], tmp_path: Path) -> None:
    """P16, P23, P73: each start begins exactly where the last one was killed, and no bit differs."""
    reference, legs, statuses = compared(JOB, tmp_path, options, within(stops))
    assert statuses == [0, *[-9] * len(stops), 0]
    assert begins(legs)[1:] == stops
    assert_equal(reference, legs)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_random(seed: int, tmp_path: Path) -> None:
    """P16, P73: kills in steps, in saves and anywhere change no bit, on one device and over a mesh."""
    options = {"devices": (1, 4)[seed % 2], "seed": seed, "interval": 1 + seed % 3}
    reference, legs, statuses = compared(JOB, tmp_path, options, random_moments(seed))
    assert statuses[-1] == 0
    assert -9 in statuses
    assert_equal(reference, legs)
