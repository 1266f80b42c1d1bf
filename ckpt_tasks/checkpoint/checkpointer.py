"""The facade: one object for any training loop, and what a flow's hooks use as well."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from ckpt_tasks.checkpoint import save as saving
from ckpt_tasks.checkpoint.config import CheckpointConfig
from ckpt_tasks.checkpoint.history import History, check_owner
from ckpt_tasks.checkpoint.interrupt import Interrupt
from ckpt_tasks.checkpoint.ownership import Heartbeat, acquire, identify
from ckpt_tasks.checkpoint.pruning import Pruner
from ckpt_tasks.checkpoint.reading import Run, open_store
from ckpt_tasks.checkpoint.restore import RestoreReport, restore_newest
from ckpt_tasks.errors import (
    CkptError,
    CommitUncertainError,
    ConfigError,
    FencedError,
    NoGoodCheckpointError,
    StateError,
    StoreError,
)
from ckpt_tasks.format.keys import MAX_STEP, parse_attempt
from ckpt_tasks.format.ledger import Checkpoint, Owner, State, lineage
from ckpt_tasks.policy.cadence import SavePoint
from ckpt_tasks.policy.retention import Verdict
from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.snapshot import BufferPool, SnapshotPlan, plan_snapshot, signature_of

__all__ = ["AttemptHooks", "Checkpointer"]


@dataclass(frozen=True, kw_only=True)
class AttemptHooks:
    """A user's own functions around every attempt of a resumable task, called beside restore, save and discard."""

    before_attempt: Callable[..., None] | None = None
    after_attempt: Callable[..., None] | None = None
    after_failure: Callable[..., None] | None = None


