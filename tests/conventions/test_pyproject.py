"""Requirements: each one used, each one declared, each one pinned at a version that its bounds allow."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
import tomllib
import zipfile
from functools import cache
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import ckpt_tasks
from tools.sources import ROOT, files, imports, parse, where

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
RUNTIME = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
EXTRAS = {
    extra: [Requirement(line) for line in lines] for extra, lines in PROJECT["project"]["optional-dependencies"].items()
}
BUILD = [Requirement(line) for line in PROJECT["build-system"]["requires"]]
DIRECT = [*RUNTIME, *BUILD, *(requirement for extra in EXTRAS.values() for requirement in extra)]
# Imported by the adapter of the extra's name alone, which imports nothing else that is not required.
ADAPTERS = {
    "lightning": {"lightning", "torchmetrics"},
    "hub": {"huggingface-hub"},
    "huggingface": {"accelerate", "greenlet", "transformers"},
    "jax": {"jax"},
    "keras": {"keras"},
    "otel": {"opentelemetry-exporter-otlp-proto-http"},
    "ray": {"ray"},
    "tensorflow": {"tensorflow-cpu"},
    "trackers": {"mlflow-skinny", "wandb"},
}
# Several distributions share this package; the one that is required requires the others.
NAMESPACES = {"opentelemetry": "opentelemetry-exporter-otlp-proto-http"}
BY_TORCH = {"tensorboard"}  # imported by torch's own writer
# Started as programs (`python -m …`, `make check`) or named in mkdocs.yml, not imported.
PROGRAMS = {"mkdocs-material", "mypy", "pymdown-extensions", "pytest-timeout", "pytest-xdist", "ruff"}
OURS = {"ckpt_tasks", "flows", "deployments", "tests", "benchmarks", "tools"}


def listed(path: str) -> list[Requirement]:
    """Return what a file of requirements lists."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


@cache
def pins() -> dict[str, Requirement]:
    found = listed("constraints.txt")
    assert len(found) == len({canonicalize_name(pin.name) for pin in found})
    return {canonicalize_name(pin.name): pin for pin in found}


def pinned(name: str) -> Version:
    (specifier,) = pins()[canonicalize_name(name)].specifier
    return Version(specifier.version)


def names(requirements: list[Requirement]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements}


JOBS = "benchmarks/comparison"  # the jobs of other tools, some of which have an environment of their own


def foreign_imports(*folders: str, but: str = "-") -> dict[str, str]:
    """Return distribution → one place that imports it, for what is neither ours nor Python's own."""
    owners = importlib.metadata.packages_distributions()
    found: dict[str, str] = {}
    for path in (path for path in files(*folders) if not path.is_relative_to(ROOT / but)):
        for line, name in imports(parse(path)):
            package = name.split(".")[0]
            if package not in OURS and package not in sys.stdlib_module_names:
                owner = NAMESPACES.get(package) or owners.get(package, [package])[0]
                found.setdefault(canonicalize_name(owner), where(path, line))
    return found


def closure(requirements: list[Requirement]) -> set[str]:
    """Return what the requirements need and what those need, read from the installed packages."""
    seen: set[tuple[str, str]] = set()
    todo = [(requirement, extra) for requirement in requirements for extra in {"", *requirement.extras}]
    while todo:
        requirement, extra = todo.pop()
        node = (canonicalize_name(requirement.name), extra)
        if node not in seen:
            seen.add(node)
            needs = [Requirement(line) for line in importlib.metadata.requires(requirement.name) or []]
            needs = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
            todo += [(need, wanted) for need in needs for wanted in {"", *need.extras}]
    return {name for name, _ in seen}


def test_a_requirement_has_a_bound_and_allows_its_pin() -> None:
    """A requirement says from which version on it works; its pin is one version of the index."""
    for pin in pins().values():
        assert pin.url is None
        assert [specifier.operator for specifier in pin.specifier] == ["=="]
        assert Version(next(iter(pin.specifier)).version).local is None
    for requirement in DIRECT:
        assert not requirement.url
        assert requirement.specifier.contains(pinned(requirement.name))
        assert ">=" in {specifier.operator for specifier in requirement.specifier}, requirement


