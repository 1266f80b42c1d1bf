"""The options: frozen, checked when made, and the same through pydantic."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.format.policy.cadence import SavePolicy
from ckpt_tasks.format.policy.retention import RetentionPolicy
from ckpt_tasks.run.ledger.config import CheckpointConfig

WHOLE = (0, -1, 1.5, "5", True)
TIME = (0, -1.0, float("nan"), float("inf"), "5", True)
BAD: dict[str, tuple[Any, ...]] = {
    "checkpoint_dir": ("", None, 3, "a\0b"),
    "run_key": ("", "..", "a/b", "../x", "a b", "x" * 201, 7),
    **dict.fromkeys(("step_interval", "epoch_interval", "max_num_checkpoints", "keep_every_n_steps"), WHOLE),
    "save_interval_secs": TIME,
    "owner_timeout_s": (*TIME, None),
    "flush_timeout_s": (*TIME, None),
    "local_dir": ("",),
    "cadence": ("often", 3),
    "memory_dir": ("", 3),
    "on_flush_failure": ("ignore",),
    "on_non_finite": ("ignore",),
    "keep_best": (-1, None, True, 1.0, 2),
    "best_metric": ("", 5),
    "best_mode": ("smallest", None, ["min"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_option_is_refused_when_made(name: str) -> None:
    """Out of its range, or of another type: a ConfigError (a ValueError) that names it; so it is through pydantic."""
    for value in BAD[name]:
        options: dict[str, Any] = {"checkpoint_dir": "runs/x", name: value}
        with pytest.raises(ConfigError) as caught:
            CheckpointConfig(**options)
        assert name in str(caught.value)
    with pytest.raises(ValidationError):  # a text of a number is one there
        TypeAdapter(CheckpointConfig).validate_python({"checkpoint_dir": "runs/x", name: BAD[name][0]})
    with pytest.raises(ConfigError, match="save_interval_secs"):  # two ways to choose the seconds
        CheckpointConfig(checkpoint_dir="runs/x", cadence="auto", save_interval_secs=5)


def test_an_unknown_option_is_refused() -> None:
    """A misspelled option is an error, by hand and through pydantic, as Prefect validates a flow's parameters."""
    with pytest.raises(ConfigError, match=r"step_intervall.*Did you mean step_interval\?"):
        CheckpointConfig(checkpoint_dir="runs/x", step_intervall=5)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="step_intervall"):
        TypeAdapter(CheckpointConfig).validate_python({"checkpoint_dir": "runs/x", "step_intervall": 5})


def test_pydantic_builds_the_same_options() -> None:
    """Options that come as JSON, as a deployment's parameters do, are the same as those made by hand."""
    made = TypeAdapter(CheckpointConfig).validate_json(
        '{"checkpoint_dir": "runs/x", "step_interval": 5, "keep_best": 0}'
    )
    assert made == CheckpointConfig(checkpoint_dir="runs/x", step_interval=5)
    assert TypeAdapter(CheckpointConfig).dump_python(made)["max_num_checkpoints"] == 3


def test_options_cannot_be_changed_or_given_by_position() -> None:
    """Options are frozen and keyword-only."""
    config = CheckpointConfig(checkpoint_dir="runs/x")
    with pytest.raises(FrozenInstanceError):
        config.step_interval = 5  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"Write CheckpointConfig\(checkpoint_dir='runs/x'\)"):
        CheckpointConfig("runs/x")  # type: ignore[call-arg]


def test_options_reach_their_policies() -> None:
    """Each option arrives at the decision that it is for."""
    config = CheckpointConfig(
        checkpoint_dir="runs/x",
        step_interval=1,
        epoch_interval=2,
        save_interval_secs=3,
        max_num_checkpoints=None,
        keep_every_n_steps=4,
        keep_best=5,
        best_metric="loss",
        best_mode="max",
    )
    assert config.save_policy == SavePolicy(step_interval=1, epoch_interval=2, save_interval_secs=3)
    assert config.retention_policy == RetentionPolicy(
        max_num_checkpoints=None, keep_every_n_steps=4, keep_best=5, best_metric="loss", best_mode="max"
    )


def test_without_an_interval_the_run_chooses() -> None:
    """The cadence is automatic where it is asked for and where no interval is given, and nowhere else."""
    assert CheckpointConfig(checkpoint_dir="runs/x").automatic
    assert CheckpointConfig(checkpoint_dir="runs/x", step_interval=5, cadence="auto").automatic
    for interval in ({"step_interval": 5}, {"epoch_interval": 1}, {"save_interval_secs": 60.0}):
        assert not CheckpointConfig(checkpoint_dir="runs/x", **interval).automatic


def test_a_path_is_a_directory(tmp_path: Path) -> None:
    """Every option that names a directory takes a Path, and keeps it as the text that a flow's parameter would be."""
    config = CheckpointConfig(checkpoint_dir=tmp_path / "run", memory_dir=tmp_path / "memory", local_dir=tmp_path)
    names = (f"{tmp_path}/run", f"{tmp_path}/memory", str(tmp_path))
    assert (config.checkpoint_dir, config.memory_dir, config.local_dir) == names
    assert config == CheckpointConfig(checkpoint_dir=names[0], memory_dir=names[1], local_dir=names[2])
