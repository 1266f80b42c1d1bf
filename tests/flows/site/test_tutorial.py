"""docs/TUTORIAL.md, typed into a terminal line by line: each command succeeds, and says what the page shows."""

from __future__ import annotations

import os
import pty
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from hatchling.builders.wheel import WheelBuilder

from ckpt_tasks import open_run
from ckpt_tasks.errors import CheckpointNotFoundError
from tests.servers.process import free_port
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "TUTORIAL.md"
PATIENCE_S = 900.0


class Typed(NamedTuple):
    """A command of the page, and the lines that it shows below it."""

    command: str
    shown: list[str]


def typed(page: Path) -> list[Typed]:
    """Return every command of a page's ```console blocks."""
    found: list[Typed] = []
    for block in re.findall(r"^```console\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(Typed(line[2:], []))
            elif line.strip() and line != "…":
                found[-1].shown.append(line)
    return found


def plain(line: str) -> str:
    """Return a line without what differs from day to day: numbers, units, paths, ages and widths of columns."""
    line = re.sub(r"\S*/runs/", "runs/", line).replace(socket.gethostname(), "your-host")
    line = re.sub(r"\d[\d,.:]*(e-?\d+)?", "#", line)
    line = re.sub(r"\bnow\b|# (s|min|h) ago", "ago", line)
    line = re.sub(r"# (ms|s|min|h)\b", "# time", line)
    line = re.sub(r"# (B|KiB|MiB)\b", "# size", line)
    return re.sub(r"─+", "─", " ".join(line.split()))


def exact(line: str) -> str:
    """Return a line with its numbers, but without paths and the widths of columns."""
    return re.sub(r"─+", "─", " ".join(re.sub(r"\S*/runs/", "runs/", line).split()))


class Terminal:
    """A shell that believes in a terminal: it is given one line after the other."""

    def __init__(self, place: Path, environment: dict[str, str]):
        self.port = environment["PREFECT_SERVER_API_PORT"]
        reading, writing = pty.openpty()
        self._shell = subprocess.Popen(
            ["bash", "--norc"], cwd=place, env=environment, stdin=subprocess.PIPE, stdout=writing, stderr=writing,
            start_new_session=True,
        )  # fmt: skip
        os.close(writing)
        self._reading, self._said, self._from = reading, bytearray(), 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __call__(self, command: str) -> str:
        """Type a command, wait until it is done, and return what was said since the one before."""
        assert self._shell.stdin is not None
        begun = len(self._said)
        self._shell.stdin.write(f"{command}\necho '==='\"$?\"'==='\n".encode())
        self._shell.stdin.flush()
        until(lambda: re.search(rb"===\d+===", self._said[begun:]) is not None, PATIENCE_S)
        status = re.search(rb"===(\d+)===", self._said[begun:])
        assert status is not None
        assert status[1] == b"0", self.said()
        return self.said()

    def said(self) -> str:
        """Return everything said so far, without colours and movements of the cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._said.decode(errors="replace")).replace("\r", "\n")

    def end(self) -> None:
        """End the shell."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.kill()
        self._shell.wait()
        self._reader.join(10)
        os.close(self._reading)

    def _read(self) -> None:
        try:
            while part := os.read(self._reading, 65536):
                self._said += part
        except OSError:  # EIO: the other side has been closed
            return


def step_of(run: Path) -> int:
    try:
        return open_run(str(run)).find("latest").step
    except CheckpointNotFoundError:
        return 0


def owner_of(run: Path) -> int:
    """Return the process that holds a run, 0 without one."""
    try:
        owner = open_run(str(run)).head().state.owner
    except CheckpointNotFoundError:
        return 0
    return owner.pid if owner is not None and not owner.released else 0


def trains(run: Path, but: int) -> int:
    """Wait until a process other than `but` holds the run and has committed; return its number."""
    until(lambda: owner_of(run) not in {0, but}, PATIENCE_S)
    before = step_of(run)
    until(lambda: step_of(run) > before, PATIENCE_S)
    return owner_of(run)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A terminal on a machine where `pip install ./ckpt-tasks` takes the wheel of this checkout."""
    (_,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path / "dist"), versions=["standard"])
    environment = {name: text for name, text in os.environ.items() if name not in {"PYTHONPATH", "PREFECT_API_URL"}}
    environment |= {
        "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_FIND_LINKS": str(tmp_path / "dist"), "PIP_QUIET": "1",
        "PREFECT_HOME": str(tmp_path / "home"), "PREFECT_SERVER_API_PORT": str(free_port()),
        "PATH": f"{Path(sys.executable).parent}:{os.defpath}", "COLUMNS": "150", "TERM": "xterm",
    }  # fmt: skip
    made = Terminal(tmp_path, environment)
    yield made
    made.end()


def follow(terminal: Terminal, place: Path, commands: list[Typed], port: str) -> None:
    """Type the commands as a reader of the page would: it is read what process to kill, and waited where it says so."""
    pid = 0
    for one in commands:
        command = one.command.replace(":4200", f":{port}").replace("~/.prefect", str(place / "home"))
        if command == "kill -9 $!":
            until(lambda: step_of(place / "nets/runs/nets") >= 3000, PATIENCE_S)
            # Steps are to be lost: a kill right after the commit loses none, and the next start says so.
            until(lambda: max(map(int, re.findall(r"step (\d+)/", terminal.said())), default=0) > 3000, PATIENCE_S)
        if command == "ckpt ls runs/served":
            pid = trains(place / "nets/runs/served", but=pid)
        if command == "kill -9 4711":
            command = f"kill -9 {pid}"
        installs = command == "pip install ./ckpt-tasks"
        terminal("pip install ckpt-tasks" if installs else command)  # the wheel: to build it takes an index
        if installs:  # what it requires is borrowed
            (packages,) = (place / "lab").glob("lib/python3.*/site-packages")
            (packages / "borrowed.pth").write_text(f"{Path(typer.__file__).parents[1]}\n")


def assert_shown(commands: list[Typed], said: str) -> None:
    """Assert that each line of the page was said, but for its numbers; those of `ckpt diff` are the same every day."""
    lines = {form(line) for line in said.splitlines() for form in (plain, exact)}
    forms = {"ckpt diff": exact}
    missing = [line for one in commands for line in one.shown if forms.get(one.command[:9], plain)(line) not in lines]
    assert missing == [], said


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tutorial_is_true(terminal: Terminal, tmp_path: Path) -> None:
    """P73: from `pip install` over two kills and two resumes to `ckpt down`, the page can be followed line by line."""
    commands, port = typed(PAGE), terminal.port
    try:
        follow(terminal, tmp_path, commands, port)
    finally:
        terminal("cd && ckpt down")
    assert_shown(commands, terminal.said())
    assert "Equal bit for bit" in terminal.said()
