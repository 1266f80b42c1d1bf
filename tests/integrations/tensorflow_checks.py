"""What a TfState holds, takes and refuses. test_checks.py runs this file in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import IntegrityError, StateMismatchError
from ckpt_tasks.integrations.tensorflow import TfState, export_saved_model
from tests.support.cli_runs import flip, only


def trackables(fill: int) -> dict[str, Any]:
    dtypes = (tf.bool, tf.int8, tf.uint16, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64)
    variables = [tf.Variable(tf.cast([fill, 1, 0], dtype)) for dtype in (*dtypes, tf.complex64)]
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    table.insert(["a", "b"], [fill, 2])
    iterator = iter(tf.data.Dataset.range(50).shuffle(10, seed=3))
    for _ in range(fill):
        next(iterator)
    generator = tf.random.Generator.from_seed(1)
    generator.normal([fill + 1])
    return {
        "variables": variables,
        "text": tf.Variable(["text", str(fill)]),
        "empty": tf.Variable(tf.zeros((0, 3))),
        "table": table,
        "data": iterator,
        "noise": generator,
    }


def read(held: dict[str, Any]) -> list[Any]:
    """Return everything that the trackables hold or give next."""
    values = [one.numpy() for one in (*held["variables"], held["text"], held["empty"])]
    return [
        *values,
        held["table"].lookup(tf.constant(["a", "b"])).numpy(),
        next(held["data"]).numpy(),
        held["noise"].normal([3]).numpy(),
    ]


def test_every_kind_of_trackable_comes_back(tmp_path: Path) -> None:
    """Every dtype, texts, tables, an iterator in the middle of its shuffled data, a generator: bit for bit."""
    held, other = trackables(5), trackables(2)
    with Checkpointer(CheckpointConfig(checkpoint_dir=tmp_path)) as ckpt:
        ckpt.restore({"train": TfState(tf.train.Checkpoint(**held))})
        ckpt.save(1, {"train": TfState(tf.train.Checkpoint(**held))})
        ckpt.restore({"train": TfState(tf.train.Checkpoint(**other))})
    for mine, yours in zip(read(held), read(other), strict=True):
        assert mine.dtype == yours.dtype
        assert mine.tobytes() == yours.tobytes() or mine.dtype == object
        assert mine.tolist() == yours.tolist()


def test_other_objects_are_refused_and_stay_as_they_were(tmp_path: Path) -> None:
    """An object without a value, and a value without an object: nothing is changed."""
    one, other = tf.Variable(1.0), tf.Variable(2.0)
    with Checkpointer(CheckpointConfig(checkpoint_dir=tmp_path)) as ckpt:
        ckpt.restore({"train": TfState(tf.train.Checkpoint(one=one))})
        ckpt.save(1, {"train": TfState(tf.train.Checkpoint(one=one))})
        for wrong in (tf.train.Checkpoint(one=other, more=tf.Variable(3.0)), tf.train.Checkpoint(two=other)):
            with pytest.raises(StateMismatchError, match="the objects are others"):
                ckpt.restore({"train": TfState(wrong)})
    assert float(other) == 2.0


def test_a_saved_model_is_made_of_a_checkpoint(tmp_path: Path) -> None:
    """The export has the values of the verified checkpoint, and says of which; a damaged one is not exported."""
    keras.utils.set_random_seed(1)
    model, other = (keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]) for _ in range(2))
    x = np.ones((1, 4), np.float32)
    run = tmp_path / "run"
    with Checkpointer(CheckpointConfig(checkpoint_dir=run)) as ckpt:
        ckpt.restore({"train": TfState(tf.train.Checkpoint(model=model))})
        ckpt.save(7, {"train": TfState(tf.train.Checkpoint(model=model))})
    expected = model(x).numpy()
    state = {"train": TfState(tf.train.Checkpoint(model=other))}
    export_saved_model(open_run(run), state, tmp_path / "7", lambda out: other.export(out, verbose=False))
    loaded = tf.saved_model.load(str(tmp_path / "7"))
    assert loaded.serve(x).numpy().tobytes() == expected.tobytes()
    assert json.loads((tmp_path / "7/assets.extra/checkpoint.json").read_text())["step"] == 7
    flip(only(run, "checkpoint_*/*/train-*.safetensors"), -1)
    with pytest.raises(IntegrityError, match="have changed"):
        export_saved_model(open_run(run), state, tmp_path / "8", other.export)
    assert not (tmp_path / "8").exists()