@pytest.mark.framework  # looks at what is installed
def test_what_the_requirements_need_is_pinned_too() -> None:
    """Two installations with these constraints have the same versions all the way down, and no pin is left over."""
    needed = closure(DIRECT) | {"editables"}  # hatchling asks for it when it builds an editable install
    # A CUDA build of torch brings packages that it pins itself.
    brought = {name for name in needed if name.startswith(("nvidia-", "cuda-")) or name == "triton"}
    assert needed - brought == pins().keys()


@pytest.mark.framework  # looks at what is installed
def test_the_package_imports_what_it_requires() -> None:
    """What ckpt_tasks/ and flows/ import is a runtime requirement, and every runtime requirement is imported."""
    found = foreign_imports("ckpt_tasks", "flows")
    for extra, adapted in ADAPTERS.items():
        assert names(EXTRAS[extra]) - BY_TORCH == adapted
        for name in adapted:
            places = ("integrations", "flows/gang", "run/report", "checkpoint/transfer")
            assert found.pop(name).startswith((*(f"ckpt_tasks/{place}/{extra}" for place in places),))
    declared = names(RUNTIME)
    assert {name: place for name, place in found.items() if name not in declared} == {}
    assert declared - found.keys() == set()


@pytest.mark.framework  # looks at what is installed
def test_tests_and_benchmarks_import_what_they_require() -> None:
    """What tests/ and benchmarks/ import is required by an extra or at run time, and no extra asks for more."""
    found = foreign_imports("tests", "benchmarks", "tools", "ckpt_tasks/integrations")
    extras = names([requirement for extra in EXTRAS.values() for requirement in extra])
    peers = names(listed(f"{JOBS}/requirements.txt"))
    of_jobs = {name for name, place in found.items() if place.startswith(JOBS)}
    apart = {name for name in of_jobs if any(peer == name or peer.startswith(f"{name}-") for peer in peers)}
    assert {name: place for name, place in found.items() if name not in extras | names(RUNTIME) | apart} == {}
    assert extras - found.keys() == PROGRAMS
    assert {*foreign_imports("benchmarks", but=JOBS)} <= names(RUNTIME) | names(EXTRAS["bench"])


def test_the_wheel_holds_the_package_alone(tmp_path: Path) -> None:
    """The wheel ships ckpt_tasks with its types, templates and licence; what is beside it stays in the checkout."""
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    held = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in held} == {"ckpt_tasks"}
    assert "ckpt_tasks/py.typed" in held
    assert {"ckpt_tasks/flows/site/prefect.yaml", "ckpt_tasks/flows/site/pools/kubernetes.json"} <= {*held}
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert Path(wheel).name.split("-")[1] == ckpt_tasks.__version__
    assert {name for name in held if name.endswith(".py")} == {
        str(path.relative_to(ROOT)) for path in files("ckpt_tasks")
    }


FRAMEWORKS = {name.split("-")[0] for name in names(EXTRAS["frameworks"])}  # tensorflow-cpu is imported as tensorflow


def is_marked(nodes: list[ast.expr]) -> bool:
    return any("mark.framework" in ast.unparse(node) for node in nodes)


def test_tests_are_collected_without_frameworks() -> None:
    """No module of tests imports a framework at its head, and a test that imports one in itself is marked so."""
    assert names(EXTRAS["frameworks"]) & (names(EXTRAS["dev"]) | names(RUNTIME)) == set()
    at_heads, unmarked = [], []
    for path in (path for path in files("tests") if path.name.startswith(("test_", "conftest"))):
        module = parse(path)
        marks = [
            node.value for node in module.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)
        ]
        for node in module.body:
            found = [
                where(path, line) for line, name in imports(ast.Module([node], [])) if name.split(".")[0] in FRAMEWORKS
            ]
            if not isinstance(node, ast.FunctionDef):
                at_heads += found
            elif node.name.startswith("test_") and not is_marked([*marks, *node.decorator_list]):
                unmarked += found
    assert (at_heads, unmarked) == ([], [])
