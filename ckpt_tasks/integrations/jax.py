"""JAX: a pytree of arrays in a state, for Checkpointer in any loop.

Arrays are saved from their own memory (sharded ones shard by shard), and stored whole under their paths in the tree:
any other number of devices can restore them. A restore makes new arrays with the shardings of the program's arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from ckpt_tasks.errors import UnsupportedStateError
from ckpt_tasks.integrations.arrays import Array, array_difference, array_of, compared, tensor_of

_X64 = "A checkpoint of 64-bit numbers needs jax_enable_x64."


class JaxState:
    """A pytree in the state of a Checkpointer; `value` is the tree.

    ::

        state = {"train": JaxState({"params": params, "optimizer": optimizer_state, "key": key})}
        begin = ckpt.restore(state)
        for step in range(begin + 1, 1001):
            state["train"].value = update(state["train"].value, batch)
            ckpt.step(step, state)

    Leaves are JAX's arrays (keys of jax.random and narrow dtypes too), NumPy's arrays, and plain values. Containers may
    be of any type that JAX knows. A restore replaces `value` by a tree of the same structure; each array gets the
    sharding of the program's array, so a program on another number of devices gets the same values.

    JAX's arrays cannot be changed, so training does not wait for their copies, except for sharded arrays: a save refers
    to an array until it is copied. If the program donates such an array to a function, JAX uses new memory.

    Raises UnsupportedStateError, which names the path, for a leaf of another kind and for an array with shards in
    other processes; StateMismatchError if names, shapes or dtypes differ.
    """

    def __init__(self, value: Any):
        self.value = value
        self._hosts: dict[str, Array] = {}  # The memory in which sharded arrays are assembled.

    def state_dict(self) -> dict[str, Any]:
        """Return the leaves by their paths; an array on one CPU device is not copied."""
        return {name: self._taken(name, leaf) for name, leaf in _named(self.value).items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the tree by a tree of the saved values."""
        live = _named(self.value)
        made = {name: _made(saved, live.get(name)) for name, saved in state_dict.items()}
        both = [(name, made[name], live[name]) for name in live if name in made]
        different = [*filter(None, (array_difference(*one) for one in both if _is_array(one[1]) and _is_array(one[2])))]
        compared(made, live, "the tree", different=different, hint=_X64 if different else None)
        self.value = jax.tree_util.tree_unflatten(
            jax.tree_util.tree_structure(self.value), [made[name] for name in live]
        )

    def _taken(self, name: str, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return tensor_of(leaf, name) if isinstance(leaf, np.ndarray) and leaf.dtype.isbuiltin != 1 else leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return {"key": str(jax.random.key_impl(leaf)), "data": self._taken(name, jax.random.key_data(leaf))}
        saved = tensor_of(self._on_host(name, leaf), name, constant=leaf.is_fully_replicated)
        return {"weak": True, "data": saved} if leaf.weak_type else saved

    def _on_host(self, name: str, leaf: jax.Array) -> Array:
        """Return the whole array in host memory: on one CPU device its own memory, else a copy."""
        if leaf.is_fully_replicated:
            return np.asarray(leaf.addressable_data(0))
        if not leaf.is_fully_addressable:
            raise UnsupportedStateError(
                "an array with shards in other processes cannot be stored",
                key=name,
                hint="Replicate it first, or save in a process that has all devices.",
            )
        host = self._hosts.get(name)
        if host is None or host.shape != leaf.shape or host.dtype != leaf.dtype:
            host = self._hosts[name] = np.empty(leaf.shape, leaf.dtype)
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                host[shard.index] = np.asarray(shard.data)
        return host


def _named(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths; raise UnsupportedStateError if two have one path."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "value"
        if name in named:
            raise UnsupportedStateError("two leaves have this path", key=name, hint="Rename one of them.")
        named[name] = leaf
    return named


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray)


def _made(saved: Any, live: Any) -> Any:
    """Make the leaf for a saved value, on the devices of the program's leaf."""
    if isinstance(saved, Mapping) and "key" in saved:
        return _placed(jax.random.wrap_key_data(jnp.asarray(array_of(saved["data"])), impl=saved["key"]), live)
    if isinstance(saved, Mapping) and "weak" in saved:
        host = array_of(saved["data"])
        return _placed(jax.lax.broadcast(jnp.asarray(host.dtype.type().item()), host.shape).at[...].set(host), live)
    if isinstance(saved, Mapping) or not (isinstance(saved, np.ndarray) or np.isscalar(saved) or saved is None):
        host = array_of(saved)
        return host if isinstance(live, np.ndarray) else _placed(host, live)
    return saved


def _placed(value: Any, live: Any) -> jax.Array:
    """Return the values with the sharding of `live`; if it has none, on the default device, as JAX puts new arrays."""
    placed: jax.Array = jax.device_put(value, live.sharding if isinstance(live, jax.Array) and live.committed else None)
    return placed
