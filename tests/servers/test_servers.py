"""Servers of a test run: each one ours, on a port of its own, and gone with the process that started it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.servers import s3
from tests.servers.azurite import AzureServer
from tests.servers.fixtures import running
from tests.servers.process import (
    NotProvisionedError,
    NotReadyError,
    StartError,
    on_free_port,
    tied,
    wait_until,
)
from tests.servers.s3 import S3Server

HOLDER = """
import sys, time
from pathlib import Path
from tests.servers import s3

with s3.ministack(Path(sys.argv[1])) as server:
    print(server.pid, server.endpoint, flush=True)
    time.sleep(600)
"""


def gone(pid: int) -> bool:
    """Wait for the end of a process that is not our child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(handle):
        return bool(select.select([handle], [], [], 60)[0])


def test_a_server_dies_with_a_killed_test_run(ministack: S3Server, tmp_path: Path) -> None:
    """SIGKILL, which leaves no time to tidy up, takes the server along; other servers stay."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        pid, endpoint = holder.stdout.readline().split()
        urlopen(f"{endpoint}/_ministack/health", timeout=20).close()
        assert endpoint != ministack.endpoint
        holder.kill()
    assert gone(int(pid))
    assert ministack.client().list_buckets()["Buckets"] is not None


def test_a_port_that_is_taken_is_left_for_another(tmp_path: Path) -> None:
    """Where the server does not come up, the next port is tried; after the last one its own words are told."""
    tried = list[int]()

    @contextmanager
    def start(port: int) -> Iterator[int]:
        tried.append(port)
        if len(tried) % 3:
            with tied(["sh", "-c", "echo address in use; exit 3"], log=tmp_path / "log") as process:
                process.wait()
                wait_until(lambda: None, process, tmp_path / "log", timeout_s=60)
        yield port

    with on_free_port(start) as port:
        assert port == tried[-1]
    assert len({*tried}) == 3
    with pytest.raises(StartError, match=r"exit status 3.*address in use"), on_free_port(start, attempts=2):
        pass


@pytest.mark.parametrize(
    ("required", "outcome"),
    [("", pytest.skip.Exception), ("ministack", pytest.skip.Exception), ("ministack liar", NotProvisionedError)],
)
def test_a_missing_server_skips_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, required: str, outcome: type[BaseException]
) -> None:
    """Without its program a server's tests are skipped, with the way to get it; they fail where it is required."""
    monkeypatch.setenv("REQUIRED_SERVERS", required)
    monkeypatch.setattr(s3, "PROGRAMS", tmp_path)
    either = (pytest.skip.Exception, NotProvisionedError)  # a skip that is not expected would only skip this test
    with pytest.raises(either, match="`make test` brings it") as caught, running("liar", s3.liar, tmp_path):
        pass
    assert isinstance(caught.value, outcome)


def test_a_stranger_is_not_let_in(liar: S3Server) -> None:
    """Whether a server is ours is told by a secret that only ours was given."""
    s3.answers_us(liar)
    with pytest.raises(NotReadyError):
        s3.answers_us(replace(liar, secret="guessed"))


@pytest.mark.slow
def test_azurite_creates_once(azurite: AzureServer) -> None:
    """Azurite, through adlfs: what is there is not created again; its bytes are seen past adlfs."""
    import adlfs

    with azurite.fresh_container() as container:
        store = adlfs.AzureBlobFileSystem(**azurite.storage_options)
        store.pipe_file(f"{container}/a", b"first", mode="create")
        with pytest.raises(FileExistsError):
            store.pipe_file(f"{container}/a", b"second", mode="create")
        assert azurite.request("GET", f"{container}/a") == b"first"
