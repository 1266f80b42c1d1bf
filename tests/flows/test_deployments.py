"""deployments/: the YAML is what Prefect accepts, and what its README says works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prefect.cli.deploy._models import DeploymentConfig, PrefectYamlModel, RawScheduleConfig
from prefect.flows import Flow, load_flow_from_entrypoint

from ckpt_tasks import open_run
from ckpt_tasks.errors import CheckpointNotFoundError
from ckpt_tasks.gang.local import build_program

ROOT = Path(__file__).parents[2]
PREFECT = str(Path(sys.prefix, "bin", "prefect"))
YAML: dict[str, Any] = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())


def test_prefect_accepts_the_yaml() -> None:
    """Prefect's own models read every deployment, and no key of ours is one that they drop silently."""
    found = PrefectYamlModel.model_validate(YAML).deployments
    assert [one.name for one in found] == ["byte-lm"] * 3 + ["following", "byte-lm"]
    known = set(DeploymentConfig.model_fields)
    for one in YAML["deployments"]:
        assert set(one) <= known
        for schedule in one.get("schedules", []):  # one bad item would skip the whole `deploy --all`
            RawScheduleConfig.model_validate(schedule)


@pytest.mark.parametrize("deployment", YAML["deployments"], ids=lambda one: str(one["entrypoint"]))
def test_the_parameters_fit_the_flow(deployment: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entrypoint loads, and takes the parameters of its deployment, which suffice to run it."""
    monkeypatch.chdir(ROOT)
    flow: Flow[..., Any] = load_flow_from_entrypoint(deployment["entrypoint"])
    validated = flow.validate_parameters(deployment["parameters"])
    assert validated.get("run_key", "byte-lm") == "byte-lm"
    if "program" in deployment["parameters"]:
        assert callable(build_program(validated["program"], {"max_bytes": 1 << 20}).train_step)


@pytest.mark.slow
def test_the_readme_works(tmp_path: Path, server: dict[str, str]) -> None:
    """Deployed with a process worker, `deployment run` trains, goes on with more steps, and evaluates once."""
    runs = str(tmp_path / "{run_key}")
    tiny = ["-p", "program=tests.flows.tiny:Tiny", "-p", "run_key=lm-7"]

    # `prefect flow-run execute` is found by its name, as it is where a worker's environment is active.
    environment = {**server, "PATH": f"{Path(sys.prefix, 'bin')}{os.pathsep}{server['PATH']}"}
    environment.pop("OMP_WAIT_POLICY", None)  # the deployment brings it
    environment["OMP_DISPLAY_ENV"] = "verbose"

    def prefect(*arguments: str) -> str:
        done = subprocess.run(
            [PREFECT, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def deployed(name: str, *parameters: str) -> None:
        prefect("deployment", "run", name, *tiny, *parameters, "--watch")

    prefect("work-pool", "create", "ckpt-tasks", "--type", "process")
    prefect("--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
    with (tmp_path / "worker.log").open("wb") as log:
        command = [PREFECT, "worker", "start", "--pool", "ckpt-tasks"]
        worker = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        checkpoint = f"checkpoint={json.dumps({'checkpoint_dir': runs, 'step_interval': 5})}"
        for total in (10, 20):
            deployed("train/byte-lm", "-p", f"total_steps={total}", "-p", checkpoint)
            log_text = (tmp_path / "worker.log").read_text()
            assert newest(tmp_path / "lm-7") == total, log_text
        assert "GOMP_SPINCOUNT = '0'" in log_text
        assert log_text.count("GOMP_SPINCOUNT = ") == log_text.count("GOMP_SPINCOUNT = '0'")
        for _ in range(2):
            deployed("evaluate/byte-lm", "-p", f"checkpoint_dir={runs}", "-p", "suite=full")
        recorded = open_run(str(tmp_path / "lm-7")).evaluations()
        committed = open_run(str(tmp_path / "lm-7")).checkpoints()
        full = sorted(one.step for one in recorded if one.suite == "full")  # `following` evaluates by the quick one
        assert full == sorted(one.step for one in committed)
    finally:
        worker.terminate()
        worker.wait(60)


def newest(run_dir: Path) -> int | None:
    try:
        return open_run(str(run_dir)).checkpoints()[0].step
    except CheckpointNotFoundError:
        return None
