"""Files of tests that run in a process which has imported their framework: it takes seconds, and no fork likes JAX."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.legs import hosted
from tests.support.sweeps import SOAK
from tools.sources import ROOT

pytestmark = pytest.mark.framework
slow = pytest.mark.slow
# A file, the job whose module the process imports, Keras's backend.
FILES = [
    ("finetuning", "finetuning", ""),
    ("libraries", "finetuning", ""),
    ("trainers", "finetuning", ""),
    ("optimizers", "finetuning", ""),
    ("huggingface", "huggingface", ""),
    ("huggingface_second_starts", "huggingface", ""),
    ("huggingface_program", "huggingface", ""),
    ("lightning", "lightning", ""),
    ("jax", "jax", ""),
    ("keras", "keras", "jax"),
    ("tensorflow", "tensorflow", "tensorflow"),
]
# Keras on the other backends runs the same code of ours.
LONG = [("keras", "keras", backend) for backend in ("torch", "tensorflow")]


def check(arguments: Sequence[str]) -> None:
    """Run those tests of a file that are marked so."""
    os.chdir(ROOT)
    file, place, marked = arguments
    imported = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"  # with what this process has imported
    options = ["-q", "-m", marked, "-W", imported, "-p", "no:cacheprovider", f"--basetemp={place}"]
    raise SystemExit(pytest.main([file, *options]))


@pytest.mark.parametrize(
    ("file", "job", "backend", "marked"),
    [
        *((*row, "not slow") for row in FILES),
        *(pytest.param(*row, "not slow", marks=SOAK) for row in LONG),
        *(
            pytest.param(*row, "slow", marks=slow)
            for row in FILES
            if row[0] in {"optimizers", "huggingface", "huggingface_second_starts", "lightning"}
        ),
    ],
)
def test_each_check_passes(file: str, job: str, backend: str, marked: str, tmp_path: Path) -> None:
    """Every test of the file passes."""
    environment = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"} if backend else {}
    arguments = [f"tests/integrations/{file}_checks.py", str(tmp_path / "checks"), marked]
    hosted(f"tests.integrations.{job}_job", environment, check, arguments, tmp_path / "said")
