"""The kinds of groups as live objects: which objects a kind has, and how to capture and restore them.

format/saved_kinds.py has the trees of these kinds. The process's random streams are a group without an object.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from ckpt_tasks.features import FEATURES, found_at
from ckpt_tasks.format.saved_kinds import RNG
from ckpt_tasks.state.kinds.generators import GeneratorPart, StreamsPart, capture_generator, capture_streams
from ckpt_tasks.state.kinds.group_parts import GroupKind
from ckpt_tasks.state.kinds.modules import ModulePart, capture_module, takes_part
from ckpt_tasks.state.kinds.names import Scope, unwrapped
from ckpt_tasks.state.kinds.optimizers import OptimizerPart, capture_optimizer, is_ordinary
from ckpt_tasks.state.kinds.plain import PlainPart, refuse_copies_of_state
from ckpt_tasks.state.kinds.stateful import StatefulPart
from ckpt_tasks.state.tensors.packing import has_state, pack
from ckpt_tasks.state.tensors.random_streams import GENERATORS
from ckpt_tasks.state.tensors.tensors import RankRule, TensorSet

_OURS = ("torch", "ckpt_tasks.state.data.", "ckpt_tasks.state.kinds.", "ckpt_tasks.integrations.")


def kind_of(value: Any) -> str:
    """Return the kind of a value: module, optimizer, generator, stateful object or plain value."""
    for name, kind in KINDS.items():
        if isinstance(value, kind.has) if isinstance(kind.has, type) else kind.has(value):
            return name
    raise AssertionError("every value is at least plain")


def may_draw(value: Any) -> bool:
    """Return True if foreign code (neither torch's nor ours) reads a value's state: it may draw random numbers."""
    return KINDS[kind_of(value)].draws(value)


@runtime_checkable
class Covering(Protocol):
    """An object of a state that saves the state of others, as those of a trainer."""

    def covered(self) -> list[Any]:
        """Return the objects that are saved through this one, or that need no state."""


def may_hold_others(value: Any) -> bool:
    """Return True if a value is a foreign object with a state: the state may include an optimizer's."""
    return kind_of(value) == "stateful" and not type(value).__module__.startswith(_OURS)


def _is_foreign(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] not in ("torch", "ckpt_tasks")


def _capture_plain(value: Any, name: str, scope: Scope, tensors: TensorSet, draws: bool) -> Any:
    tree = pack(value, name, tensors)
    refuse_copies_of_state(value, name)
    return tree


# The rows are in the order of capture; features, which may be modules too, come first. Memory that two groups share
# belongs to the first, so modules come before optimizers. A data loader's state_dict() may draw from a generator, so
# generators come after stateful objects.
KINDS: dict[str, GroupKind] = {
    **{one.kind: found_at(one.place) for one in FEATURES if one.kind},
    "module": GroupKind(
        nn.Module,
        lambda v, name, at, to, draws: capture_module(v, name, at.full_keys if to.many else (), to, is_plain=not draws),
        lambda v, name, tree, at, copies, kept: ModulePart(v, name, tree, copies, kept=kept),
        RankRule.REPLICATED,  # For parameters; capture_module sets the rule of buffers.
        draws=lambda v: any(map(takes_part, unwrapped(v).modules())),
    ),
    "optimizer": GroupKind(
        Optimizer,
        lambda v, name, at, to, draws: capture_optimizer(v, name, at.names, to, at.modules),
        lambda v, name, tree, at, copies, kept: OptimizerPart(
            v, name, tree, at.names, copies, modules=at.modules, kept=kept
        ),
        RankRule.REPLICATED,
        draws=lambda v: not is_ordinary(v),
    ),
    "stateful": GroupKind(
        lambda v: has_state(v) and not isinstance(v, GENERATORS),
        lambda v, name, at, to, draws: pack(v.state_dict(), name, to),
        lambda v, name, tree, at, copies, kept: StatefulPart(v, name, tree),
        RankRule.ONE,
        draws=_is_foreign,
    ),
    "generator": GroupKind(
        lambda v: isinstance(v, GENERATORS),
        lambda v, name, at, to, draws: capture_generator(v, name, to),
        lambda v, name, tree, at, copies, kept: GeneratorPart(v, name, tree),
        RankRule.BY_RANK,
        resizes=True,
    ),
    RNG: GroupKind(
        lambda v: False,
        lambda streams, name, at, to, draws: capture_streams(streams, to),
        lambda v, name, tree, at, copies, kept: StreamsPart(tree),
        RankRule.BY_RANK,
        resizes=True,
    ),
    "plain": GroupKind(
        lambda v: True,
        _capture_plain,
        lambda v, name, tree, at, copies, kept: PlainPart(at.state, name, tree, copies, can_assign=at.can_assign(name)),
        RankRule.ONE,
    ),
}
