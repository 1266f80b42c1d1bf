"""Sites for the tests: one on the server's own SQLite, one on PostgreSQL."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.site import Site
from tests.servers.process import free_port


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is here: it takes minutes, and runs with `make test-e2e` alone."""
    for item in items:
        if item.nodeid.startswith("tests/e2e/"):
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(3000))


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Start a PostgreSQL server on a free port; yield the connection URL of an empty database."""
    try:
        programs = {name: _program(name) for name in ("initdb", "postgres", "pg_isready", "createdb")}
    except FileNotFoundError as error:
        pytest.skip(f"PostgreSQL is not installed: {error}")
    # Not in pytest's folder: nobody else may enter that, and PostgreSQL refuses to run as root.
    with TemporaryDirectory(prefix="ckpt-tasks-postgres-") as home, _postgres(programs, Path(home)) as url:
        yield url


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site with a worker, our deployments and our automations; on each of both databases."""
    database = request.getfixturevalue("postgres") if request.param == "postgresql" else None
    with Site(tmp_path_factory.mktemp(f"site-{request.param}"), database) as made:
        made.start_worker()
        yield made


def _program(name: str) -> str:
    """Find a program of PostgreSQL; Debian keeps those of the server off the path."""
    places = [os.environ["PATH"], *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        raise FileNotFoundError(name)
    return found


@contextmanager
def _postgres(programs: Mapping[str, str], home: Path) -> Iterator[str]:
    user = "postgres" if os.geteuid() == 0 else None
    if user is not None:
        shutil.chown(home, pwd.getpwnam(user).pw_uid)
    data = home / "data"
    command = [programs["initdb"], "-D", str(data), "-U", "prefect", "-A", "trust", "--no-sync"]
    subprocess.run(command, user=user, cwd=home, check=True, capture_output=True)
    port = free_port()
    options = ["-p", str(port), "-k", str(home), "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
    server = subprocess.Popen([programs["postgres"], "-D", str(data), *options], user=user, cwd=home)
    try:
        for _ in range(100):
            ready = [programs["pg_isready"], "-h", "127.0.0.1", "-p", str(port), "-U", "prefect"]
            if subprocess.run(ready, check=False, capture_output=True).returncode == 0:
                break
            subprocess.run(["sleep", "0.2"], check=True)
        create = [programs["createdb"], "-h", "127.0.0.1", "-p", str(port), "-U", "prefect", "prefect"]
        subprocess.run(create, check=True, capture_output=True)
        yield f"postgresql+asyncpg://prefect@127.0.0.1:{port}/prefect"
    finally:
        server.terminate()
        server.wait(30)
