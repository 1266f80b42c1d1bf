"""The wheel brings everything: installed into an empty environment, it trains, and writes a project that trains."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[3]
OTHERS = [
    found
    for version in ("3.12", "3.13")
    for found in sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))[:1]
]


def install(python: str | Path, place: Path) -> Path:
    """Make an environment with the wheel, and what it requires borrowed from ours; return its folder of programs."""
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(place), versions=["standard"])
    environment = place / "environment"
    subprocess.run([python, "-m", "venv", "--without-pip", environment], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    (packages,) = environment.glob("lib/python3.*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")  # a path in it brings no further .pth
    return environment / "bin"


def run(place: Path, *command: str | Path) -> str:
    path = f"{place / 'environment' / 'bin'}:{os.defpath}"
    environment = {**os.environ, "PREFECT_HOME": str(place / "home"), "PATH": path}
    for name in ("PYTHONPATH", "OMP_WAIT_POLICY"):
        environment.pop(name, None)
    empty = place / "empty"
    empty.mkdir(exist_ok=True)
    done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("python", OTHERS, ids=lambda path: path.parents[1].name)
def test_other_pythons_import_the_wheel(python: Path, tmp_path: Path) -> None:
    """On every other Python that is here each module compiles, and the package is imported without what is compiled."""
    programs = install(python, tmp_path)
    (package,) = (tmp_path / "environment").glob("lib/python3.*/site-packages/ckpt_tasks")
    run(tmp_path, programs / "python", "-W", "error", "-m", "compileall", "-q", "-f", package)
    run(tmp_path, programs / "python", "-W", "error", "-c", "import ckpt_tasks; dir(ckpt_tasks)")
