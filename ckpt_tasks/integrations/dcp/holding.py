"""The runs that this process holds for DCP's saves, and the checkpoints that it restored; both outlive the writers.

Invariants

1. All saves have one commit algorithm: the coordinator's process has a `Committer`, as a Checkpointer's first rank has.
2. A process holds a run from its first save to its end: if two processes train the run, one is refused or fenced.
3. As everywhere, a process that has neither restored nor saved does not commit to a run that has checkpoints.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from ckpt_tasks.checkpoint.acquiring import take_run
from ckpt_tasks.checkpoint.memory.cache import SnapshotCache
from ckpt_tasks.checkpoint.save.ending import end_with_interpreter
from ckpt_tasks.checkpoint.save.parts import RankPart, Saving, Stored
from ckpt_tasks.checkpoint.save.pruning import Pruner
from ckpt_tasks.checkpoint.save.tenure import Line, Tenure
from ckpt_tasks.errors import CkptError, ConfigError
from ckpt_tasks.format.keys import Attempt
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.history import Head, History
from ckpt_tasks.storage.port import Store
from ckpt_tasks.system import system

_END_S = 5.0


class RestoredState(NamedTuple):
    """A checkpoint of a run that this process has restored, and the newest ledger entry that committed a checkpoint."""

    checkpoint: Checkpoint
    known_n: int


restored: dict[str, RestoredState] = {}  # By the URL of the run; a save that continues from the checkpoint removes it.
_held: dict[str, SharedRun] = {}
_turns: dict[str, threading.Thread] = {}  # By the URL of the run; the thread whose save is under way.
_waiting: dict[str, list[int]] = {}
_staged: dict[str, int] = {}  # By the URL of the run; the copies of states whose saves have not begun to wait.
_ARRIVAL_S = 5.0
_LOOK_S = 0.01
_lock = system().lock()


def store_of(config: CheckpointConfig) -> Store:
    """Open the run's store."""
    return config.location.resolve(config.run_key).open()


def expect_turn(url: str) -> None:
    """Count a state that was copied: its save will begin in a thread of its own."""
    with _lock:
        _staged[url] = _staged.get(url, 0) + 1


def begin_turn(url: str, step: int) -> None:
    """Wait until no other thread of this process saves this run, and no waiting save is of an earlier step.

    DCP saves each state in a thread of its own, and several may be under way. A save that failed has no end that a
    writer sees: its turn is over with its thread, or when the main thread lets another thread save.
    """
    mine, since_s = threading.current_thread(), system().monotonic()
    with _lock:
        _staged[url] = max(_staged.get(url, 0) - 1, 0)
        waiting = _waiting.setdefault(url, [])
        waiting.append(step)
    while True:
        with _lock:
            other = _turns.get(url)
            free = other is None or other in (mine, threading.main_thread()) or not other.is_alive()
            if system().monotonic() - since_s > _ARRIVAL_S:
                _staged[url] = 0  # A save that was to come has failed before it.
            if free and step == min(waiting) and not _staged[url]:
                waiting.remove(step)
                _turns[url] = mine
                return
        system().sleep(_LOOK_S)


def end_turn(url: str) -> None:
    """Let the next save of this run begin."""
    with _lock:
        if _turns.get(url) is threading.current_thread():
            del _turns[url]


def held_run(config: CheckpointConfig) -> SharedRun:
    """Return this process's object for a run; the process holds the run from its first save on."""
    url = store_of(config).url
    with _lock:
        held = _held.get(url)
        if held is None or held.pid != os.getpid():
            held = _held[url] = SharedRun(config)
            end_with_interpreter(held)
        held.configure(config)
        return held


class SharedRun:
    """A run directory that this process holds for DCP, as its coordinator."""

    def __init__(self, config: CheckpointConfig):
        self.pid = os.getpid()
        self._config = config
        self._history = History(store_of(config))
        self._pruner = Pruner(self._history, config.retention_policy)
        self._line = Line()
        self._tenure: Tenure | None = None
        self._admitted: tuple[Head, State] | None = None
        self._unfinished: Attempt | None = None
        self._started_s = 0.0

    @property
    def url(self) -> str:
        """The URL of the run."""
        return self._history.store.url

    def configure(self, config: CheckpointConfig) -> None:
        """Use another configuration of the same run: its retention policy counts from now on."""
        self._config, self._pruner.policy = config, config.retention_policy

    def begin(self, step: int, world_size: int, newer: RestoredState | None) -> Saving:
        """Take the run if this process does not hold it, and name a new attempt.

        `newer` is a checkpoint that was restored after the last save. Raises the errors of a Checkpointer's first save:
        OwnedError, FencedError, ConfigError, StoreError.
        """
        self._started_s = system().monotonic()
        if newer is not None:
            self._line.follow(newer.checkpoint)
            self._line.known_n = max(self._line.known_n, newer.known_n)
        if step <= self._line.step:
            why = f"step {step} is not after step {self._line.step}, which was saved or restored before it"
            raise ConfigError(why, hint="Give each save a step of its own: CkptWriter(run, step=…).")
        tenure = self._own()
        assert tenure.committer is not None
        tenure.check()
        self._admitted = tenure.committer.admit()
        self.abandon()
        saving = tenure.new_saving(step, {}, metrics=None, epochs=None, interim=False)
        self._unfinished = saving.attempt
        return replace(saving, world_size=world_size)

    def commit(self, saving: Saving, parts: list[RankPart]) -> Checkpoint:
        """Commit the parts of all ranks; if this raises, nothing is committed."""
        tenure, admitted = self._tenure, self._admitted
        if tenure is None or tenure.committer is None or admitted is None or self._unfinished != saving.attempt:
            raise ConfigError("this save has not begun here", hint="Use one writer for one save.")
        committer = tenure.committer
        with committer.owning():
            entry, prepared = committer.commit(admitted, saving, parts, observed={}, began_s=self._started_s)
        self._unfinished = None
        new = entry.state.live[-1]
        self._line.committed(new, Stored.of(prepared.manifest.objects, prepared.index))
        committer.prune_behind(entry)
        return new

    def abandon(self) -> None:
        """Delete the objects of a save that did not reach its commit; raise FencedError if the run was taken over."""
        attempt, self._unfinished = self._unfinished, None
        if attempt is not None and self._tenure is not None and self._tenure.committer is not None:
            self._tenure.committer.abandon(attempt)

    def _own(self) -> Tenure:
        if self._tenure is None:
            location = self._config.location.resolve(self._config.run_key)
            self._tenure = take_run(
                self._history,
                self._config,
                SnapshotCache(self._history.store, None),
                self._pruner,
                self._line,
                single_writer=location.single_writer,
                take_over=False,
                flow_run_id=None,
            )
            try:
                assert self._tenure.committer is not None
                self._tenure.committer.check_line()
            except BaseException:
                self.end()
                raise
        self._tenure.beat()
        return self._tenure

    def end(self) -> None:
        """Release the run directory."""
        tenure, self._tenure = self._tenure, None
        if tenure is None or self.pid != os.getpid():
            return
        with suppress(CkptError):
            self._pruner.cancel(_END_S)
            tenure.quiet()
            tenure.release()
