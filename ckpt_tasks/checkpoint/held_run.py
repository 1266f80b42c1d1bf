"""What a program does with the run that it holds, beside saving: list, pin, prune, and write into its history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tasks.checkpoint.tenure import Following, Tenure
from ckpt_tasks.errors import StateError
from ckpt_tasks.format.ledger import Checkpoint
from ckpt_tasks.policy.retention import Verdict
from ckpt_tasks.reading.reading import Run
from ckpt_tasks.saving.committer import Line
from ckpt_tasks.saving.saver import Saver
from ckpt_tasks.snapshot.cache import SnapshotCache
from ckpt_tasks.state.processes import Process
from ckpt_tasks.upkeep.pruning import Pruner

__all__ = ["HeldRun"]


class HeldRun:
    """The half of a Checkpointer that needs no state. Of many ranks, rank 0 writes, once."""

    freed_bytes: int
    _cache: SnapshotCache
    _flow_run_id: str | None
    _knows_line: bool
    _line: Line
    _process: Process
    _pruner: Pruner
    _saver: Saver
    _tenure: Tenure | Following | None

    @property
    def run(self) -> Run:
        """The run, read-only: does not take the run directory."""
        raise NotImplementedError

    def wait(self) -> None:
        """Return when every snapshot is committed."""
        raise NotImplementedError

    def checkpoints(self) -> list[Checkpoint]:
        """List the live checkpoints, newest commit first."""
        return self.run.checkpoints()

    def pin(self, step: int, reason: str = "by hand") -> None:
        """Keep the checkpoint of a step whatever the policy says. Raises StateError if the directory is not held."""
        self._pin(step, reason)

    def unpin(self, step: int) -> None:
        """Leave the checkpoint of a step to the policy again. Raises StateError if the directory is not held."""
        self._pin(step, None)

    def note(self, what: str, **fields: Any) -> None:
        """Write an event of your own into the run's history. Raises StateError if the directory is not held."""
        self._held().note(what, fields)

    def record_failure(self, **fields: Any) -> None:
        """Record a failed attempt in the run's history, as one more without progress. Raises StateError as `note`."""
        self._held().note("failure", fields, lambda state: state.with_stall(self._flow_run_id))

    def record_program(self, program: str, params: Mapping[str, Any]) -> None:
        """Record in the run's history which program it trains, with which parameters. Raises StateError as `note`."""
        recorded = {"program": program, "params": params}
        self._held().note("program", recorded, lambda state: replace(state, program=program, params=params))

    def prune(self, *, dry_run: bool = False) -> list[Verdict]:
        """Remove what the policy no longer keeps, and what dead attempts left; return every checkpoint's verdict.

        First read back the newest checkpoint to be kept, unless a kept one has been verified before. Raises StateError
        if the directory is not held and this is not a `dry_run`.
        """
        held = None if dry_run else self._held()
        self.wait()
        if not isinstance(held, Tenure):
            return self._pruner.plan(self._line.digest)
        verdicts = self._pruner.run(held.owner, self._line.digest)
        if not self._knows_line:
            self.freed_bytes = self._cache.clean(self.checkpoints())
        return verdicts

    def _pin(self, step: int, reason: str | None) -> None:
        held = self._held()
        self._saver.wait()
        if isinstance(held, Tenure):
            self._pruner.pin(held.owner, step, reason)

    def _held(self) -> Tenure | Following:
        """Return the present ownership; raises StateError if there is none."""
        self._process.check()
        if self._tenure is None:
            raise StateError(
                "this process does not hold the run directory", hint="Call restore(), save() or acquire() first."
            )
        self._tenure.beat()
        return self._tenure
