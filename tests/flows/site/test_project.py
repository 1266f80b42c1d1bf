"""`ckpt init`: what it writes runs, and it writes over nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prefect.cli.deploy._models import DeploymentConfig, PrefectYamlModel
from prefect.flows import Flow, load_flow_from_entrypoint

from ckpt_tasks import open_run
from ckpt_tasks.flows.session.local_session import build_program
from tests.support.cli_runs import ckpt, tree
from tests.support.sweeps import quick_first

FILES = [".gitignore", "README.md", "prefect.yaml", "test_resume.py", "training.py"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project as `ckpt init` writes it."""
    answer = ckpt("init", tmp_path / "my nets")
    assert answer.status == 0, answer.err
    return tmp_path / "my nets"


@pytest.mark.slow
def test_the_program_learns(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is found in the working directory; its loss falls, and its evaluation changes nothing."""
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [*sys.path])
    program = build_program("training:Training", {"lr": 5e-3})
    losses = [program.train_step()["loss"] for _ in range(800)]
    before = {name: value.clone() for name, value in program.state["model"].state_dict().items()}
    assert 0 <= program.evaluate("quick")["heldout_accuracy"] <= 1
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])
    assert program.state["model"].training
    assert all(bool((value == before[name]).all()) for name, value in program.state["model"].state_dict().items())


@pytest.mark.parametrize("name", quick_first(["001", "no", "1.5", "2026-01-01", "null", "1e3", "0x1F", "1_000"], 3))
def test_a_name_stays_a_name(tmp_path: Path, name: str) -> None:
    """A directory whose name YAML reads as a number, a switch or a date gives deployments of that name."""
    assert ckpt("init", tmp_path / name).status == 0
    said: dict[str, Any] = yaml.safe_load((tmp_path / name / "prefect.yaml").read_text())
    deployments = PrefectYamlModel.model_validate(said).deployments
    assert [said["name"], *(one.name for one in deployments)] == [name, *[name] * 3, f"{name}-following", name]
    parameters = [one["parameters"] for one in said["deployments"]]
    assert {repr(one["run_key"]) for one in parameters if "run_key" in one} == {repr(name)}
    related = said["deployments"][3]["triggers"][0]["match_related"]
    assert {"prefect.resource.role": "deployment", "prefect.resource.name": name} in related


def test_its_deployments_are_its_own(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect takes every deployment; each names the project, its program and its run, and none is the example's."""
    said: dict[str, Any] = yaml.safe_load((project / "prefect.yaml").read_text())
    names = [one.name for one in PrefectYamlModel.model_validate(said).deployments]
    assert names == ["my-nets"] * 3 + ["my-nets-following", "my-nets"]
    assert "byte-l" not in (project / "prefect.yaml").read_text()
    monkeypatch.chdir(project)
    for one in said["deployments"]:
        assert {*one} <= {*DeploymentConfig.model_fields}
        flow: Flow[..., Any] = load_flow_from_entrypoint(one["entrypoint"])
        validated = flow.validate_parameters(one["parameters"])
        assert validated.get("run_key", "my-nets") == "my-nets"
    following = said["deployments"][3]["triggers"]
    assert {"prefect.resource.role": "deployment", "prefect.resource.name": "my-nets"} in following[0]["match_related"]
    assert following[1]["match"] == {"prefect.resource.id": "ckpt-tasks.run.my-nets"}


def test_a_directory_that_holds_something_is_left_as_it_is(tmp_path: Path) -> None:
    """Nothing is written into a directory with a file, over a file, or under a name that is none."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine").write_text("mine")
    before = tree(tmp_path)
    for arguments, says in (
        ([tmp_path / "kept"], "is not empty: it has mine"),
        ([tmp_path / "kept" / "mine"], "cannot be written"),
        ([tmp_path / "new", "--name", "../x"], "is not a name"),
    ):
        answer = ckpt("init", *arguments)
        assert answer.status == 1
        assert says in answer.err
    assert tree(tmp_path) == before
    (tmp_path / "empty").mkdir()
    answer = ckpt("init", tmp_path / "empty", "--name", "nets", "--json")
    assert answer.data["name"] == "nets"
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == FILES == sorted(answer.data["files"])


@pytest.mark.slow
def test_the_test_that_it_writes_passes(project: Path, tmp_path: Path) -> None:
    """The project's own test trains, kills and resumes for real, and its command line is the one that its page has."""
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "base")]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    (killed,) = {found.resolve() for found in (tmp_path / "base").glob("*/killed")}  # pytest has a link to it, too
    assert open_run(str(killed)).find("latest").step == 3000
