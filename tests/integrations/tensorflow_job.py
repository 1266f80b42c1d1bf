"""A TensorFlow user's loops, as jobs whose legs are killed; one of them saves by TensorFlow's own CheckpointManager."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch

from ckpt_tasks import ByRank, CheckpointConfig, Checkpointer
from ckpt_tasks.integrations.tensorflow import TfState
from tests.support.legs import Leg

STEPS = 36


class Theirs:
    """TensorFlow's CheckpointManager behind the calls of a Checkpointer."""

    def __init__(self, leg: Leg, checkpoint: Any):
        self.step_saved = checkpoint.saved = tf.Variable(0, dtype=tf.int64)
        self.checkpoint = checkpoint
        self.manager = tf.train.CheckpointManager(checkpoint, str(leg.folder / "theirs"), max_to_keep=2)

    def restore(self) -> int:
        if self.manager.latest_checkpoint:
            self.checkpoint.restore(self.manager.latest_checkpoint).assert_consumed()
        return int(self.step_saved)

    def step(self, step: int) -> None:
        self.step_saved.assign(step)
        self.manager.save()


def train(leg: Leg) -> None:
    """Train a model with Dropout on a shuffled data set, with noise of a generator and of eager operations."""
    random.seed(7)
    keras.utils.set_random_seed(leg.options.get("seed", 7))
    dense, normalized, dropout = keras.layers.Dense, keras.layers.BatchNormalization, keras.layers.Dropout
    model = keras.Sequential([keras.Input((4,)), dense(16), normalized(), dropout(0.5), dense(1)])
    optimizer = keras.optimizers.AdamW(0.01)
    optimizer.build(model.trainable_variables)
    x = np.random.default_rng(7).normal(size=(48, 4)).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True)))
    iterator = iter(dataset.shuffle(16, seed=3).repeat().batch(4))
    generator = tf.random.Generator.from_seed(5)
    tf.random.set_global_generator(tf.random.Generator.from_seed(6))
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, data=iterator, noise=generator)

    def update(inputs: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            noisy = inputs + generator.normal(inputs.shape) * 0.1
            loss = tf.reduce_mean((model(noisy, training=True) - targets) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    compiled = tf.function(update)

    def one(step: int) -> float:
        leg.within(step)
        inputs, targets = next(iterator)
        eager = tf.random.normal(targets.shape) + tf.random.get_global_generator().normal(targets.shape)
        loss = float(compiled(inputs, targets + eager * 0.1))
        leg.record("loss", step + 1, loss)
        return loss

    if leg.options.get("theirs"):
        theirs = Theirs(leg, checkpoint)
        begin = theirs.restore()
        leg.record("begin", begin, 0.0)
        for step in range(begin, STEPS):
            one(step)
            theirs.step(step + 1)
    else:
        config = CheckpointConfig(
            checkpoint_dir=leg.folder / "run",
            step_interval=leg.options.get("interval", 1),
            memory_dir=leg.folder / "memory",
        )
        state = {"train": TfState(checkpoint)}
        with Checkpointer(config) as ckpt:
            leg.settle = ckpt.wait
            begin = ckpt.restore(state)
            leg.record("begin", begin, 0.0)
            for step in range(begin, STEPS):
                ckpt.step(step + 1, state, metrics={"loss": one(step)})
    leg.end(STEPS, [torch.from_numpy(np.array(one.numpy())) for one in (*model.weights, *optimizer.variables)])


def workers(leg: Leg) -> None:
    """Train in two workers of a MultiWorkerMirroredStrategy; the first one commits, and one of them is killed."""
    with socket.socket() as one, socket.socket() as other:
        for bound in (one, other):
            bound.bind(("127.0.0.1", 0))
        hosts = [f"127.0.0.1:{bound.getsockname()[1]}" for bound in (one, other)]
    meeting = leg.folder / f"meeting-{os.getpid()}"
    child = os.fork()
    rank = int(child == 0)
    if rank:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # It dies with the first one.
    else:
        threading.Thread(target=_follow, args=(child,), daemon=True).start()
    if rank != leg.options["killed"]:
        leg.spare()
    leg.label = " of the second" if rank else ""
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": rank}})
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    _work(leg, leg.folder / "run")
    if rank:
        os._exit(0)
    os.waitpid(child, 0)


def _follow(child: int) -> None:
    """Die when the other worker has been killed, as a launcher sees to."""
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    if ended is None or ended.si_status:
        os.kill(os.getpid(), signal.SIGKILL)


def _work(leg: Leg, run: Path) -> None:
    random.seed(7)
    tf.random.set_seed(7)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weight, momentum = (tf.Variable(tf.zeros((4, 1))) for _ in range(2))
    x = np.random.default_rng(7).normal(size=(48, 4)).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).shuffle(16, seed=3).repeat().batch(4)
    rank = torch.distributed.get_rank()
    iterator = iter(dataset.skip(rank).prefetch(1))

    def update(inputs: Any, targets: Any) -> Any:
        def replica(inputs: Any, targets: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((inputs @ weight - targets) ** 2)
            gradient = tf.distribute.get_replica_context().all_reduce("sum", tape.gradient(loss, weight))
            momentum.assign(0.9 * momentum + gradient)
            weight.assign_sub(0.01 * momentum)
            return loss

        return strategy.reduce("sum", strategy.run(replica, (inputs, targets)), None)

    compiled = tf.function(update)
    state = {
        "train": TfState(tf.train.Checkpoint(weight=weight, momentum=momentum)),
        "data": ByRank(TfState(tf.train.Checkpoint(data=iterator))),
    }
    with Checkpointer(CheckpointConfig(checkpoint_dir=run, step_interval=1, memory_dir=None)) as ckpt:
        leg.settle = ckpt.wait
        begin = ckpt.restore(state)
        leg.record("begin", begin, 0.0)
        for step in range(begin, 12):
            leg.within(step)
            loss = float(compiled(*next(iterator)))
            leg.record("loss", step + 1, loss)
            ckpt.step(step + 1, state, metrics={"loss": loss})
    leg.end(12, [torch.from_numpy(np.array(one.numpy())) for one in (weight, momentum)])
