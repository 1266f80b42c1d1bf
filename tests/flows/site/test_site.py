"""`ckpt up` and `ckpt down` on a real server and worker, with parts of it killed in between."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import httpx
import pytest

from ckpt_tasks import open_run
from ckpt_tasks.errors import CheckpointNotFoundError, SiteError
from ckpt_tasks.flows.site.prefect_server import answers, make_password, read_password
from ckpt_tasks.flows.site.site_parts import SiteProcess, read_site
from tests.servers.process import free_port
from tests.support import processes
from tests.support.waiting import until

PATIENCE_S = 240.0
BIN = Path(sys.prefix, "bin")


class Shell:
    """A user's shell in a project: commands, and what they leave behind."""

    def __init__(self, place: Path):
        self.home, self.project = place / "home", place / "nets"
        self.port = str(free_port())
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.environment = {**os.environ, "PREFECT_HOME": str(self.home)}
        self.password = self.home / "ckpt-up.auth"

    def __call__(self, *command: str, status: int = 0, url: bool = False) -> str:
        """Run a command, and return what it printed; with `url`, where what `ckpt up` says was typed."""
        done = self.run(*command, url=url)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    def run(self, *command: str, url: bool) -> subprocess.CompletedProcess[str]:
        said = {"PREFECT_API_URL": self.url} if url else {}
        if url and self.password.exists():
            said["PREFECT_API_AUTH_STRING"] = self.password.read_text().strip()
        environment = {**self.environment, **said}
        return subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            cwd=self.project if self.project.exists() else self.project.parent,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def up(self) -> dict[str, str]:
        """Bring it up; return the state of each part."""
        said: dict[str, Any] = json.loads(self("ckpt", "up", "--port", self.port, "--json"))
        assert said["page"] == self.url.removesuffix("/api")
        with urlopen(f"{said['page']}/ui-settings", timeout=60) as answer:
            assert json.load(answer)["api_url"] == self.url, "the page would show another server, or none"
        self.about = {part["name"]: part["about"] for part in said["parts"]}
        return {part["name"]: part["status"] for part in said["parts"]}

    def answer(self, password: str | None = None) -> int:
        """Ask the server for what only the owner may know; return the status of its answer."""
        auth = tuple(password.split(":")) if password else None
        return httpx.get(f"{self.url}/admin/settings", auth=auth, timeout=60).status_code  # type: ignore[arg-type]

    def down(self) -> dict[str, str]:
        return {part["name"]: part["status"] for part in json.loads(self("ckpt", "down", "--json"))["parts"]}

    def part(self, name: str) -> SiteProcess:
        site = read_site(self.home / "ckpt-up.json")
        assert site is not None
        return site.started[name]

    def kill(self, name: str) -> None:
        part = self.part(name)
        os.kill(part.pid, signal.SIGKILL)
        until(lambda: not part.lives, PATIENCE_S)

    def is_another(self, name: str, before: SiteProcess) -> bool:
        return self.part(name) != before and self.part(name).lives

    def is_well(self) -> bool:
        done = self.run("ckpt", "doctor", "--json", url=True)
        return done.returncode == 0 and '"verdict": "wrong"' not in done.stdout

    def step(self) -> int:
        try:
            return open_run(str(self.project / "runs" / "nets")).find("latest").step
        except CheckpointNotFoundError:
            return 0

    def assert_only_the_owner_gets_in(self) -> None:
        """Assert that the server asks for the password, which stands in its file alone, and in no command."""
        password = self.password.read_text().strip()
        assert (self.answer(), self.answer("ckpt:guess"), self.answer(password)) == (401, 401, 200)
        assert stat.S_IMODE(self.password.stat().st_mode) == 0o600
        secret = password.removeprefix("ckpt:")
        assert len(secret) >= 40
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                assert secret.encode() not in place.read_bytes(), place
        holding = [path for path in self.home.parent.rglob("*") if path.is_file() and _holds(path, secret)]
        assert holding == [self.password]

    def processes(self) -> list[str]:
        """Return the commands of the processes that live in our Prefect home."""
        return [*processes.with_variable(f"PREFECT_HOME={self.home}").values()]


