"""The runner of PyTorch's own DCP tests: what a file without a test, and one for GPUs, come to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.torch_dcp_tests import main

NOTHING = "import there_is_no_expecttest\n\n\ndef test_it():\n    pass\n"
FOR_GPUS = """
import torch

rank = 3


@requires_accelerator_dist_backend(["nccl"])
def test_of_four():
    assert min(4, torch.cuda.device_count()) == 4
    made = dict(device_id=torch.accelerator.current_device_index())
    assert made == {"device_id": torch.device("cpu")}
    assert torch.empty(1, device=rank).is_cpu
"""


@pytest.mark.slow
def test_a_file_of_which_no_test_passes_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named with the cause, and the status is 1; what asks for devices and NCCL runs on a CPU."""
    place = tmp_path / "test" / "distributed" / "checkpoint"
    place.mkdir(parents=True)
    (place / "test_nothing.py").write_text(NOTHING)
    (place / "test_for_gpus.py").write_text(FOR_GPUS)
    assert main(["--cpu", str(tmp_path), "test_nothing.py", "test_for_gpus.py"]) == 1
    said = capsys.readouterr().out
    assert "| test_for_gpus.py | 1 | 1 | 1 |" in said
    assert "test_nothing.py: no test of it passes with DCP's own either: ModuleNotFoundError" in said
    assert "test_for_gpus.py: " not in said
