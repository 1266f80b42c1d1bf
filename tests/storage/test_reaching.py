"""Stores that do not answer, and names that are no place, as a person at the command line meets them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.cli import output
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.storage.locations import Location
from tests.support.cli_runs import ckpt, save_steps


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of a server that takes connections and never answers, which s3:// and gs:// lead to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        _lead_to(url, monkeypatch)
        yield url


def _lead_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_FIRST_ANSWER_S", 2.0)  # 15 s for a person
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "gs://bucket/run"),
        ("sync", "{run}", "s3://bucket/run"),
    ],
    ids=" ".join,
)
def test_a_store_that_does_not_answer_is_one_line(arguments: tuple[str, ...], run_dir: Path) -> None:
    """Every verb gives a silent store a limited time, and says one line."""
    save_steps(run_dir, 1)
    answer = ckpt(*(argument.format(run=run_dir) for argument in arguments))
    assert answer.status == 1
    assert answer.out == ""
    [line] = answer.err.splitlines()
    assert "did not answer within 2 s" in line
    assert arguments[-1] in line


@pytest.mark.parametrize("name", ["s3:/bucket/run", "gs:bucket/run", "az:/c/run", "block:/lab/run", "file:/tmp/run"])
def test_a_scheme_without_its_slashes_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelled URL is no directory of that name, for the library and for the command line; ./ says that it is."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is not a place: after"):
        Checkpointer(CheckpointConfig(checkpoint_dir=name))
    assert "Write " in ckpt("ls", name).err
    assert list(tmp_path.iterdir()) == []
    for directory in (f"./{name}", "a:b", "runs/s3:/x"):
        assert Location(directory).resolve().url == directory
