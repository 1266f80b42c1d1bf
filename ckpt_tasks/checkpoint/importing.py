"""Commit an import: a plan's groups and tensors become a checkpoint of a run, in the form that a save writes.

Invariants

1. The whole file, with its sizes and CRCs, and the checkpoint that it will become are checked before the run directory
   is taken; until then nothing is written.
2. Before the checkpoint is committed, every byte is read back from the store and compared with the digest of the file's
   bytes. A file that changes meanwhile is an error, and nothing is committed.
3. An imported checkpoint follows only imported checkpoints: a trained run has a history that no file has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ckpt_tasks.checkpoint.held_run import HeldRun
from ckpt_tasks.checkpoint.memory.snapshot import bytes_of
from ckpt_tasks.checkpoint.save.parts import RankPart, Saving, Stored, joined, put_tensors
from ckpt_tasks.checkpoint.save.prepared import PreparedCheckpoint, prepare_checkpoint
from ckpt_tasks.checkpoint.save.tenure import Line, Tenure
from ckpt_tasks.checkpoint.transfer.importing.plan import ImportPlan, spec_of
from ckpt_tasks.checkpoint.transfer.importing.sources import SourceTensor
from ckpt_tasks.errors import CkptError, ConfigError, IntegrityError, StateError
from ckpt_tasks.format.keys import Attempt, attempt_prefix, shard_name
from ckpt_tasks.format.layout.image import TensorSpec, plan_image, plan_parts
from ckpt_tasks.format.ledger import lineage
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.ledger.ownership import identify
from ckpt_tasks.run.opening import open_checkpoint
from ckpt_tasks.run.upkeep.verifying import verify_checkpoint
from ckpt_tasks.storage.port import Store, WatchedStore

IMPORTED_FROM = "imported_from"  # A manifest's environment has the source under this key.
_SHARD_BYTES = 32 << 20  # The tensors of one file are in memory while it is written.
OnProgress = Callable[[int], None]


class ImportedRun(HeldRun):
    """A run whose checkpoints come from files of other tools."""

    def add(self, plan: ImportPlan, on_progress: OnProgress = lambda size_bytes: None) -> Checkpoint:
        """Commit a plan as the next checkpoint of the run, and release the run.

        `on_progress` gets the size in bytes of every read: of the file, and of the written objects. Raises StateError
        if the run has been trained, ConfigError if it has this step or a later one, OwnedError if a process holds it,
        IntegrityError if the file changes meanwhile, and StoreError. Nothing is committed then.
        """
        self._newest(plan.step)  # Check this before the directory is made.
        for file in plan.source.opened:
            file.check(on_progress)
        _check_bounds(plan)
        try:
            self._own()
            newest = self._newest(plan.step)
            self._line.follow(newest)
            self._line.known_n = newest.n if newest is not None else -1
            return self._write(self._begin_save(), plan, on_progress)
        finally:
            self._release(prune_s=0.0)

    def _newest(self, step: int) -> Checkpoint | None:
        """Return the checkpoint that a new one of this step would follow; raise an error if none may follow."""
        live = lineage(self._history.head().state.live)
        if not live:
            return None
        if IMPORTED_FROM not in open_checkpoint(self._history.store, live[0]).manifest.environment:
            raise StateError(
                f"{self._history.store.url} is a run that has been trained",
                hint="Import to a directory of its own: a file does not say what its weights come from.",
            )
        latest = max(checkpoint.step for checkpoint in live)
        if step <= latest:
            raise ConfigError(
                f"the run has step {latest}, and step {step} would come after it",
                hint="Give a later one: --step N.",
            )
        return live[0]

    def _write(self, tenure: Tenure, plan: ImportPlan, on_progress: OnProgress) -> Checkpoint:
        if (committer := tenure.committer) is None:
            raise StateError("only rank 0 imports", hint="Call it in rank 0.")
        admitted = committer.admit()
        saving = _new_saving(tenure, plan)
        store = self._history.store

        def check(prepared: PreparedCheckpoint) -> None:
            new = prepared.checkpoint(parent=None, n=admitted[0].next_n, cost_s=0.0)
            faults = verify_checkpoint(WatchedStore(store, on_progress), new)
            if faults or any(file.has_changed() for file in plan.source.opened):
                what = f"what was written is not what was read: {faults[0]}" if faults else "the file has changed"
                raise IntegrityError(
                    what,
                    step=plan.step,
                    hint=f"Does another process write {plan.source.name}? Import it again when nothing does.",
                )

        try:
            part = _write_all(store, saving.attempt, plan, on_progress)
            entry, _ = committer.commit(admitted, saving, [part], observed={}, check=check)
        except CkptError:
            committer.abandon(saving.attempt)
            raise
        self._line.committed(entry.state.live[-1], Stored.of(part.objects, part.index))
        return entry.state.live[-1]


def _new_saving(tenure: Tenure, plan: ImportPlan) -> Saving:
    saving = tenure.new_saving(plan.step, plan.groups, metrics=None, epochs=None, interim=False)
    return replace(saving, environment={IMPORTED_FROM: plan.source.name, **plan.environment})


def _check_bounds(plan: ImportPlan) -> None:
    """Make index and manifest without a store or tensor bytes; raise the errors that a save or a reader would raise."""
    saving = _new_saving(Tenure(identify(None), "run", Line()), plan)
    prepare_checkpoint(saving, [_write_all(None, saving.attempt, plan)])


def _write_all(
    store: Store | None, attempt: Attempt, plan: ImportPlan, on_progress: OnProgress = lambda size_bytes: None
) -> RankPart:
    """Write the plan's tensors in the same files as a save, group by group; without a store, only plan them."""
    groups: dict[str, list[TensorSpec]] = {}
    for key, tensor in plan.tensors.items():
        groups.setdefault(key.partition("/")[0], []).append(spec_of(key, tensor))

    def bytes_read(group: str, name: str) -> memoryview:
        tensor = plan.tensors[f"{group}/{name}"]
        if isinstance(tensor, SourceTensor):
            data = tensor.file.read(tensor.begin, tensor.end)
        else:
            data = bytes_of(plan.source.copied(tensor))
        on_progress(data.nbytes)
        return data

    return joined(
        [
            put_tensors(
                store,
                attempt_prefix(attempt) + shard_name(group, 0, 1, number),
                group,
                plan_image(part),
                partial(bytes_read, group),
            )
            for group, specs in groups.items()
            for number, part in enumerate(plan_parts(specs, _SHARD_BYTES))
        ]
    )
