"""What the tests of killed processes share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.s3 import S3Server
from tests.support.pipelines import gate
from tests.support.places import S3Place

__all__ = ["gate", "memory", "s3_place"]


@pytest.fixture
def memory(fast_dir: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir=fast_dir))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def s3_place(ministack: S3Server, bucket: str) -> S3Place:
    """Return a run directory on S3 that does not exist yet, in a bucket that holds nothing else."""
    return S3Place(ministack, bucket)
