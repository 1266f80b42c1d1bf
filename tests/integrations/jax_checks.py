"""JAX's pytrees as a state. Its threads make a fork a hazard: test_checks.py runs this file in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import NoGoodCheckpointError, StateMismatchError, UnsupportedStateError
from ckpt_tasks.integrations.jax import JaxState
from tests.support.cli_runs import ckpt, flip, only

for name, setting in (("jax_num_cpu_devices", 4), ("jax_enable_x64", True)):
    jax.config.update(name, setting)

NARROW = ["int4", "uint4", "int2", "float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz", "float4_e2m1fn"]
WIDE = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16"]
WIDE += ["float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"]
WIDE += ["float8_e5m2fnuz", "float8_e8m0fnu"]


class Moments(NamedTuple):
    """As optax keeps its state: named tuples in tuples."""

    count: Any
    mean: Any


def bits(value: Any) -> Any:
    """Return what a leaf is, bit for bit."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return str(value.dtype), np.asarray(jax.random.key_data(value)).tobytes()
    if isinstance(value, jax.Array | np.ndarray):
        kind = (value.weak_type, value.sharding, value.committed) if isinstance(value, jax.Array) else None
        return type(value), kind, str(value.dtype), value.shape, np.asarray(value).tobytes()
    return type(value), value


def assert_same(one: Any, other: Any) -> None:
    structures: list[Any] = [*map(jax.tree_util.tree_structure, (one, other))]
    assert structures[0] == structures[1]
    for mine, yours in zip(*map(jax.tree_util.tree_leaves, (one, other)), strict=True):
        assert bits(mine) == bits(yours)


def test_a_sharded_array_of_another_shape_under_the_same_name() -> None:
    """The memory in which shards are assembled is that of the array, also when it has grown."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    state = JaxState({})
    for size in (4, 8, 4):
        state.value = {"a": jax.device_put(jnp.arange(float(size)), NamedSharding(mesh, PartitionSpec("x")))}
        (taken,) = state.state_dict().values()
        assert np.asarray(taken).tolist() == [*map(float, range(size))]


def saved(run: Path, value: Any, step: int = 1) -> None:
    with Checkpointer(CheckpointConfig(checkpoint_dir=run)) as checkpointer:
        checkpointer.restore({"train": JaxState(value)})
        checkpointer.save(step, {"train": JaxState(value)})


def restored(run: Path, value: Any) -> Any:
    state = {"train": JaxState(value)}
    with Checkpointer(CheckpointConfig(checkpoint_dir=run)) as checkpointer:
        assert checkpointer.restore(state)
    return state["train"].value


def zeros(value: Any) -> Any:
    """Return a tree of the same structure with other values."""

    def zero(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jnp.zeros_like(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        return (
            jax.device_put(jnp.zeros_like(leaf), leaf.sharding if leaf.committed else None)
            if isinstance(leaf, jax.Array)
            else leaf
        )

    return jax.tree_util.tree_map(zero, value)


def test_every_kind_of_leaf_comes_back_as_it_was(tmp_path: Path) -> None:
    """Dtypes, keys, weak types, NumPy's arrays and plain values, in any container; tools read the arrays by path."""
    value: dict[str, Any] = {
        "wide": [jnp.asarray(np.array([0, 1, 1]).astype(name)) for name in WIDE],
        "narrow": [jnp.asarray(np.array([0, 1, 1]).astype(getattr(ml_dtypes, name))) for name in NARROW],
        "moments": (Moments(jnp.zeros((), jnp.int32), {"w": jnp.arange(6.0).reshape(2, 3).T}), None),
        "keys": {impl: jax.random.split(jax.random.key(3, impl=impl)) for impl in ("threefry2x32", "rbg")},
        "raw": jax.random.PRNGKey(5),
        "weak": [jnp.asarray(2), jnp.asarray(0.1), jnp.ones(()) * 1, jax.lax.broadcast(jnp.asarray(0.5), (2, 2))],
        "numpy": [np.arange(3), np.array(2.0, ml_dtypes.bfloat16), np.float32(2)],
        "plain": [1, 2.5, True, "text"],
        "empty": jnp.zeros((0, 3)),
    }
    run = tmp_path / "run"
    saved(run, value)
    assert_same(restored(run, zeros(value)), value)
    assert ckpt("verify", str(run)).status == 0
    value["moments"][0].mean["w"] = value["moments"][0].mean["w"] + 1
    saved(run, value, 2)
    assert "train/moments/0/mean/w" in ckpt("diff", f"{run}@1", f"{run}@2").out
    assert [row["step"] for row in ckpt("ls", str(run), "--json").data["checkpoints"]] == [2, 1]
    assert ckpt("show", str(run), "--json").data["groups"][0]["kind"] == "stateful"
    assert ckpt("report", str(run), "--out", f"{run}.html").status == 0