def _holds(path: Path, text: str) -> bool:
    try:
        return text.encode() in path.read_bytes()
    except OSError:  # gone meanwhile
        return False


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Return a shell in a new project."""
    made = Shell(tmp_path)
    made("ckpt", "init", "nets")
    yield made
    made("ckpt", "down")


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep the machine busy."""
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_site_comes_up_goes_on_and_ends(shell: Shell) -> None:
    """Up may be said again; what is killed comes back; down ends all after a commit, and the next up goes on."""
    assert {*shell.up().values()} <= {"started", "created", "applied"}
    shell.assert_only_the_owner_gets_in()
    password = shell.password.read_text()
    again = shell.up()
    assert {again[name] for name in ("server", "worker", "keeper")} == {"as it was"}
    assert again["automations"] == "as they were"
    shell("prefect", "deployment", "run", "train/nets", "-p", "total_steps=10000000", url=True)
    until(lambda: shell.step() >= 100, PATIENCE_S)
    until(
        lambda: open_run(str(shell.project / "runs" / "nets")).evaluations() != [], PATIENCE_S
    )  # by the project's own follower

    for name in ("worker", "server"):  # the keeper starts them again
        before = shell.part(name)
        shell.kill(name)
        until(partial(shell.is_another, name, before), PATIENCE_S)
    assert "the server has ended while its worker started" in (shell.home / "keeper.log").read_text()
    shell.assert_only_the_owner_gets_in()
    until(shell.is_well, PATIENCE_S)  # the worker that lost its server as it began is started once more
    shell.kill("keeper")
    again = shell.up()
    assert (again["server"], again["worker"], again["keeper"]) == ("as it was", "as it was", "started")

    before_step = shell.step()
    until(lambda: shell.step() > before_step, PATIENCE_S)
    with busy_loops(8):
        assert shell.down() == {"keeper": "ended", "worker": "ended", "server": "ended"}
    until(lambda: shell.processes() == [], PATIENCE_S)
    stopped_at, owner = shell.step(), open_run(str(shell.project / "runs" / "nets")).head().state.owner
    assert owner is not None
    assert owner.released  # it was ended by its own end, not by force

    shell.up()
    assert shell.password.read_text() == password  # a terminal in which it was typed goes on
    shell.assert_only_the_owner_gets_in()
    until(lambda: shell.step() > stopped_at, PATIENCE_S)  # what was under way goes on by itself
    for name in ("keeper", "server", "worker"):
        shell.kill(name)
    serve = f"from ckpt_tasks.flows.site.prefect_server import main; main(['--port', '{shell.port}'])"
    shell("python", "-c", serve)  # not the site's
    again = shell.up()
    assert (again["server"], again["worker"]) == ("runs already, not started here", "started")
    for name in ("keeper", "worker"):
        shell.kill(name)
    assert shell.down() == {"keeper": "was gone", "worker": "was gone", "server": "not started here"}
    shell("prefect", "server", "stop")
    until(lambda: shell.processes() == [], PATIENCE_S)
    assert shell.down() == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_password_of_ones_own_stays(shell: Shell) -> None:
    """PREFECT_SERVER_API_AUTH_STRING is the site's password, for its parts too, and no other one is made.

    A server that PREFECT_API_URL names and that does not answer is an error.
    """
    shell.environment["PREFECT_SERVER_API_AUTH_STRING"] = "me:mine"
    assert shell.up()["worker"] == "started"
    assert (shell.answer(), shell.answer("me:mine"), shell.password.exists()) == (401, 200, False)
    del shell.environment["PREFECT_SERVER_API_AUTH_STRING"]
    shell.kill("keeper")
    said = json.loads(shell("ckpt", "up", "--port", shell.port, "--json", status=1))["error"]
    assert said["message"] == f"the server at {shell.url} asks for a password"
    shell.kill("server")
    assert shell.down() == {"keeper": "was gone", "worker": "ended", "server": "was gone"}
    shell.url = "http://127.0.0.1:9/api"  # where PREFECT_API_URL names a server, none is started
    said = json.loads(shell("ckpt", "up", "--json", status=1, url=True))["error"]
    assert said["message"] == "no server answers at http://127.0.0.1:9/api"
    assert shell.processes() == []


def test_the_password_is_for_its_owner_alone(tmp_path: Path) -> None:
    """Whatever the umask and what a kill has left; one that others can read, or that is empty, is replaced."""
    before = os.umask(0)
    try:
        (tmp_path / "ckpt-up.auth.new").write_text("half")
        made = make_password(tmp_path)
        first = read_password(made)
        assert read_password(make_password(tmp_path)) == first
        made.chmod(0o640)
        second = read_password(make_password(tmp_path))
        made.write_text("")
        third = read_password(make_password(tmp_path))
    finally:
        os.umask(before)
    assert len({first, second, third, ""}) == 4
    assert [(path.name, stat.S_IMODE(path.stat().st_mode)) for path in tmp_path.iterdir()] == [("ckpt-up.auth", 0o600)]
    made.unlink()
    with pytest.raises(SiteError, match=r"cannot be read: .*ckpt down, then ckpt up makes another"):
        read_password(made)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"ok": "yes"}',
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_another_program_on_the_port_is_named(answer: bytes) -> None:
    """Whatever it speaks, and also if it answers 200 to everything, it is not taken for Prefect's server."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(SiteError, match=r"another program listens there: .*Choose another --port"):
            answers(f"http://127.0.0.1:{listening.getsockname()[1]}/api")
        thread.join()
