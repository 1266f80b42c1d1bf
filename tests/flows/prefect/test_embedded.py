"""Prefect's embedded server: the wait for it, with a stand-in for the program that serves, and its new database."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from prefect.settings import PREFECT_HOME, get_current_settings, temporary_settings

from ckpt_tasks.flows.prefect.embedded import make_database
from tests.support import processes
from tests.support.sweeps import quick_first
from tools.prefect_database import migrated
from tools.sources import ROOT

# Imported in the server's process instead of uvicorn and of Prefect's server, which takes many seconds to start.
SERVES = """
import os, socket, struct, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"true")

class Config:
    def __init__(self, *arguments, **options):
        pass

class Server:
    def __init__(self, config):
        pass

    def run(self, sockets):
        (listening,) = sockets
        connection, _ = listening.accept()
        connection.recv(1000)
        if os.environ["STAND_IN"] == "ends":
            os._exit(3)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()  # with RST
        server = HTTPServer(("127.0.0.1", 0), Answer, bind_and_activate=False)
        server.socket.close()
        server.socket = listening
        server.serve_forever()
"""
STARTS = """
import os, sys
from ckpt_tasks.errors import SiteError
from ckpt_tasks.flows.prefect.embedded import start_embedded_server
os.environ["PYTHONPATH"] = sys.argv[1]
try:
    start_embedded_server()
    print("it answers")
except SiteError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("does", "says"), quick_first([("resets", "it answers"), ("ends", "does not start: it ended with status 3")])
)
def test_a_reset_connection_is_no_end(does: str, says: str, tmp_path: Path) -> None:
    """A server that resets a connection and lives is asked again; one that has ended is an error with its status."""
    stand_in = tmp_path / "stand-in"
    package = stand_in / "prefect" / "server" / "api"
    package.mkdir(parents=True)
    (stand_in / "uvicorn.py").write_text(SERVES)
    (package / "server.py").write_text("create_app = None\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PYTHONPATH": str(ROOT), "PREFECT_HOME": str(tmp_path), "STAND_IN": does}
    command = [sys.executable, "-c", STARTS, str(stand_in)]
    ran = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300
    )
    processes.kill(processes.with_variable(f"PREFECT_HOME={tmp_path}"))  # a stand-in does not end when told to
    assert says in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.slow
def test_the_database_of_a_newer_prefect_is_named(tmp_path: Path) -> None:
    """A server that does not know its database's revision is an error that says so, and which home to take."""
    with closing(sqlite3.connect(tmp_path / "prefect.db")) as newer:
        newer.executescript("create table alembic_version (version_num); insert into alembic_version values ('f' || 1)")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PYTHONPATH": str(ROOT), "PREFECT_HOME": str(tmp_path)}
    command = [sys.executable, "-c", STARTS, str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    assert f"A newer Prefect has used the database {tmp_path / 'prefect.db'}" in ran.stdout, ran.stdout + ran.stderr
    assert f"PREFECT_HOME={tmp_path}-" in ran.stdout


@pytest.mark.slow
def test_a_new_database_has_the_tables_of_prefects_migrations(tmp_path: Path) -> None:
    """A database that we begin is, after the migrations of the installed Prefect, what these make from nothing."""
    ours = tmp_path / "ours"
    with temporary_settings({PREFECT_HOME: ours}):
        make_database(get_current_settings())
    assert [file.name for file in ours.iterdir()] == ["prefect.db"]
    # Alembic sorts the constraints and indexes of a table by chance.
    made, theirs = (
        sorted(line.rstrip(", ") for line in migrated(tmp_path / home).splitlines()) for home in ("ours", "theirs")
    )
    assert made == theirs


def test_a_database_that_is_there_stays(tmp_path: Path) -> None:
    """A start leaves a database alone, and makes none where the settings name another."""
    database = tmp_path / "prefect.db"
    with temporary_settings({PREFECT_HOME: tmp_path, "PREFECT_SERVER_DATABASE_CONNECTION_URL": "sqlite+aiosqlite://"}):
        make_database(get_current_settings())
    assert not database.exists()
    database.write_text("a user's")
    with temporary_settings({PREFECT_HOME: tmp_path}):
        make_database(get_current_settings())
    assert database.read_text() == "a user's"
