"""Processes that are killed here report to a real server: an embedded one would be killed and orphaned with them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.conftest import server

__all__ = ["memory", "server"]


@pytest.fixture
def memory(fast_dir: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir=fast_dir))
    yield made
    shutil.rmtree(made)
