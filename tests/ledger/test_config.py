"""The options: frozen, checked when made, and the same through pydantic."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from ckpt_tasks.errors import ConfigError
from ckpt_tasks.ledger.config import CheckpointConfig
from ckpt_tasks.policy.cadence import SavePolicy
from ckpt_tasks.policy.retention import RetentionPolicy

BAD: list[dict[str, Any]] = [
    {"checkpoint_dir": ""},
    {"checkpoint_dir": None},
    {"checkpoint_dir": 3},
    {"checkpoint_dir": "a\0b"},
    {"run_key": ""},
    {"run_key": ".."},
    {"run_key": "a/b"},
    {"run_key": "../x"},
    {"run_key": "a b"},
    {"run_key": "x" * 201},
    {"run_key": 7},
    *({name: value} for name in ("step_interval", "epoch_interval") for value in (0, -1, 1.5, "5", True)),
    *({name: value} for name in ("max_num_checkpoints", "keep_every_n_steps") for value in (0, -1, 2.0, "5", True)),
    *(
        {name: value}
        for name in ("save_interval_secs", "owner_timeout_s", "flush_timeout_s")
        for value in (0, -1.0, float("nan"), float("inf"), "5", True)
    ),
    {"owner_timeout_s": None},
    {"flush_timeout_s": None},
    {"local_dir": ""},
    {"cadence": "often"},
    {"cadence": 3},
    {"memory_dir": ""},
    {"memory_dir": 3},
    {"on_flush_failure": "ignore"},
    {"keep_best": -1},
    {"keep_best": None},
    {"keep_best": True},
    {"keep_best": 1.0},
    {"keep_best": 2},
    {"best_metric": ""},
    {"best_metric": 5},
    {"best_mode": "smallest"},
    {"best_mode": None},
    {"best_mode": ["min"]},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_option_is_refused_when_made(bad: dict[str, Any]) -> None:
    """Every option out of its range, or of another type, is a ConfigError (a ValueError) that names it."""
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig(**{"checkpoint_dir": "runs/x", **bad})
    [name] = bad
    assert name in str(caught.value)


def test_an_unknown_option_is_refused() -> None:
    """A misspelled option is an error, by hand and through pydantic, as Prefect validates a flow's parameters."""
    with pytest.raises(ConfigError, match=r"step_intervall.*Did you mean step_interval\?"):
        CheckpointConfig(checkpoint_dir="runs/x", step_intervall=5)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="step_intervall"):
        TypeAdapter(CheckpointConfig).validate_python({"checkpoint_dir": "runs/x", "step_intervall": 5})


@pytest.mark.parametrize("bad", [{"keep_best": 2}, {"step_interval": 0}, {"best_mode": "smallest"}, {"run_key": ".."}])
def test_pydantic_refuses_what_we_refuse(bad: dict[str, Any]) -> None:
    """The checks also run when pydantic builds the options."""
    with pytest.raises(ValidationError):
        TypeAdapter(CheckpointConfig).validate_python({"checkpoint_dir": "runs/x", **bad})


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


def test_the_list_of_options_is_pinned() -> None:
    """The options and their defaults are part of the public surface: a change shows here."""
    assert {field.name: field.default for field in fields(CheckpointConfig) if field.name != "checkpoint_dir"} == {
        "run_key": None,
        "step_interval": None,
        "epoch_interval": None,
        "save_interval_secs": None,
        "max_num_checkpoints": 3,
        "keep_every_n_steps": None,
        "keep_best": 0,
        "best_metric": None,
        "best_mode": "min",
        "owner_timeout_s": 120.0,
        "cadence": None,
        "memory_dir": "auto",
        "on_flush_failure": "raise",
        "on_non_finite": "warn",
        "flush_timeout_s": 600.0,
        "local_dir": None,
        "compile_cache": False,
        "spot_notices": None,
        "on_spike": None,
    }


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


def test_two_ways_to_choose_the_seconds_are_refused() -> None:
    """The automatic cadence and save_interval_secs exclude each other."""
    with pytest.raises(ConfigError, match="save_interval_secs"):
        CheckpointConfig(checkpoint_dir="runs/x", cadence="auto", save_interval_secs=5)
