"""Events: one for every commit, with the payload that is documented, and none for what did not happen."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from prefect.assets import Asset
from prefect.events import emit_event
from prefect.events.worker import EventsWorker
from prefect.exceptions import Abort
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.checkpoint.save.listening import Listener
from ckpt_tasks.errors import FencedError
from ckpt_tasks.flows.prefect.events import asset_key, delivers_events
from ckpt_tasks.format.records import Checkpoint
from tests.flows.prefect.announcer import announcer
from tests.support.tiny import Tiny

ROOT = Path(__file__).parents[3]
GONE = "http://127.0.0.1:9/api"
COMMITTED = {"step", "epochs", "manifest_digest", "metrics", "size_bytes", "waited_s", "saved_at"}


def events(server: Mapping[str, str], run_dir: Path, *names: str, wait_for: int = 0) -> list[dict[str, Any]]:
    """Return the events of a run directory by name, oldest first; wait until there are as many."""
    body = {"filter": {"event": {"name": list(names)}}, "limit": 50}
    headers = {"Content-Type": "application/json"}
    request = Request(f"{server['PREFECT_API_URL']}/events/filter", json.dumps(body).encode(), headers)
    ours: list[dict[str, Any]] = []
    for _ in range(100):
        with urlopen(request, timeout=30) as answer:
            found = json.load(answer)["events"]
        ours = [one for one in found if one["payload"]["checkpoint_dir"] == str(run_dir)]
        if len(ours) >= wait_for:
            break
        time.sleep(0.2)
    return sorted(ours, key=lambda one: str(one["occurred"]))


def told(server: Mapping[str, str], run_dir: Path, steps: int, **options: Any) -> subprocess.CompletedProcess[str]:
    given = json.dumps({"params": {}, **options})
    command = [sys.executable, "-m", "tests.flows.prefect.announcer", str(run_dir), str(steps), given]
    return subprocess.run(command, cwd=ROOT, env=server, capture_output=True, text=True, check=False, timeout=240)


def committed_steps(run_dir: Path) -> list[int]:
    """Return the steps of all commits in the ledger, pruned ones too."""
    history = open_run(str(run_dir)).history
    happened = [history.read_entry(n)[0].event for n in range(history.head().next_n)]
    return [event["step"] for event in happened if event["kind"] == "commit"]


@pytest.fixture
def after_gone() -> Iterator[None]:
    """End Prefect's thread for events, which was made for a server that is gone: it would keep those of later tests."""
    yield
    EventsWorker.drain_all(timeout=10)


@pytest.mark.slow
def test_the_commit_of_a_signal_has_its_event(run_dir: Path, server: dict[str, str]) -> None:
    """The checkpoint that SIGTERM leaves is announced before the process is gone, and so is the restore after it."""
    stopped = told(server, run_dir, 6, params={"signal_at": 3, "signum": signal.SIGTERM})
    assert stopped.returncode != 0
    assert [one["payload"]["step"] for one in events(server, run_dir, "ckpt.committed", wait_for=2)] == [2, 3]
    assert told(server, run_dir, 4).returncode == 0
    [restored] = events(server, run_dir, "ckpt.restored", wait_for=1)
    assert set(restored["payload"]) == {
        *("run_key", "checkpoint_dir", "step", "source", "seconds", "size_bytes", "skipped", "program", "params"),
    }
    assert restored["payload"]["step"] == 3


def test_a_listener_that_fails_is_in_nobodys_way(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a listener raises is logged once; the run goes on, and the next commit is told all the same."""
    heard: list[int] = []

    def hear(checkpoint: Checkpoint) -> None:
        heard.append(checkpoint.step)
        raise RuntimeError("the server is away")

    program = Tiny()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:
        ckpt.listen(Listener(committed=hear))
        for step in (1, 2, 3):
            ckpt.save(step, program.state)
    assert heard == [1, 2, 3]
    assert [record.exc_info is not None for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("/runs/a", "file:///runs/a/checkpoint_1/e1"),
        ("s3://bucket/run/", "s3://bucket/run/checkpoint_1/e1"),
        ("block://ours", "block://ours/checkpoint_1/e1"),
        ("/runs/a b#[1]", "file:///runs/a_b__1_/checkpoint_1/e1"),
        ("/" + "x" * 600, "ckpt://told/checkpoint_1/e1"),
    ],
)
def test_a_checkpoints_key_is_one_that_prefect_takes(run_dir: Path, place: str, expected: str) -> None:
    """Any directory's name leads to a valid key of an asset."""
    program = Tiny()
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir))) as ckpt:
        saved = ckpt.save(1, program.state)
    key = asset_key(place, "told", saved).replace(saved.manifest.rpartition("/")[0], "checkpoint_1/e1")
    assert key == expected
    assert Asset(key=key).key == expected


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


