"""deployments/: the YAML is what Prefect accepts, and what its README says works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
import yaml  # type: ignore[import-untyped]
from prefect.cli.deploy._models import DeploymentConfig, PrefectYamlModel, RawScheduleConfig
from prefect.flows import Flow, load_flow_from_entrypoint
from prefect.server.utilities.user_templates import render_user_template_sync

from ckpt_tasks import CheckpointConfig, Location, open_run
from ckpt_tasks.flows.prefect.config import config_of_run
from ckpt_tasks.flows.session.local_session import build_program
from ckpt_tasks.storage.secrets import SECRET_OPTIONS
from tests.servers.process import free_port
from tests.support import processes

ROOT = Path(__file__).parents[3]
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


SECRET = "hush-4711"
OPTIONS: list[dict[str, Any]] = [
    *({name: SECRET} for name in sorted(SECRET_OPTIONS)),
    *({"client_kwargs": {name: SECRET}} for name in sorted(SECRET_OPTIONS)),
    {"client_kwargs": {"proxies": [f"http://me:{SECRET}@proxy:3128"]}},
    {"endpoint_url": f"https://store.example.org/a?sig={SECRET}"},
]


def passed_on(place: Any) -> Any:
    """Return the `checkpoint_dir` that our YAML passes on from a flow run of `train` to the evaluation beside it."""
    template = YAML["deployments"][3]["triggers"][0]["parameters"]["checkpoint_dir"]["value"]["template"]
    run = SimpleNamespace(parameters={"checkpoint": {"checkpoint_dir": place}})
    return json.loads(render_user_template_sync(template, {"flow_run": run}))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_secret_of_a_flow_is_warned_of_and_never_copied_on(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Each option that is a secret: the flow that has it says so, without it, and the evaluation gets the URL alone."""
    config = CheckpointConfig(checkpoint_dir=Location("s3://b/{run_key}", storage_options=options))
    config_of_run(config, "lm-7")
    assert "is a secret, and Prefect stores a flow's parameters in plain text: use block://NAME." in caplog.text
    assert SECRET not in caplog.text
    assert passed_on({"url": "s3://b/{run_key}", "storage_options": options}) == "s3://b/{run_key}"


@pytest.mark.parametrize(
    "place",
    ["runs/{run_key}", "block://lab", {"url": "s3://b/r", "storage_options": {"client_kwargs": {"a": ["é", 1]}}}],
)
def test_a_place_without_a_secret_is_passed_on_whole(place: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever form the place has, the evaluation gets the same one, and nothing is warned of."""
    location = Location(**place) if isinstance(place, dict) else Location(place)
    config_of_run(CheckpointConfig(checkpoint_dir=location), "lm-7")
    assert (passed_on(place), caplog.text) == (place, "")


@pytest.mark.slow
def test_the_page_works_as_it_stands(tmp_path: Path) -> None:
    """Every command of deployments/README.md works, pasted into one shell of a clean environment.

    A run is trained and evaluated, the doctor has nothing to say, no thread spins, and the server outlives the shell.
    """
    checkout = tmp_path / "checkout"
    for name in ("flows", "deployments"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    port = str(free_port())
    environment = {
        "PATH": f"{Path(sys.prefix, 'bin')}{os.pathsep}{os.defpath}",
        "HOME": str(tmp_path),
        "NO_PROXY": "127.0.0.1",
        "DO_NOT_TRACK": "1",
        "COLUMNS": "200",
        "PREFECT_SERVER_API_PORT": port,  # several tests at once: not that of the page
        "OMP_DISPLAY_ENV": "verbose",
    }
    page = (checkout / "deployments" / "README.md").read_text()
    blocks = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    commands = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    assert len(commands) >= 9, page
    script = "\n".join(["set -e", *commands]).replace("4200", port)
    shell = subprocess.Popen(
        ["bash", "-c", script],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = shell.communicate(timeout=1500)
        assert shell.returncode == 0, said
        worker_log = (checkout / "worker.log").read_text()
        run = open_run(str(checkout / "runs" / "lm-7"))
        newest = run.checkpoints()[0]
        assert newest.step == 100, worker_log
        assert ("full", newest.manifest_digest) in [(one.suite, one.manifest_digest) for one in run.evaluations()]
        warned = [line for line in said.splitlines() if re.search(r"\s{2}warning\s{2}", line)]
        assert [line for line in warned if "snapshots" not in line] == [], said  # Others of this host may leave those.
        assert "Nothing is wrong, warnings: " in said, said
        assert "GOMP_SPINCOUNT = '0'" in worker_log
        assert worker_log.count("GOMP_SPINCOUNT = ") == worker_log.count("GOMP_SPINCOUNT = '0'")
        with urlopen(f"http://127.0.0.1:{port}/api/health", timeout=60) as answer:
            assert answer.status == 200
        again = [sys.executable, "-m", "deployments.server"]
        once_more = subprocess.run(again, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        assert "A server answers already" in once_more.stdout, once_more.stderr
    finally:
        processes.kill(processes.with_variable(f"HOME={tmp_path}"))  # the server, the worker and its flow runs too
