"""TensorFlow: a tf.train.Checkpoint in a state, and the random states that a tf.train.Checkpoint leaves out.

Tensors are saved from their own memory. Values without numbers (states of iterators, texts, the graph of the objects)
are kept as files of TensorFlow's own format. A tf.train.Checkpoint has neither the seeds of Keras's layers nor
TensorFlow's global random state: a model with Dropout would restore without an error, and continue with other numbers.
So both are saved too. The state of a stateful random operation in a tf.function is not saved: only its kernel has it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import stateful_random_ops
from torch.utils.data import DataLoader

from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.checkpoint.transfer.publishing import new_directory
from ckpt_tasks.errors import StateMismatchError, UnsupportedStateError
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.integrations.arrays import array_of, tensor_of

_WITHOUT_NUMBERS = (tf.string, tf.variant)
_ROUND_BYTES = 1 << 16
_BUILD = "Build the model and its optimizer before the restore: their variables must exist."


class TfState:
    """The trackables of a tf.train.Checkpoint in the state of a Checkpointer.

    ::

        state = {"train": TfState(tf.train.Checkpoint(model=model, optimizer=optimizer, data=iterator))}
        begin = ckpt.restore(state)

    It saves models, optimizers, variables, tables, tf.random.Generator, iterators of tf.data, and all else that a
    tf.train.Checkpoint can hold; and also the seeds of Keras's layers, TensorFlow's global generator and the seeds of
    eager operations. A restore raises StateMismatchError if a value in the checkpoint has no object, or an object has
    no value. Under a strategy of many workers, each worker restores and the first one commits; each worker has its own
    iterators: ``ByRank(TfState(tf.train.Checkpoint(data=iterator)))``.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint):
        self._checkpoint = checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors by TensorFlow's names, in their own memory."""
        tensors, tracked = _gathered(self._checkpoint)
        numbers = {name: one for name, one in tensors.items() if one.dtype not in _WITHOUT_NUMBERS}
        return {
            "tensors": {name: tensor_of(np.asarray(tensor), name) for name, tensor in numbers.items()},
            "others": _packed({name: tensor for name, tensor in tensors.items() if name not in numbers}),
            "seeds": seeds.state_dict() if (seeds := _seeds_of(self._checkpoint, tracked)) else {},
            "random": _random_state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the tf.train.Checkpoint read the tensors; then set the random states, which it leaves out."""
        tensors = {name: tf.convert_to_tensor(array_of(saved)) for name, saved in state_dict["tensors"].items()}
        tensors |= _unpacked(state_dict["others"])
        with tempfile.TemporaryDirectory() as directory:
            _write(f"{directory}/all", tensors)
            try:
                self._checkpoint.read(f"{directory}/all").assert_consumed()
            except (AssertionError, ValueError) as error:
                raise StateMismatchError(
                    f"the objects are others than the checkpoint's: {error}", hint=_BUILD
                ) from error
        seeds = _seeds_of(self._checkpoint, _gathered(self._checkpoint)[1])
        if seeds:
            seeds.load_state_dict(state_dict["seeds"])
        _set_random_state(state_dict["random"])


def _gathered(checkpoint: Any) -> tuple[dict[str, Any], set[int]]:
    """Return all tensors of a tf.train.Checkpoint by name, and the identities of the objects that own them."""
    gathered, _, custom, _ = checkpoint._saver._gather_serialized_tensors()
    if custom:
        raise UnsupportedStateError(f"objects that {', '.join(custom)} saves cannot be stored")
    tensors: dict[str, Any] = {}
    for own in gathered.values():
        for name, value in own.items():
            if isinstance(value, Mapping):
                raise UnsupportedStateError("a variable that is cut among parameter servers cannot be stored", key=name)
            tensors[name] = getattr(value, "tensor", value)  # A variable returns a function that reads it.
    return tensors, {id(one) for one in gathered}


def _seeds_of(checkpoint: Any, tracked: set[int]) -> Any:
    """Return the variables of Keras's layers that a tf.train.Checkpoint leaves out; None without Keras."""
    if "keras" not in sys.modules:
        return None
    import keras

    from ckpt_tasks.integrations.keras_state import Variables, named

    nodes = tf.train.TrackableView(checkpoint).descendants()
    variables = {id(one): one for node in nodes if isinstance(node, keras.Layer) for one in node.variables}
    left_out = [variable for identity, variable in variables.items() if identity not in tracked]
    return Variables(lambda: named(left_out), None)


def _write(prefix: str, tensors: Mapping[str, Any]) -> None:
    tf.raw_ops.SaveV2(
        prefix=prefix, tensor_names=[*tensors], shape_and_slices=[""] * len(tensors), tensors=[*tensors.values()]
    )


def _packed(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors without numbers, such as strings, as the bytes of files that TensorFlow writes."""
    with tempfile.TemporaryDirectory() as directory:
        _write(f"{directory}/others", tensors)
        files = {path.name: _padded(path.read_bytes(), path.name) for path in sorted(Path(directory).iterdir())}
    return {"dtypes": {name: tensor.dtype.name for name, tensor in tensors.items()}, "files": files}


def _padded(content: bytes, name: str) -> tuple[int, Any]:
    """Return a file's size and its padded bytes: an iterator's size varies, and a new shape makes a save plan again."""
    padded = content.ljust(-(-len(content) // _ROUND_BYTES) * _ROUND_BYTES, b"\0")
    return len(content), tensor_of(np.frombuffer(padded, np.uint8), name)


def _unpacked(packed: Mapping[str, Any]) -> dict[str, Any]:
    names = [*packed["dtypes"]]
    with tempfile.TemporaryDirectory() as directory:
        for name, (size, content) in packed["files"].items():
            (Path(directory) / Path(name).name).write_bytes(array_of(content).tobytes()[:size])
        dtypes = [tf.as_dtype(dtype) for dtype in packed["dtypes"].values()]
        tensors = tf.raw_ops.RestoreV2(
            prefix=f"{directory}/others", tensor_names=names, shape_and_slices=[""] * len(names), dtypes=dtypes
        )
    return dict(zip(names, tensors, strict=True))


def _random_state() -> dict[str, Any]:
    """Return the state of the global generator, if it exists, and of the seeds from which eager operations draw."""
    made, eager = stateful_random_ops.global_generator, context.context()
    state = None if made is None else tensor_of(np.asarray(made.state.read_value()), "global")
    rng = getattr(eager, "_rng", None)  # tf.random.set_seed creates this generator.
    return {"global": state, "seed": context.global_seed(), "eager": rng and rng.getstate()}


def _set_random_state(saved: Mapping[str, Any]) -> None:
    if saved["global"] is not None:
        tf.random.get_global_generator().reset(array_of(saved["global"]))
    if saved["seed"] is not None:
        tf.random.set_seed(saved["seed"])  # This also drops the kernels that have drawn by these seeds.
    if saved["eager"] is not None:
        context.context()._rng.setstate(saved["eager"])


def export_saved_model(
    run: Run,
    state: Mapping[str, Any],
    out: str | os.PathLike[str],
    write: Callable[[str], object],
    *,
    step: int | None = None,
) -> Checkpoint:
    """Write a SavedModel of a checkpoint, the newest or the one of `step`, as the directory `out`.

    ::

        export_saved_model(open_run("runs/first"), {"train": TfState(checkpoint)}, "serving/7", model.export)

    The checkpoint is verified and restored into `state`, then `write` writes the object of the state:
    `partial(tf.saved_model.save, module)`, or a Keras model's `export`. `assets.extra/checkpoint.json` names run, step
    and digest. `out` appears when it is complete. Raises ConfigError if `out` exists, and what `Run.restore` raises.
    """
    checkpoint = run.find("latest" if step is None else step)
    run.restore(checkpoint, dict(state))
    with new_directory(Path(out).absolute()) as directory:
        write(str(directory))
        (directory / "assets.extra").mkdir(exist_ok=True)
        made_of = {"run_key": run.run_key, "step": checkpoint.step, "manifest_digest": checkpoint.manifest_digest}
        (directory / "assets.extra/checkpoint.json").write_text(json.dumps(made_of), encoding="utf-8")
    return checkpoint


def dataset_of(loader: DataLoader[Any]) -> Any:
    """Return a loader as a tf.data.Dataset that fetches a batch only when training requests it, never ahead.

    TensorFlow fetches in its own thread, which draws from the process's random streams: a batch that is fetched ahead
    would change the numbers that training draws between two steps.
    """
    from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter

    options = tf.data.Options()
    options.autotune.enabled = options.experimental_optimization.inject_prefetch = False
    dataset = TorchDataLoaderAdapter(loader).get_tf_dataset().with_options(options)
    return dataset.apply(tf.data.experimental.assert_cardinality(len(loader)))
