"""Orbax's CheckpointManager, as its guide has it: JAX arrays, saved in the background of training; it keeps three.

The program is JAX's form of what the other jobs train; Orbax keeps no position in the data, so the loop counts steps.
"""

from __future__ import annotations

import hashlib
import time
from importlib import import_module
from typing import Any

import numpy as np

from benchmarks.comparison.shared import BALLAST_MIB, BATCH, DIRECTORY, EVERY, SAMPLES, SEED, STEP_S, STEPS, Steps

jax: Any = import_module("jax")
ocp: Any = import_module("orbax.checkpoint")
jnp: Any = jax.numpy
draws = np.random.default_rng(1)
x = draws.normal(size=(SAMPLES, 8)).astype(np.float32)
y = x.sum(1, keepdims=True)


def update(state: Any, x: Any, y: Any) -> Any:
    """One step of momentum with dropout; the ballast changes in every step, so a save has something to write."""
    key, now = jax.random.split(state["key"])

    def loss(w: Any) -> Any:
        kept = jnp.where(jax.random.bernoulli(now, 0.8, x.shape), x / 0.8, 0)
        return jnp.mean((kept @ w - y) ** 2)

    momentum = 0.9 * state["momentum"] + jax.grad(loss)(state["w"])
    w = state["w"] - 0.01 * momentum
    return {"w": w, "momentum": momentum, "key": key, "ballast": state["ballast"] + 1}


step_of = jax.jit(update)
first, key = jax.random.split(jax.random.key(SEED))
ballast = jax.random.normal(first, (BALLAST_MIB << 18,))
w = jnp.zeros((8, 1))
state: dict[str, Any] = {"w": w, "momentum": jnp.zeros_like(w), "key": key, "ballast": ballast}
options = ocp.CheckpointManagerOptions(max_to_keep=3, save_interval_steps=EVERY)
with ocp.CheckpointManager(DIRECTORY, options=options) as manager:
    step = manager.latest_step() or 0
    if step:
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        state = manager.restore(step, args=ocp.args.StandardRestore(like))
    said = Steps(step)
    while step < STEPS:
        order = np.random.default_rng([SEED, step // (SAMPLES // BATCH)]).permutation(SAMPLES)
        batch = order.reshape(-1, BATCH)[step % (SAMPLES // BATCH)]
        state = jax.block_until_ready(step_of(state, x[batch], y[batch]))
        time.sleep(STEP_S)
        step += 1
        manager.save(step, args=ocp.args.StandardSave(state))
        said.step()
    manager.wait_until_finished()
found = hashlib.sha256(b"".join(np.asarray(state[name]).tobytes() for name in ("w", "momentum", "ballast")))
print(f"end {found.hexdigest()[:16]}", flush=True)