def meshed(devices: int) -> dict[str, Any]:
    """Return arrays that are cut over a mesh, in rows, in columns, in both, and one that is on all of its devices."""
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(-1, 2 if devices > 1 else 1), ("a", "b"))
    values = {"rows": ("a",), "columns": (None, "b"), "both": ("b", "a"), "whole": (), "together": (("a", "b"),)}
    return {
        name: jax.device_put(jax.random.normal(jax.random.key(n), (8, 4)), NamedSharding(mesh, PartitionSpec(*spec)))
        for n, (name, spec) in enumerate(values.items())
    }


def test_another_number_of_devices_gets_the_same_values(tmp_path: Path) -> None:
    """P34: saved on a mesh of 4 devices, restored on 2, then on 1, and on 4 again: each array in its given sharding."""
    expected = meshed(4)
    saved(tmp_path / "4", expected)
    value: Any = expected
    for before, devices in ((4, 2), (2, 1), (1, 4)):
        value = restored(tmp_path / f"{before}", zeros(meshed(devices)))
        assert_same(value, meshed(devices))
        if devices < 4:
            saved(tmp_path / f"{devices}", value)
    assert_same(value, expected)


def test_a_restore_is_given_away_as_any_other_array(tmp_path: Path) -> None:
    """What a restore has made may be donated: no other array changes with it."""
    value = {"one": jnp.arange(4096.0), "other": jnp.arange(4096.0)}
    value["tied"] = value["one"]
    saved(tmp_path / "run", value)
    found = restored(tmp_path / "run", zeros(value))
    jax.jit(lambda x: x * 2, donate_argnums=0)(found["one"])
    assert bits(found["other"]) == bits(found["tied"]) == bits(value["one"])


def test_training_neither_waits_for_a_copy_nor_changes_it(tmp_path: Path) -> None:
    """P1: arrays that are donated, deleted and replaced right after `step()` are in the checkpoint as they were."""
    config = CheckpointConfig(checkpoint_dir=tmp_path / "run", step_interval=1, max_num_checkpoints=None)
    update = jax.jit(lambda value: jax.tree.map(lambda x: x + 1, value), donate_argnums=0)
    moments, state = (
        {},
        {"train": JaxState({"w": jnp.zeros((4, 1 << 20)), "n": jnp.zeros(3, "int4"), "b": jnp.ones(9)})},
    )
    with Checkpointer(config) as checkpointer:
        for step in range(1, 7):
            moments[step] = {name: np.array(leaf) for name, leaf in state["train"].value.items()}
            assert checkpointer.step(step, state)
            for _ in range(3):
                state["train"].value = update(state["train"].value)
            checkpointer.wait()  # Otherwise a newer snapshot may replace this one.
    run, found = open_run(tmp_path / "run"), {"train": JaxState(zeros(state["train"].value))}
    assert len(run.checkpoints()) == len(moments)
    for checkpoint in run.checkpoints():
        run.restore(checkpoint, found)
        value = {name: np.array(leaf) for name, leaf in found["train"].value.items()}
        assert all(np.array_equal(value[name], then) for name, then in moments[checkpoint.step].items()), checkpoint


REFUSED: list[tuple[Any, Any, str]] = [
    ({"w": jnp.ones(2)}, {"w": jnp.ones(2), "b": jnp.ones(1)}, "not in the checkpoint: b"),
    ({"w": jnp.ones(2), "b": jnp.ones(1)}, {"w": jnp.ones(2)}, "only in the checkpoint: b"),
    ({"w": jnp.ones(2)}, {"w": jnp.ones(3)}, r"w: float64\[3\] here, float64\[2\]"),
    ({"w": jnp.ones(2)}, {"w": jnp.ones(2, jnp.bfloat16)}, r"w: bfloat16\[2\] here"),
]


@pytest.mark.parametrize(("there", "here", "why"), REFUSED)
def test_another_tree_is_refused_by_name(there: Any, here: Any, why: str, tmp_path: Path) -> None:
    """Names, shapes and dtypes that differ are all in the error, and the program's tree is as it was."""
    saved(tmp_path / "run", there)
    state = {"train": JaxState(here)}
    config = CheckpointConfig(checkpoint_dir=tmp_path / "run")
    with Checkpointer(config) as checkpointer, pytest.raises(StateMismatchError, match=why):
        checkpointer.restore(state)
    assert_same(state["train"].value, here)


def test_what_cannot_be_stored_is_refused_by_its_path(tmp_path: Path) -> None:
    """An object without a form, and two leaves of one path: nothing is written."""
    for value in ({"a": {"b": object()}}, {"a/b": 1, "a": {"b": 2}}, {"a": {"b": np.array(["text"])}}):
        with pytest.raises(UnsupportedStateError, match="a/b"):
            Checkpointer(CheckpointConfig(checkpoint_dir=tmp_path / "run")).save(1, {"train": JaxState(value)})
    assert not (tmp_path / "run").exists()


def test_one_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """A restore passes a damaged checkpoint over, and raises if there is no other."""
    run, value = tmp_path / "run", {"w": jnp.arange(1000.0)}
    saved(run, value)
    flip(only(run, "checkpoint_*/*/train-*.safetensors"), -1)
    with pytest.raises(NoGoodCheckpointError):
        restored(run, zeros(value))
    assert ckpt("verify", str(run)).status != 0
