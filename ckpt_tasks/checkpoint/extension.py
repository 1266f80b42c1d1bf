"""What a feature may do at the moments of a run: it is a module in `extensions/` and a row in `features.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from ckpt_tasks.features import FEATURES, found_at
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.policy.space import CheckpointSize
from ckpt_tasks.format.records import Checkpoint, Rollback
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.history import History

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.memory.rank_snapshot import Part
    from ckpt_tasks.checkpoint.save.listening import Listeners
    from ckpt_tasks.checkpoint.save.parts import RankPart
    from ckpt_tasks.checkpoint.save.pipeline import Snapshot
    from ckpt_tasks.checkpoint.save.tenure import Tenure
    from ckpt_tasks.format.keys import Attempt
    from ckpt_tasks.state.groups import Groups
    from ckpt_tasks.state.tensors.placements import World
    from ckpt_tasks.storage.port import ReadableStore, Store

Metrics = Mapping[str, Any]
_Answer = TypeVar("_Answer")
_Arguments = ParamSpec("_Arguments")


@dataclass(frozen=True)
class Restored:
    """A restore that has ended: its step and state, and what the run's history says of it.

    `rollback`: the last rollback. `parent`: the committed checkpoint that the next one follows. `uncommitted`: the
    files of the restored snapshot, if storage lacks it. `first`: whether this is rank 0. `begins`: the run has no
    checkpoint, and begins at step 0.
    """

    step: int
    state: Groups
    rollback: Rollback | None
    _: KW_ONLY
    parent: Checkpoint | None
    uncommitted: ReadableStore | None
    first: bool
    begins: bool = False


class Attached(Protocol):
    """What a feature stores with one snapshot."""

    def files(self) -> Mapping[str, bytes]:
        """Return the files beside the snapshot in memory, from which `Restored.uncommitted` reads."""

    def put(self, store: Store, attempt: Attempt, after: int) -> Mapping[str, object]:
        """Put objects before the entry, and return fields of its event; `after`: the step of the committed parent."""

    def committed(self, listeners: Listeners) -> None:
        """The entry exists; the listeners of commits are told next."""


@dataclass(eq=False)
class Extension:
    """A feature of one Checkpointer; it overrides the moments that it needs, which do nothing here.

    The thread that commits calls `admitted`, `digested`, `refused` and `committed`, the training every other method.
    """

    config: CheckpointConfig
    history: History | None
    world: World | None

    def __post_init__(self) -> None:
        """The feature is made, with its Checkpointer."""

    def holding(self, holds: bool) -> None:
        """The process begins, or ends, to hold signals back until the end of a step."""

    def has_answered(self) -> bool | None:
        """Return True if it is known that the run's store has answered this host before."""

    def opened(self, format_bytes: bytes) -> None:
        """The run has been found, in each rank: its format.json; what the feature raises releases it in all ranks."""

    def owned(self, tenure: Tenure) -> None:
        """The run was taken."""

    def remembers(self, facts: Mapping[str, Any]) -> None:
        """Another process of this training remembers these facts for the feature; a restore follows."""

    def restoring(self, state: Mapping[str, Any], rollback: Rollback | None) -> None:
        """A restore begins; the feature may raise ConfigError."""

    def keeps_in(self) -> str | None:
        """Say where the feature keeps snapshots that outlive this process, as words."""

    def snapshots(self, rank: int) -> Iterable[Part] | None:
        """Return a rank's snapshots that the feature keeps on this host, newest first."""

    def goes_back(self) -> bool | None:
        """Return True if the next restore must take an older checkpoint than the newest one."""

    def older(self, known: Sequence[Checkpoint]) -> list[Checkpoint] | None:
        """Return the checkpoints that a restore may take, in rank 0 if it goes back; may raise StateError."""

    def returned(self, chosen: Checkpoint, state: Mapping[str, Any]) -> tuple[Rollback, Mapping[str, Any]] | None:
        """Return the rollback that the restore of a checkpoint was, with facts for the ledger's event, or None."""

    def restored(self, now: Restored) -> None:
        """A restore has ended, or training begins at step 0, because there is nothing to restore."""

    def wish(self, step: int, metrics: Metrics | None) -> str | None:
        """Return what rank 0 wishes of all ranks at a completed step, as words, or None."""

    def agreed(self, wish: str) -> None:
        """All ranks have heard a wish, at the same step; the feature to which it belongs may raise StateError."""

    def check(self, step: int, metrics: Metrics, *, saving: bool) -> None:
        """Check a step before it is saved, if it is; the feature may raise StateError.

        From here on metrics are floats, or copies of tensors on a device.
        """

    def stepped(self, step: int, state: Mapping[str, Any], metrics: Metrics) -> None:
        """A step has ended; it is not saved yet."""

    def captured(self, step: int, state: Groups) -> None:
        """The state of a step was read for a save; what the feature raises ends the save in all ranks."""

    def attached(self, after: int) -> Attached | None:
        """A snapshot is taken: return what the feature stores with it; `after`: the step of the committed parent."""

    def admitted(self, state: State, size: CheckpointSize) -> None:
        """Rank 0 begins to save: the run's state, and the size that a checkpoint of all ranks has."""

    def digested(self, snapshot: Snapshot, files: Sequence[tuple[RankPart, memoryview | None]]) -> None:
        """This rank's files of a snapshot are known, with the bytes that this process has, and not yet in storage."""

    def refused(self, attempt: Attempt) -> None:
        """No rank may restore this attempt."""

    def committed(self, checkpoint: Checkpoint) -> None:
        """A checkpoint exists."""

    def released(self, limit_s: float) -> None:
        """The run is given back after this call, which may wait this long for work after the last commit."""


class Extensions:
    """The features of one Checkpointer."""

    def __init__(self, features: Sequence[Extension] = ()):
        self._all = features
        self._at: dict[Callable[..., Any], list[Callable[..., Any]]] = {}  # By a moment, what is done at it.

    @classmethod
    def of(cls, config: CheckpointConfig, history: History | None, world: World | None = None) -> Extensions:
        """Make the features that a configuration asks for; without a history, those of an agent."""
        there = [one for one in FEATURES if one.kind is None and (history is not None or one.agent)]
        asked = [one for one in there if one.option is None or getattr(config, one.option)]
        return cls([found_at(one.place)(config, history, world) for one in asked])

    def holding(self, holds: bool) -> None:
        """Tell every feature that the process begins, or ends, to hold signals back."""
        self.tell(Extension.holding, holds)

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
        if (methods := self._at.get(moment)) is None:
            name = moment.__name__
            methods = [getattr(one, name) for one in self._all if getattr(type(one), name) is not moment]
            self._at[moment] = methods
        return methods
