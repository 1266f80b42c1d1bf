"""`ckpt train`: every option of the config is there, and means what the config says."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.cli.arguments import config_of_options, params_of, repeated_command
from ckpt_tasks.cli.start import check_example
from ckpt_tasks.errors import ConfigError
from tests.support.cli_runs import ckpt

GIVEN = {
    "checkpoint_dir": ("somewhere", "somewhere"),
    "run_key": ("mine", "mine"),
    "step_interval": ("10", 10),
    "epoch_interval": ("2", 2),
    "save_interval_secs": ("1.5", 1.5),
    "cadence": ("none", None),
    "max_num_checkpoints": ("none", None),
    "keep_every_n_steps": ("100", 100),
    "keep_best": ("2", 2),
    "best_metric": ("loss", "loss"),
    "best_mode": ("max", "max"),
    "owner_timeout_s": ("60", 60.0),
    "memory_dir": ("none", None),
    "on_flush_failure": ("warn", "warn"),
    "on_non_finite": ("stop", "stop"),
    "flush_timeout_s": ("30", 30.0),
    "local_dir": ("near", "near"),
    "compile_cache": ("true", True),
    "spot_notices": ("aws", "aws"),
    "on_spike": ("loss", "loss"),
}


def test_every_option_of_the_config_is_one_of_the_command() -> None:
    """No field is missing from the help, and a value of each becomes the field's, typed."""
    said = ckpt("train", "--help").out
    for option in fields(CheckpointConfig):
        assert f"--{option.name.replace('_', '-')} " in said
    config = config_of_options({name: text for name, (text, _) in GIVEN.items()}, "m:P")
    assert {option.name: getattr(config, option.name) for option in fields(config)} == {
        name: value for name, (_, value) in GIVEN.items()
    }


def test_the_help_of_an_option_says_all_of_it() -> None:
    """No sentence of an option's text is left out, and no trigger of a save is said to be absent by default."""
    said = " ".join(ckpt("train", "--help").out.split())
    assert "It is code: who can write to the run can run code in that process" in said
    assert "Of the three intervals the first that is due counts" in said
    assert "[default: auto, if no interval is given]" in said
    assert not re.search(r"--(step|epoch|save)-interval\S* \S+ [^-[]*\[default: none\]", said)
    assert "see below" not in said.lower()


def test_an_evaluation_without_a_program_knows_the_example_by_its_old_name(run_dir: Path) -> None:
    """A run that was recorded when the example lay elsewhere is the example's, and is evaluated without a word."""
    chosen = CheckpointConfig(checkpoint_dir=run_dir, run_key="run")
    with Checkpointer(chosen) as made:
        made.save(1, {"at": 1})
        made.record_program("flows.programs.byte_lm:ByteLM", {})
    check_example(chosen)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"step_interval": "1.5"}, "--step-interval must be a whole number, not '1.5'"),
        ({"save_interval_secs": "soon"}, "--save-interval-secs must be a number, not 'soon'"),
        ({"keep_best": "none"}, "--keep-best must be a whole number, not 'none'"),
        ({"best_mode": "least"}, "best_mode must be 'min' or 'max', not 'least'"),
        ({"keep_best": "1"}, "keep_best needs best_metric"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, str], says: str) -> None:
    """A value of another kind, or one that the config refuses, is an error that names the option."""
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        config_of_options(settings, "m:P")


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("width=128", 128),
        ("lr=1e-3", 1e-3),
        ("name=a b", "a b"),
        ("on=true", True),
        ("sizes=[1,2]", [1, 2]),
        ("x=", ""),
    ],
)
def test_a_parameter_is_json_or_a_text(pair: str, value: Any) -> None:
    """A number, a list or true is taken as such; everything else is a text, without quotes."""
    assert params_of([pair], "{}", None) == {pair.partition("=")[0]: value}


def test_one_parameter_has_one_value() -> None:
    """The three ways to give a parameter may repeat one another, and not contradict."""
    assert params_of(["seed=3"], '{"seed": 3}', 3) == {"seed": 3}
    with pytest.raises(ConfigError, match="seed is given twice: 3 and 4"):
        params_of(["seed=3"], "{}", 4)


def test_the_command_is_repeated_with_what_was_given() -> None:
    """What is suggested next has the options of this call, and no other ones."""
    heard: list[list[str]] = []
    app = typer.Typer()

    @app.command("train")
    def listen(
        ctx: typer.Context, program: str | None = None, steps: int = 5, param: list[str] | None = None, on: bool = False
    ) -> None:
        heard.append(repeated_command(ctx, without=("on",), steps=2 * steps)[2:])

    app(["--program", "m:P", "--param", "a=1", "--param", "b=x y", "--on"], standalone_mode=False)
    assert heard == [["--program", "m:P", "--steps", "10", "--param", "a=1", "--param", "b=x y"]]


def test_a_mistake_is_told_before_torch_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--ranks in torchrun's rank ends with 1 and makes nothing; in JSON it is as every verb's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    answer = ckpt("train", "m:P", "--ranks", "2", "--json")
    assert (answer.status, answer.data["error"]["type"]) == (1, "ConfigError")
    assert (
        "rank 0 of 2, which a launcher has started: leave --ranks and --engine out" in answer.data["error"]["message"]
    )
    assert [*tmp_path.iterdir()] == []
