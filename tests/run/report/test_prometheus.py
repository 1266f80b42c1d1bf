"""`ckpt metrics`: what Prometheus reads of runs, and the alerts over it."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import StoreError
from ckpt_tasks.format.parsing import seconds_of
from ckpt_tasks.format.records import RunCheck
from ckpt_tasks.run.ledger.goodput import follow
from ckpt_tasks.run.ledger.timeline import read_timeline
from ckpt_tasks.run.report.prometheus import Runs, registry_of
from ckpt_tasks.testing import FaultyStore, MemoryStore, die, located
from tests.servers.process import free_port
from tests.support.cli_runs import ckpt, started
from tests.support.histories import LOST, Told, trained
from tools.sources import ROOT

ALERTS = ROOT / "deployments" / "alerts.yaml"
NAMES = {
    f"{one.name}_total" if one.type == "counter" else one.name for one in Runs(dict, lambda *_: follow(())).collect()
}


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Samples of an exposition, by name, run and the other label."""
    return {
        (
            sample.name,
            *(sample.labels[name] for name in sorted(sample.labels, key=lambda name: name != "run")),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run that was killed after two steps, went past a damaged checkpoint and on; one without format.json; no run."""
    config = CheckpointConfig(checkpoint_dir=tmp_path / "killed", memory_dir=None)
    first = Checkpointer(config)
    first.restore(state := {"x": torch.zeros(8)})
    for step in (1, 2):
        state["x"] += 1
        first.save(step, state, metrics={"loss": 1 / step})
    die(first)
    part = max((tmp_path / "killed").rglob("*.safetensors"))
    part.write_bytes(bytes(part.stat().st_size))
    with Checkpointer(config, take_over=True) as again:
        assert again.restore(state) == 1
        again.save(3, state, metrics={"loss": 0.25})
    shutil.copytree(tmp_path / "killed", tmp_path / "damaged")
    (tmp_path / "damaged" / "format.json").unlink()
    (tmp_path / "nothing").mkdir()
    return tmp_path


def test_metrics_are_served_to_this_machine_only(runs: Path) -> None:
    """`ckpt metrics --port` has the rule of `ckpt serve`: a Host header of another site is refused."""
    port = free_port()
    with started("metrics", runs, "--port", port) as server:
        assert "Serving" in server.stdout.readline()
        answers = {host: get(port, host) for host in ("localhost", "127.0.0.1:80", "evil.example", "")}
    assert [status for status, _ in answers.values()] == [200, 200, 421, 421]
    assert "ckpt_last_checkpoint_step" in answers["localhost"][1]
    assert "ckpt_" not in answers["evil.example"][1]


def get(port: int, host: str) -> tuple[int, str]:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        line.request("GET", "/metrics", headers={"Host": host})
        answer = line.getresponse()
        return answer.status, answer.read().decode()
    finally:
        line.close()


def test_each_metric_is_what_the_ledger_says(runs: Path) -> None:
    """Counts of commits, deaths, resumes and fallbacks, the newest checkpoint, and shares that are all of the time."""
    written = ckpt("metrics", runs, "--out", runs / "ckpt.prom", "--json").data
    text = (runs / "ckpt.prom").read_text(encoding="utf-8")
    assert len(samples(text)) == len(written["metrics"])
    found, [newest, *_] = samples(text), open_run(runs / "killed").checkpoints()
    expected = {
        ("ckpt_run_state", "killed", "ended"): 1,
        ("ckpt_run_state", "damaged", "damaged"): 1,
        ("ckpt_last_checkpoint_timestamp_seconds", "killed"): seconds_of(newest.saved_at),
        ("ckpt_last_checkpoint_step", "killed"): 3,
        ("ckpt_checkpoints", "killed"): len(open_run(runs / "killed").checkpoints()),
        ("ckpt_size_bytes", "killed"): sum(one.size_bytes for one in open_run(runs / "killed").checkpoints()),
        ("ckpt_metric", "killed", "loss"): 0.25,
        ("ckpt_commits_total", "killed"): 3,
        ("ckpt_failures_total", "killed"): 0,
        ("ckpt_deaths_total", "killed"): 1,
        ("ckpt_resumes_total", "killed"): 1,
        ("ckpt_fallbacks_total", "killed"): 1,
        ("ckpt_rollbacks_total", "killed"): 0,
        ("ckpt_steps_redone_total", "killed"): 1,  # Step 2, whose checkpoint was damaged.
    }
    assert {key: found.get(key) for key in expected} == expected
    assert found["ckpt_flush_seconds", "killed"] > 0
    shares = {key[2]: value for key, value in found.items() if key[:2] == ("ckpt_time_seconds_total", "killed")}
    assert found["ckpt_goodput_ratio", "killed"] == pytest.approx(shares["useful"] / sum(shares.values()))
    assert {key[0] for key in found} <= NAMES
    assert not any("nothing" in key for key in found)


def test_steps_that_were_done_again_are_counted(run_dir: Path) -> None:
    """Steps behind a failed attempt and behind a rollback count once each; a restart where it ended repeats nothing."""
    config = CheckpointConfig(checkpoint_dir=run_dir, memory_dir=None, step_interval=1000, max_num_checkpoints=None)
    state = {"x": torch.zeros(8)}
    redone = []
    with Checkpointer(config) as ckpt:

        def until(*steps: int) -> None:
            begin = ckpt.restore(state)
            for step in range(begin + 1, steps[-1] + 1):
                ckpt.step(step, state)
                if step in steps[:-1]:
                    ckpt.save(step, state)
            [course] = [follow(read_timeline(open_run(run_dir).history).moments)]
            redone.append(course.redone_steps)

        until(5, 8)
        ckpt.record_failure(attempt=1, step=8, why="injected")
        until(6, 10, 10)  # Steps 6 to 8 again.
        until(11, 12, 12)
        ckpt.rollback(6)
        until(7, 7)  # Steps 7 to 12 again.
    assert redone == [0, 3, 3, 9]


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportMetricsServiceRequest]]]:
    """A receiver of OTLP over HTTP: its URL, and what it has taken."""
    taken: list[ExportMetricsServiceRequest] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/metrics":
                taken.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(200 if self.path == "/v1/metrics" else 400)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", taken
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_a_collector_gets_the_same_numbers(
    runs: Path, collector: tuple[str, list[ExportMetricsServiceRequest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--otlp` sends once, as OTLP has it: each sample with its labels, counters as sums; the answer counts them."""
    url, taken = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "trainings")
    answer = ckpt("metrics", runs / "killed", "--otlp", "--json")
    [request] = taken
    [resource] = request.resource_metrics
    named = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert named["service.name"] == "trainings"
    found = {}
    for metric in resource.scope_metrics[0].metrics:
        total = "_total" if metric.HasField("sum") else ""
        assert not total or metric.sum.is_monotonic
        for point in (metric.sum if total else metric.gauge).data_points:
            labels = {one.key: one.value.string_value for one in point.attributes}
            found[metric.name + total, *sorted(labels.values())] = point.as_double or float(point.as_int)
    expected = {(one["name"], *sorted(one["labels"].values())): one["value"] for one in answer.data["metrics"]}
    assert found == expected
    assert len(taken) == 1
    assert "samples sent" in ckpt("metrics", runs / "killed", "--otlp").out
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{url}/elsewhere")
    refused = ckpt("metrics", runs / "killed", "--otlp")
    assert (refused.status, "has not taken the metrics" in refused.err) == (1, True)


def test_saves_that_failed_are_counted_with_the_next_commit() -> None:
    """Two saves that a store refused are two failed saves, once; the next process counts anew."""
    store = FaultyStore(MemoryStore())
    config = CheckpointConfig(checkpoint_dir=located(store, deadline_s=0.1), run_key="run", memory_dir=None)
    with Checkpointer(config) as ckpt:
        ckpt.save(1, {"x": torch.zeros(8)})
        down = store.on("refused", verb="put put_if_absent")
        for step in (2, 3):
            with pytest.raises(StoreError):
                ckpt.save(step, {"x": torch.full((8,), float(step))})
        store.off(down)
        for step in (4, 5):
            ckpt.save(step, {"x": torch.full((8,), float(step))})
    with Checkpointer(config) as ckpt:
        ckpt.restore(state := {"x": torch.zeros(8)})
        ckpt.save(6, state)
    commits = [one.failed_saves for one in read_timeline(open_run(config.location).history).moments if one.identity]
    assert commits == [0, 2, 0, 0]
    found = samples(generate_latest(registry_of(store)).decode())
    assert [value for key, value in found.items() if key[0] == "ckpt_failed_saves_total"] == [2]


def test_alerts_are_over_metrics_that_exist() -> None:
    """Every name in the rules is a metric, and each metric that needs somebody to act has a rule."""
    named = set(re.findall(r"\bckpt_\w+", ALERTS.read_text(encoding="utf-8")))
    assert named <= NAMES
    assert len(named) == 10


HOLDER = """
import sys, time
from ckpt_tasks import CheckpointConfig, Checkpointer
for place in sys.argv[1:]:
    Checkpointer(CheckpointConfig(checkpoint_dir=place, memory_dir=None)).acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of the package prometheus")
def test_each_alert_fires_on_a_run_with_its_trouble_and_on_no_other(tmp_path: Path) -> None:
    """Runs are scraped before and after they get into trouble, and Prometheus plays the rules over these samples."""
    runs = tmp_path / "runs"
    told = {
        name: trained(Told(runs / name, ago_s=ago_s).taken(), commits, every_s=60, steps=10, step_s=5.9, stall_s=0.1)
        for name, ago_s, commits in [("well", 3600, 59), ("stale", 3 * 3600, 100), ("silent", 7200, 60)]
    }
    for name in ("damaged", "passed", "failing", "slow", "drilled", "verified"):
        told[name] = trained(Told(runs / name, ago_s=3600).taken(), 2, every_s=60, steps=10, step_s=5.9, stall_s=0.1)
    for name in ("well", "stale", "damaged", "passed", "failing", "slow", "drilled", "verified"):
        told[name].released()
    down = trained(Told(runs / "down", ago_s=3 * 3600).taken(), 5, every_s=60, steps=10, step_s=5.9)
    trained(down.after(10_200).taken(LOST), 4, every_s=60, steps=10, step_s=5.9).released()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(runs / "well"), str(runs / "stale"), str(runs / "down")],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        before = samples(ckpt("metrics", runs).out)
        told["passed"].noted("fallback")
        for _ in range(5):
            told["failing"].noted("failure")
        told["slow"].taken().commit(30, stall_s=45.0).released()
        open_run(runs / "drilled").history.append(
            {"kind": "note"}, lambda state, n: state.with_check(DRILL), owner=None
        )
        assert ckpt("verify", runs / "verified").status == 1  # Its checkpoints are only told of in the ledger.
        newest = min((runs / "damaged" / "ledger").iterdir())
        newest.write_bytes(newest.read_bytes()[:40])
        after = samples(ckpt("metrics", runs).out)
    finally:
        holder.kill()
        holder.communicate()
    assert after["ckpt_stall_seconds", "slow"] == 45.0
    assert after["ckpt_failures_total", "failing"] == 5
    lasting = {("RunDamaged", "damaged"), ("CheckpointPassedOver", "passed"), ("RestoreDrillFailed", "drilled")}
    lasting |= {("RunSilent", "silent"), ("VerifyFoundDamage", "verified")}
    expected = {
        "25m": {("RunSilent", "silent"), ("CheckpointTooOld", "stale")},
        "55m": lasting | {("CheckpointTooOld", "stale"), ("RunFailsAgainAndAgain", "failing")},
        # Nothing has saved since, and nothing has failed in the last hour.
        "150m": lasting
        | {("SavesAreSlow", "slow"), ("GoodputLow", "down")}
        | {("CheckpointTooOld", name) for name in ("well", "stale", "down")},
    }
    assert fired(tmp_path, before, after, expected) == ""


DRILL = RunCheck(
    kind="drill",
    at="2026-01-01T00:00:00+00:00",
    host="box",
    fault="no such module",
    figures={"step": 20, "ranks": 1},
)


def fired(
    place: Path, before: dict[Any, float], after: dict[Any, float], expected: dict[str, set[tuple[str, str]]]
) -> str:
    """Play half an hour of the samples before and then those after; return what promtool says against `expected`."""
    now_s, series = time.time(), []
    for name, run, *other in {**before, **after}:
        labels = {"run": run, **dict(zip([{"ckpt_run_state": "state"}.get(name, "other")], other, strict=False))}
        words = ", ".join(f"{key}={json.dumps(value)}" for key, value in labels.items())
        # The clock of promtool begins at 0.
        shift_s = now_s if name == "ckpt_last_checkpoint_timestamp_seconds" else 0
        first, then = (
            "_" if key is None else f"{key - shift_s}"
            for key in (before.get((name, run, *other)), after.get((name, run, *other)))
        )
        series.append({"series": f"{name}{{{words}}}", "values": f"{first}x30 {then}x200"})
    tests = [
        {
            "eval_time": at,
            "expr": 'count by (alertname, run) (ALERTS{alertstate="firing"})',
            "exp_samples": [
                {"labels": f'{{alertname="{alert}", run="{run}"}}', "value": 1} for alert, run in sorted(alerts)
            ],
        }
        for at, alerts in expected.items()
    ]
    shutil.copy(ALERTS, place)
    played = {"interval": "1m", "input_series": series, "promql_expr_test": tests}
    file = {"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": [played]}
    (place / "played.yaml").write_text(json.dumps(file), encoding="utf-8")
    subprocess.run(["promtool", "check", "rules", "alerts.yaml"], cwd=place, check=True)
    done = subprocess.run(
        ["promtool", "test", "rules", "played.yaml"], cwd=place, capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr
