"""`ckpt metrics`: what Prometheus reads of runs, and the alerts over it."""

from __future__ import annotations

import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
import torch
from prometheus_client import generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import CheckpointNotFoundError
from ckpt_tasks.format.parsing import seconds_of
from ckpt_tasks.report.prometheus import metric_texts, registry_of
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.testing import die
from tests.support.cli_runs import ckpt
from tools.sources import ROOT

ALERTS = ROOT / "deployments" / "alerts.yaml"


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


def test_each_metric_is_what_the_ledger_says(runs: Path) -> None:
    """Counts of commits, deaths, resumes and fallbacks, the newest checkpoint, and shares that are all of the time."""
    text = generate_latest(registry_of(Location(str(runs)).open())).decode()
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
    }
    assert {key: found.get(key) for key in expected} == expected
    assert found["ckpt_flush_seconds", "killed"] > 0
    shares = {key[2]: value for key, value in found.items() if key[:2] == ("ckpt_time_seconds_total", "killed")}
    assert found["ckpt_goodput_ratio", "killed"] == pytest.approx(shares["useful"] / sum(shares.values()))
    assert {key[0] for key in found} <= {*metric_texts()}
    assert not any("nothing" in key for key in found)


def test_a_metric_is_read_again_each_time(runs: Path) -> None:
    """What is served grows with the run; entries that were read before are not read again."""
    registry = registry_of(Location(str(runs / "killed")).open())
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.urlopen(url) as before:
            assert samples(before.read().decode())["ckpt_commits_total", "killed"] == 3
        with Checkpointer(CheckpointConfig(checkpoint_dir=runs / "killed", memory_dir=None)) as again:
            again.restore(state := {"x": torch.zeros(8)})
            again.save(4, state)
        with urllib.request.urlopen(url) as after:
            now = samples(after.read().decode())
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert (now["ckpt_commits_total", "killed"], now["ckpt_last_checkpoint_step", "killed"]) == (4, 4)


def test_the_verb_writes_a_file_that_is_whole(runs: Path) -> None:
    """A file for node-exporter, the same text in the terminal, and with --json every sample."""
    file = runs / "ckpt.prom"
    written = ckpt("metrics", str(runs / "killed"), "--out", file, "--json").data
    assert written["file"] == str(file)
    found = samples(file.read_text(encoding="utf-8"))
    assert len(found) == len(written["metrics"])
    assert samples(ckpt("metrics", str(runs / "killed")).out).keys() == found.keys()


def test_a_directory_without_runs_is_an_error(tmp_path: Path) -> None:
    """An empty answer would look like runs that are well."""
    with pytest.raises(CheckpointNotFoundError, match="no run in"):
        registry_of(Location(str(tmp_path)).open())


def test_alerts_are_over_metrics_that_exist() -> None:
    """Every name in the rules is a metric, and each metric that needs somebody to act has a rule."""
    named = set(re.findall(r"\bckpt_\w+", ALERTS.read_text(encoding="utf-8")))
    assert named <= {*metric_texts()}
    assert len(named) == 8


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of the package prometheus")
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    """Prometheus's own tool plays the rules over series that are well and ill."""
    shutil.copy(ALERTS, tmp_path)
    shutil.copy(Path(__file__).with_name("alerts_test.yaml"), tmp_path)
    tested = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
