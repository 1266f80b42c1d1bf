"""Agreements of the ranks of a training: the owner of the run, the checkpoints to try, the action at a step.

Every rank makes the same calls in the same order. A single process agrees with itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from ckpt_tasks.checkpoint.acquiring import share_tenure
from ckpt_tasks.checkpoint.memory.cache import SnapshotCache
from ckpt_tasks.checkpoint.ranks.exchange import StoreExchange, Together, all_or_none, find_exchange, from_first
from ckpt_tasks.checkpoint.ranks.horizon import Horizon
from ckpt_tasks.checkpoint.restore.restore import HostSnapshot
from ckpt_tasks.checkpoint.save.prepared import refuse_differences
from ckpt_tasks.checkpoint.save.tenure import Line, Tenure
from ckpt_tasks.errors import ConfigError, StateError
from ckpt_tasks.format.parsing import typed
from ckpt_tasks.format.records import Checkpoint, Rollback, checkpoint_item, read_checkpoint
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.state.tensors.placements import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DRAIN_S = 10.0  # Rank 0 waits this long until the other ranks have read its last answers.

_OF_HOST = ("memory_dir", "local_dir")  # These options may differ between ranks.

_log = logging.getLogger("ckpt_tasks")
_Found = TypeVar("_Found", bound=HostSnapshot)
Tried = tuple[list[Checkpoint], list[Checkpoint], Rollback | None]


class Agreement:
    """The agreements between the ranks of a given process group, of torch's default group, or of this process alone."""

    def __init__(self, process_group: ProcessGroup | None, config: CheckpointConfig):
        deadline_s = config.flush_timeout_s
        self.exchange = find_exchange(process_group, deadline_s)
        options = {name: str(value) for name, value in vars(config).items() if name not in _OF_HOST}
        self._options = json.dumps(options).encode()
        self.world = World(self.exchange.rank, self.exchange.size)
        self.deadline_s = deadline_s
        self._horizon = Horizon(self.exchange, deadline_s)
        self._topics = 0

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which does the writes that must happen only once."""
        return self.exchange.first

    @property
    def alone(self) -> bool:
        """Whether there is only one rank."""
        return self.world.size == 1

    def end_with(self, must_end: Callable[[], bool]) -> None:
        """Stop waiting for other ranks as soon as `must_end` returns True."""
        if isinstance(self.exchange, StoreExchange):
            self.exchange.must_end = must_end

    def topic(self, name: str) -> str:
        """Return a name for the next agreement, the same in every rank."""
        self._topics += 1
        return f"{name}/{self._topics}"

    def tenure(self, take: Callable[[], Tenure], line: Line, timeout_s: float, cache: SnapshotCache) -> Tenure:
        """Take the run directory in rank 0, which may wait `timeout_s` for another owner; see `share_tenure`."""
        deadline_s = self.deadline_s + timeout_s
        self.exchange.agree(self.topic("options"), self._options, _same_options, self.deadline_s)
        return share_tenure(self.exchange, self.topic("own"), take, line, cache, deadline_s=deadline_s)

    def together(self, name: str) -> AbstractContextManager[Together]:
        """Run a block in all ranks, or in no rank; see `all_or_none`."""
        return all_or_none(self.exchange, self.topic(name), self.deadline_s)

    def candidates(self, find: Callable[[], Tried]) -> Tried:
        """Return what `find` returns in rank 0: live checkpoints, candidates in order, the last rollback."""
        if self.alone:
            return find()

        def as_json() -> bytes:
            *both, rollback = find()
            items = [[checkpoint_item(c) for c in checkpoints] for checkpoints in both]
            return json.dumps([*items, asdict(rollback) if rollback else None]).encode()

        *both, rollback = json.loads(from_first(self.exchange, self.topic("candidates"), as_json, self.deadline_s))
        live, tried = ([read_checkpoint(item) for item in items] for items in both)
        return live, tried, rollback and typed(rollback, Rollback)

    def in_all(self, find: Callable[[], Sequence[_Found]]) -> Sequence[_Found]:
        """Return this host's snapshots that every rank has sealed and that fit together, in rank 0's order."""
        if self.alone:
            return find()
        sealed: dict[str, _Found] = {}
        word: bytes | BaseException
        try:
            sealed = {f"{snapshot.checkpoint.manifest} {snapshot.place}": snapshot for snapshot in find()}
            word = json.dumps({name: snapshot.seal.compared for name, snapshot in sealed.items()}).encode()
        except Exception as error:  # noqa: BLE001 (handed in: it is raised in every rank)
            word = error
        chosen = self.exchange.agree(self.topic("sealed"), word, _in_all, self.deadline_s)
        return [sealed[name] for name in json.loads(chosen)]

    def restored(self, step: int) -> None:
        """Begin to agree on steps, after a restore of `step` in all ranks."""
        self._horizon.begin(step)

    def at(self, step: int, *, save: bool, signal: int | None, wish: str | None) -> tuple[bool, int | None, str | None]:
        """Return the action of all ranks at a step: whether they save, which signal ends them, an extension's wish.

        The arguments are this rank's requests. Raises StoreError if rank 0 does not answer.
        """
        own = wish or (f"signal {signal}" if signal is not None else "save" if save else None)
        agreed = self._horizon.at(step, own)
        kind, _, number = (agreed or "none").partition(" ")
        if kind in {"none", "save"}:
            return kind == "save", None, None
        return (False, int(number), None) if kind == "signal" else (False, None, agreed)

    def drain(self) -> None:
        """Wait until the other ranks have read rank 0's answers: this process may run the c10d store that has them."""
        self.exchange.drain(_DRAIN_S)


def _same_options(words: list[bytes]) -> bytes:
    """Raise ConfigError if the ranks' configurations differ: they would save at other steps, or to other places."""
    first, *others = map(json.loads, words)
    for rank, options in enumerate(others, start=1):
        different = sorted(name for name in first if options.get(name) != first[name])
        if different:
            raise ConfigError(
                f"rank {rank} and rank 0 have different values of {', '.join(different)}",
                key=different[0],
                hint="Give every rank's CheckpointConfig the same options.",
            )
    return b""


def _in_all(words: list[bytes]) -> bytes:
    """Choose the snapshots that all ranks have sealed and that a commit would accept; they may still be uncommitted."""
    sealed = [*map(json.loads, words)]
    chosen = []
    for name in dict.fromkeys(name for names in sealed for name in names):
        lacking = [str(rank) for rank, names in enumerate(sealed) if name not in names]
        if lacking:
            _log.warning("%s is not used: rank %s does not have it", name, ", ".join(lacking))
            continue
        try:
            refuse_differences([names[name] for names in sealed])
            chosen.append(name)
        except StateError as error:
            _log.warning("%s is not used: %s", name, error)
    return json.dumps(chosen).encode()
