"""What a feature may do at the moments of a run, and the table of the features.

A feature is a module in `extensions/` and a row of `FEATURES`. Nothing else imports the module, so the product without
both still saves and restores; `tests/checkpoint/test_extensions.py` takes each one out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from ckpt_tasks.format.layout.steps import StepMetrics
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.policy.space import CheckpointSize
from ckpt_tasks.format.records import Checkpoint, Rollback
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.history import History

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.save.tenure import Tenure

Metrics = Mapping[str, Any]
_Answer = TypeVar("_Answer")
_Arguments = ParamSpec("_Arguments")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A restore that has ended: its step and state, and what the run's history says of it.

    `rollback`: the last rollback. `parent`: the committed checkpoint that the next one follows. `newer`: the metrics of
    steps after `parent`. `first`: whether this is rank 0.
    """

    step: int
    state: Mapping[str, Any]
    rollback: Rollback | None
    parent: Checkpoint | None
    newer: Sequence[StepMetrics]
    first: bool


class Extension:
    """A feature of one Checkpointer; it overrides the moments that it needs, which do nothing here.

    The thread that commits calls `admitted` and `committed`, the training every other method.
    """

    goes_back = False  # True if the next restore must take an older checkpoint than the newest one.

    def __init__(self, config: CheckpointConfig, history: History | None):
        self.config = config
        self.history = history

    def holding(self, holds: bool) -> None:
        """The process begins, or ends, to hold signals back until the end of a step."""

    def owned(self, tenure: Tenure) -> None:
        """The run was taken."""

    def remembers(self, facts: Mapping[str, Any]) -> None:
        """Another process of this training remembers these facts for the feature; a restore follows."""

    def restoring(self, state: Mapping[str, Any], rollback: Rollback | None) -> None:
        """A restore begins; the feature may raise ConfigError."""

    def older(self, known: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Return the checkpoints that a restore may take while the feature `goes_back`; may raise StateError."""
        return [*known]

    def returned(self, chosen: Checkpoint, state: Mapping[str, Any]) -> tuple[Rollback, Mapping[str, Any]] | None:
        """Return the rollback that the restore of a checkpoint was, with facts for the ledger's event, or None."""

    def restored(self, now: Restored) -> None:
        """A restore has ended."""

    def wish(self, step: int, metrics: Metrics | None) -> str | None:
        """Return what rank 0 wishes of all ranks at a completed step, as words, or None."""

    def agreed(self, wish: str) -> None:
        """All ranks have heard a wish, at the same step; the feature to which it belongs may raise StateError."""

    def check(self, step: int, metrics: Metrics, *, saving: bool) -> None:
        """Check the metrics of a step, before it is saved if it is; the feature may raise StateError."""

    def stepped(self, step: int, state: Mapping[str, Any]) -> None:
        """A step has ended; it is not saved yet."""

    def admitted(self, state: State, size: CheckpointSize) -> None:
        """Rank 0 begins to save: the run's state, and the size that a checkpoint of all ranks has."""

    def committed(self, checkpoint: Checkpoint) -> None:
        """A checkpoint exists."""

    def released(self, limit_s: float) -> None:
        """The run is given back after this call, which may wait this long for work after the last commit."""


@dataclass(frozen=True)
class Feature:
    """A row: where the feature is, and the option that asks for it (None: it is always there).

    `agent`: a process that starts the ranks of a gang, and trains nothing itself, has the feature too.
    """

    place: str
    option: str | None = None
    agent: bool = False


_HERE = "ckpt_tasks.checkpoint.extensions"
# In the order in which they are asked: what may refuse a step comes first.
FEATURES = [
    Feature(f"{_HERE}.going_back:GoingBackFromBadMetrics"),
    Feature(f"{_HERE}.left_out:LeftOutBatches"),
    Feature(f"{_HERE}.space_forecast:SpaceForecast"),
    Feature(f"{_HERE}.live_steps:LiveSteps"),
    Feature(f"{_HERE}.compiled:CompiledCode", option="compile_cache"),
    Feature(f"{_HERE}.notices:SpotNotices", option="spot_notices", agent=True),
]


class Extensions:
    """The features that a configuration asks for; without a history, those of an agent."""

    def __init__(self, config: CheckpointConfig, history: History | None):
        there = [one for one in FEATURES if history is not None or one.agent]
        asked = [one for one in there if one.option is None or getattr(config, one.option)]
        self._all: list[Extension] = [_class_of(one.place)(config, history) for one in asked]
        self._at: dict[str, list[Callable[..., Any]]] = {}  # By the name of a moment, what is done at it.

    def __iter__(self) -> Iterator[Extension]:
        return iter(self._all)

    @property
    def goes_back(self) -> bool:
        """Whether the next restore must take an older checkpoint than the newest one."""
        return any(one.goes_back for one in self)

    def holding(self, holds: bool) -> None:
        """Tell every feature that the process begins, or ends, to hold signals back."""
        self.tell(Extension.holding, holds)

    def older(self, known: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Return the checkpoints that every feature which goes back allows."""
        allowed = [*known]
        for one in self:
            allowed = one.older(allowed) if one.goes_back else allowed
        return allowed

    def tell(
        self,
        moment: Callable[Concatenate[Extension, _Arguments], _Answer],
        *args: _Arguments.args,
        **named: _Arguments.kwargs,
    ) -> _Answer | None:
        """Tell every feature of a moment, and return the first answer: `tell(Extension.stepped, step, state)`.

        Only the features that override the moment are called.
        """
        first = None
        for method in self.at(moment):
            answer = method(*args, **named)
            first = answer if first is None else first
        return first

    def at(self, moment: Callable[..., Any]) -> Sequence[Callable[..., Any]]:
        """Return the methods of the features that override a moment."""
        name = moment.__name__
        if (methods := self._at.get(name)) is None:
            methods = self._at[name] = [getattr(one, name) for one in self if getattr(type(one), name) is not moment]
        return methods


def _class_of(place: str) -> type[Extension]:
    module, _, name = place.partition(":")
    found: type[Extension] = getattr(import_module(module), name)
    return found
