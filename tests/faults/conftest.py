"""A place of its own on ministack for every test of S3's faults, behind the proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.s3_runs import Place
from tests.servers.process import token
from tests.servers.s3 import S3Server
from tests.support.chaos import Chaos
from tests.support.systems import Impatient, running_on


@pytest.fixture(scope="session")
def common_bucket(ministack: S3Server) -> Iterator[str]:
    """Return a bucket that many tests use, each below a prefix of its own."""
    with ministack.fresh_bucket() as name:
        yield name


@pytest.fixture
def place(ministack: S3Server, common_bucket: str, chaos: Chaos) -> Iterator[Place]:
    """Return a place for a run, as it is seen through the proxy and past it; between tries it waits a tenth as long."""
    found = Place(ministack, chaos, common_bucket, token())
    with running_on(Impatient(10)):
        yield found
    found.past.remove()
