"""Where a step-batch ends, and what the parameters of a flow mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import ConfigError, RunMismatchError
from ckpt_tasks.flows.prefect.config import BatchLength, config_of_run, position_of_run
from ckpt_tasks.run.ledger.config import CheckpointConfig


def ends(length: BatchLength, total: int, *, step_s: float, start: int = 0) -> list[int]:
    found, position, last = [], start, None
    while position < total:
        end = length.end(position, total, step_s=step_s if last else None, last=last)
        position, last = end, end - position
        found.append(end)
    return found


def test_a_given_length_is_kept() -> None:
    """Batches end at multiples of their length, also after a stop within one, and the last ends with the run."""
    assert ends(BatchLength(steps=500), 1200, step_s=1.0) == [500, 1000, 1200]
    assert ends(BatchLength(steps=500), 1200, step_s=1.0, start=437) == [500, 1000, 1200]


def test_an_automatic_length_grows_to_the_seconds() -> None:
    """The first batch is short, then batches grow, at most eightfold each, until they take the seconds asked for."""
    found = ends(BatchLength(seconds=30), 10_000, step_s=0.01)
    lengths = [b - a for a, b in zip([0, *found], found, strict=False)]
    assert lengths[0] == 10
    assert max(lengths) <= 3000
    assert lengths[-2] > 2500


def test_an_automatic_length_follows_the_saves() -> None:
    """Batches end where saves are due: at multiples of the interval when longer, and as parts of it when shorter."""
    longer = ends(BatchLength(seconds=30, step_interval=100), 2000, step_s=0.1)
    assert all(end % 100 == 0 for end in longer if end >= 100)
    shorter = ends(BatchLength(seconds=30, step_interval=20), 100, step_s=2.3)
    assert set(range(20, 101, 20)) <= set(shorter)


@given(st.data())
def test_every_batch_goes_forward(data: st.DataObject) -> None:
    """Whatever was measured, a batch has at least one step and none beyond the end of the run."""
    some = st.none() | st.integers(1, 1000)
    length = BatchLength(steps=data.draw(some), step_interval=data.draw(some))
    position, more = data.draw(st.integers(0, 10**6)), data.draw(st.integers(1, 10**6))
    step_s, last = data.draw(st.none() | st.floats(0, 100)), data.draw(st.none() | st.integers(1, 10**5))
    assert position < length.end(position, position + more, step_s=step_s, last=last) <= position + more


@pytest.mark.parametrize("options", [{"steps": 0}, {"steps": -1}, {"seconds": 0.0}, {"seconds": float("nan")}])
def test_impossible_lengths_are_refused(options: dict[str, Any]) -> None:
    """A length of nothing is a ConfigError, not an endless run."""
    with pytest.raises(ConfigError):
        BatchLength(**options)


def test_a_run_has_its_own_directory() -> None:
    """`{run_key}` in the directory stands for the key, and two different keys are a conflict."""
    config = CheckpointConfig(checkpoint_dir="runs/{run_key}", step_interval=5)
    made = config_of_run(config, "lm-7")
    assert replace(made, checkpoint_dir=made.location.url) == CheckpointConfig(
        checkpoint_dir="runs/lm-7", run_key="lm-7", step_interval=5
    )
    with pytest.raises(ConfigError, match="lm-8"):
        config_of_run(CheckpointConfig(checkpoint_dir="x", run_key="lm-8"), "lm-7")


@pytest.mark.parametrize("key", ["..", "../x", "a/../b", "/etc", "", "a b", "a\n", "-x", "ä"])
def test_a_key_never_leaves_the_directory(key: str) -> None:
    """P51: a key that is not a plain name is refused before it becomes part of a path."""
    with pytest.raises(ConfigError, match="is not a name"):
        config_of_run(CheckpointConfig(checkpoint_dir="runs/{run_key}"), key)


def test_the_ledger_says_where_to_begin(run_dir: Path) -> None:
    """P71: the position is the newest commit's, not the highest step's, and another run's directory is refused."""
    config = CheckpointConfig(checkpoint_dir=str(run_dir), run_key="mine")
    assert position_of_run(config, 100) == 0
    state = {"n": 0}
    with Checkpointer(config) as ckpt:
        for step in (0, 5, 9):
            ckpt.save(step, state)
        assert position_of_run(config, 100) == 9
        ckpt.restore(state, step=5)
        ckpt.save(6, state)
    assert position_of_run(config, 100) == 6
    with pytest.raises(RunMismatchError):
        position_of_run(CheckpointConfig(checkpoint_dir=str(run_dir), run_key="another"), 100)
