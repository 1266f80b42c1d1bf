"""A rank's session: its program trains one model together with those of the other ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.errors import ConfigError, ProgramError
from ckpt_tasks.flows.session.local_session import LocalSession, Program
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.state.groups import ByRank, objects_of
from ckpt_tasks.state.tensors.placements import is_sharded


class RankSession(LocalSession):
    """The session of one rank of several, in its process: every rank gets the metrics of all ranks together.

    A metric is the mean over the ranks that return it, the amount of data is their sum. A program may name another rule
    for a metric: `reduce = {"correct": "sum"}`, of "mean", "sum", "min" and "max".
    """

    def __init__(self, ckpt: Checkpointer, program: str, params: Mapping[str, Any]):
        super().__init__(ckpt, program, params)
        self.ranks = dist.get_world_size()
        self._group: Any = None

    def evaluate(self, checkpoint: Checkpoint, suite: str) -> Mapping[str, float]:
        """Measure a checkpoint in all ranks; a signal ends this at once, since nothing is left to commit."""
        self.hold_signals(False)
        return super().evaluate(checkpoint, suite)

    def take_step(self, program: Program) -> dict[str, float]:
        """Make one step; raise NonFiniteError at once if `on_non_finite` says so of this rank's metrics."""
        own = super().take_step(program)
        if self.config.on_non_finite != "warn" and not all(map(math.isfinite, own.values())):
            # This raises, and does not wait for the other ranks: they may be in a collective of this step.
            self.ckpt.step(self.ckpt.position + 1, program.state, metrics=own)
        return own

    def _of_all_ranks(self, program: Program, own: dict[str, float]) -> dict[str, float]:
        rules = _rules(program)
        if self.ranks == 1:
            return own
        if self._group is None:  # A group of its own keeps the metrics apart from the program's collectives.
            self._group = dist.new_group(backend="gloo")
        each: list[dict[str, float]] = [json.loads(said) for said in _gather(json.dumps(own).encode(), self._group)]
        names = dict.fromkeys(name for metrics in each for name in metrics)
        return {
            name: _RULES[rules.get(name, "mean")]([metrics[name] for metrics in each if name in metrics])
            for name in names
        }


_RULES: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values) if all(map(math.isfinite, values)) else sum(values),
    "sum": sum,
    "min": min,
    "max": max,
}
_BYTES = 1 << 10  # Most metrics of a rank fit into this, so that one collective exchanges them.


def _rules(program: Any) -> dict[str, str]:
    """Return the program's rules by metric; raise ProgramError for an unknown rule."""
    named = {str(getattr(program, "unit", "samples")): "sum", **getattr(program, "reduce", {})}
    for name, rule in named.items():
        if rule not in _RULES:
            raise ProgramError(
                f"the program's `reduce` has the rule {rule!r:.80} for the metric {name!r}",
                hint=f"Rules are {', '.join(_RULES)}.",
            )
    return named


def _gather(own: bytes, group: Any) -> list[bytes]:
    """Return each rank's bytes, in the order of ranks."""
    framed = len(own).to_bytes(8, "little") + own
    each = _exchange(framed, _BYTES, group)
    longest = max(int.from_bytes(data[:8], "little") for data in each) + 8
    if longest > _BYTES:
        each = _exchange(framed, longest, group)
    return [data[8 : 8 + int.from_bytes(data[:8], "little")] for data in each]


def _exchange(data: bytes, size: int, group: Any) -> list[bytes]:
    sent = torch.frombuffer(bytearray(data[:size].ljust(size, b"\0")), dtype=torch.uint8)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group=group)
    return [each.numpy().tobytes() for each in received]


def check_parallel(program: Any, ranks: int) -> None:
    """Raise ConfigError if a program has no DistributedDataParallel, FSDP or DTensor in its state or attributes.

    A `ByRank` is enough, too: it shows that the program knows its ranks.
    """
    held = (*objects_of(program.state), *objects_of(getattr(program, "__dict__", {})))
    if not any(map(_is_parallel, held)):
        raise ConfigError(
            f"the program holds no DistributedDataParallel, FSDP or DTensor: {ranks} ranks would train the same",
            hint="Wrap its model (DistributedDataParallel, fully_shard), or train with one rank.",
        )


def _is_parallel(value: Any) -> bool:
    if not isinstance(value, torch.nn.Module):
        return isinstance(value, ByRank) or is_sharded(value)
    from torch.distributed.fsdp import FullyShardedDataParallel  # Its import takes long, and one rank does not need it.

    if any(map(is_sharded, value.parameters())):
        return True
    return any(isinstance(each, (DistributedDataParallel, FullyShardedDataParallel)) for each in value.modules())
