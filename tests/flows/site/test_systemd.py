"""`ckpt up --systemd`: the units are systemd's, hold no secret, and their commands are a server and its worker."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

from ckpt_tasks.flows.site.prefect_server import answers, read_password, server_start
from ckpt_tasks.flows.site.systemd import main
from tests.servers.process import free_port
from tests.support.cli_runs import ckpt

VERIFIER = shutil.which("systemd-analyze")


def units(home: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(directory)
    with temporary_settings({PREFECT_HOME: home}):
        answer = ckpt("up", "--systemd", "--port", str(free_port()), "--json")
    assert answer.status == 0
    assert not home.exists()  # it has started and made nothing
    return dict(answer.data)


def lines(unit: str, name: str) -> list[str]:
    return [line.removeprefix(f"{name}=") for line in unit.splitlines() if line.startswith(f"{name}=")]


def test_the_units_are_such_that_systemd_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both start again whatever happens, also after a reboot, and systemd finds nothing wrong with them."""
    texts = units(tmp_path / "home", tmp_path, monkeypatch)
    assert [*texts] == ["ckpt-server.service", "ckpt-worker.service"]
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        assert lines(text, "Restart") == ["always"]
        assert lines(text, "WantedBy") == ["default.target"]
    if VERIFIER is not None:
        command = [VERIFIER, "verify", "--user", "--man=no", *(str(tmp_path / name) for name in texts)]
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert "ckpt-" not in done.stderr
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_units_commands_serve_and_deploy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As systemd would start them: the server asks for the site's password, the worker deploys, and stop ends it."""
    home = tmp_path / "home"
    texts = units(home, tmp_path, monkeypatch)
    started: list[subprocess.Popen[bytes]] = []
    environment: dict[str, str] = {}
    try:
        for text in texts.values():
            given = dict(word.split("=", 1) for line in lines(text, "Environment") for word in shlex.split(line))
            environment = {**os.environ, **given}
            with (tmp_path / f"{len(started)}.log").open("wb") as log:
                command = shlex.split(lines(text, "ExecStart")[0])
                started.append(subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=log))
        deadline = time.monotonic() + 300
        while "Worker 'ckpt up on" not in (tmp_path / "1.log").read_text():
            assert all(part.poll() is None for part in started), (tmp_path / "1.log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "1.log").read_text()
            time.sleep(0.5)
        assert answers(environment["PREFECT_API_URL"])
        assert read_password(home / "ckpt-up.auth") not in "".join(texts.values())
        stop = shlex.split(lines(texts["ckpt-worker.service"], "ExecStop")[0])
        subprocess.run(stop, env=environment, cwd=tmp_path, check=True, timeout=200)
        assert started[1].wait(30) == -signal.SIGKILL
    finally:
        for part in started:
            part.kill()
            part.wait()


def test_the_servers_unit_becomes_a_server_at_its_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that systemd starts serves at the port that its unit names."""
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda path, command, environment: became.append(command))
    with temporary_settings({PREFECT_HOME: tmp_path, PREFECT_API_URL: "http://127.0.0.1:4711/api"}):
        main("server")
    (command,) = became
    assert command[command.index("--port") + 1] == "4711"
    assert command[command.index("--host") + 1] == "127.0.0.1"


@pytest.mark.parametrize(("given", "sent"), [(None, "0"), ("1", "1")])
def test_a_server_sends_no_usage_data(given: str | None, sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of a site sends Prefect no usage data, unless the environment says so."""
    name = "PREFECT_SERVER_ANALYTICS_ENABLED"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    assert server_start("127.0.0.1", 4200)[1][name] == sent
