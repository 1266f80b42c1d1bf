"""JAX's pytrees in runs. JAX does not go with forks, so all of it runs in processes of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_runs import ckpt
from tests.support.legs import assert_equal, begins, compared, random_moments, within

ROOT = Path(__file__).parents[2]
JOB = "tests.integrations.jax_job:train"


def test_the_checks_of_values_meshes_and_refusals(tmp_path: Path) -> None:
    """Every test of jax_checks.py passes."""
    call = [
        sys.executable,
        "-m",
        "pytest",
        "tests/integrations/jax_checks.py",
        "-q",
        f"--basetemp={tmp_path / 'checks'}",
    ]
    done = subprocess.run([*call, "-p", "no:cacheprovider"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:]


def test_the_page_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """P73: the page's block, killed in a step and started again, ends as it does without a kill."""
    block = re.findall(
        r"^```text\n(.*?)^```$", (ROOT / "docs/JAX.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )[0]
    kill = "        if step == 13:\n            ckpt.wait()\n            os.kill(os.getpid(), 9)\n"
    for name, more, status in (("whole", "", 0), ("killed", kill, -9), ("killed", "", 0)):
        (tmp_path / name).mkdir(exist_ok=True)
        call = [sys.executable, "-c", f"import os\n{block}{more}"]
        done = subprocess.run(call, cwd=tmp_path / name, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
    assert ckpt("diff", tmp_path / "whole/runs/first", tmp_path / "killed/runs/first", "--ignore", "rng").status == 0


@pytest.mark.parametrize("options", [{"devices": 4}, pytest.param({}, marks=pytest.mark.slow)], ids=str)
def test_killed_in_some_steps(options: dict[str, Any], tmp_path: Path) -> None:
    """P16, P23, P73: each start begins exactly where the last one was killed, and no bit differs."""
    stops = [1, 12, 13, 30]
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
