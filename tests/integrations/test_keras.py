"""Keras on the torch backend, as docs/LOOP.md has it. Keras is in the environment of `make peers` alone."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from ckpt_tasks.copying.compare import compare_checkpoints
from ckpt_tasks.reading.reading import open_run

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv/peers/bin/python"
KILL = "            if step == {step}:\n                ckpt.wait()\n                os.kill(os.getpid(), 9)\n"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="make peers installs Keras")
def test_keras_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """P73: the page's block, killed in two steps and started again, ends as it does without a kill."""
    page = (ROOT / "docs/LOOP.md").read_text(encoding="utf-8").partition("## In Keras\n")[2]
    block = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    for name, kills in (("whole", [0]), ("killed", [13, 22, 0])):
        for step in kills:
            place = tmp_path / name
            place.mkdir(exist_ok=True)
            (place / "job.py").write_text(block + (KILL.format(step=step) if step else "    ckpt.save(step, state)\n"))
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                [PYTHON, "job.py"], cwd=place, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == (-9 if step else 0), done.stderr
    runs = [open_run(str(tmp_path / name / "runs/first")) for name in ("whole", "killed")]
    one, other = (run.find("latest") for run in runs)
    assert one.step == other.step == 32
    assert compare_checkpoints(runs[0].history.store, one, runs[1].history.store, other).differences == ()
