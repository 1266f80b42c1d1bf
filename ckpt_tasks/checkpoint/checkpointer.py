"""The facade: one object for any training loop, and for flows."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from ckpt_tasks.checkpoint.agreement import Tried
from ckpt_tasks.checkpoint.extension import Extension, Restored
from ckpt_tasks.checkpoint.held_run import HeldRun
from ckpt_tasks.checkpoint.interrupt import Interrupt
from ckpt_tasks.checkpoint.memory.cache import CachedSnapshot
from ckpt_tasks.checkpoint.memory.rank_snapshot import RankSnapshot
from ckpt_tasks.checkpoint.restore.restore import RestoreReport, of_checkpoints, restore_newest
from ckpt_tasks.checkpoint.rollback import goes_back
from ckpt_tasks.checkpoint.save.parts import encode_groups
from ckpt_tasks.checkpoint.save.pipeline import Snapshot, checkpoint_of
from ckpt_tasks.checkpoint.save.schedule import check_epoch, check_step, point
from ckpt_tasks.checkpoint.telling import note_idle, note_trained
from ckpt_tasks.errors import ConfigError, FencedError, StateError
from ckpt_tasks.format.ledger import lineage
from ckpt_tasks.format.policy.cadence import SavePoint
from ckpt_tasks.format.records import Checkpoint, Rollback
from ckpt_tasks.gc_pause import collects_here, gc_paused
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.metrics import held
from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.data.loops import may_train
from ckpt_tasks.state.data.whole_epochs import check_dealt, check_passes
from ckpt_tasks.state.groups import Groups, flat, objects_of, storable
from ckpt_tasks.state.kinds.switches import note_begun
from ckpt_tasks.state.selection import Only, Selection
from ckpt_tasks.state.structure import Structure
from ckpt_tasks.system import system

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_EARLY_BYTES = 64 << 20  # The first save of a smaller state prepares itself: its memory takes less time than a walk.
_PRUNE_S = 10.0  # `close` gives the prune after the last commit this long; the next owner prunes the rest.
_log = logging.getLogger("ckpt_tasks")
_UNSAVED = "Steps %s are not saved: no save was due. Call save(step, state) after the last step."
Metrics = Mapping[str, float]
_InMemory = CachedSnapshot | RankSnapshot
_State = Mapping[str, Any]


class Checkpointer(HeldRun):
    """Save and restore the state of one run.

    The first restore or save takes the run directory. Only one process holds the directory at a time; a process that
    has lost it gets FencedError at its next save. `take_over` takes the directory from an owner that may be alive.
    `flow_run_id` names the flow run of this process; another attempt of the same flow run waits until this process
    releases the directory.

    A save blocks training only while it copies the state into memory; a thread writes and commits the copy. If the
    thread fails, the next call raises the error. With a memory directory the copies outlive the process, for a restart
    on this host.

    In a `with` block it holds SIGTERM and Ctrl-C back until the next `step()`, which saves, commits and then delivers
    the signal. The end of the block waits for saves under way and releases the run directory.

    A Checkpointer belongs to the process that made it. A forked child has no memory, ownership or signal handlers of
    its parent: in the child, saves, restores and waits raise ConfigError, and the end of the block does nothing.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        take_over: bool = False,
        flow_run_id: str | None = None,
        process_group: ProcessGroup | None = None,
    ):
        super().__init__(config, take_over=take_over, flow_run_id=flow_run_id, process_group=process_group)
        self.last_restore: RestoreReport | None = None
        self._seen = Structure()
        self._interrupt = Interrupt(self._extensions.holding)
        self._ranks.end_with(self._interrupt.must_end)
        self._entered = False
        self._resumed = False  # True from a restore of the whole newest checkpoint to the end of the block.

    def __enter__(self) -> Self:
        self._process.check()
        self._entered, self._interrupt.is_failing = True, False
        self._interrupt.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._process.is_here:
            return
        if collects_here() and threading.current_thread() is not threading.main_thread():
            # This may be a thread that the save under way needs. The run's next Checkpointer, or the exit, finishes it.
            self._interrupt.let_go()
            return
        self._entered, self._interrupt.is_failing = False, error is not None
        self._interrupt.install()  # hold_signals may have removed it: a second signal must wait for the release.
        if error is None and self._interrupt.pending is None:
            if steps := self._at.unsaved:
                _log.warning(_UNSAVED, steps)
            idle = self._resumed and not self._at.has_trained and self._flow_run_id is None
            if idle and may_train(inspect.currentframe()):
                note_idle(self._history.store.url, self._at.step)
        if self._at.has_trained:
            note_trained(self._history.store.url)
        self._resumed = self._at.has_trained = False
        try:
            # After an error or a signal, a retry on this host resumes from memory.
            self._close(keep=error is not None or self._interrupt.pending is not None)
        except Exception as second:
            if error is None:
                raise
            if second is not error:
                error.add_note(f"The last snapshot could not be saved either: {second}")
        finally:
            self._interrupt.deliver()  # Even after an error: the sender wants this process to end.

    @property
    def position(self) -> int:
        """The number of completed steps, as restored or as last reported by `step()` or `save()`; 0 before that."""
        return self._at.step

    def restore(
        self,
        state: dict[str, Any],
        *,
        step: int | None = None,
        only: Only | None = None,
        missing: Literal["error", "keep"] = "error",
        leave: Iterable[str] = (),
    ) -> int:
        """Restore the newest good checkpoint (or the one of `step`) into the state; return its step, or 0 without one.

        Objects with a state are restored in place; plain values of `state` are replaced. A restore is strict. It skips
        a damaged checkpoint and takes the next older one; `last_restore` says which and why. The state is unchanged
        after StateMismatchError, CheckpointNotFoundError, OwnedError, RunMismatchError and NoGoodCheckpointError; the
        last one says if it is half restored: damage inside of a file is found late. `step` and `save` raise then.

        A loose restore takes a part of a checkpoint, for fine-tuning. `only`: the groups ("model", "rng") and keys
        ("model/head") to take, or a mapping of them to their names in the checkpoint. `leave`: what not to take. With
        `missing="keep"` values that it lacks stay as they are. Raises ConfigError for a name that matches nothing.
        """
        selection, began_s, groups = Selection.of(only, missing, leave), system().monotonic(), storable(state)
        check_dealt(groups)
        resume = self._own().resume
        self._be_idle(groups)
        known, candidates, rollback = self._ranks.candidates(partial(self._candidates, step))
        self._extensions.tell(Extension.restoring, groups, rollback)
        in_memory = self._in_memory(known, candidates, newest=step is None and not goes_back(rollback, known))
        if not candidates and not in_memory:
            return self._begin(groups)
        chosen, report, cached = restore_newest(
            self._history.store,
            candidates,
            groups,
            selection=selection,
            run_key=self.config.run_key,
            damaged=self._damaged,
            in_memory=in_memory,
            ranks=self._ranks.exchange,
            topic=self._ranks.topic("restore"),
            deadline_s=self._ranks.deadline_s,
            writing=self._begin_writing,
        )
        self._half_restored = False
        self._ranks.restored(chosen.step)
        rollback = self._note(chosen, report, groups, newest=step is None) or rollback
        self._log_restored(chosen, report, cached, groups)
        self.last_restore, self._knows_line, self._resumed = report, True, step is None and selection is None
        self._at.restored(chosen.step, chosen.epochs, resume.restored(report, groups, began_s))
        self._writer.hold(cached.slot if cached else None, lacks=chosen.n < 0)
        self._line.follow(chosen if chosen.n >= 0 else known[0] if known else None)
        self._tell_restored(chosen.step, groups, rollback, cached if chosen.n < 0 else None)
        if chosen.n < 0 and cached is not None:  # Storage does not have the checkpoint yet.
            self._snapshot(self._at.last, groups, chosen.metrics, keep=True, interim=chosen.interim, why=chosen.why)
        elif cached is None and selection is None:  # Only a full restore from the store has read every byte.
            self._pruner.verified.add(chosen.manifest_digest)
        self._writer.listeners.restored(report)
        self._deliver_signal()
        if step is None and selection is None and chosen.step and chosen.size_bytes >= _EARLY_BYTES:
            self._writer.prepare_early(partial(capture, state, world=self._ranks.world))
        return chosen.step

    def _tell_restored(
        self,
        step: int,
        state: Groups,
        rollback: Rollback | None,
        uncommitted: _InMemory | None = None,
        *,
        begins: bool = False,
    ) -> None:
        store, parent, first = uncommitted.store if uncommitted else None, self._line.parent, self._ranks.first
        now = Restored(step, state, rollback, parent=parent, uncommitted=store, first=first, begins=begins)
        self._extensions.tell(Extension.restored, now)

    def _be_idle(self, state: Groups) -> None:
        """Before a restore, wait for saves under way, and record the state with which training begins."""
        note_begun(objects_of(state), anew=not self._knows_line)
        self._wait_idle()
        self._pruner.cancel(_PRUNE_S)  # A prune could remove the checkpoint to restore.

    def _begin(self, state: Groups) -> int:
        """Begin at step 0, because the run has no checkpoint; training repeats steps that were never committed."""
        self._log_begun()
        self._ranks.restored(0)
        self._knows_line = True
        self._writer.hold(None, lacks=False)
        self._at.restored(0, None, self._own().resume.begun())
        self._tell_restored(0, state, None, begins=True)
        self._deliver_signal()
        return 0

    def step(
        self,
        step: int,
        state: dict[str, Any],
        *,
        metrics: Metrics | None = None,
        epoch: int | None = None,
    ) -> bool:
        """Report a completed optimizer step; save if the policy says so, or if SIGTERM or Ctrl-C is pending.

        `step` counts completed optimizer steps, `epoch` completed epochs. Returns True if a snapshot was taken.
        Training waits only for the snapshot; a thread commits it. A pending signal is delivered after the commit.
        Raises FencedError if this process has lost the run, NonFiniteError, and the failure of an earlier snapshot.
        """
        step, epoch = check_step(step, self._at.step), check_epoch(epoch)
        self._raise_failure()
        now = point(step, epoch)
        due, ending = self._due(now, metrics)
        taken = due or ending
        numbers = self._check_step(step, metrics, saving=taken)
        self._at.stepped(now)
        self._cache.note_step(step)
        self._extensions.tell(Extension.stepped, step, state, numbers)
        if taken:
            keep = ending or bool(self.config.retention_policy.preserves(*self._at.saves(now)))
            self._snapshot(now, state, metrics, keep=keep, interim=not due, why="signal" if ending else "")
        elif self._knows_line and self._writer.unprepared:
            self._writer.prepare(capture(state, world=self._ranks.world))
        if taken:  # A signal that has come since `_due` waits for a step that is saved; ranks agree on it first.
            self._deliver_signal(everywhere=ending)
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
        """Save now; return when the checkpoint is committed. A thread then prunes what the policy does not keep.

        `interim`: the save happens because a batch has ended. If the configuration has an interval, an interim
        checkpoint does not count among the newest `max_num_checkpoints`, and does not move the interval. Raises
        UnsupportedStateError, NonFiniteError (nothing was written), StoreError or FencedError; the newest checkpoint is
        still the old one then. After CommitUncertainError this is unknown.
        """
        step, epoch = check_step(step, self._at.step), check_epoch(epoch)
        if not isinstance(interim, bool):
            raise ConfigError(f"interim is True or False, not {interim!r:.80}")
        self._raise_failure()
        numbers = self._check_step(step, metrics, saving=True)
        now = point(step, epoch)
        _, ending = self._due(now, metrics, saving=True)
        self._at.stepped(now)
        self._cache.note_step(step)
        self._extensions.tell(Extension.stepped, step, state, numbers)
        why = "signal" if ending else "batch" if interim else "call"
        snapshot = self._snapshot(now, state, metrics, keep=True, interim=interim, why=why)
        self._writer.wait()
        self._at.waited()
        self._deliver_signal(everywhere=ending)
        return checkpoint_of(snapshot)

    def close(self) -> None:
        """Wait for saves under way, release the run directory and restore the signal handlers.

        A later save can take it again. The prune after the last commit gets 10 s; the next owner prunes the rest.
        """
        if self._process.is_here:
            self._close(keep=False)

    def _close(self, *, keep: bool) -> None:
        keep = keep or not self._knows_line  # A process that never trained must not change the snapshots in memory.
        try:
            self.wait()
        except BaseException:
            keep = True  # Storage may lack the snapshot in memory.
            raise
        finally:
            with self._writer.turn():
                self._interrupt.uninstall()
                self._release(prune_s=0 if keep else _PRUNE_S)
                self._writer.forget_plan()
                self._cache.close(keep=keep)

    def _snapshot(
        self, now: SavePoint, state: _State, metrics: Metrics | None, *, keep: bool, interim: bool, why: str
    ) -> Snapshot | None:
        step, epoch, interim = now.step, now.epoch, interim and self.config.has_interval
        started_s = system().monotonic()
        try:
            live = flat(state)
            if self._line.last_commit is None:
                check_dealt(storable(live))
            check_passes(live, step)
            with gc_paused():
                captured = capture(live, world=self._ranks.world, parent=self._line.known_parent, structure=self._seen)
                groups = encode_groups(captured)  # This raises for an unsupported value before anything is written.
                self._extensions.tell(Extension.captured, step, live)
        except Exception as error:  # noqa: BLE001 (raised in all ranks)
            self._refuse_save(error)
        with self._writer.turn():
            tenure = self._begin_save()
            offered = [attach(self._line.step) for attach in self._extensions.at(Extension.attached)]
            attached = [one for one in offered if one is not None]
            saving = tenure.new_saving(
                step, groups, metrics=metrics, epochs=epoch, interim=interim, why=why, attached=attached
            )
            snapshot = self._writer.snapshot(
                tenure, saving, captured, started_s=started_s, keep=keep, spent=self._at.spent(live)
            )
        self._at.saved(step, epoch, interim=interim)
        return snapshot

    def _check_step(self, step: int, metrics: Metrics | None, *, saving: bool) -> Mapping[str, Any]:
        """Return the metrics as `held` does; raise FencedError or StateError, in all ranks if the step is saved."""
        try:
            self._check_owner()
            numbers = {} if metrics is None else held(metrics, step)
            self._extensions.tell(Extension.check, step, numbers, saving=saving)
        except (FencedError, StateError) as error:
            if saving:
                self._refuse_save(error)
            raise
        return numbers

    def _note(self, chosen: Checkpoint, report: RestoreReport, state: Groups, *, newest: bool) -> Rollback | None:
        """Record in the run's history which checkpoints a restore skipped, and from which failed step it goes back."""
        self._damaged = ()
        if report.skipped or report.damaged:
            self.note("fallback", step=chosen.step, skipped=[*map(list, report.skipped)], damaged=[*report.damaged])
        back = self._extensions.tell(Extension.returned, chosen, state) if newest else None
        if back is None:
            return None
        rollback, fields = replace(back[0], by=self._flow_run_id), back[1]
        self._record_rollback(rollback, **fields)
        return rollback

    def _candidates(self, step: int | None) -> Tried:
        """Return the live checkpoints, the checkpoints to try in their order, and the last rollback."""
        live = self._history.head().state
        known = lineage(live.live)
        if step is not None:
            return known, [self.run.find(step)], live.rollback
        return known, self._extensions.tell(Extension.older, known) or known, live.rollback

    def _in_memory(
        self, known: Sequence[Checkpoint], candidates: Sequence[Checkpoint], *, newest: bool
    ) -> Sequence[_InMemory]:
        """Return the snapshots of the candidates that all ranks have in memory; if `newest`, also uncommitted ones."""
        in_memory = self._ranks.in_all(partial(self._cache.restorable, known))
        goes_back = self._extensions.tell(Extension.goes_back)
        return in_memory if newest and not goes_back else of_checkpoints(in_memory, candidates)

    def _due(self, now: SavePoint, metrics: Metrics | None, *, saving: bool = False) -> tuple[bool, bool]:
        """Return whether a save is due at this step, and whether a signal ends training; all ranks return the same.

        `saving`: the step is saved anyway, so the schedule is not asked. Raises in all ranks what an extension raises
        at a step on which they agree.
        """
        wish = self._extensions.tell(Extension.wish, now.step, metrics) if self._ranks.first else None
        due = saving or self._schedule.steady(self._at.last, now)
        timely = not due and self._ranks.world.rank == 0 and self._schedule.due(self._at.last, now)
        save, number, agreed = self._ranks.at(now.step, save=timely, signal=self._interrupt.asked(), wish=wish)
        if agreed is not None:
            self._extensions.tell(Extension.agreed, agreed)
        if number is not None:
            self._interrupt.pending = number
        return due or save, number is not None

    def _deliver_signal(self, *, everywhere: bool = False) -> None:
        """Deliver a pending signal if this rank is alone, or if all ranks end at this step (`everywhere`)."""
        if self._interrupt.pending is not None and (everywhere or self._ranks.alone):
            self._writer.wait()
            # Without a release the next owner would wait for a timeout; a later save takes the directory again.
            self._release(prune_s=0)
            self._interrupt.deliver()
