"""A JAX user's script, as a job whose legs are killed."""

from __future__ import annotations

import random
from typing import Any

import jax
import numpy as np
import torch
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableSampler
from ckpt_tasks.integrations.jax import JaxState
from tests.support.legs import Leg

STEPS = 36


def train(leg: Leg) -> None:
    """Train with momentum and dropout; with `devices` over a mesh, in bfloat16 beside float32."""
    random.seed(7)
    devices = leg.options.get("devices", 1)
    jax.config.update("jax_num_cpu_devices", devices)
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    rows, whole = NamedSharding(mesh, PartitionSpec("rows")), NamedSharding(mesh, PartitionSpec())
    draws = np.random.default_rng(7)
    x = draws.normal(size=(48, 8)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    first, second, key = jax.random.split(jax.random.key(leg.options.get("seed", 1)), 3)
    params: Any = {
        "hidden": jax.device_put(jax.random.normal(first, (8, 16)) * 0.1, rows),
        "out": jax.device_put((jax.random.normal(second, (16, 1)) * 0.1).astype(jnp.bfloat16), whole),
    }
    value = {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params), "key": key, "rate": jnp.asarray(0.1)}

    def loss_of(params: Any, key: Any, x: Any, y: Any) -> Any:
        hidden = jax.nn.relu(x @ params["hidden"])
        kept = jnp.where(jax.random.bernoulli(key, 0.8, hidden.shape), hidden / 0.8, 0)
        return jnp.mean((kept @ params["out"].astype(jnp.float32) - y) ** 2)

    def update(value: Any, x: Any, y: Any) -> Any:
        key, now = jax.random.split(value["key"])
        loss, gradients = jax.value_and_grad(loss_of)(value["params"], now, x, y)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, value["momentum"], gradients)
        params = jax.tree.map(lambda p, m: p - (value["rate"] * m).astype(p.dtype), value["params"], momentum)
        return loss, {"params": params, "momentum": momentum, "key": key, "rate": value["rate"] * 0.99}

    step_of = jax.jit(update, donate_argnums=0)
    sampler = ResumableSampler(48, 4, shuffle=True)
    train = JaxState(value)
    state = {"train": train, "data": sampler}
    config = CheckpointConfig(
        checkpoint_dir=leg.folder / "run",
        step_interval=leg.options.get("interval", 1),
        memory_dir=leg.folder / "memory",
    )
    with Checkpointer(config) as ckpt:
        leg.settle = ckpt.wait
        begin = ckpt.restore(state)
        leg.record("begin", begin, 0.0)
        step = begin
        while step < STEPS:
            for batch in sampler:
                leg.within(step)
                sampler.advance()
                step += 1
                loss, train.value = step_of(train.value, x[batch], y[batch])
                leg.record("loss", step, float(loss))
                ckpt.step(step, state, metrics={"loss": float(loss)})
    value = {**train.value, "key": jax.random.key_data(train.value["key"])}
    leg.end(STEPS, [torch.from_numpy(np.asarray(leaf).astype(np.float64)) for leaf in jax.tree.leaves(value)])
