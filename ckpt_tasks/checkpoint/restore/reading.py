"""A run for a reader, without ownership: its checkpoints, restore of parts, leases, pins and evaluations."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from ckpt_tasks.checked import checked
from ckpt_tasks.errors import (
    CheckpointNotFoundError,
    CommitUncertainError,
    ConfigError,
    IntegrityError,
    StoreError,
)
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.format.keys import evaluation_name, is_group
from ckpt_tasks.format.ledger import State, lineage
from ckpt_tasks.format.policy.retention import RetentionPolicy, rank_best
from ckpt_tasks.format.records import Checkpoint, Evaluation, Lease, Owner
from ckpt_tasks.process import Process
from ckpt_tasks.run.ledger.history import Head, History
from ckpt_tasks.storage.locations import Location, location_of
from ckpt_tasks.system import now_iso, system

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.restore.restore import RestoreReport
    from ckpt_tasks.run.ledger.config import CheckpointConfig
    from ckpt_tasks.run.ledger.curve import Curve
    from ckpt_tasks.state.selection import Only

_LONGEST_LEASE_S = 3.2e9

_log = logging.getLogger("ckpt_tasks")


def open_run(checkpoint_dir: str | os.PathLike[str] | Location, run_key: str | None = None) -> Run:
    """Open a run for reading. Raises CheckpointNotFoundError without a run, RunMismatchError if the key differs."""
    history = History(location_of(checkpoint_dir).open(run_key))
    return Run(history, history.check(run_key))


def run_of(config: CheckpointConfig) -> Run:
    """Open the run of a configuration; raises what `open_run` raises."""
    return open_run(config.location, config.run_key)


class Run:
    """One run, read-only except for leases, pins and evaluations; `run_key` is None if format.json is damaged.

    `read_only` is True after the store has refused a lease, so that the run is read without one.
    """

    def __init__(self, history: History, run_key: str | None):
        self.history = history
        self.read_only = False
        self.run_key = run_key

    def __repr__(self) -> str:
        return f"<Run {self.run_key} at {self.history.store.url}>"

    def head(self) -> Head:
        """Read the newest entry of the run's ledger."""
        return self.history.head()

    def checkpoints(self) -> list[Checkpoint]:
        """List the live checkpoints, newest commit first and abandoned lines last."""
        return lineage(self.head().state.live)

    def find(self, which: int | str, *, metric: str | None = None, mode: str | None = None) -> Checkpoint:
        """Return the checkpoint of a step, "latest", or "best" by `metric` (default: the run's best_metric).

        Raises CheckpointNotFoundError, which lists the steps that exist, and ConfigError for any other name.
        """
        state = self.head().state
        newest_first = lineage(state.live)
        if which == "latest" and newest_first:
            return newest_first[0]
        if which == "best":
            return self._best(state, newest_first, metric, mode)
        if which == "latest" or (isinstance(which, int) and not isinstance(which, bool)) or str(which).isdecimal():
            matches = [c for c in newest_first if which != "latest" and c.step == int(which)]
            if matches:
                return matches[0]
            raise CheckpointNotFoundError(
                "the run has no checkpoint" + (f" of step {which}" if which != "latest" else " yet"),
                hint=f"It has steps {_steps(newest_first)}." if newest_first else None,
            )
        raise ConfigError(f"{which!r} is not a checkpoint", hint="Name a step, 'latest' or 'best'.")

    def restore(
        self,
        checkpoint: Checkpoint,
        state: dict[str, Any],
        *,
        partial: bool = False,
        only: Only | None = None,
        missing: Literal["error", "keep"] = "error",
        leave: Iterable[str] = (),
    ) -> RestoreReport:
        """Restore a checkpoint into `state`, all of its groups and the random streams, as `Checkpointer.restore` does.

        With `partial` only the groups that `state` names are restored, and no random stream. `only`, `missing` and
        `leave` restore a part, as in `Checkpointer.restore`. Raises StateMismatchError, IntegrityError, StoreError, or
        ConfigError for anything but a Checkpoint; the state is unchanged then.
        """
        # Import it here, so that reading a run without a restore need not import torch.
        from ckpt_tasks.checkpoint.restore.restore import restore_one
        from ckpt_tasks.state.selection import Selection

        selection = Selection.of(only, missing, leave)
        if not isinstance(partial, bool):
            raise ConfigError(f"partial is True or False, not {partial!r:.80}")
        if not isinstance(checkpoint, Checkpoint):
            raise ConfigError(
                f"a checkpoint is wanted first, not a value of type {type(checkpoint).__name__}",
                hint='Write run.restore(run.find("latest"), state).',
            )
        return restore_one(self.history.store, checkpoint, state, partial=partial, selection=selection)

    @checked
    @contextmanager
    def lease(self, checkpoint: Checkpoint, holder: str, expires_s: float = 3600.0) -> Iterator[Lease]:
        """Protect a checkpoint from being pruned while the block runs, for at most `expires_s` seconds.

        If the end of the lease cannot be written, the lease expires by itself. A child that is forked in the block does
        not end the lease. Raises CheckpointNotFoundError if the checkpoint has been pruned, ConfigError, and
        StoreError.
        """
        process = Process()
        if not 0 <= expires_s < _LONGEST_LEASE_S:
            raise ConfigError(f"a lease lasts from no time to a century, not {expires_s!r}")
        now = system().time()
        lease = Lease(
            id=system().token_hex(8),
            manifest_digest=checkpoint.manifest_digest,
            holder=holder,
            expires_at=now + expires_s,
        )

        def add(state: State, n: int) -> State:
            check_live(state, checkpoint)
            return state.with_lease(lease, now)

        self.history.append({"kind": "lease", "holder": holder, "step": checkpoint.step}, add, owner=None)
        try:
            yield lease
        finally:
            if process.is_here:
                self._end_lease(lease, checkpoint.step)

    def _end_lease(self, lease: Lease, step: int) -> None:
        event = {"kind": "lease", "holder": lease.holder, "step": step, "ended": True}
        try:
            self.history.append(event, lambda state, n: state.without_lease(lease.id), owner=None)
        except (StoreError, CommitUncertainError) as error:
            _log.warning("The lease of step %d stays until it expires: %s", step, error)

    @checked
    def pin(self, checkpoint: Checkpoint, reason: str) -> None:
        """Keep a checkpoint, whatever the policy says, even while another process trains the run.

        Raises CheckpointNotFoundError if the run has pruned it, ConfigError for an empty reason.
        """
        if not reason.strip():
            raise ConfigError("a pin needs a reason", hint="Say why the checkpoint is to stay.")
        put_pin(self.history, checkpoint, reason)

    @checked
    def unpin(self, checkpoint: Checkpoint) -> None:
        """Remove a pin, so that the policy decides. Raises CheckpointNotFoundError if the checkpoint was pruned."""
        put_pin(self.history, checkpoint, None)

    def evaluations(self) -> list[Evaluation]:
        """List the evaluations of live checkpoints, in the order in which they were recorded."""
        return list(self.head().state.evaluations)

    @checked
    def record_evaluation(self, checkpoint: Checkpoint, suite: str, metrics: Mapping[str, float]) -> bool:
        """Commit an evaluation of a checkpoint; return False if this suite has been recorded for it already.

        Raises CheckpointNotFoundError if the run has pruned the checkpoint, ConfigError for a bad suite name,
        StateError for a metric that is not a number, and StoreError.
        """
        if not is_group(suite):
            raise ConfigError(
                f"{suite!r:.80} is not the name of an evaluation set",
                hint="Use a letter, then letters, digits and underscores.",
            )
        from ckpt_tasks.format.layout.arrow import write_metrics

        metadata = {"step": str(checkpoint.step), "suite": suite, "manifest_digest": checkpoint.manifest_digest}
        data = write_metrics(metrics, metadata)
        name = evaluation_name(checkpoint.step, suite, system().token_hex(8))
        evaluation = Evaluation(
            manifest_digest=checkpoint.manifest_digest,
            step=checkpoint.step,
            suite=suite,
            metrics={key: float(value) for key, value in metrics.items()},
            table=name,
            table_digest=digest_hex(data),
            evaluated_at=now_iso(),
        )
        if self._evaluated(self.head().state, checkpoint, suite):
            return False
        self.history.store.put(name, [data])

        def add(state: State, n: int) -> State:
            if self._evaluated(state, checkpoint, suite):
                raise _RecordedMeanwhileError
            check_live(state, checkpoint)
            return state.with_evaluation(evaluation)

        try:
            self.history.append({"kind": "evaluation", "suite": suite, "step": checkpoint.step}, add, owner=None)
        except _RecordedMeanwhileError:
            self.history.store.delete(name)
            return False
        return True

    def curve(self) -> Curve:
        """Read the metrics of every step, in the order of their commits; abandoned lines are marked."""
        from ckpt_tasks.run.ledger.curve import read_curve
        from ckpt_tasks.run.ledger.goodput import follow
        from ckpt_tasks.run.ledger.timeline import read_timeline

        return read_curve(self.history, follow(read_timeline(self.history).moments))

    def _evaluated(self, state: State, checkpoint: Checkpoint, suite: str) -> bool:
        return any(e.manifest_digest == checkpoint.manifest_digest and e.suite == suite for e in state.evaluations)

    def _best(self, state: State, newest_first: list[Checkpoint], metric: str | None, mode: str | None) -> Checkpoint:
        wanted = metric or state.best_metric
        if wanted is None:
            known = ", ".join(sorted(state.metric_names)) or "none yet"
            raise ConfigError(
                "the run does not say by which metric a checkpoint is the best",
                hint=f"Train with best_metric, of {known}; or take a step that `ckpt ls --metrics NAME` shows.",
            )
        mode = mode or state.best_mode
        policy = RetentionPolicy(keep_best=1, best_metric=wanted, best_mode=mode)
        ranked = rank_best(newest_first, policy, state.evaluated)
        if not ranked:
            raise CheckpointNotFoundError(f"no checkpoint whose metrics are all finite has {wanted!r}")
        return next(c for c in newest_first if c.manifest_digest == ranked[0].manifest_digest)

    def notes(self) -> list[Mapping[str, Any]]:
        """List the notes of the newest 64 ledger entries, newest first: failures, fall-backs and notes of your own."""
        head = self.head()
        notes: list[Mapping[str, Any]] = []
        for n in range(head.next_n - 1, max(-1, head.next_n - 65), -1):
            try:
                entry, _ = self.history.read_entry(n)
            except (StoreError, IntegrityError):
                continue  # `ckpt verify` reports damaged entries.
            if entry.event["kind"] == "note":
                notes.append({**entry.event, "at": entry.at, "n": n})
        return notes


def put_pin(history: History, checkpoint: Checkpoint, reason: str | None, owner: Owner | None = None) -> None:
    """Pin a checkpoint; without a `reason`, unpin it. `owner` (None: any process) is the writer.

    Raises CheckpointNotFoundError if the checkpoint has been pruned, and FencedError if `owner` has lost the directory.
    """

    def change(state: State, n: int) -> State:
        check_live(state, checkpoint)
        return state.with_pin(checkpoint.manifest_digest, reason)

    history.append({"kind": "pin", "step": checkpoint.step, "reason": reason}, change, owner=owner)


def check_live(state: State, checkpoint: Checkpoint) -> None:
    """Raise CheckpointNotFoundError if the run no longer has a checkpoint."""
    if checkpoint.manifest_digest not in state.by_identity:
        raise CheckpointNotFoundError("the checkpoint has just been pruned", step=checkpoint.step)


class _RecordedMeanwhileError(Exception):
    """Another evaluator recorded the same suite between our check and our entry."""


def _steps(checkpoints: list[Checkpoint], most: int = 12) -> str:
    steps = sorted({c.step for c in checkpoints})
    text = ", ".join(str(step) for step in steps[-most:])
    return f"…, {text}" if len(steps) > most else text
