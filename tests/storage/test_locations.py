"""A location: where a run lives and how its store is reached, as people and flows give it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from ckpt_tasks import CheckpointConfig, Checkpointer, Location
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.flows.prefect.config import config_of_run
from tests.support.cli_runs import ckpt

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("", {}),
        (3, {}),
        ("a\0b", {}),
        ("s3://b/r", {"storage_options": SECRET}),
        ("s3://b/r", {"storage_options": {1: SECRET}}),
        ("s3://b/r", {"storage_options": {"secret": SECRET}, "single_writer": 1}),
    ],
)
def test_a_location_that_is_none_is_refused(url: Any, options: dict[str, Any]) -> None:
    """A URL, options or a flag of another type is a ConfigError when the location is made; no option is shown."""
    with pytest.raises(ConfigError) as caught:
        Location(url, **options)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("hdfs:/x", "s3, "), ("dbfs:/x", "gs, "), ("s3//b/x", "s3://b/x"), ("s3:/b/x", "s3://b/x"), ("gs//b", "gs://b"),
        ("gs:b/x", "gs://b/x"), ("block:/b/x", "block://b/x"), ("file:/tmp/x", "Write /tmp/x"),
    ],
)  # fmt: skip
def test_a_misspelled_url_is_no_directory(
    name: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Checkpointer and the command line refuse it with what works, before a directory of that name is made."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is not a place") as caught:
        Checkpointer(CheckpointConfig(checkpoint_dir=name))
    assert instead in str(caught.value)
    assert f"./{name}" in str(caught.value)
    assert instead in ckpt("ls", name).err
    assert list(tmp_path.iterdir()) == []
    assert Location(f"./{name}").resolve().url == f"./{name}"


@pytest.mark.parametrize("name", ["s3/x", "s3b//x", "a:b", "a/s3:/d", "C:/x", "./hdfs:/x", "./s3//x", "x//y"])
def test_a_directorys_name_may_look_like_a_url(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A colon or a double slash elsewhere in a path is part of a name."""
    monkeypatch.chdir(tmp_path)
    assert Location(name).open().url == str(tmp_path / name)


def test_a_location_is_a_flows_parameter() -> None:
    """As JSON it is a dict beside which a name still is a name; a misspelled option is an error there as well."""
    config = TypeAdapter(CheckpointConfig)
    given = {"url": "s3://b/{run_key}", "storage_options": {"endpoint_url": "http://h:9"}, "single_writer": True}
    made = config.validate_python({"checkpoint_dir": given})
    assert made.location == Location(
        "s3://b/{run_key}", storage_options={"endpoint_url": "http://h:9"}, single_writer=True
    )
    assert config_of_run(made, "lm-7").location == Location(
        "s3://b/lm-7", storage_options={"endpoint_url": "http://h:9"}, single_writer=True
    )
    assert config.validate_python({"checkpoint_dir": "s3://b/r"}).location == Location("s3://b/r")
    with pytest.raises(ValidationError, match="single_writr"):
        config.validate_python({"checkpoint_dir": {"url": "s3://b/r", "single_writr": True}})


_DRAWS = """
import random
from ckpt_tasks import Location
from ckpt_tasks.errors import StoreError
random.seed(0)
before = random.getstate()
options = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s"}
store = Location("s3://bucket/run", storage_options=options).open()
try:
    store.inner.names("")
except StoreError:
    print(random.getstate() == before)
"""


def test_opening_a_store_draws_no_number() -> None:
    """P11: s3fs brings in rich, which draws a number at its import: Python's stream is the training's, and stays."""
    done = subprocess.run([sys.executable, "-c", _DRAWS], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n", done.stderr


_A_CLIENT_TRIES_AGAIN = """
import http.server
import os
import random
import threading
from ckpt_tasks import Location

asked = threading.Semaphore(0)

class Failing(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked.release()
        self.send_error(503)
    def log_message(self, *arguments):
        "Print nothing."

server = http.server.HTTPServer(("127.0.0.1", 0), Failing)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["STORAGE_EMULATOR_HOST"] = f"http://127.0.0.1:{server.server_port}"
store = Location("gs://bucket/run").open()
before = random.getstate()
threading.Thread(target=store.inner.names, args=[""], daemon=True).start()
print(asked.acquire(timeout=60), asked.acquire(timeout=60), random.getstate() == before, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_client_that_tries_again_draws_no_number() -> None:
    """P11: gcsfs retries by itself and draws its waits from the module `random`: it has a stream of its own here."""
    done = subprocess.run([sys.executable, "-c", _A_CLIENT_TRIES_AGAIN], capture_output=True, text=True, check=True)
    assert done.stdout == "True True True\n", done.stderr