@pytest.mark.slow
@pytest.mark.usefixtures("after_gone")
def test_a_server_that_is_gone_holds_no_process(caplog: pytest.LogCaptureFixture) -> None:
    """The end waits a bounded time for the events that are queued; then it drops them, and says how many."""

    def stop_within() -> None:
        with delivers_events():
            for step in range(30):
                emit_event("ckpt.committed", resource={"prefect.resource.id": "gone"}, payload={"step": step})
            raise KeyboardInterrupt

    EventsWorker.drain_all()
    gone = {PREFECT_API_URL: GONE, PREFECT_CLIENT_MAX_RETRIES: 0}
    with temporary_settings(gone):
        with pytest.raises(KeyboardInterrupt):
            stop_within()
        assert EventsWorker.instance()._queue.empty()
    assert re.search(r"did not take (29|30) events", caplog.text)


@pytest.mark.slow
@pytest.mark.usefixtures("after_gone")
@pytest.mark.parametrize("away", [True, False])
@pytest.mark.parametrize("raised", [None, ValueError("oh")], ids=["ends", "fails"])
def test_without_a_server_no_final_state_is_set(
    raised: Exception | None, away: bool, server: dict[str, str], caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Abort, which Prefect's engine leaves without a request, takes the place of minutes of them, and says so.

    Beside a server that answers a block ends or raises as it is, and nothing is said.
    """
    monkeypatch.setattr("ckpt_tasks.flows.prefect.events._AWAY_S", 0.0)
    ended: BaseException | None = None
    with temporary_settings({PREFECT_API_URL: GONE if away else server["PREFECT_API_URL"]}):
        try:
            with delivers_events():
                if raised is not None:
                    raise raised
        except (Abort, ValueError) as error:
            ended = error
    if away:
        assert isinstance(ended, Abort)
        assert ("has completed" if raised is None else "has failed, ValueError: oh") in str(ended)
        assert "All commits are made" in caplog.text
    else:
        # Prefect's own thread may still log that the server of a test before this one is gone.
        assert (ended, [one for one in caplog.records if one.name.startswith("ckpt_tasks")]) == (raised, [])


# Last here: from now on this process is configured for the server.


@pytest.mark.usefixtures("harness")
def test_every_commit_has_its_event(run_dir: Path, server: dict[str, str]) -> None:
    """Each commit, mid-batch ones too, is an event of its flow run, and an asset; NaN is a text."""
    announcer(str(run_dir), 6, {})
    found = events(server, run_dir, "ckpt.committed", wait_for=3)
    assert [one["payload"]["step"] for one in found] == committed_steps(run_dir) == [2, 4, 6]
    newest, live = found[-1], open_run(str(run_dir)).find("latest")
    assert set(newest["payload"]) == COMMITTED | {"run_key", "checkpoint_dir", "program", "params"}
    assert newest["payload"]["manifest_digest"] == live.manifest_digest
    assert {name: newest["payload"]["metrics"][name] for name in ("odd", "most")} == {"odd": "nan", "most": "inf"}
    assert newest["payload"]["params"] == {"width": 8}
    assert newest["resource"]["prefect.resource.id"] == "ckpt-tasks.run.told"
    assert "flow-run" in {one["prefect.resource.role"] for one in newest["related"]}
    assert all(moment(one["occurred"]) >= moment(one["payload"]["saved_at"]) for one in found)
    assets = events(server, run_dir, "prefect.asset.materialization.succeeded", wait_for=3)
    assert [one["payload"]["step"] for one in assets] == [2, 4, 6]
    assert assets[-1]["resource"]["prefect.resource.id"] == f"file://{(run_dir / live.manifest).parent}"


@pytest.mark.usefixtures("harness")
def test_a_commit_that_did_not_happen_has_no_event(run_dir: Path, server: dict[str, str]) -> None:
    """P33: a process that lost its directory announces what went wrong, and no commit."""
    with pytest.raises(FencedError):
        announcer(str(run_dir), 6, {}, lost_at=4)
    [failed] = events(server, run_dir, "ckpt.save_failed", wait_for=1)
    assert failed["payload"]["step"] == 4
    assert failed["payload"]["error"] == "FencedError"
    assert set(failed["payload"]) == {"run_key", "checkpoint_dir", "step", "error", "message"}
    found = events(server, run_dir, "ckpt.committed")
    assert [one["payload"]["step"] for one in found] == committed_steps(run_dir) == [2]
