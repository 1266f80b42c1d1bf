"""What a restore into a Keras model refuses and takes. test_checks.py runs this file in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableLoader
from ckpt_tasks.errors import ConfigError, StateMismatchError
from ckpt_tasks.integrations.keras import CkptCallback
from ckpt_tasks.integrations.keras_state import state_of

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # TensorFlow's tensors


def compiled(width: int = 4, **options: Any) -> Any:
    layers = [keras.Input((8,)), keras.layers.Dense(width), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.AdamW(0.01), loss="mse", **options)
    return model


def fitted(run: Path, model: Any, epochs: int = 1, *, interval: int = 3, others: tuple[Any, ...] = ()) -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32))
    config = CheckpointConfig(checkpoint_dir=run, step_interval=interval)
    with CkptCallback(config, ResumableLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True)) as saving:
        model.fit(saving.data, epochs=epochs, shuffle=False, verbose=0, callbacks=[saving, *others])


def values(model: Any) -> list[bytes]:
    variables = [*model.variables, *model.optimizer.variables]
    return [np.asarray(keras.ops.convert_to_numpy(one.value)).tobytes() for one in variables]


def test_a_model_that_is_made_again_goes_on(tmp_path: Path) -> None:
    """The numbers that Keras puts into names count on in a process; the values find their variables all the same."""
    keras.utils.set_random_seed(1)
    model = compiled()
    fitted(tmp_path, model)
    other = compiled()
    assert [one.path for one in other.variables] != [one.path for one in model.variables]
    fitted(tmp_path, other)  # nothing is left to train
    assert values(other) == values(model)


def test_another_model_is_refused(tmp_path: Path) -> None:
    """Shapes that differ are named, and the model stays as it was."""
    fitted(tmp_path, compiled())
    model = compiled(5)
    model.optimizer.build(model.trainable_variables)
    before = values(model)
    with pytest.raises(StateMismatchError, match=r"kernel: float32\[8, 5\] here, float32\[8, 4\] in the checkpoint"):
        fitted(tmp_path, model)
    assert values(model) == before


class Stopping(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 3:
            raise KeyError("stop")


@pytest.mark.skipif(keras.config.backend() == "torch", reason="Keras executes one step at a time on torch")
def test_a_place_within_an_execution_is_refused(tmp_path: Path) -> None:
    """With another steps_per_execution a run goes on only where an execution begins."""
    with pytest.raises(KeyError):
        fitted(tmp_path, compiled(), others=(Stopping(),))
    with pytest.raises(ConfigError, match="3 batches of epoch 0 are trained, and `fit` trains 2 at a time"):
        fitted(tmp_path, compiled(steps_per_execution=2))


def test_after_an_error_the_same_callback_goes_on(tmp_path: Path) -> None:
    """Without a block too `fit` may raise; called again it restores the last checkpoint and trains to the end."""
    keras.utils.set_random_seed(1)
    whole = compiled()
    fitted(tmp_path / "whole", whole, 2)
    keras.utils.set_random_seed(1)
    model = compiled()
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32))
    config = CheckpointConfig(checkpoint_dir=tmp_path / "run", step_interval=1)
    saving = CkptCallback(config, ResumableLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True))
    for others in ([Stopping()], []):
        try:
            model.fit(saving.data, epochs=2, shuffle=False, verbose=0, callbacks=[saving, *others])
        except KeyError:
            assert others
    assert values(model) == values(whole)


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    """`state_of` holds what train_on_batch trains: restored into a new model it has every bit."""
    keras.utils.set_random_seed(1)
    model, other = compiled(), compiled()
    x = np.ones((8, 8), np.float32)
    with Checkpointer(CheckpointConfig(checkpoint_dir=tmp_path)) as ckpt:
        ckpt.restore(state_of(model))
        for _ in range(3):
            model.train_on_batch(x, x[:, :1])
        ckpt.save(3, state_of(model))
        assert ckpt.restore(state_of(other)) == 3
    assert values(other) == values(model)
    for one in (model, other):
        keras.utils.set_random_seed(2)  # On torch, Keras's dropout draws from the stream of the process.
        one.train_on_batch(x, x[:, :1])
    assert values(other) == values(model)
