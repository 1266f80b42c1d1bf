"""The run that a program holds: take and release its directory; list, pin and prune checkpoints; write its history."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from ckpt_tasks.checked import checked
from ckpt_tasks.checkpoint.acquiring import take_run
from ckpt_tasks.checkpoint.agreement import Agreement
from ckpt_tasks.checkpoint.extension import Extension, Extensions
from ckpt_tasks.checkpoint.interrupt import leave_flow_run
from ckpt_tasks.checkpoint.memory.cache import SnapshotCache
from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.checkpoint.restore.restore import HALF_RESTORED, HostSnapshot, RestoreReport
from ckpt_tasks.checkpoint.rollback import checked_skip
from ckpt_tasks.checkpoint.save.ending import end_with_interpreter
from ckpt_tasks.checkpoint.save.listening import Listener
from ckpt_tasks.checkpoint.save.pruning import Pruner
from ckpt_tasks.checkpoint.save.schedule import SaveSchedule, TrainingPosition
from ckpt_tasks.checkpoint.save.tenure import Line, Tenure
from ckpt_tasks.checkpoint.save.writer import Writer
from ckpt_tasks.checkpoint.telling import Start
from ckpt_tasks.errors import ConfigError, IntegrityError, OwnedError, OwnerError, StateError
from ckpt_tasks.format.ledger import State
from ckpt_tasks.format.policy.cadence import FIRST_INTERVAL_S
from ckpt_tasks.format.policy.retention import Verdict
from ckpt_tasks.format.records import Checkpoint, Rollback
from ckpt_tasks.process import Process, fill_standard_descriptors, finalize_here
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.run.ledger.history import History
from ckpt_tasks.run.ledger.ownership import left_here
from ckpt_tasks.run.upkeep.verifying import verify_checkpoint
from ckpt_tasks.state.groups import Groups
from ckpt_tasks.state.kinds.started import Started
from ckpt_tasks.system import gang_rank, system

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("ckpt_tasks")
_REPLACED = (
    "This program has other settings than the run at step %d (was → is):\n  %s\nTo train on with other values than the"
    " restored ones, set them after the restore (in Lightning in on_train_start), in optimizer.param_groups or the"
    " schedule's attributes. For a run of ckpt train, fork it: ckpt fork DIR NEW --param NAME=VALUE"
)


class HeldRun:
    """The half of a Checkpointer that needs no state: take the run directory, wait, write its history, release it.

    With many ranks, only rank 0 writes.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        take_over: bool = False,
        flow_run_id: str | None = None,
        process_group: ProcessGroup | None = None,
    ):
        if not isinstance(config, CheckpointConfig):
            raise ConfigError(
                f"a Checkpointer takes a CheckpointConfig, not a value of type {type(config).__name__}",
                hint='Write Checkpointer(CheckpointConfig(checkpoint_dir="runs/first")).',
            )
        if not isinstance(take_over, bool):
            raise ConfigError(f"take_over is True or False, not {take_over!r:.80}")
        self.config = config
        self.freed_bytes = 0  # The bytes of snapshots in this host's memory that prune() freed.
        self._process = Process()
        fill_standard_descriptors()
        self._location = config.location.resolve(config.run_key)
        self._history = History(self._location.open())
        self._take_over = take_over
        self._flow_run_id = flow_run_id
        self._tenure: Tenure | None = None
        self._pruner = Pruner(self._history, config.retention_policy)
        self._ranks = Agreement(process_group, config)
        self._extensions = Extensions.of(config, self._history, self._ranks.world)
        self._cache = SnapshotCache(self._history.store, config.memory_dir, self._extensions, self._ranks.world)
        self._line = Line()
        self._at = TrainingPosition()
        self._schedule = SaveSchedule(self._history, config)
        self._writer = Writer(
            self._history,
            config,
            self._cache,
            self._pruner,
            self._schedule,
            extensions=self._extensions,
            ranks=self._ranks.exchange,
        )
        for committed in self._extensions.at(Extension.committed):
            self._writer.listeners.add(Listener(committed=committed))
        self._start = Start(self._history.store.url, in_flow=flow_run_id is not None)
        if self._ranks.first:
            self._writer.listeners.add(Listener(committed=self._start.committed))
        self._damaged: tuple[str, ...] = ()
        self._knows_line = False  # True if other processes can have committed nothing that this one has not restored.
        self._knows_state = False  # True if all ranks have captured a state.
        self._half_restored = False  # True from a restore's first change of the state to its success.
        finalize_here(self, _leave, weakref.ref(self._writer))

    def __repr__(self) -> str:
        holds = "holds the run" if self._tenure is not None else "does not hold the run"
        return f"<{type(self).__name__} {self._history.store.url}: {holds}>"

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "a Checkpointer belongs to its process, and is neither copied nor pickled",
            hint="Hand its config to the other process; open_run(config.location) reads the run there.",
        )

    @property
    def run(self) -> Run:
        """The run as a reader sees it; does not take the run directory."""
        return Run(self._history, self._tenure.run_key if self._tenure else self.config.run_key)

    @property
    def last_commit(self) -> Checkpoint | None:
        """The checkpoint that this process committed last."""
        return self._line.last_commit

    def wait(self) -> None:
        """Wait until every snapshot is committed; raise the failure of one that is not. Does not wait for pruning.

        The report does not count the time before the return as training. Raises StoreError if the store takes no bytes
        of a checkpoint for `flush_timeout_s`.
        """
        self._process.check()
        self._writer.wait()
        self._at.waited()

    def acquire(self) -> None:
        """Take the run directory now, as the first restore or save does; raises OwnedError and RunMismatchError."""
        self._own()

    def listen(self, listener: Listener) -> None:
        """Call a listener after every commit, failed save and restore from now on."""
        self._writer.listeners.add(listener)

    def _own(self) -> Tenure:
        """Return the ownership of the run; take the run directory if this process does not hold it."""
        self._process.check()
        if self._tenure is None:
            take = partial(
                take_run,
                self._history,
                self.config,
                self._cache,
                self._pruner,
                self._line,
                single_writer=self._location.single_writer,
                take_over=self._take_over,
                flow_run_id=self._flow_run_id,
                world_size=self._ranks.world.size,
            )
            began_s = system().monotonic()
            try:
                self._tenure = self._ranks.tenure(take, self._line, self.config.owner_timeout_s, self._cache)
            except OwnedError as error:
                if self._ranks.alone and (of_gang := gang_rank()):
                    error.hint = f"{of_gang}, and each rank is alone: call init_process_group() before Checkpointer()."
                if error.same_flow_run:
                    leave_flow_run(self._flow_run_id, error)
                raise
            self._damaged, self._tenure.resume.owner_s = self._tenure.damaged, system().monotonic() - began_s
            self._knows_line = False
            self._take_over = False  # Take over only once: do not fence a later owner.
            tenure = self._tenure
            self._extensions.tell(Extension.owned, tenure)
            self._writer.tenure = self._tenure
            end_with_interpreter(self._writer)
        self._tenure.beat()
        return self._tenure

    def checkpoints(self) -> list[Checkpoint]:
        """List the live checkpoints, newest commit first."""
        return self.run.checkpoints()

    @checked
    def pin(self, step: int, reason: str = "by hand") -> None:
        """Keep the checkpoint of a step, whatever the policy says.

        Raises StateError if the directory is not held, CheckpointNotFoundError if no checkpoint has this step.
        """
        self._pin(step, reason)

    @checked
    def unpin(self, step: int) -> None:
        """Remove the pin of a step's checkpoint, so that the policy decides. Raises as `pin` does."""
        self._pin(step, None)

    @checked
    def remove(self, checkpoint: Checkpoint) -> Verdict:
        """Remove a checkpoint from the run and delete it; the verdict says whether it was removed, or why not.

        The newest, the newest good, pinned and leased checkpoints stay. Raises StateError if the directory is not held,
        CheckpointNotFoundError, and NoGoodCheckpointError if none verifies.
        """
        held = self._held()
        self.wait()
        if not self._ranks.first:
            raise StateError("only rank 0 removes checkpoints", hint="Call it in rank 0.")
        return self._pruner.remove(held.owner, checkpoint, self._line.digest)

    @checked
    def note(self, what: str, **fields: Any) -> None:
        """Write an event of your own into the run's history. Raises StateError if the directory is not held."""
        self._note_once(what, fields)

    def record_failure(self, **fields: Any) -> None:
        """Record a failed attempt, which counts as one without progress. Raises StateError as `note` does."""
        self._note_once("failure", fields, lambda state: state.with_stall(self._flow_run_id))

    @checked
    def record_program(self, program: str, params: Mapping[str, Any]) -> None:
        """Record the run's program and its parameters in the history. Raises StateError as `note` does."""
        recorded = {"program": program, "params": params}
        self._note_once("program", recorded, lambda state: replace(state, program=program, params=params))

    @checked
    def rollback(
        self, step: int, *, skip_batches: tuple[int, int] | None = None, reason: str = "by hand"
    ) -> Checkpoint:
        """Go back to the checkpoint of a step; later checkpoints are marked as abandoned.

        Call `restore` next. That call skips the batches of the steps `skip_batches`, given as (first, last); for this
        an object of the state must have a method `skip_batches(count)`, as ResumableSampler has. Every byte of the
        checkpoint is read back first. Raises StateError if the directory is not held, CheckpointNotFoundError,
        ConfigError for batches that do not come after the checkpoint, and IntegrityError if it is damaged; nothing
        changes then.
        """
        self._held()
        self._writer.wait()
        target = self.run.find(step)
        skip = checked_skip(skip_batches, target.step)
        if self._ranks.first and (faults := verify_checkpoint(self._history.store, target)):
            raise IntegrityError(f"the checkpoint is damaged: {faults[0]}", step=step)
        rollback = Rollback(identity=target.manifest_digest, step=target.step, skip=skip, by=self._flow_run_id)
        self._record_rollback(rollback, why=reason)
        # A save without a restore would continue the abandoned line.
        self._knows_line, self._line.known_n = False, -1
        return target

    def _record_rollback(self, rollback: Rollback, **fields: Any) -> None:
        fields = {"step": rollback.step, "skip": rollback.skip, **fields}
        self._note_once("rollback", fields, lambda state: state.rolled_back(rollback))

    @checked
    def prune(self, *, dry_run: bool = False) -> list[Verdict]:
        """Prune the run: remove checkpoints that the policy does not keep, and dead attempts; return all verdicts.

        First reads back the newest checkpoint that stays, unless a checkpoint that stays is verified already. Raises
        StateError if the directory is not held and this is not a `dry_run`.
        """
        held = None if dry_run else self._held()
        self.wait()
        if held is None or not self._ranks.first:
            return self._pruner.plan(self._line.digest)
        verdicts = self._pruner.run(held.owner, self._line.digest)
        if not self._knows_line:
            self.freed_bytes = self._cache.clean(self.checkpoints())
        return verdicts

    def _pin(self, step: int, reason: str | None) -> None:
        held = self._held()
        self._writer.wait()
        if self._ranks.first:
            self._pruner.pin(held.owner, step, reason)

    def _note_once(
        self, what: str, fields: Mapping[str, Any], change: Callable[[State], State] = lambda state: state
    ) -> None:
        if (committer := self._held().committer) is not None:
            committer.note(what, fields, change)

    def _held(self) -> Tenure:
        """Return the ownership of the run; raise StateError if this process does not hold the directory."""
        self._process.check()
        if self._tenure is None:
            raise StateError(
                "this process does not hold the run directory", hint="Call restore(), save() or acquire() first."
            )
        self._tenure.beat()
        return self._tenure

    def _begin_save(self, error: Exception | None = None) -> Tenure:
        """Take the run for a save; the caller holds `turn()`.

        `error` says why this rank cannot save; it is raised in all ranks. At the first save it is raised before
        anything is written.
        """
        if not (self._ranks.alone or self._knows_state):
            with self._ranks.together("state") as confirm:
                if error is not None:
                    raise error
                confirm()
            self._knows_state = True
        tenure = self._own()
        if not self._knows_line:
            with self._ranks.together("line") as confirm:
                if tenure.committer is not None:
                    tenure.committer.check_line()
                confirm()
            self._knows_line = True
        if error is not None:
            self._writer.refuse(tenure, error, tenure.next_number())
        return tenure

    def _refuse_save(self, error: Exception) -> NoReturn:
        """Raise `error` in all ranks, so that no rank waits for this one."""
        if not self._ranks.alone:
            with self._writer.turn():
                self._begin_save(error)
        raise error

    def _release(self, *, prune_s: float) -> None:
        self._writer.wait_idle()
        self._pruner.finish(prune_s)
        self._extensions.tell(Extension.released, prune_s)
        self._knows_state = False
        if self._tenure is not None:
            self._tenure.quiet()
            if self._writer.release():
                self._tenure = None
        self._ranks.drain()

    def _raise_failure(self) -> None:
        """Raise the failure of an earlier save, the same in every rank; in a listener, or half restored, StateError."""
        self._process.check()
        if self._half_restored:
            raise StateError("the last restore has failed, and has changed a part of the state", hint=HALF_RESTORED)
        self._writer.listeners.check()
        self._writer.raise_failure()

    def _begin_writing(self) -> None:
        self._half_restored = True

    def _check_owner(self) -> None:
        """Raise FencedError if the heartbeat has seen another owner; only rank 0 has a heartbeat."""
        if self._tenure is not None:
            self._tenure.check()

    def _log_begun(self) -> None:
        """Tell that training begins at step 0, and if an earlier process has committed nothing."""
        owned = self._own()
        if self._ranks.first:
            self._note_again(0)
            is_earlier = owned.owner.epoch > 1 and not self._start.is_told  # Otherwise it was this process.
            after_s = FIRST_INTERVAL_S if self.config.automatic else None
            self._start.begun(self._cache.reached(0), after_death=is_earlier, first_save_s=after_s)

    def _log_restored(
        self, chosen: Checkpoint, report: RestoreReport, snapshot: HostSnapshot | None, state: Groups
    ) -> None:
        """Tell where training resumes, and warn of settings that differ from the run's.

        A fork applies its own parameters later, so there is no warning of them.
        """
        if self._ranks.first:
            self._note_again(chosen.step)
            self._start.restored(chosen, snapshot, self._cache.reached(chosen.step))
        origin = self._history.head().state.origin if report.replaced else None
        if report.replaced and not (origin and origin.set and origin.identity == chosen.manifest_digest):
            is_tried = any(isinstance(value, Started) and value.is_tried for value in state.values())
            self._start.replaced(_REPLACED % (chosen.step, "\n  ".join(report.replaced)), is_tried=is_tried)

    def _note_again(self, step: int) -> None:
        """Note for the next commit which steps of an earlier process are trained again after a start at `step`."""
        reached = self._cache.reached(step)
        if reached is not None and reached > step and not self._start.is_told:
            self._own().resume.again = step + 1, reached
            self._cache.note_again(step, reached)

    def _wait_idle(self) -> None:
        """Wait until saves under way have succeeded or failed; raise only the loss of the run."""
        self._writer.wait_idle()
        failure = self._writer.take_failure()
        if isinstance(failure, OwnerError):
            raise failure
        if failure is not None:
            _log.warning("The last snapshot was not committed: %s", failure)


def _leave(writer: weakref.ref[Writer]) -> None:
    """Keep a garbage-collected Checkpointer's Writer, so that the next Checkpointer of the run finishes its saves."""
    left = writer()
    if left is not None and left.tenure is not None:
        left_here[left.tenure.owner.id] = left
