"""TensorFlow: torch's loaders as its data sets."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from torch.utils.data import DataLoader


def dataset_of(loader: DataLoader[Any]) -> Any:
    """Return a loader as a tf.data.Dataset, whose batches are fetched when they are asked for, none ahead.

    TensorFlow fetches in a thread of its own, and the random streams of the process belong to the batch meanwhile: a
    batch that is fetched ahead would change what a training draws between two steps.
    """
    from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter

    options = tf.data.Options()
    options.autotune.enabled = options.experimental_optimization.inject_prefetch = False
    dataset = TorchDataLoaderAdapter(loader).get_tf_dataset().with_options(options)
    return dataset.apply(tf.data.experimental.assert_cardinality(len(loader)))
