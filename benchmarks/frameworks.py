"""A JAX save beside Orbax's, and a Keras save beside ModelCheckpoint: what training waits for, and until it is on disk.

JAX does not go with forks, so all of it runs in a process of its own. Orbax is measured where it is installed
(benchmarks/peers.py says how). Both save the same values in one run, in shuffled order, with new values each time.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.apart import summary
from benchmarks.peers import OURS, Orbax, is_installed
from benchmarks.stall import fsync_all
from ckpt_tasks import CheckpointConfig, Checkpointer

__all__ = ["measure"]

_Save = Callable[[int], tuple[Callable[[], object], Callable[[], object]]]  # number → what training waits for, the rest


def measure(directory: Path, *, tiny: bool, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Time all of it; `ratios` are ours over theirs, the median over the rounds."""
    call = [sys.executable, "-m", "benchmarks.frameworks", str(directory), str(int(tiny)), str(rounds)]
    environment = {**os.environ, "KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(call, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _main(directory: Path, tiny: bool, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {"size_bytes": 0, "rounds": rounds, "device": "cpu", "rows": {}, "ratios": {}, "absent": {}}
    for title, (ways, size_bytes) in {"JAX": _jax(directory, tiny), "Keras": _keras(directory, tiny)}.items():
        seconds: dict[str, dict[str, list[float]]] = {}
        for number in range(1, rounds + 3):
            for name in random.Random(number).sample(sorted(ways), len(ways)):
                waits, rest = ways[name](number)
                os.sync()
                begin = time.perf_counter()
                waits()
                waited_s = time.perf_counter() - begin
                rest()
                if number > 2:  # The first ones touch new memory.
                    times = {"training waits": waited_s, "until it is on disk": time.perf_counter() - begin}
                    for timed, value in times.items():
                        seconds.setdefault(timed, {}).setdefault(name, []).append(value)
        for timed, by_name in seconds.items():
            row = f"{title}, {size_bytes >> 20} MiB: {timed}"
            found["rows"][row] = {name: summary(times) for name, times in by_name.items()}
            for name in by_name.keys() - {OURS}:
                each = zip(by_name[OURS], by_name[name], strict=True)
                found["ratios"][f"{row}, over {name}"] = median(ours / theirs for ours, theirs in each)
    if not is_installed(Orbax):
        found["absent"]["Orbax, async"] = "not installed"
    return found


def _computed(tree: Any) -> Any:
    """Wait for arrays: JAX computes behind the program's back, and no save is to wait for that."""
    jax: Any = import_module("jax")
    return jax.block_until_ready(tree)


def _ours(run: Path, state: Callable[[int], Mapping[str, Any]]) -> _Save:
    ckpt = Checkpointer(CheckpointConfig(checkpoint_dir=run, step_interval=1))

    def save(number: int) -> tuple[Callable[[], object], Callable[[], object]]:
        values = dict(state(number))
        return lambda: ckpt.step(number, values), ckpt.wait

    return save


def _jax(directory: Path, tiny: bool) -> tuple[dict[str, _Save], int]:
    jax: Any = import_module("jax")
    from ckpt_tasks.integrations.jax import JaxState

    count, rows = (4, 16) if tiny else (64, 1024)

    def tree(number: int) -> Any:
        made = {f"layer{n}": jax.random.normal(jax.random.key(number + n), (rows, 1024)) for n in range(count)}
        return _computed(made)

    ways = {OURS: _ours(directory / "jax", lambda number: {"train": JaxState(tree(number))})}
    if is_installed(Orbax):
        orbax: Any = import_module(Orbax.package)
        saving = orbax.AsyncCheckpointer(orbax.StandardCheckpointHandler())

        def theirs(number: int) -> tuple[Callable[[], object], Callable[[], object]]:
            place, value = directory / "orbax" / str(number), tree(number)
            shutil.rmtree(place.parent, ignore_errors=True)

            def rest() -> None:
                saving.wait_until_finished()
                fsync_all(place)

            return lambda: saving.save(place, args=orbax.args.StandardSave(value)), rest

        ways["Orbax, async"] = theirs
    return ways, count * rows * 1024 * 4


def _keras(directory: Path, tiny: bool) -> tuple[dict[str, _Save], int]:
    keras: Any = import_module("keras")
    from ckpt_tasks.integrations.keras_state import state_of

    width = 16 if tiny else 2048
    model = keras.Sequential([keras.Input((width,)), *(keras.layers.Dense(width) for _ in range(5))])
    model.compile(keras.optimizers.AdamW(0.01), loss="mse")
    model.optimizer.build(model.trainable_variables)

    def changed(number: int) -> None:
        for variable in model.trainable_variables:
            variable.assign(keras.random.normal(variable.shape, seed=number))
        _computed([variable.value for variable in model.variables])

    def state(number: int) -> Mapping[str, Any]:
        changed(number)
        return state_of(model)

    saving = keras.callbacks.ModelCheckpoint(str(directory / "model.keras"))
    saving.set_model(model)

    def theirs(number: int) -> tuple[Callable[[], object], Callable[[], object]]:
        changed(number)
        return lambda: saving.on_epoch_end(number, {}), lambda: fsync_all(directory / "model.keras")

    size_bytes = sum(4 * int(variable.value.size) for variable in (*model.variables, *model.optimizer.variables))
    return {OURS: _ours(directory / "keras", state), "ModelCheckpoint": theirs}, size_bytes


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    print(json.dumps(_main(place, sys.argv[2] == "1", int(sys.argv[3]))))
