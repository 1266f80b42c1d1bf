"""A Keras user's script on each backend, as a job whose legs are killed; KERAS_BACKEND chooses the backend."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf  # noqa: F401 (Keras imports it late, in every leg anew)
import torch
from torch.utils.data import Dataset

from ckpt_tasks import CheckpointConfig, ResumableLoader
from ckpt_tasks.integrations.keras import CkptCallback
from tests.support.legs import Leg

SAMPLES = 46  # 12 batches of 4, the last one of 2


class Noisy(Dataset[Any]):
    """Draws noise for its samples."""

    def __init__(self) -> None:
        x = np.random.default_rng(7).normal(size=(SAMPLES, 4)).astype(np.float32)
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(x.sum(1, keepdims=True))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        return self.x[i] + torch.randn(4) * 0.1, self.y[i]


class Drawing(keras.layers.Layer):
    """Draws from Keras's own generator, and counts its calls."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1)
            if keras.backend.backend() != "jax":  # There a function that is compiled has no such generator.
                return x + keras.random.normal((4,), stddev=0.1)
        return x


class Watching(keras.callbacks.Callback):
    """Records what fit logs and how it numbers the batches, draws from the process's streams, and is killed."""

    def __init__(self, leg: Leg, saving: CkptCallback):
        super().__init__()
        self.leg, self.saving, self.epoch, self.steps = leg, saving, 0, 0

    def on_train_begin(self, logs: Any = None) -> None:
        assert self.saving.ckpt is not None
        self.leg.settle = self.saving.ckpt.wait
        self.steps = self.saving.ckpt.position
        self.leg.record("begin", self.steps, 0.0)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if 12 * self.epoch + batch >= self.steps:
            self.leg.within(12 * self.epoch + batch)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        if logs:
            step = 12 * self.epoch + min(batch, 11) + 1
            for name, value in logs.items():
                self.leg.record(name, step, float(value))
            self.leg.record("drawn", step, random.random() + torch.rand(()).item())

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        for name, value in (logs or {}).items():
            self.leg.record(f"epoch {name}", epoch, float(value))


class Slower(keras.callbacks.Callback):
    """Changes the learning rate when an epoch ends, after the callback that saves."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate.assign(self.model.optimizer.learning_rate * 0.7)


def train(leg: Leg) -> None:
    """Train three epochs."""
    options = leg.options
    keras.utils.set_random_seed(7)
    layers = keras.layers
    body = [layers.Dense(16), layers.BatchNormalization(), layers.Dropout(0.2), layers.GaussianNoise(0.1)]
    model = keras.Sequential([keras.Input((4,)), Drawing(), *body, layers.Dense(1)])
    rate: Any = keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.9) if options.get("schedule") else 0.01
    optimizer = keras.optimizers.AdamW(rate, gradient_accumulation_steps=options.get("accumulate"))
    model.compile(optimizer, loss="mse", metrics=["mae"], steps_per_execution=options.get("together", 1))
    loader = ResumableLoader(Noisy(), batch_size=4, shuffle=True, num_workers=options.get("workers", 0))
    config = CheckpointConfig(
        checkpoint_dir=leg.folder / "run", step_interval=options.get("interval", 1), memory_dir=leg.folder / "memory"
    )
    checked = Noisy()
    with CkptCallback(config, loader) as saving:
        others = [Watching(leg, saving)] if options.get("schedule") else [Watching(leg, saving), Slower()]
        model.fit(
            saving.data,
            epochs=3,
            callbacks=[saving, *others],
            validation_data=(checked.x.numpy(), checked.y.numpy()),
            verbose=0,
            shuffle=False,
        )
    variables = [*model.variables, *model.optimizer.variables]
    leg.end(36, [torch.from_numpy(np.array(keras.ops.convert_to_numpy(one.value))) for one in variables])
