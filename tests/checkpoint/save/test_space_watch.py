"""A run says that its disk will be full while there is still room, once, and trains on."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from tests.support.cli_runs import ckpt, config
from tests.support.small_disk import small_disk

MIB = 1 << 20


class Frozen(nn.Module):
    """A base of 5 MiB that is not trained, and a small adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.ones(5 * MIB // 4), requires_grad=False)
        self.adapter = nn.Parameter(torch.ones(10))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "run out of room" in record.getMessage()]


def train(run_dir: Path, state: dict[str, Any], steps: int, **options: Any) -> None:
    with Checkpointer(config(run_dir, memory_dir=None, **options)) as saver:
        for step in range(1, steps + 1):
            saver.save(step, state)
            for name in state.keys() & {"w"}:
                state[name] += 1  # what has not changed is not written again


def test_it_is_said_before_the_disk_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P37: on a disk of 8 MiB, three checkpoints of 2 MiB and the one in flight are too many: told at once."""
    with small_disk(tmp_path / "disk") as disk, caplog.at_level(logging.WARNING, "ckpt_tasks"):
        train(disk / "run", {"w": torch.zeros(MIB // 2)}, 2, max_num_checkpoints=3)
        (said,) = warnings(caplog)
        assert re.search(r"[678]\.\d MiB free, 8\.\d MiB more needed: up to 4 checkpoints of 2.0 MiB at once", said)
        assert "Set a smaller max_num_checkpoints" in said
        assert len(list((disk / "run").glob("checkpoint_*"))) == 2  # there was room for these


def test_what_fits_is_not_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two checkpoints at once fit; so does a frozen base, which all of them share."""
    with small_disk(tmp_path / "disk") as disk, caplog.at_level(logging.WARNING, "ckpt_tasks"):
        train(disk / "one", {"w": torch.zeros(MIB // 2)}, 3, max_num_checkpoints=1)
        assert warnings(caplog) == []
    with small_disk(tmp_path / "other") as disk, caplog.at_level(logging.WARNING, "ckpt_tasks"):
        train(disk / "two", {"model": Frozen()}, 5, max_num_checkpoints=3)
        assert warnings(caplog) == []


def test_a_run_that_keeps_all_is_told_in_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P37: where all are kept, it is told while two more fit: after that many saves, and no save has failed."""
    with small_disk(tmp_path / "disk") as disk, caplog.at_level(logging.WARNING, "ckpt_tasks"):
        train(disk / "run", {"w": torch.zeros(MIB // 4)}, 6, max_num_checkpoints=None)
        (said,) = warnings(caplog)
        assert "room for 2 more checkpoints of 1.0 MiB, and the policy keeps ever more" in said
        assert "Prune it, or set max_num_checkpoints" in said


def test_the_doctor_says_so(tmp_path: Path) -> None:
    """`ckpt doctor` says what the next save needs."""
    with small_disk(tmp_path / "disk") as disk:
        train(disk / "run", {"w": torch.zeros(MIB // 2)}, 3, max_num_checkpoints=2)
        checks = {check["name"]: check for check in ckpt("doctor", disk / "run", "--json").data["checks"]}
        assert "the next checkpoint needs 2.0 MiB" in checks["disk"]["seen"]
