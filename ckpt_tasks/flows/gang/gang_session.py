"""The session of a gang: the flow's process commands a program on many ranks; it neither trains nor owns the run.

An order is a message to the ranks over socket pairs; each rank carries it out in a `LocalSession`. The first failure
ends the gang: in gloo the remaining ranks would wait for a dead rank. The next restore starts a new gang.

Invariants

1. Every rank carries out an order, or the gang is killed and `clean` is False.
2. If a killed gang has owned the run, the agent releases the run, or the next gang takes it over.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from secrets import token_hex
from socket import gethostname
from types import TracebackType
from typing import Any, Self

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.extension import Extensions
from ckpt_tasks.checkpoint.interrupt import Interrupt, leave_flow_run
from ckpt_tasks.checkpoint.restore.reading import Run, run_of
from ckpt_tasks.checkpoint.save.listening import Listener
from ckpt_tasks.errors import (
    CheckpointNotFoundError,
    CkptError,
    NonFiniteError,
    OwnedError,
    RankError,
    StateError,
    StateMismatchError,
)
from ckpt_tasks.flows.gang.engine import Engine, Heard, RankProcess
from ckpt_tasks.flows.gang.messages import (
    HOST,
    Begin,
    Done,
    Logged,
    Message,
    Order,
    RankFailed,
    RankMoved,
    Stepped,
    Stop,
    Told,
    read_progress,
    tell_agent,
    write_config,
)
from ckpt_tasks.flows.gang.processes import Gang
from ckpt_tasks.flows.gang.reporting import GangRows, endings_of, hung, table_of
from ckpt_tasks.flows.session.session import Progress, watcher
from ckpt_tasks.format.records import Checkpoint, checkpoint_item, read_checkpoint
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.history import Head
from ckpt_tasks.run.ledger.metrics import GoingBack

_LOOK_S = 0.05
_STACKS_S = 2.0
_EXIT_S = 10.0
_ROOM_S = 1.0
# A step may take `flush_timeout_s`. A restore, a save (ranks watch each other in both) and a rank's first step, which
# may compile the model, may take this many times as long.
_LONGER = 3
_log = logging.getLogger("ckpt_tasks")


class GangSession:
    """Holds a program's live state in `ranks` processes; a `ProgramSession`.

    As a context manager it delays SIGTERM and Ctrl-C, as a Checkpointer does, and ends all of its processes. A rank
    that completes no step for `flush_timeout_s` counts as hung; its first step may take three times as long.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        program: str,
        params: Mapping[str, Any] | None = None,
        *,
        ranks: int,
        engine: Engine | None = None,
        flow_run_id: str | None = None,
    ):
        self.config = config
        self.clean = False
        self.position = 0
        self.metrics: Mapping[str, float] = {}
        self.step_s: float | None = None
        self.last_commit: Checkpoint | None = None
        self._begin = Begin(
            size=ranks,
            first_rank=0,
            local_size=ranks,
            host=HOST,
            port=0,
            config=write_config(config),
            program=program,
            params=dict(params or {}),
            flow_run_id=flow_run_id,
            command=sys.orig_argv,
        )
        self._flow_run_id = flow_run_id
        self._gang = engine or Gang()
        self._interrupt = Interrupt(Extensions.of(config, None).holding)
        self._listeners: list[Listener] = []
        self._run: Run | None = None
        self._rows = GangRows()
        self._done: Mapping[int, Done] = {}  # The answers of the ranks to the last order.
        # The failed steps, for the ranks of the next gang: the ranks that saw these steps fail have ended.
        self._back = GoingBack()
        self._owner_pid = 0  # The process of the last gang's rank 0, which may have owned the run.

    def __enter__(self) -> Self:
        self._gang.prepare()
        self._interrupt.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interrupt.install()  # Again, after hold_signals: a second signal must wait until the run is released.
        try:
            self._end(keep=error is not None or self._interrupt.pending is not None)
        except Exception as second:
            if error is None:
                raise
            error.add_note(f"The ranks could not end in order either: {second}")
        finally:
            self._gang.close()
            with suppress(CkptError):
                self._release()
            self._interrupt.uninstall()
            self._interrupt.deliver()

    @property
    def ranks(self) -> int:
        """The number of ranks that train: fewer than requested if the engine has no room for all."""
        return len(self._gang.ranks) or self._begin.size

    @property
    def gangs(self) -> Sequence[Mapping[str, str]]:
        """The gangs of this process, newest first, as rows of texts."""
        return self._rows.rows

    def checkpoints(self) -> list[Checkpoint]:
        """List the live checkpoints, newest commit first."""
        with suppress(CheckpointNotFoundError):
            return self._opened().checkpoints()
        return []

    def head(self) -> Head:
        """Return the head of the ledger of the run that the gang trains."""
        return self._opened().head()

    def listen(self, listener: Listener) -> None:
        """Call a listener after every commit, failed save and restore from now on, but only during orders."""
        self._listeners.append(listener)

    def note(self, what: str, **fields: Any) -> None:
        """Write an event into the run's history."""
        self._carry_out("note", self._gang.ranks[:1], what=what, fields=fields)

    def restore(self) -> int:
        """Restore the newest good checkpoint in every rank; if no gang runs, start a gang first. See `LocalSession`."""
        try:
            if self._gang.ranks and self._gang.has_more():
                self._end(keep=True)
            if not self._gang.ranks:
                self._start()
            self._order_restore()
            self._back.went_back(self.position)
            if self._gang.ranks:  # None are left after a signal during the restore, even if its handler returned.
                on = self._rows.began(self._gang.ranks, gethostname(), self._done)
                self.note("gang", step=self.position, on=on)
        except OwnedError as error:
            if error.same_flow_run:
                leave_flow_run(self._flow_run_id, error)
            raise
        self.clean = True
        return self.position

    def run(self, until: int) -> None:
        """Train from the position to step `until` in every rank."""
        self._order("run", until=until)
        self._rows.trained(self._done)

    def save(self, step: int) -> None:
        """Commit the live state as `step`, if that is not committed yet.

        If there is now room for more ranks, the next batch begins with a restore in a larger gang.
        """
        self._order("save", step=step)
        self.clean = not self._gang.has_more()

    def evaluate(self, checkpoint: Checkpoint, suite: str) -> Mapping[str, float]:
        """Measure a checkpoint with a fresh program on all ranks together; if no gang runs, start a gang first."""
        if not self._gang.ranks:
            self._start()
        self._order("evaluate", checkpoint=checkpoint_item(checkpoint), suite=suite)
        self.clean = False
        return self._done[0].measured

    def discard(self) -> None:
        """Kill the gang; the next restore starts a new gang."""
        self.clean = False
        self._gang.kill()
        self._gang.prepare()

    def record_failure(self, **fields: Any) -> None:
        """Take the run over to record a failed attempt in its history, and release the run."""
        with self._taken() as ckpt:
            ckpt.note("failure", **fields)

    def hold_signals(self, hold: bool) -> None:
        """If `hold`, delay SIGTERM and Ctrl-C until a step ends; otherwise deliver them at once, also a pending one."""
        if hold:
            self._let_through()
            self._interrupt.install()
        else:
            self._interrupt.uninstall()
            self._interrupt.deliver()

    def _order_restore(self) -> None:
        """Restore; if only the ranks that have saved the checkpoint can, wait until there is room for as many."""
        try:
            self._order("restore", back=vars(self._back))
        except StateMismatchError as error:
            if not self._gang.keep_to(error.of_ranks):
                raise
            _log.warning("%s. Now %s ranks are waited for.", str(error).rstrip("."), error.of_ranks)
            self._release()
            self._start()
            self._order("restore", back=vars(self._back))

    def _start(self) -> None:
        while not self._gang.has_room():
            self._let_through()
            time.sleep(_ROOM_S)
        self._gang.start(replace(self._begin, secret=token_hex()))
        self._owner_pid = self._gang.ranks[0].pid

    def _order(self, name: str, **arguments: Any) -> None:
        """Have all ranks carry out an order, then deliver a pending signal; if its handler returns, continue."""
        while self._carry_out(name, self._gang.ranks, **arguments):
            self._interrupt.deliver()  # The ranks have committed and released the run.
        if name != "run":  # After "run", deliver a late signal only when the next order has saved the steps.
            self._let_through()

    def _let_through(self) -> None:
        """Release the run and deliver a pending signal; call this only if no step follows the last commit."""
        if self._interrupt.pending is not None:
            self.clean = False
            self._end(keep=True)
            self._interrupt.deliver()

    def _end(self, *, keep: bool) -> None:
        """Have the ranks finish their running saves, release the run, and end."""
        if self._gang.ranks:
            self._carry_out("close", self._gang.ranks, keep=keep)
            self._gang.await_end(_EXIT_S)
            self._gang.kill()

    def _carry_out(self, name: str, ranks: Sequence[RankProcess], **arguments: Any) -> bool:
        """Have ranks carry out an order; return True if a signal stopped it. Raises an error of any rank."""
        done: dict[int, Done] = {}
        try:
            self._gang.tell(ranks, Order(name=name, arguments=arguments))
            self._await(name, {rank.rank: time.monotonic() for rank in ranks}, done)
        # Catch a signal's exception, too: the ranks are in the middle of a step.
        except BaseException as error:
            if isinstance(error, NonFiniteError) and error.rolls_back:
                self._back.failed(error.step or 0, error.began)
            self.clean = False
            self._rows.ended(error, self.position)
            self._gang.kill()
            raise
        if name == "close":
            return False
        first, self._done = done[0], done
        self.position, self.metrics, self.step_s = first.position, first.metrics, first.step_s
        self.last_commit = read_checkpoint(first.commit) if first.commit else None
        stopped = next((each.stopped for each in done.values() if each.stopped), None)
        if stopped and self._interrupt.pending is None:
            self._interrupt.pending = stopped  # Another process has sent a rank this signal.
        return stopped is not None

    def _await(self, name: str, moved_s: dict[int, float], done: dict[int, Done]) -> None:
        """Receive messages until `done` has each rank's answer; `moved_s` has the time of each rank's last progress."""
        stopping, deadline_s = False, math.inf if name == "evaluate" else self.config.flush_timeout_s
        while len(done) < len(moved_s):
            if name == "run" and self._interrupt.pending is not None and not stopping:
                self._gang.tell(self._gang.ranks, Stop())
                stopping = True
            heard = self._gang.hear(_LOOK_S)
            if any(isinstance(message, RankFailed) for _, message in heard):
                # If a rank fails because another rank has ended, the error must name the ended rank.
                heard += self._gang.hear_causes()
            for rank, message in heard:
                self._take(rank, message)
                if isinstance(message, RankMoved):  # This is progress of all ranks: others may wait for this rank.
                    moved_s = dict.fromkeys(moved_s, time.monotonic())
                elif not isinstance(message, Logged):  # Logging is not progress: a thread may log while training hangs.
                    moved_s[rank.rank] = time.monotonic()
                if isinstance(message, Done):
                    done[rank.rank] = message
            self._check([(rank, message) for rank, message in heard if rank.rank not in done])
            silent_s = {rank: time.monotonic() - at_s for rank, at_s in moved_s.items() if rank not in done}
            late = [rank for rank, for_s in silent_s.items() if for_s > deadline_s]
            if late and not self._may_be_busy(name, late, max(silent_s.values())):
                self._gang.write_stacks(_STACKS_S)
                raise hung(self._gang.ranks, late, max(silent_s.values()), self.position)

    def _may_be_busy(self, name: str, late: list[int], silent_s: float) -> bool:
        """Return True if the late ranks may need more than a step's time for their work, and no rank is stopped."""
        longer = name != "run" or any(self._gang.ranks[rank].step == 0 for rank in late)
        if not longer or silent_s > _LONGER * self.config.flush_timeout_s:
            return False
        self._gang.look()
        return not any(rank.is_stopped for rank in self._gang.ranks)

    def _check(self, heard: Heard) -> None:
        """Raise an error if a rank has ended or failed; of several failures, raise the first: it causes the others."""
        ended = {rank.rank: rank for rank, message in heard if message is None}
        if ended:
            self._gang.look()
            error = RankError(
                endings_of([rank for rank in self._gang.ranks if rank.rank in ended or rank.lost]),
                step=self.position,
                hint="The other ranks were ended.",
            )
            error.add_note(table_of(self._gang.ranks))
            for rank in ended.values():
                if rank.written:
                    error.add_note(f"Rank {rank.rank} wrote:\n{rank.written}")
            raise error
        failed = [(rank, message) for rank, message in heard if isinstance(message, RankFailed)]
        if failed:
            rank, why = min(failed, key=lambda pair: pair[1].at_s)
            self.position = why.step or self.position
            raise why.exception(rank.rank)

    def _take(self, rank: RankProcess, message: Message | None) -> None:
        if isinstance(message, Logged):
            logging.getLogger(message.logger).log(message.level, "%s", message.text)
        elif isinstance(message, Stepped):
            rank.step = message.steps[-1]["step"]
            for progress in map(read_progress, message.steps if rank.rank == 0 else []):
                self._stepped(progress)
        elif isinstance(message, Told):
            for listener in self._listeners:
                try:
                    tell_agent(listener, message)
                except Exception:  # noqa: BLE001 (logged: a listener must not stop training)
                    _log.exception("A listener failed after an event %r; the run continues", message.event)

    def _stepped(self, progress: Progress) -> None:
        self.position, self.metrics = progress.step, progress.metrics
        self._back.passed(progress.step)
        if watch := watcher.get():
            watch(progress)

    def _opened(self) -> Run:
        if self._run is None:
            self._run = run_of(self.config)
        return self._run

    def _release(self) -> None:
        """Release the run if a killed gang still owns it."""
        with suppress(StateError, CheckpointNotFoundError), self._taken():
            pass

    def _taken(self) -> Checkpointer:
        """Take the run over from rank 0 of an ended gang; the returned Checkpointer releases it when its block ends.

        Raises StateError if rank 0 does not own the run.
        """
        owner = self.head().state.owner
        if (
            owner is None
            or owner.released
            or owner.pid != self._owner_pid
            or owner.flow_run_id != self._flow_run_id
            or self._gang.ranks
        ):
            raise StateError("the ranks that have ended do not hold the run directory")
        # These directories belong to the ranks, and the next gang needs their contents.
        config = replace(self.config, memory_dir=None, local_dir=None)
        ckpt = Checkpointer(config, take_over=True, flow_run_id=self._flow_run_id)
        ckpt.acquire()
        return ckpt
