"""A home in which a site cannot live: `ckpt up` and `ckpt down` say so in one line, and start nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

from ckpt_tasks.flows.site import site
from tests.servers.process import free_port
from tests.support.cli_runs import ckpt


@pytest.mark.parametrize("verb", ["up", "down"])
def test_a_home_that_cannot_be_made_is_one_line(tmp_path: Path, verb: str) -> None:
    """The error names the path and the reason, and which variable names the directory."""
    (tmp_path / "file").touch()
    with temporary_settings({PREFECT_HOME: tmp_path / "file" / "home"}):
        answer = ckpt(verb)
    assert answer.status == 1
    assert answer.err.splitlines()[0].startswith("error: ")
    assert str(tmp_path / "file") in answer.err.replace("\n", "")
    assert "Not a directory" in answer.err
    assert "PREFECT_HOME" in answer.err
    assert "Traceback" not in answer.err


def test_a_full_disk_is_named_whatever_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no room for the server's files the error begins with that, and then has what failed."""
    monkeypatch.setattr(site, "_ROOM_BYTES", 1 << 62)
    nowhere = f"http://127.0.0.2:{free_port()}/api"
    with temporary_settings({PREFECT_HOME: tmp_path / "home", PREFECT_API_URL: nowhere}):
        answer = ckpt("up")
    assert answer.status == 1
    assert "is full" in answer.err
    assert "no server answers at" in answer.err