class Checkpointer:
    """Save and restore the state of one run.

    The first restore or save takes the run directory: one process holds it at a time, and one that lost it gets
    FencedError at its next save. `take_over` takes it from an owner that may be alive. `flow_run_id` names the flow run
    that this process belongs to; another attempt of the same flow run waits for this one to let go.

    As a context manager it holds SIGTERM and Ctrl-C back until the next `step()`, which saves, commits and then hands
    the signal on; and it lets the run directory go at the end.
    """

    def __init__(self, config: CheckpointConfig, *, take_over: bool = False, flow_run_id: str | None = None):
        self.config = config
        self.attempt_hooks = AttemptHooks()
        self.last_commit: Checkpoint | None = None
        self.last_restore: RestoreReport | None = None
        self._history = History(open_store(config.checkpoint_dir))
        self._take_over = take_over
        self._flow_run_id = flow_run_id
        self._owner: Owner | None = None
        self._heartbeat: Heartbeat | None = None
        self._run_key = ""
        self._interrupt = Interrupt()
        self._entered = False
        self._pool = BufferPool()
        self._plan: SnapshotPlan | None = None
        self._parent: Checkpoint | None = None
        self._pruner = Pruner(self._history, config.retention_policy)
        self._damaged: tuple[str, ...] = ()
        self._known_n = -1  # the ledger entry up to which this process knows what has been committed
        self._position = 0
        self._last = SavePoint(step=0, epoch=None, clock_s=time.monotonic())

    def __enter__(self) -> Self:
        self._entered = True
        self._interrupt.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        self.close()
        self._interrupt.deliver()  # also after an error: whoever sent the signal wants this process to end

    @property
    def position(self) -> int:
        """The steps completed: as restored, or as last reported by `step()` or `save()`; 0 before either."""
        return self._position

    @property
    def stalled_attempts(self) -> int:
        """How often the present flow run took the directory or failed an attempt since a new step was committed."""
        return self._history.head().state.stalled_attempts

    # ── restore ──────────────────────────────────────────────────────────────────────────────────────────────

    def restore(self, state: dict[str, Any], *, step: int | None = None) -> int:
        """Restore the newest good checkpoint (or that of `step`) into the state; return its step, 0 if there is none.

        Modules, optimizers and other statefuls are restored in place, plain values of `state` are replaced. Strict
        and all or nothing. A damaged checkpoint is passed over and the next older one is taken; `last_restore` says
        which and why. Raises StateMismatchError, CheckpointNotFoundError, NoGoodCheckpointError, OwnedError or
        RunMismatchError; the state is untouched then.
        """
        self._own()
        known = candidates = self.checkpoints()
        if step is not None:
            candidates = [Run(self._history, self._run_key).find(step)]
        if not candidates:
            return 0
        damaged, self._damaged = self._damaged, ()
        found, report = restore_newest(
            self._history.store, candidates, state, run_key=self.config.run_key, damaged=damaged
        )
        if report.skipped or report.damaged:
            passed = [[passed_step, reason] for passed_step, reason in report.skipped]
            self.note("fallback", step=found.step, skipped=passed, damaged=list(report.damaged))
        self.last_restore, self._parent = report, found
        self._known_n = max(c.n for c in known)
        self._pruner.verified.add(found.manifest_digest)
        self._position = found.step
        self._last = SavePoint(step=found.step, epoch=found.epochs, clock_s=time.monotonic())
        return found.step

    # ── save ─────────────────────────────────────────────────────────────────────────────────────────────────

    def step(
        self,
        step: int,
        state: dict[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        epoch: int | None = None,
    ) -> Checkpoint | None:
        """Report a completed optimizer step; save when the policy says so, and at a pending SIGTERM or Ctrl-C.

        `step` counts completed optimizer steps, `epoch` completed epochs. Returns the checkpoint if one was committed.
        Raises FencedError as soon as this process knows that it lost the run directory.
        """
        self._check_step(step)
        if self._heartbeat is not None and self._heartbeat.fenced is not None:
            raise self._heartbeat.fenced
        self._position = step
        now = SavePoint(step=step, epoch=epoch, clock_s=time.monotonic())
        saved = None
        if self._interrupt.pending is not None or self.config.save_policy.due(self._last, now):
            saved = self._save(step, state, metrics or {}, epoch)
        self._hand_on()
        return saved

    def save(
        self,
        step: int,
        state: dict[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        epoch: int | None = None,
    ) -> Checkpoint:
        """Save now; the checkpoint is committed when this returns.

        Raises UnsupportedStateError (nothing was written), StoreError, FencedError or CommitUncertainError; the newest
        checkpoint is still the old one then.
        """
        self._check_step(step)
        saved = self._save(step, state, metrics or {}, epoch)
        self._hand_on()
        return saved

    def wait(self) -> None:
        """Return when everything that was saved is committed (saves are synchronous: at once)."""

    def close(self) -> None:
        """Let the run directory go and give the signals back; a later save takes the directory again."""
        self.wait()
        self._interrupt.uninstall()
        self._release()
        self._drop_plan()

    def _release(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
        if self._owner is not None:
            owner, self._owner = self._owner, None
            # Fenced: there is nothing to let go. Else an error under way is the one to report, and whoever comes next
            # sees that this process is gone, or that its heartbeat grows old.
            with suppress(FencedError, StoreError, CommitUncertainError):
                self._history.append({"kind": "release"}, lambda state, n: state.released(), owner=owner)

    # ── the run ──────────────────────────────────────────────────────────────────────────────────────────────

    def checkpoints(self) -> list[Checkpoint]:
        """List the live checkpoints, newest commit first."""
        return lineage(self._history.head().state.live)

    def pin(self, step: int, reason: str = "by hand") -> None:
        """Keep the checkpoint of a step whatever the policy says."""
        self._pin(step, reason)

    def unpin(self, step: int) -> None:
        """Leave the checkpoint of a step to the policy again."""
        self._pin(step, None)

    def note(self, what: str, **fields: Any) -> None:
        """Write an event into the run's history: a failure, a fall-back, whatever people should find later."""
        owner = self._own()
        stall = what == "failure"
        self._history.append(
            {**fields, "kind": "note", "note": what},
            lambda state, n: state.with_stall(self._flow_run_id) if stall else state,
            owner=owner,
        )

    def prune(self, *, dry_run: bool = False) -> list[Verdict]:
        """Remove what the policy no longer keeps, and what dead attempts left; return every checkpoint's verdict.

        The newest checkpoint that is kept is read back first unless one that is kept has been verified before: the
        last good one is never removed for the sake of one that nobody has read.
        """
        parent = self._parent.manifest_digest if self._parent else None
        return self._pruner.plan(parent) if dry_run else self._pruner.run(self._own(), parent)

    def hold_signals(self, hold: bool) -> None:
        """Hold SIGTERM and Ctrl-C back until the next step, or let them through at once, the one that waits included.

        For whoever waits within the `with` block where nothing trains (the delay before a retry); outside of it this
        does nothing.
        """
        if not self._entered:
            return
        if hold:
            self._interrupt.install()
        else:
            self._interrupt.uninstall()
            self._interrupt.deliver()

    def hooks(
        self,
        *,
        before_attempt: Callable[..., None] | None = None,
        after_attempt: Callable[..., None] | None = None,
        after_failure: Callable[..., None] | None = None,
    ) -> None:
        """Add functions of your own around every attempt of a resumable task: beside restore, save and discard."""
        self.attempt_hooks = AttemptHooks(
            before_attempt=before_attempt, after_attempt=after_attempt, after_failure=after_failure
        )

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _own(self) -> Owner:
        config = self.config
        if self._owner is None:
            key = config.run_key or self._history.store.url.rstrip("/").rpartition("/")[2]
            self._history.create(key)
            self._run_key = self._history.check(config.run_key) or key
            self._damaged = self._damage()  # the owner's entry will stand above it
            self._owner = acquire(
                self._history,
                identify(self._flow_run_id),
                take_over=self._take_over,
                timeout_s=config.owner_timeout_s,
                best=(config.best_metric, config.best_mode),
            )
            self._pruner.new_owner()
            self._take_over = False  # asked for once: whoever takes the directory from us later is not fenced for it
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(self._history, self._owner, config.owner_timeout_s)
        return self._owner

    def _damage(self) -> tuple[str, ...]:
        """Name the ledger entries that cannot be read; raise NoGoodCheckpointError where they leave no checkpoint.

        A run whose history is lost must not begin again from nothing over the checkpoints that it still has.
        """
        head, store = self._history.head(), self._history.store
        if head.entry is None and not head.damaged and any(parse_attempt(name) for name in store.names("")):
            raise NoGoodCheckpointError(
                f"{store.url} holds checkpoints and no ledger",
                hint="The target is untouched. Bring the ledger back, or use another directory.",
            )
        if head.damaged and not head.state.live:
            raise NoGoodCheckpointError(
                f"no ledger entry of {self._history.store.url} that names a checkpoint can be read",
                reasons=tuple((0, f"{name} is damaged") for name in head.damaged),
                hint="The target is untouched. `ckpt verify` lists the damage.",
            )
        return head.damaged

    def _save(self, step: int, state: dict[str, Any], metrics: Mapping[str, float], epoch: int | None) -> Checkpoint:
        started = time.perf_counter()
        captured = capture(state)
        groups = saving.encode_groups(captured)  # what cannot be stored is refused here, before anything is written
        owner = self._own()
        self._check_line(owner)
        task = saving.Saving(
            attempt=saving.new_attempt(step, owner),
            run_key=self._run_key,
            owner=owner,
            parent=self._parent.manifest_digest if self._parent else None,
            groups=groups,
            metrics={name: float(value) for name, value in metrics.items()},
            epochs=epoch,
        )
        plan = self._planned(captured.tensors)
        try:
            plan.fill(captured.tensors)
            part = saving.flush(self._history.store, task.attempt, plan)
            sealed = saving.seal(self._history.store, task, [part])
        except CkptError:
            saving.discard(self._history.store, task.attempt)
            raise
        cost_s = time.perf_counter() - started
        saved = saving.commit(self._history, task, sealed, cost_s, self._pruner.deleted)
        self._pruner.deleted = frozenset()
        self.last_commit = self._parent = saved
        self._known_n = saved.n
        self._position = step
        self._last = SavePoint(step=step, epoch=epoch, clock_s=time.monotonic())
        with suppress(StoreError, CommitUncertainError):  # the checkpoint is committed; the next save prunes again
            self.prune()
        return saved

    def _hand_on(self) -> None:
        if self._interrupt.pending is not None:
            self._release()  # whoever comes next need not wait for a timeout; a later save takes it again
            self._interrupt.deliver()

    def _planned(self, tensors: Mapping[str, Any]) -> SnapshotPlan:
        if self._plan is None or self._plan.signature != signature_of(tensors):
            self._drop_plan()
            self._plan = plan_snapshot(tensors, self._pool)
            self._pool.trim()
        return self._plan

    def _drop_plan(self) -> None:
        if self._plan is not None:
            self._plan.free(self._pool)
            self._plan = None

    def _check_line(self, owner: Owner) -> None:
        # A process that does not know what others have committed must not put a line of its own over it.
        state = self._history.head().state
        check_owner(state.owner, owner)
        live = state.live
        if any(c.n > self._known_n for c in live):
            raise ConfigError(
                f"{self._history.store.url} holds checkpoints up to step {max(c.step for c in live)}",
                hint="Call restore() first, or use another directory.",
            )

    def _pin(self, step: int, reason: str | None) -> None:
        owner = self._own()
        found = Run(self._history, self._run_key).find(step)

        def change(state: State, n: int) -> State:
            return state.with_pin(found.manifest_digest, reason)

        self._history.append({"kind": "pin", "step": step, "reason": reason}, change, owner=owner)

    def _check_step(self, step: int) -> None:
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            raise StateError(f"a step is a whole number of completed optimizer steps from 0 on, not {step!r}")
