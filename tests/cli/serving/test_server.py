"""The server of `ckpt serve`: what it answers, what it refuses, and that it follows the runs without writing."""

from __future__ import annotations

import http.client
import json
import math
import os
import shutil
import signal
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.cli.serving.access import is_loopback
from ckpt_tasks.cli.serving.run_table import RunTable
from ckpt_tasks.cli.serving.server import PageServer
from ckpt_tasks.format.keys import LEDGER_PREFIX
from ckpt_tasks.run.ledger.live_steps import LIVE_STEPS_NAME
from ckpt_tasks.storage.local import LocalStore
from tests.support.children import Child
from tests.support.cli_runs import ckpt, config, save_steps, some_state, started, tree
from tests.support.histories import Told, trained
from tests.support.owner_child import OwnerChild
from tests.support.waiting import until

EVIL = "<img src=x onerror=alert(1)>"


class Asked:
    """A server in this process, and what it answers."""

    def __init__(self, root: Path, token: str | None = None):
        self.table = RunTable(LocalStore(root))
        self.server = PageServer(self.table, "127.0.0.1", 0, token)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def raw(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            line.request(headers.pop("method", "GET"), path, headers=headers)
            answer = line.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            line.close()

    def rows(self, since: int = -1) -> dict[str, Any]:
        """Look at the runs, and return the rows that changed after a revision."""
        self.table.look()
        return {row["name"]: row for row in self.data(f"/api/runs?since={since}")["rows"]}

    def data(self, path: str, status: int = 200) -> Any:
        got, _, body = self.raw(path)
        assert got == status, body
        return json.loads(body)


@pytest.fixture(scope="module")
def trained_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of a few steps, and something that is no run."""
    place = tmp_path_factory.mktemp("runs")
    for name, steps in (("first", 2), ("second", 4)):
        with Checkpointer(CheckpointConfig(checkpoint_dir=place / name, memory_dir=None, step_interval=2)) as one:
            one.acquire()
            one.record_program("m:P", {"lr": 0.1 if name == "first" else 0.2, "model": {"width": 8}})
            for step in range(1, steps + 1):
                one.step(step, {"x": torch.full((4,), step)}, metrics={"loss": 1 / step, EVIL: math.nan})
    (place / "nothing").mkdir()
    return place


@pytest.fixture
def root(trained_runs: Path, tmp_path: Path) -> Path:
    """A copy of them, in which a test may change what it likes."""
    return shutil.copytree(trained_runs, tmp_path / "runs")


@pytest.fixture
def asked(root: Path) -> Iterator[Asked]:
    with (made := Asked(root)).server:
        yield made
        made.server.shutdown()


def curve(asked: Asked, run: str, *metrics: str, **more: Any) -> Any:
    words = "".join(f"&{name}={value}" for name, value in more.items())
    return asked.data(f"/api/curves?run={run}&metrics={quote(json.dumps(metrics))}{words}")


def test_what_is_shown_is_what_the_ledger_says(asked: Asked, root: Path) -> None:
    """Each run's state, step, metrics, parameters, every committed step in its curve, and what a report says of it.

    NaN is a text in a row, and null in a curve. `--json` has the same rows.
    """
    rows = asked.rows()
    assert [*rows] == ["first", "second"]
    second = rows["second"]
    assert (second["state"], second["step"], second["program"]) == ("ended", 4, "m:P")
    assert second["params"] == {"lr": 0.2, "model.width": 8}
    assert second["metrics"] == {"loss": 0.25, EVIL: "nan"}
    lines = curve(asked, "second", "loss", EVIL)["lines"]
    assert lines["loss"]["line"]["step"] == [1, 2, 3, 4]
    assert lines["loss"]["line"]["value"] == [1.0, 0.5, 0.3333333, 0.25]
    assert lines[EVIL]["line"]["value"] == [None] * 4
    assert curve(asked, "second", "loss", low=2, high=3)["lines"]["loss"]["line"]["step"] == [2, 3]
    about = asked.data("/api/run?run=second")
    assert about["summary"].startswith("step 4")
    assert [row["step"] for row in about["checkpoints"]] == ["4", "2"]
    assert about["environment"]["torch"] == torch.__version__
    assert {name for name, _ in about["facts"]} >= {"commits", "failures"}
    assert ckpt("serve", root, "--json").data["rows"][1]["metrics"] == second["metrics"]


def save_and_stay(arguments: Sequence[str]) -> None:
    """Commit a step, and hold the run until somebody kills this process."""
    one = Checkpointer(CheckpointConfig(checkpoint_dir=arguments[0], memory_dir=None))
    one.restore(state := {"x": torch.zeros(4, dtype=torch.int64)})
    one.save(9, state, metrics={"loss": 9.0})
    Path(arguments[1]).touch()
    signal.pause()


def test_a_run_that_trains_is_followed(asked: Asked, root: Path, tmp_path: Path) -> None:
    """Only the row that changed is sent again; its curve has the new step, and a dead owner is seen."""
    asked.rows()
    before = asked.data("/api/runs?since=-1")["revision"]
    assert asked.rows(before) == {}
    with Child(save_and_stay, [str(root / "first"), str(tmp_path / "saved")], tmp_path / "said") as child:
        assert child.until((tmp_path / "saved").exists)
        rows = asked.rows(before)
        assert [(name, row["state"], row["step"]) for name, row in rows.items()] == [("first", "running", 9)]
        assert curve(asked, "first", "loss")["lines"]["loss"]["line"]["step"] == [1, 2, 9]
    assert asked.rows(before)["first"]["state"] == "silent"


@pytest.mark.slow
def test_an_unchanged_run_is_not_read_again(tmp_path: Path) -> None:
    """While the times of a run's directories stay, its ledger is not read: what was damaged behind them is not seen."""
    trained(Told(tmp_path / "old").taken(), 3, every_s=1, steps=1).released()
    ledger = tmp_path / "old" / LEDGER_PREFIX
    for folder in (tmp_path / "old", ledger):
        os.utime(folder, (1e9, 1e9))
    with (asked := Asked(tmp_path)).server:
        assert asked.rows()["old"]["state"] == "ended"
        min(ledger.iterdir()).write_bytes(b"torn")
        assert asked.rows()["old"]["state"] == "ended"
        os.utime(ledger, (1.1e9, 1.1e9))
        assert asked.rows()["old"]["state"] == "damaged"


def test_a_damaged_run_is_a_row_and_the_others_are_shown(asked: Asked, root: Path) -> None:
    """A torn newest entry and a missing format.json are said in the row; a run that goes away leaves the table."""
    newest = min((root / "first" / LEDGER_PREFIX).iterdir())
    newest.write_bytes(newest.read_bytes()[:50])
    rows = asked.rows()
    assert (rows["first"]["state"], rows["first"]["why"]) == ("damaged", "1 ledger entry cannot be read")
    assert rows["second"]["state"] == "ended"
    assert curve(asked, "first", "loss")["lines"]["loss"]["line"]["step"] == [1, 2]
    (root / "second").rename(root / ".hidden")
    asked.table.look()
    assert asked.data("/api/runs?since=-1")["gone"] == ["second"]


def test_it_looks_and_writes_nothing(asked: Asked, root: Path) -> None:
    """Nothing below the root is made, changed, or made and removed: the times of all files and directories stay."""

    def times() -> dict[Path, tuple[int, int]]:
        return {place: (place.lstat().st_mtime_ns, place.lstat().st_ctime_ns) for place in (root, *root.rglob("*"))}

    before, bytes_before = times(), tree(root)
    asked.rows()
    asked.data("/api/run?run=first")
    curve(asked, "first", "loss")
    assert asked.raw("/metrics")[0] == 200
    assert (times(), tree(root)) == (before, bytes_before)


def test_what_happens_to_a_run_while_it_is_looked_at(asked: Asked, root: Path) -> None:
    """A pruned run has fewer checkpoints; another run in its place is read anew; one that is gone is a 404."""
    asked.rows()
    assert len(curve(asked, "second", "loss")["lines"]["loss"]["line"]["step"]) == 4
    assert len(asked.data("/api/run?run=second")["checkpoints"]) == 2
    assert ckpt("prune", root / "second", "--max-num-checkpoints", "1").status == 0
    asked.rows()
    assert [row["step"] for row in asked.data("/api/run?run=second")["checkpoints"]] == ["4"]
    shutil.rmtree(root / "second")
    trained(Told(root / "second").taken(), 30, every_s=1, steps=1).released()
    assert asked.rows()["second"]["step"] == 30
    assert curve(asked, "second", "loss")["lines"] == {}  # This one has no metrics.
    assert asked.data("/api/run?run=second")["summary"].startswith("step 30")
    (root / "second").rename(root / "third")
    asked.rows()
    assert asked.data("/api/run?run=third")["summary"].startswith("step 30")
    assert "second" in asked.data("/api/run?run=second", 404)["error"]
    assert 'ckpt_commits_total{run="third"} 30.0' in asked.raw("/metrics")[2].decode().splitlines()


@pytest.mark.parametrize("name", ["evil.example:80", "", "127.0.0.1.evil.example", "[::2]:1"])
def test_a_name_that_another_site_gave_is_refused(asked: Asked, name: str) -> None:
    """A page whose name was pointed to this machine reads nothing: the browser says by which name it asks."""
    for path in ("/", "/api/runs", "/page.js"):
        assert asked.raw(path, Host=name)[0] == 421


def test_a_wrong_question_has_an_answer(asked: Asked) -> None:
    """Only the page's own files are there, only GET is known, and wrong names and parameters are said as JSON."""
    asked.rows()
    for path in ("/../pyproject.toml", "/..%2f..%2fetc/passwd", "//etc/passwd", "/page/uPlot.LICENSE", "/server.py"):
        assert asked.raw(path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert asked.raw("/api/runs", method=method)[0] == 501
    for path in ("run?run=..", "run?run=nothing/../first", "run"):
        assert asked.data(f"/api/{path}", 404)["error"]
    for path in ("most=x", "low=nan", "metrics=%7B%7D", "metrics=[", "by=clock"):
        assert asked.data(f"/api/curves?run=first&{path}", 400)["error"]
    assert asked.data("/api/runs?since=x", 400)["error"]
    deep = "%5B" * 100_000 + "%5D" * 100_000
    assert asked.raw(f"/api/curves?run=first&metrics={deep}")[0] in {400, 414}
    assert asked.data("/api/curves?run=first&metrics=" + "%5B" * 15_000, 400)["error"]
    for path in ("metrics=[[%22a%22]]", "metrics=[1]"):
        assert asked.data(f"/api/curves?run=first&{path}", 400)["error"]
    assert asked.raw("/api/runs?" + "&".join(f"a{n}=1" for n in range(21)))[0] == 400


@pytest.mark.slow
def test_a_client_that_leaves_is_passed_over(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    """A connection that is reset before its answer prints no traceback, and the next one is answered."""
    asked.rows()
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", asked.port)) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            line.sendall(b"GET /uPlot.js HTTP/1.1\r\nHost: localhost\r\n\r\nGET")
    assert asked.data("/api/runs?since=-1")["rows"]
    asked.server.shutdown()
    asked.server.server_close()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("token", ["two words", "caf\u00e9", "a+b/c=%41;d"])
def test_any_token_lets_its_owner_in(root: Path, token: str) -> None:
    """The address that is printed, the cookie that it sets and a header of its form all have the token."""
    with (asked := Asked(root, token=token)).server:
        quoted = quote(token, safe="")
        status, headers, _ = asked.raw(f"/?token={quoted}")
        assert status == 303
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert asked.raw("/api/runs", Cookie=cookie)[0] == 200
        assert asked.raw("/api/runs", Authorization=f"Bearer {quoted}")[0] == 200
        assert asked.raw("/api/runs", Cookie=cookie + "x")[0] == 401
        asked.server.shutdown()


def test_every_answer_forbids_what_the_page_does_not_need(asked: Asked) -> None:
    """Nothing from elsewhere is loaded or run, no other site frames or reads an answer, and nothing is kept."""
    for path in ("/", "/page.js", "/api/runs", "/none"):
        headers = asked.raw(path)[1]
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers


def test_a_token_is_needed_where_there_is_one(root: Path) -> None:
    """Without it nothing is answered; the address with it sets a cookie that scripts cannot read, then it is gone."""
    with (asked := Asked(root, token="s3cret")).server:
        for headers in ({}, {"Authorization": "Bearer other"}, {"Cookie": f"ckpt_serve_{asked.port}=other"}):
            assert asked.raw("/api/runs", **headers)[0] == 401
        assert asked.raw("/?token=other")[0] == 401
        status, headers, _ = asked.raw("/?token=s3cret")
        assert (status, headers["Location"]) == (303, "/")
        assert headers["Set-Cookie"] == f"ckpt_serve_{asked.port}=s3cret; HttpOnly; SameSite=Strict; Path=/"
        assert asked.raw("/", Cookie=f"a=b; ckpt_serve_{asked.port}=s3cret")[0] == 200
        assert asked.raw("/api/runs", Authorization="Bearer s3cret", Host="box.local")[0] == 200
        asked.server.shutdown()


def test_prometheus_reads_the_same_runs(asked: Asked, root: Path, tmp_path: Path) -> None:
    """/metrics has the very samples that `ckpt metrics` writes into the file for node-exporter."""
    assert asked.raw("/metrics")[0] == 503  # Nothing has been looked at: an empty answer would look like no run.
    asked.table.look()
    status, headers, body = asked.raw("/metrics")
    assert (status, headers["Content-Type"].partition(";")[0]) == (200, "text/plain")
    assert 'ckpt_last_checkpoint_step{run="first"} 2.0' in body.decode().splitlines()
    assert ckpt("metrics", root, "--out", tmp_path / "ckpt.prom").status == 0
    assert body.decode() == (tmp_path / "ckpt.prom").read_text(encoding="utf-8")
    assert 'ckpt_last_checkpoint_step{run="second"} 4.0' in body.decode().splitlines()


def test_what_was_left_behind_is_a_line_of_its_own(tmp_path: Path) -> None:
    """After a fall-back the curve has the steps of the training that counts, and beside it those that were lost."""
    place = tmp_path / "run"
    save_steps(place, 1, 2, 3)
    with Checkpointer(config(place)) as again:
        again.acquire()
        again.rollback(1)
        again.restore(state := some_state())
        again.save(2, state, metrics={"loss": 7.0})
    with (asked := Asked(tmp_path)).server:
        asked.rows()
        lines = curve(asked, "run", "loss")["lines"]["loss"]
        assert lines["line"]["value"] == [0.5, 7.0]
        assert [one["step"] for one in lines["left"]] == [[2, 3]]


def test_a_port_that_is_taken_is_an_error(asked: Asked, root: Path) -> None:
    """It names the address, and what to do; only a name of this machine's loopback needs no token."""
    own = ("127.0.0.1", "localhost", "::1")
    assert [is_loopback(name) for name in (*own, "0.0.0.0", "box.local")] == [True] * 3 + [False] * 2
    answer = ckpt("serve", root, "--port", str(asked.port))
    assert answer.status == 1
    assert "--port 0" in answer.err


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    """`ckpt serve nowhere` serves, since a run may come, and says that there is no such directory yet."""
    with started("serve", tmp_path / "nowhere", "--port", 0) as server:
        assert "Serving" in server.stdout.readline()
        assert server.stdout.readline().startswith("There is no directory")


@pytest.mark.slow
def test_steps_that_no_commit_has_are_shown_and_marked(tmp_path: Path) -> None:
    """The table, the curves, /metrics and `ckpt ls` have the step that training has reached, apart from the committed.

    They are gone with its commit. What a foreign process writes in their place breaks nothing, and shows nothing.
    """
    place = tmp_path / "runs" / "live"
    shown, owner = place / LIVE_STEPS_NAME, OwnerChild(place)
    assert owner.ask("save 10") == "ok 10"
    assert [owner.ask(f"measure {step}") for step in (11, 12, 13)] == ["ok"] * 3
    until(lambda: shown.exists() and b'"step":13' in shown.read_bytes())
    with (asked := Asked(tmp_path / "runs")).server:
        row = asked.rows()["live"]
        assert (row["state"], row["step"], row["live_step"], row["live"]) == ("running", 10, 13, {"loss": 1 / 13})
        line = asked.data(f"/api/curves?run=live&metrics={quote(json.dumps(['loss']))}")["lines"]["loss"]
        assert (line["line"]["step"], line["left"][-1]["step"]) == ([], [11, 12, 13])
        assert b'ckpt_live_step{run="live"} 13.0' in asked.raw("/metrics")[2]
        assert "to 13" in ckpt("ls", tmp_path / "runs").out
        assert owner.ask("measure 14") == "ok"
        until(lambda: asked.rows()["live"]["live_step"] == 14)
        assert b'ckpt_live_step{run="live"} 14.0' in asked.raw("/metrics")[2]  # It is no figure of the ledger.
        whole = shown.read_bytes()
        for foreign in (b"", b"{", b"[" * 10_000, whole.replace(b":14}", b":-1}"), whole.replace(b"0.0", b"Infinity")):
            shown.write_bytes(foreign)
            assert asked.rows()["live"]["live_step"] is None
        assert owner.ask("save 15") == "ok 15"
        shown.write_bytes(whole)
        assert (asked.rows()["live"]["step"], asked.rows()["live"]["live_step"]) == (15, None)
    assert owner.ask("close") == "ok"
    assert not shown.exists()
    owner.kill()
