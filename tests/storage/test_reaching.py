"""Stores that do not answer, and names that are no place, as a person at the command line meets them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.checkpoint import acquiring
from ckpt_tasks.checkpoint.memory.cache import SnapshotCache
from ckpt_tasks.checkpoint.memory.memory import MemoryDirectory, private_root
from ckpt_tasks.cli import output
from ckpt_tasks.errors import StoreError
from ckpt_tasks.flows.console import TerminalTraining, evaluate_in_terminal
from ckpt_tasks.storage.locations import Location
from tests.support.cli_runs import ckpt, save_steps
from tests.support.sweeps import quick_first


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of a server that takes connections and never answers, which s3:// and gs:// lead to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        _lead_to(url, monkeypatch)
        yield url


def _lead_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_FIRST_ANSWER_S", 2.0)  # 15 s for a person
    monkeypatch.setattr(acquiring, "_FIRST_ANSWER_S", 2.0)  # 30 s for a start
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(
    "arguments", quick_first([(("sync", "{run}", "s3://bucket/run"),), (("ls", "gs://bucket/run"),)]), ids=" ".join
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


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("url", quick_first(["s3://bucket/run", "gs://bucket/run"]))
def test_a_first_start_gives_a_silent_store_a_limited_time(url: str, tmp_path: Path) -> None:
    """A start of a run on a host that has never trained it ends with the URL and what to do, not after minutes."""
    with (
        Checkpointer(CheckpointConfig(checkpoint_dir=url, memory_dir=tmp_path)) as ckpt,
        pytest.raises(StoreError, match=f"{url} did not answer within 2 s. Check its name, its endpoint") as caught,
    ):
        ckpt.restore({})
    assert not caught.value.transient


@pytest.mark.slow
@pytest.mark.usefixtures("silent")
def test_a_training_in_a_terminal_reaches_its_store_first(caplog: pytest.LogCaptureFixture) -> None:
    """`ckpt train` and `ckpt evaluate` end before they start a server, and the client logs no traceback of its own."""
    config, program = CheckpointConfig(checkpoint_dir="gs://bucket/run", run_key="r"), "tests.support.tiny:Tiny"
    verbs: list[Callable[[], object]] = [
        lambda: TerminalTraining(program=program, config=config, steps=1, params={}).check(),
        lambda: evaluate_in_terminal(config, program, suite="heldout", which="latest"),
    ]
    for verb in verbs:
        with pytest.raises(StoreError, match="gs://bucket/run did not answer within 2 s"):
            verb()
    assert [record for record in caplog.records if record.name.startswith("gcsfs")] == []


@pytest.mark.usefixtures("silent")
def test_a_store_that_has_answered_this_host_keeps_its_patience(tmp_path: Path) -> None:
    """A start of a run that this host has trained gives an outage the minutes that each request has."""
    store = Location("s3://bucket/run").open()
    cache = SnapshotCache(store, tmp_path)
    with pytest.raises(StoreError):
        acquiring.await_store(store, cache)
    MemoryDirectory(private_root(tmp_path), "0a", store.url).close(keep=True)
    acquiring.await_store(store, cache)
