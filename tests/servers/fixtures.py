"""The servers as fixtures: one of each kind for a worker's whole session, started by the first test that asks for it.

A server that is not installed skips its tests, unless REQUIRED_SERVERS names it: then they fail. `make test` and
`make test-all` name what they have installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.servers import s3
from tests.servers.ceph import ceph as start_ceph
from tests.servers.gcs import GcsServer
from tests.servers.gcs import gcs as start_gcs
from tests.servers.process import NotProvisionedError, Server
from tests.servers.s3 import S3Server
from tests.support.chaos import Chaos

if TYPE_CHECKING:
    from tests.servers.azurite import AzureServer


@contextmanager
def running(name: str, start: Callable[[Path], AbstractContextManager[Server]], place: Path) -> Iterator[Server]:
    """Run a server that `start` makes in `place`; skip the test where it is neither installed nor required."""
    try:
        started = start(place)
    except NotProvisionedError as error:
        if name in os.environ.get("REQUIRED_SERVERS", "").split():
            raise
        pytest.skip(str(error))
    with started as server:
        yield server


@pytest.fixture(scope="session")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Return an S3 server with exact conditional puts."""
    with running("ministack", s3.ministack, tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture(scope="module")  # rclone keeps a core busy once a client has hung up on it
def liar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Return an S3 server that accepts preconditions and ignores them."""
    with running("liar", s3.liar, tmp_path_factory.mktemp("liar")) as server:
        yield server


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Return Ceph's S3 gateway; it takes long to start: for tests that are marked slow."""
    with running("ceph", start_ceph, tmp_path_factory.mktemp("ceph")) as server:
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    """Return a server of Azure's blob protocol: for tests that are marked slow."""
    # Imported here: most sessions do without it, and Azure's packages are heavy.
    from tests.servers.azurite import azurite as start_azurite

    with running("azurite", start_azurite, tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    """Return a server of Google's storage protocol that ignores the conditions of a write."""
    with running("gcs", start_gcs, tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture
def bucket(ministack: S3Server) -> Iterator[str]:
    """Return the name of a fresh bucket on ministack."""
    with ministack.fresh_bucket() as name:
        yield name


@pytest.fixture
def chaos(ministack: S3Server) -> Iterator[Chaos]:
    """Return a proxy in front of ministack that does no harm yet."""
    with Chaos(ministack.endpoint) as proxy:
        yield proxy
