"""Features that see a save or a restore: each one is a file and a row, and the product works without both."""

from __future__ import annotations

import pytest

from ckpt_tasks.features import FEATURES, Feature
from tests.support.interpreters import Python
from tests.support.sweeps import quick_first
from tools.sources import files, imports, module_name, parse

WITHOUT = """
import importlib, pkgutil, sys
place, run, *gone = sys.argv[1:]
for name in [name for name in sys.modules if name.partition(".")[0] == "ckpt_tasks"]:
    del sys.modules[name]  # The interpreter is forked from one that has imported the product whole.
sys.modules.update(dict.fromkeys(gone))  # From now on an import of these fails, as if they were not there.
import ckpt_tasks
from ckpt_tasks.features import FEATURES
FEATURES[:] = [one for one in FEATURES if one.place != place and not one.place.startswith(f"{gone[0]}.")]
for folder in ("checkpoint", "run", "state", "storage", "format"):
    package = importlib.import_module(f"ckpt_tasks.{folder}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not any(f"{module.name}.".startswith(f"{one}.") for one in gone):
            importlib.import_module(module.name)
import torch
from ckpt_tasks import CheckpointConfig, Checkpointer
options = {"compile_cache": True, "on_spike": "loss", "on_non_finite": "rollback", "spot_notices": "aws"}
options["local_dir"] = f"{run}-near"
for first in (True, False):
    weights = torch.zeros(3)
    with Checkpointer(CheckpointConfig(checkpoint_dir=run, memory_dir=None, step_interval=2, **options)) as ckpt:
        step = ckpt.restore({"weights": weights})
        print(step, weights.tolist(), flush=True)
        for step in range(step + 1, step + 5):
            weights.fill_(step)
            ckpt.step(step, {"weights": weights}, metrics={"loss": 1.0})
"""


def gone(feature: Feature) -> list[str]:
    """Return what goes with a row: the module of an extension, the folder of a kind, the module of its figures."""
    module = feature.place.partition(":")[0]
    figures = [feature.figures.partition(":")[0]] if feature.figures else []
    return [module.rpartition(".")[0] if feature.kind else module, *figures]


@pytest.mark.parametrize("feature", quick_first(FEATURES, 8), ids=lambda feature: feature.place.partition(":")[2])
def test_the_product_works_without_a_feature(feature: Feature, tmp_path: object) -> None:
    """Without a feature's file and row every module is imported, and a run is saved and restored."""
    with Python("-c", WITHOUT, feature.place, f"{tmp_path}/run", *gone(feature)) as process:
        done = process.ends(120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 [0.0, 0.0, 0.0]", "4 [4.0, 4.0, 4.0]"]


def test_nothing_else_imports_a_feature() -> None:
    """A feature is known by its row alone; a public name and an example may stand beside it."""
    imported = {module_name(path): [name for _, name in imports(parse(path))] for path in files("ckpt_tasks")}
    for own in (f"{one}." for feature in FEATURES for one in gone(feature)):
        others = {module: names for module, names in imported.items() if not f"{module}.".startswith(own)}
        found = {module for module, names in others.items() if any(name.startswith(own) for name in names)}
        assert found <= {"ckpt_tasks", "ckpt_tasks.tables", "ckpt_tasks.flows.programs.two_tower"}
    assert {gone(feature)[0] for feature in FEATURES if feature.kind is None} == {
        module_name(path) for path in files("ckpt_tasks/checkpoint/extensions") if path.name != "__init__.py"
    }
