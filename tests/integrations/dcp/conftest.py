"""A process group for tests of DCP in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture
def gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give this process a gloo group of one rank."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # DCP's other process asks for it
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
