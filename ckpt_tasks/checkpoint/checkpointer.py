"""The facade: one object for any training loop, and what a flow's hooks use as well."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from ckpt_tasks.checkpoint.interrupt import Interrupt
from ckpt_tasks.checkpoint.tenure import Tenure
from ckpt_tasks.errors import OwnerError
from ckpt_tasks.format.gc_pause import gc_paused
from ckpt_tasks.format.ledger import Checkpoint
from ckpt_tasks.ledger.config import CheckpointConfig
from ckpt_tasks.ledger.history import History
from ckpt_tasks.ledger.metrics import FiniteMetrics
from ckpt_tasks.policy.retention import Verdict
from ckpt_tasks.reading.reading import Run
from ckpt_tasks.reading.restore import RestoreReport, restore_newest
from ckpt_tasks.saving.committer import Line
from ckpt_tasks.saving.ending import end_with_interpreter
from ckpt_tasks.saving.listening import Listener
from ckpt_tasks.saving.parts import encode_groups
from ckpt_tasks.saving.saver import Saver
from ckpt_tasks.saving.schedule import Position, SaveSchedule, check_step, point
from ckpt_tasks.snapshot.cache import SnapshotCache
from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.processes import Process
from ckpt_tasks.state.unsaved import warn_of_unsaved
from ckpt_tasks.upkeep.pruning import Pruner

__all__ = ["Checkpointer", "hold_signals"]

_PRUNE_S = 10.0  # for the prune behind the last commit, at a close in order; what is left is the next owner's
_log = logging.getLogger("ckpt_tasks")
Metrics = Mapping[str, float]


class Checkpointer:
    """Save and restore the state of one run.

    The first restore or save takes the run directory: one process holds it at a time, and one that lost it gets
    FencedError at its next save. `take_over` takes it from an owner that may be alive. `flow_run_id` names the flow run
    that this process belongs to; another attempt of the same flow run waits for this one to let go.

    A save blocks training for one copy of the state into memory; a thread writes and commits it. The next call raises
    what fails there. The copies outlive the process where there is a memory directory, for the next one on this host.

    As a context manager it holds SIGTERM and Ctrl-C back until the next `step()`, which saves, commits and hands the
    signal on; at the end it waits for what is on its way and lets the run directory go.

    It belongs to the process that made it. A forked child has neither its memory nor its ownership nor its signal
    handlers: saves, restores and waits raise ConfigError there, and the end of the block does nothing.
    """

    def __init__(self, config: CheckpointConfig, *, take_over: bool = False, flow_run_id: str | None = None):
        self.config = config
        self.last_restore: RestoreReport | None = None
        self.freed_bytes = 0  # of snapshots in this host's memory, by prune()
        self._process = Process()
        self._location = config.location.resolve(config.run_key)
        self._history = History(self._location.open())
        self._take_over = take_over
        self._flow_run_id = flow_run_id
        self._tenure: Tenure | None = None
        self._interrupt = Interrupt()
        self._entered = False
        self._pruner = Pruner(self._history, config.retention_policy)
        self._cache = SnapshotCache(self._history.store, config.memory_dir, config.local_dir)
        self._line = Line()
        self._schedule = SaveSchedule(self._history, config)
        self._saver = Saver(self._history, config, self._cache, self._pruner, self._schedule)
        self._damaged: tuple[str, ...] = ()
        self._knows_line = False  # this owner has seen that nobody else has committed anything
        self._finite = FiniteMetrics(config.on_non_finite)
        self._at = Position()

    def __enter__(self) -> Self:
        self._process.check()
        self._entered = True
        self._interrupt.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._process.is_here:
            return
        self._entered = False
        self._interrupt.install()  # it may have been given back for a delay: a second signal waits for the release
        if error is None and self._interrupt.pending is None and (steps := self._at.unsaved):
            _log.warning("Steps %s are not saved: no save was due. Call save(step, state) after the last step.", steps)
        try:
            # After an error, or a signal, whoever tries again on this host goes on from memory.
            self._close(keep=error is not None or self._interrupt.pending is not None)
        except Exception as second:
            if error is None:
                raise
            if second is not error:
                error.add_note(f"The last snapshot could not be saved either: {second}")
        finally:
            self._interrupt.deliver()  # also after an error: whoever sent the signal wants this process to end

    @property
    def last_commit(self) -> Checkpoint | None:
        """The checkpoint that this process committed last."""
        return self._line.last_commit

    @property
    def position(self) -> int:
        """The steps completed: as restored, or as last reported by `step()` or `save()`; 0 before either."""
        return self._at.step

    @property
    def run(self) -> Run:
        """The run as everybody may read it; nothing is taken or written by it."""
        return Run(self._history, self._tenure.run_key if self._tenure else self.config.run_key)

    def restore(self, state: dict[str, Any], *, step: int | None = None) -> int:
        """Restore the newest good checkpoint (or that of `step`) into the state; return its step, 0 if there is none.

        Modules, optimizers and other statefuls are restored in place, plain values of `state` are replaced. Strict
        and all or nothing. A damaged checkpoint is passed over and the next older one is taken; `last_restore` says
        which and why. Raises StateMismatchError, CheckpointNotFoundError, NoGoodCheckpointError, OwnedError or
        RunMismatchError; the state is untouched then.
        """
        self._own()
        self._wait_idle()
        self._pruner.cancel(_PRUNE_S)  # it would remove what is about to be restored
        known = candidates = self.checkpoints()
        in_memory = self._cache.found(known)
        if step is not None or self._finite.failed_step is not None:
            candidates = self._finite.older(known) if step is None else [self.run.find(step)]
            digests = {one.manifest_digest for one in candidates}
            in_memory = [one for one in in_memory if one.checkpoint.manifest_digest in digests]
        if not candidates and not in_memory:
            self._knows_line = True
            self._saver.restored(None)
            self._at.restored(0, None)  # also after steps of which nothing was committed: they are taken again
            self._deliver_signal()
            return 0
        damaged, self._damaged = self._damaged, ()
        found, report, cached = restore_newest(
            self._history.store, candidates, state, run_key=self.config.run_key, damaged=damaged, in_memory=in_memory
        )
        if report.skipped or report.damaged:
            self.note("fallback", step=found.step, skipped=[*map(list, report.skipped)], damaged=[*report.damaged])
        if step is None and (failed_step := self._finite.went_back(found.step)) is not None:
            self.note("rollback", step=found.step, failed=failed_step)
        self.last_restore, self._knows_line = report, True
        self._at.restored(found.step, found.epochs)
        self._saver.restored(cached.slot if cached is not None else None)
        if found.n < 0:  # storage does not have it yet
            self._line.parent = known[0] if known else None
            self._snapshot(found.step, state, found.metrics, found.epochs, keep=True, interim=found.interim)
        else:
            self._line.parent = found
            if cached is None:  # what lies in memory or in a local copy says nothing of the bytes in the store
                self._pruner.verified.add(found.manifest_digest)
        self._saver.listeners.restored(report)
        self._deliver_signal()
        return found.step

    def step(
        self,
        step: int,
        state: dict[str, Any],
        *,
        metrics: Metrics | None = None,
        epoch: int | None = None,
    ) -> bool:
        """Report a completed optimizer step; save when the policy says so, and at a pending SIGTERM or Ctrl-C.

        `step` counts completed optimizer steps, `epoch` completed epochs. Returns whether a snapshot was taken;
        training waits for it alone: a thread commits it. Before a signal is handed on, it is committed. Raises
        FencedError if this process has lost the run, NonFiniteError, and what went wrong with an earlier snapshot.
        """
        step = check_step(step, self._at.step)
        self._raise_failure()
        now = point(step, epoch)
        ending = self._interrupt.pending is not None
        due = self._schedule.due(self._at.last, now)
        taken = due or ending
        self._finite.check(step, metrics or {}, saving=taken)
        self._at.stepped(now)
        if taken:
            keep = ending or self.config.retention_policy.preserves(step)
            self._snapshot(step, state, metrics, epoch, keep=keep, interim=not due)
        elif self._knows_line and self._saver.unprepared:
            self._saver.prepare(capture(state))
        if ending:
            self._saver.wait()
        self._deliver_signal()
        return taken

    def save(
        self,
        step: int,
        state: dict[str, Any],
        *,
        metrics: Metrics | None = None,
        epoch: int | None = None,
        interim: bool = False,
    ) -> Checkpoint:
        """Save now; the checkpoint is committed when this returns. What the policy no longer keeps is pruned behind it.

        `interim` says that only a batch has ended. Where the configuration has an interval, the checkpoint does not
        count among the newest `max_num_checkpoints` then, and the interval goes on as if it were not there.
        Raises UnsupportedStateError, NonFiniteError (nothing was written), StoreError, FencedError or
        CommitUncertainError; the newest checkpoint is still the old one then.
        """
        step = check_step(step, self._at.step)
        self._raise_failure()
        self._finite.check(step, metrics or {}, saving=True)
        self._snapshot(step, state, metrics, epoch, keep=True, interim=interim)
        self._saver.wait()
        self._deliver_signal()
        saved = self.last_commit
        assert saved is not None
        return saved

    def wait(self) -> None:
        """Return when everything that was saved is committed; raise what went wrong. Pruning goes on behind.

        Raises StoreError where the store takes nothing of a checkpoint for `flush_timeout_s`.
        """
        self._process.check()
        self._saver.wait()

    def close(self) -> None:
        """Wait for what is on its way, release the run directory and give the signals back.

        A later save takes the directory again. The prune behind the last commit has 10 s; the next owner prunes what
        is left then.
        """
        if self._process.is_here:
            self._close(keep=False)

    def _close(self, *, keep: bool) -> None:
        keep = keep or not self._knows_line  # who never trained leaves all as it was
        try:
            self.wait()
        except BaseException:
            keep = True  # storage may lack what is in memory
            raise
        finally:
            with self._saver.turn():
                self._interrupt.uninstall()
                self._release(prune_s=0 if keep else _PRUNE_S)
                self._saver.forget_plan()
                self._cache.close(keep=keep)

    def _release(self, *, prune_s: float) -> None:
        self._saver.wait_idle()
        self._pruner.finish(prune_s)
        if self._tenure is not None:
            self._tenure.quiet()
            if self._saver.release():
                self._tenure = None

    def checkpoints(self) -> list[Checkpoint]:
        """List the live checkpoints, newest commit first."""
        return self.run.checkpoints()

    def pin(self, step: int, reason: str = "by hand") -> None:
        """Keep the checkpoint of a step whatever the policy says."""
        owner = self._own().owner
        self._saver.wait()
        self._pruner.pin(owner, step, reason)

    def unpin(self, step: int) -> None:
        """Leave the checkpoint of a step to the policy again."""
        owner = self._own().owner
        self._saver.wait()
        self._pruner.pin(owner, step, None)

    def note(self, what: str, **fields: Any) -> None:
        """Write an event into the run's history: a fall-back, or whatever people should find later."""
        self._history.append({**fields, "kind": "note", "note": what}, lambda s, n: s, owner=self._own().owner)

    def record_failure(self, **fields: Any) -> None:
        """Write into the run's history that an attempt has failed; it counts among the stalled attempts of the run."""
        event = {**fields, "kind": "note", "note": "failure"}
        self._history.append(event, lambda s, n: s.with_stall(self._flow_run_id), owner=self._own().owner)

    def prune(self, *, dry_run: bool = False) -> list[Verdict]:
        """Remove what the policy no longer keeps, and what dead attempts left; return every checkpoint's verdict.

        The newest checkpoint that is kept is read back first, unless one that is kept has been verified before.
        """
        owner = None if dry_run else self._own().owner
        self.wait()
        if owner is None:
            return self._pruner.plan(self._line.digest)
        verdicts = self._pruner.run(owner, self._line.digest)
        if not self._knows_line:
            self.freed_bytes = self._cache.clean(self.checkpoints())
        return verdicts

    def listen(self, listener: Listener) -> None:
        """Tell a listener of commits, failed saves and restores from now on."""
        self._saver.listeners.add(listener)

    def _own(self) -> Tenure:
        """Take the run directory, unless this process holds it."""
        self._process.check()
        if self._tenure is None:
            self._tenure = Tenure(
                self._history,
                self.config,
                self._cache,
                self._pruner,
                self._line,
                single_writer=self._location.single_writer,
                take_over=self._take_over,
                flow_run_id=self._flow_run_id,
            )
            self._damaged = self._tenure.damaged
            self._knows_line = False
            self._take_over = False  # asked for once: whoever takes the directory from us later is not fenced for it
            self._saver.committer = self._tenure.committer
            end_with_interpreter(self._saver)
        self._tenure.beat()
        return self._tenure

    def _snapshot(
        self, step: int, state: dict[str, Any], metrics: Metrics | None, epoch: int | None, *, keep: bool, interim: bool
    ) -> None:
        interim = interim and self.config.has_interval
        started_s = time.perf_counter()
        with gc_paused():
            captured = capture(state)
            groups = encode_groups(captured)  # what cannot be stored is refused here, before anything is written
            if self.last_commit is None:
                warn_of_unsaved(state)
        with self._saver.turn():
            committer = self._own().committer
            if not self._knows_line:
                committer.check_line()
                self._knows_line = True
            saving = committer.new_saving(step, groups, metrics=metrics or {}, epochs=epoch, interim=interim)
            self._saver.snapshot(committer, saving, captured, started_s=started_s, keep=keep, step_s=self._at.step_s)
        self._at.saved(step, epoch, interim=interim)

    def _raise_failure(self) -> None:
        """Raise what a thread found."""
        self._process.check()
        if self._tenure is not None:
            self._tenure.check()
        self._saver.raise_failure()

    def _wait_idle(self) -> None:
        """Let what is on its way end, however it ends: a restore goes on from what is there then."""
        self._saver.wait_idle()
        failure = self._saver.take_failure()
        if isinstance(failure, OwnerError):
            raise failure
        if failure is not None:
            _log.warning("The last snapshot was not committed: %s", failure)

    def _deliver_signal(self) -> None:
        if self._interrupt.pending is not None:
            self._release(prune_s=0)  # the next owner need not wait for a timeout; a later save takes it again
            self._interrupt.deliver()


def hold_signals(ckpt: Checkpointer, hold: bool) -> None:
    """Hold SIGTERM and Ctrl-C back until the next step, or let them through at once, with the one that waits.

    For a pause within the `with` block (the delay before a retry); outside of the block this does nothing.
    """
    if not ckpt._entered or not ckpt._process.is_here:
        return
    if hold:
        ckpt._deliver_signal()  # nothing has been trained since the last commit
        ckpt._interrupt.install()
    else:
        ckpt._interrupt.uninstall()
        ckpt._interrupt.deliver()
