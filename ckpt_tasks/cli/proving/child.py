"""A process that trains a program for `prove_resume`, records digests of every step, and may kill itself.

Its command is `python -m ckpt_tasks.cli.proving.child ORDER` (JSON); each process has another hash seed. With `ranks`
this process is the agent of a gang, and each rank records the values of every step that it would save.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import CkptError, StateError
from ckpt_tasks.flows.session.local_session import LocalSession, Program, build_program
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.tree import TensorRef, Typed, children, is_leaf
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.data.loader import ResumableLoader
from ckpt_tasks.state.data.sampler import ResumableSampler
from ckpt_tasks.state.groups import flat, items_of, objects_of
from ckpt_tasks.state.kinds.kinds import kind_of
from ckpt_tasks.state.tensors.packing import has_state
from ckpt_tasks.state.tensors.placements import ALONE, World
from ckpt_tasks.state.tensors.random_streams import preserved_rng

_LOADERS = (ResumableLoader, ResumableSampler, DataLoader)
_SUITE = "quick"  # Flows evaluate this suite by default.
_DEEPEST = 3


def train(order: Mapping[str, Any]) -> None:
    """Train to the last step; save at the ordered steps, and die in the ordered step, after its computation."""
    never = order["steps"] + 1
    config = CheckpointConfig(checkpoint_dir=order["run"], step_interval=never, memory_dir=None)
    with Checkpointer(config) as ckpt, open(order["log"], "a", encoding="utf-8") as log:
        session = LocalSession(ckpt, order["program"], order["params"])
        step = session.restore()
        _write(log, {"begin": step, "loaders": _loaders(session.state)})
        train_step = session.program.train_step

        def dying() -> Mapping[str, float]:
            reported = train_step()
            if ckpt.position + 1 == order["die_within"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return reported

        session.program.train_step = dying  # type: ignore[method-assign]
        while step < order["steps"]:
            session.run(step + 1)
            step += 1
            _write(log, _step(step, session.metrics, session.program, ALONE))
            if step in order["saves"]:
                session.save(step)
        _write(log, {"evaluated": _evaluated(session.program)})


def train_gang(order: Mapping[str, Any]) -> None:
    """Train on many ranks to the last step; save at the ordered steps.

    Raises StateError if the gang restores another step than the ordered one.
    """
    from ckpt_tasks.flows.gang.gang_session import GangSession

    config = CheckpointConfig(checkpoint_dir=order["run"], step_interval=order["steps"] + 1, memory_dir=None)
    params = {"order": {**order, "agent": os.getpid()}, "seed": order["params"].get("seed", 0)}
    with GangSession(config, "ckpt_tasks.cli.proving.child:recorded", params, ranks=order["ranks"]) as session:
        if (begin := session.restore()) != order["begin"]:
            raise StateError(f"the checkpoint of step {order['begin']} was saved, and not restored", step=begin)
        for step in (step for step in (*order["saves"], order["steps"]) if step > begin):
            session.run(step)
            if step in order["saves"]:
                session.save(step)


def recorded(order: Mapping[str, Any], seed: int) -> Program:
    """Build a program in a rank; after each step it records digests, or kills the agent and itself."""
    import torch.distributed as dist

    world = World(dist.get_rank(), dist.get_world_size())
    program = build_program(order["program"], order["params"])
    train_step, step = program.train_step, order["begin"]
    log = open(f"{order['log']}.{world.rank}" if world.rank else order["log"], "a", encoding="utf-8")  # noqa: SIM115
    _write(log, {"begin": step, "loaders": _loaders(program.state)})

    def recording() -> Mapping[str, float]:
        nonlocal step
        metrics = train_step()
        step += 1
        if step == order["die_within"]:
            if world.rank == 0:
                os.kill(order["agent"], signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        _write(log, _step(step, metrics, program, world))
        if step == order["steps"]:
            _write(log, {"evaluated": _evaluated(program)})
        return metrics

    program.train_step = recording  # type: ignore[method-assign]
    return program


def _loaders(state: Mapping[str, Any]) -> list[str]:
    return [name for name, value in flat(state).items() if isinstance(value, _LOADERS)]


def _step(step: int, metrics: Mapping[str, Any], program: Program, world: World) -> dict[str, Any]:
    """Return the values to compare after a step; with many ranks, the values that this rank would save."""
    numbers = {name: float(value).hex() for name, value in metrics.items()}
    known = {id(one) for one in (program.state, *_parts(program.state))}
    outside = dict(_outside(program, "program", known, 0))
    return {"step": step, "metrics": numbers, "values": _values(program.state, world=world), "outside": outside}


def _write(log: Any, line: Mapping[str, Any]) -> None:
    log.write(json.dumps(line) + "\n")
    log.flush()


def _values(state: Mapping[str, Any], *, rng: bool = True, world: World = ALONE) -> dict[str, str]:
    """Return a digest of every tensor and the text of every other value, by path."""
    captured = capture(state, rng=rng, world=world)
    values = dict(_leaves({name: group.tree for name, group in captured.groups.items()}, ""))
    for key, tensor in captured.tensors.items():
        plain = tensor.detach().cpu().contiguous()
        values[key] = digest_hex(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    for one in captured.files:
        values[f"{one.group}/files"] = digest_hex(one.bytes())
    return values


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    if type(tree) is Typed:
        yield path, repr((tree.tag, tree.head))
    elif is_leaf(tree) and type(tree) is not TensorRef:
        yield path, repr(tree)
    for key, item in children(tree):
        yield from _leaves(item, f"{path}/{key}".lstrip("/"))


def _parts(state: Mapping[str, Any]) -> Iterator[Any]:
    for value in objects_of(state):
        yield from value.modules() if isinstance(value, torch.nn.Module) else (value,)


def _outside(value: Any, path: str, known: set[int], level: int) -> Iterator[tuple[str, str]]:
    """Yield name and digest of a program's values outside its state: objects with a state, and plain values."""
    if id(value) in known or level > _DEEPEST:
        return
    named = path if kind_of(value) == "plain" else f"{path} ({type(value).__qualname__})"
    if isinstance(value, DataLoader) and not has_state(value):
        # A plain loader's position differs in every process.
        yield f"{path} ({type(value).__qualname__})", str(os.getpid())
        return
    try:
        parts = flat({"it": value})
        digest = _digest(_values(parts, rng=False)) if "it" in parts else None
    except Exception:  # noqa: BLE001 (the value cannot be saved: look at the values in it)
        digest = None
    if digest is not None:
        yield named, digest
    else:
        for name, item in items_of(value):
            yield from _outside(item, path + name, known, level + 1)


def _digest(values: dict[str, str]) -> str:
    return digest_hex(json.dumps(values, sort_keys=True).encode())  # Restored options of a group have another order.


def _evaluated(program: Any) -> dict[str, str] | None:
    """Return the metrics that are equal in two evaluations, thus no times; None if the program cannot evaluate."""
    tries = []
    for _ in range(2):
        with preserved_rng():
            try:
                tries.append({name: float(value).hex() for name, value in program.evaluate(_SUITE).items()})
            except Exception:  # noqa: BLE001 (the program has no such suite)
                return None
    return {name: value for name, value in tries[0].items() if tries[1].get(name) == value}


if __name__ == "__main__":
    try:
        given = json.loads(sys.argv[1])
        (train if given["ranks"] == 1 else train_gang)(given)
    except CkptError as error:
        sys.exit(f"\n{error}")
