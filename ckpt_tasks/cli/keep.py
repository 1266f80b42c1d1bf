"""`ckpt pin`, `unpin`, `rm`, `prune` and `rollback`: which checkpoints stay, and where training continues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ckpt_tasks.cli.arguments import (
    DryOption,
    JsonOption,
    OneArgument,
    argument,
    complete_checkpoint,
    complete_run,
    option,
    parse_target,
)
from ckpt_tasks.cli.output import Column, Output, column, listing, output, row_facts, title
from ckpt_tasks.errors import ConfigError, IntegrityError, OwnedError
from ckpt_tasks.run.report.words import age, count, size

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.checkpointer import Checkpointer
    from ckpt_tasks.checkpoint.restore.reading import Run
    from ckpt_tasks.format.policy.retention import Verdict
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.run.ledger.config import CheckpointConfig

ReasonOption = Annotated[str, option("--reason -m", "TEXT", "why it must stay")]
NewestOption = Annotated[int | None, option("--max-num-checkpoints", "N", "keep the newest N checkpoints")]
EveryOption = Annotated[int | None, option("--keep-every-n-steps", "N", "also keep every N-th step")]
BestOption = Annotated[int, option("--keep-best", "N", "also keep the best N", show_default=False)]
MetricOption = Annotated[str | None, option("--best-metric", "NAME", "metric for --keep-best [default: the run's own]")]
ModeOption = Annotated[str | None, option("--best-mode", "min|max", "whether its lowest or its highest value is best")]
MemoryOption = Annotated[str, option("--memory-dir", "PATH", "the memory_dir option of the run")]
GoneOption = Annotated[
    bool, option("--memory", None, "only free the snapshots in this host's memory whose runs are gone; takes no DIR")
]
PrunedArgument = Annotated[str | None, argument("[DIR]", "a run directory", complete_run)]
BackArgument = Annotated[str, argument("DIR@STEP", "the checkpoint to go back to", complete_checkpoint)]
WhyOption = Annotated[str, option("--reason", "TEXT", "why; recorded in the ledger and shown in the report")]
SkipOption = Annotated[
    str | None,
    option(
        "--skip-batches", "401-410|N", "batches to skip after that: the steps that would take them, or the next N",
        show_default=False,
    ),
]  # fmt: skip


def pin(
    checkpoint: OneArgument,
    *,
    reason: ReasonOption = "by hand",
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Pin DIR@STEP: no policy removes it from now on.

    Works while another process trains the run: a pin is one entry in the ledger. `ckpt ls` shows the pin.
    """
    with output(as_json) as out:
        run, record = _named(checkpoint)
        if dry_run:
            _say(out, run, record, {"dry_run": True, "pinned": reason}, f"Would be pinned: {reason}.")
            return
        run.pin(record, reason)
        _say(out, run, record, {"pinned": reason}, f"Pinned: {reason}. No rule removes it now.")


def unpin(checkpoint: OneArgument, *, dry_run: DryOption = False, as_json: JsonOption = False) -> None:
    """Unpin DIR@STEP, and print why it was pinned.

    Works while another process trains the run.
    """
    with output(as_json) as out:
        run, record = _named(checkpoint)
        was = run.head().state.pins.get(record.manifest_digest)
        if was is None:
            raise ConfigError("the checkpoint is not pinned", step=record.step, hint="`ckpt ls` shows which ones are.")
        if dry_run:
            _say(out, run, record, {"dry_run": True, "was": was}, f"Would be unpinned; it is pinned: {was}.")
            return
        run.unpin(record)
        text = f"Unpinned; it was pinned: {was}. The run's own policy decides about it now."
        _say(out, run, record, {"pinned": None, "was": was}, text)


def rm(checkpoint: OneArgument, *, dry_run: DryOption = False, as_json: JsonOption = False) -> None:
    """Remove DIR@STEP; print what it frees, or why it stays.

    Keeps the newest checkpoint, the newest good one, and pinned and leased ones. Exits with 1 if DIR@STEP stays, or if
    the store refuses to delete an object. Reads the newest checkpoint back first. Takes ownership of the run while it
    works, so it refuses a run that is training.
    """
    with output(as_json) as out:
        run, record = _named(checkpoint)
        verdict = _look(run, record) if dry_run else _remove(parse_target(checkpoint).checkpoint_dir, record)
        goes = not verdict.keep and not dry_run
        undeleted = _undeleted(run, _attempt(record)) if goes else []
        fate = "stays" if verdict.keep else "would go" if dry_run else "not deleted" if undeleted else "removed"
        facts = {"dry_run": dry_run, "verdict": fate, "reasons": list(verdict.reasons), "size_bytes": record.size_bytes}
        text = f"It stays: {', '.join(verdict.reasons)}."
        if undeleted:
            text = f"Not deleted: {count(len(undeleted), 'object')}. Allow this process to delete, then: ckpt prune"
        elif not verdict.keep:
            text = f"{'Would be removed' if dry_run else 'Removed'}: {size(record.size_bytes)}."
        elif record.manifest_digest in run.head().state.pins:
            text += " `ckpt unpin` leaves it to the policy."
        _say(out, run, record, facts, text)
        out.fail(verdict.keep or bool(undeleted))


def prune(
    directory: PrunedArgument = None,
    *,
    max_num_checkpoints: NewestOption = None,
    keep_every_n_steps: EveryOption = None,
    keep_best: BestOption = 0,
    best_metric: MetricOption = None,
    best_mode: ModeOption = None,
    memory_dir: MemoryOption = "auto",
    memory: GoneOption = False,
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove what no rule keeps; list what stays in DIR, and why.

    Also deletes orphaned objects. Without --max-num-checkpoints every checkpoint stays. The newest checkpoint, pinned
    and leased checkpoints always stay. Takes ownership of the run while it works, so it refuses a run that is training,
    which prunes itself. Frees the run's snapshots in this host's memory, unless storage does not have one of them yet.

    `ckpt prune --memory` frees only what killed runs left in this host's memory, if their run directory on a local disk
    is gone. `ckpt doctor` lists what is there.
    """
    from ckpt_tasks.checkpoint.restore.reading import open_run
    from ckpt_tasks.run.ledger.config import CheckpointConfig
    from ckpt_tasks.run.upkeep.verifying import missing_metric

    with output(as_json) as out:
        if memory == (directory is not None):
            raise ConfigError("`ckpt prune` takes a run directory, or --memory for runs that are gone")
        if directory is None:
            _free(out, memory_dir, dry_run)
            return
        run = open_run(directory)
        state = run.head().state
        if max_num_checkpoints is None and (keep_every_n_steps is not None or keep_best):
            raise ConfigError(
                "without --max-num-checkpoints every checkpoint stays, and the other rules say nothing",
                hint="Add --max-num-checkpoints N, the number of newest ones to keep.",
            )
        mode = best_mode if best_mode is not None else (state.best_mode if keep_best or best_metric else "min")
        config = CheckpointConfig(
            checkpoint_dir=directory,
            max_num_checkpoints=max_num_checkpoints,
            keep_every_n_steps=keep_every_n_steps,
            keep_best=keep_best,
            best_metric=state.best_metric if best_metric is None and (keep_best or best_mode) else best_metric,
            best_mode=mode,  # type: ignore[arg-type] # CheckpointConfig checks it
            memory_dir=memory_dir,
        )
        # The run keeps this metric for @best, so the metric must exist even if the prune keeps no best checkpoint.
        named = replace(config.retention_policy, keep_best=keep_best or int(best_metric is not None))
        missing = missing_metric(state, named)
        if missing is not None:
            raise ConfigError(missing, hint="Name one of them with --best-metric; nothing was removed.")
        _prune(out, run, config, dry_run)


def rollback(
    target: BackArgument,
    *,
    skip_batches: SkipOption = None,
    reason: WhyOption = "by hand",
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go back to DIR@STEP, and print what that discards.

    The next restore takes DIR@STEP, and does not use uncommitted snapshots in memory. Marks the checkpoints after
    DIR@STEP as abandoned, and deletes none of them. Reads every byte of DIR@STEP back first. Takes ownership of the run
    for a moment, so it refuses a run that is training.
    """
    from ckpt_tasks.checkpoint.rollback import parse_skip
    from ckpt_tasks.run.ledger.config import CheckpointConfig

    with output(as_json) as out:
        parsed = parse_target(target)
        if parsed.which is None:
            raise ConfigError(f"{target!r:.200} names no step", hint="Write DIR@STEP, as ckpt ls lists them.")
        run, checkpoint = parsed.find()
        skip = parse_skip(skip_batches, checkpoint.step)
        if dry_run:
            _say_back(out, run, checkpoint, skip)
            return
        config = CheckpointConfig(checkpoint_dir=parsed.checkpoint_dir, memory_dir=None)
        with _held(config, "Stop the training first: a rollback would fence it.") as ckpt:
            ckpt.rollback(checkpoint.step, skip_batches=skip, reason=reason)
        left = sorted(checkpoint.step for checkpoint in run.checkpoints() if checkpoint.abandoned)
        parts = [
            f"Training resumes from step {checkpoint.step}; {count(len(left), 'checkpoint')} on the discarded branch."
        ]
        parts += [f"Then it leaves out the batches of steps {skip[0]} to {skip[1]}."] if skip else []
        facts = {"checkpoint_dir": run.history.store.url, "step": checkpoint.step, "skip": skip, "left_behind": left}
        out.answer(facts, [*parts, f"Reason: {reason}"])


def _say_back(out: Output, run: Run, checkpoint: Checkpoint, skip: tuple[int, int] | None) -> None:
    from ckpt_tasks.run.upkeep.verifying import verify_checkpoint

    if faults := verify_checkpoint(run.history.store, checkpoint):
        raise IntegrityError(f"the checkpoint is damaged: {faults[0]}", step=checkpoint.step)
    left = sorted(one.step for one in run.checkpoints() if one.abandoned or one.n > checkpoint.n)
    text = f"Training would resume from it; {count(len(left), 'checkpoint')} on the discarded branch."
    _say(out, run, checkpoint, {"dry_run": True, "skip": skip, "left_behind": left}, text)


# ── one checkpoint ───────────────────────────────────────────────────────────────────────────────────────────────


def _named(text: str) -> tuple[Run, Checkpoint]:
    target = parse_target(text)
    if target.which is None:
        raise ConfigError(f"{text!r:.200} names no checkpoint", hint="Write DIR@500, DIR@latest or DIR@best.")
    return target.find()


def _look(run: Run, checkpoint: Checkpoint) -> Verdict:
    from ckpt_tasks.run.upkeep.verifying import newest_good, plan_removal

    state = run.head().state
    verified = frozenset({newest_good(run.history.store, state).manifest_digest})
    plan = plan_removal(state, checkpoint.manifest_digest, verified)
    return next(v for v in plan if v.manifest_digest == checkpoint.manifest_digest)


def _remove(directory: str, checkpoint: Checkpoint) -> Verdict:
    from ckpt_tasks.run.ledger.config import CheckpointConfig

    config = CheckpointConfig(checkpoint_dir=directory, max_num_checkpoints=None, memory_dir=None)
    hint = "Only the process that trains a run removes its checkpoints. Stop it first, or let it prune."
    with _held(config, hint) as ckpt:
        return ckpt.remove(checkpoint)


@contextmanager
def _held(config: CheckpointConfig, hint: str) -> Iterator[Checkpointer]:
    """Own the run during the block; if another process owns it, raise OwnedError with the hint."""
    from ckpt_tasks.checkpoint.checkpointer import Checkpointer

    ckpt = Checkpointer(config)
    try:
        ckpt.acquire()  # Outside the block: a signal must end a wait for another owner at once.
        with ckpt:
            yield ckpt
    except OwnedError as error:
        error.hint = hint
        raise
    finally:
        ckpt.close()


def _say(out: Output, run: Run, checkpoint: Checkpoint, facts: dict[str, Any], text: str) -> None:
    named = {"step": checkpoint.step, "manifest_digest": checkpoint.manifest_digest}
    out.answer(
        {"checkpoint_dir": run.history.store.url, **named, **facts}, [title(run, f" step {checkpoint.step}"), text]
    )


# ── prune ────────────────────────────────────────────────────────────────────────────────────────────────────────

_STYLES = {"stays": "", "stays after all": "red", "not deleted": "red"}
_COLUMNS = (
    Column("step", "step", lambda row: row[0].step, numbers=True),
    Column("verdict", None, lambda row: row[2]),
    Column("reasons", None, lambda row: list(row[0].reasons)),
    Column("saved_at", "saved", lambda row: row[1].saved_at, age),
    Column("size_bytes", "size", lambda row: row[1].size_bytes, size, numbers=True),
    column("verdict", itemgetter(2)),
    column("because", lambda row: ", ".join(row[0].reasons)),
    Column("manifest_digest", None, lambda row: row[0].manifest_digest),
)


def _prune(out: Output, run: Run, config: CheckpointConfig, dry_run: bool) -> None:
    from ckpt_tasks.run.upkeep.verifying import orphans, plan_prune

    head, store = run.head(), run.history.store
    before = {checkpoint.manifest_digest: checkpoint for checkpoint in head.state.live}
    swept = sorted({*orphans(store, head.state), *filter(head.state.has_retired, store.names(""))})
    verdicts, freed_bytes = (plan_prune(head.state, config.retention_policy), 0) if dry_run else _execute(config)
    left = {checkpoint.manifest_digest for checkpoint in run.checkpoints()}
    undeleted = [] if dry_run else _undeleted(run)
    planned = ((each, before[each.manifest_digest]) for each in verdicts)
    rows = [(each, checkpoint, _fate(each, checkpoint, left, undeleted, dry_run)) for each, checkpoint in planned]
    swept = [name for name in swept if name not in undeleted]
    facts = {"checkpoint_dir": store.url, "dry_run": dry_run, "freed_memory_bytes": freed_bytes}
    lists = {"checkpoints": row_facts(_COLUMNS, rows), "swept": swept, "undeleted": undeleted}
    table = listing(_COLUMNS, rows, lambda row: _STYLES.get(row[2], "yellow"))
    out.answer({**facts, **lists}, [title(run), table, *_summary(rows, swept, dry_run)])
    if undeleted:
        what = f"{count(len(undeleted), 'object')} of retired checkpoints could not be deleted, and take up room."
        out.print(f"{what} Allow this process to delete, and prune again.")
    if freed_bytes:
        out.print(f"Freed {size(freed_bytes)} of this host's memory: snapshots of the run, which storage has.")
    elif not swept and all(fate == "stays" for *_, fate in rows):
        out.print("There is nothing to remove.")
    out.fail(bool(undeleted) or any(fate == "stays after all" for *_, fate in rows))


_GONE = (
    Column("checkpoint_dir", "run", itemgetter(0)),
    Column("size_bytes", "size", itemgetter(1), size, numbers=True),
)


def _free(out: Output, memory_dir: str, dry_run: bool) -> None:
    from ckpt_tasks.checkpoint.memory.cache import free_snapshots, snapshots_left
    from ckpt_tasks.checkpoint.memory.memory_room import SHARED_MEMORY

    directory = SHARED_MEMORY if memory_dir == "auto" else Path(memory_dir)
    rows = [(url, size_bytes) for url, (size_bytes, is_gone) in snapshots_left(directory).items() if is_gone]
    if rows and not dry_run:
        free_snapshots(directory)
    freed_bytes = sum(size_bytes for _, size_bytes in rows)
    facts = {"dry_run": dry_run, "freed_memory_bytes": freed_bytes, "gone": row_facts(_GONE, rows)}
    end = f"{'Would free' if dry_run else 'Freed'} {size(freed_bytes)}." if rows else "No run that is gone has any."
    out.answer(facts, [listing(_GONE, rows), end])


def _execute(config: CheckpointConfig) -> tuple[list[Verdict], int]:
    """Prune the run; return the verdicts, and the size in bytes of the snapshots that the prune freed in memory."""
    with _held(config, "A run that is training prunes itself. --dry-run only looks.") as ckpt:
        return ckpt.prune(), ckpt.freed_bytes


def _undeleted(run: Run, prefix: str = "") -> list[str]:
    """List the objects below `prefix` that could not be deleted: objects of retired checkpoints."""
    return sorted(filter(run.head().state.has_retired, run.history.store.names(prefix)))


def _attempt(checkpoint: Checkpoint) -> str:
    return checkpoint.manifest.rpartition("/")[0] + "/"


def _fate(verdict: Verdict, checkpoint: Checkpoint, left: set[str], undeleted: list[str], dry_run: bool) -> str:
    if verdict.keep or dry_run:
        return "stays" if verdict.keep else "would go"
    if verdict.manifest_digest in left:
        return "stays after all"
    return "not deleted" if any(name.startswith(_attempt(checkpoint)) for name in undeleted) else "removed"


def _summary(rows: list[tuple[Verdict, Checkpoint, str]], swept: list[str], dry_run: bool) -> Iterator[Any]:
    if any(fate == "stays after all" for *_, fate in rows):
        yield "Nothing was removed: the newest checkpoint cannot be read back. Look at it: ckpt verify", "red"
        return
    gone = [checkpoint.size_bytes for _, checkpoint, fate in rows if fate in ("would go", "removed")]
    parts = [f"{count(len(gone), 'checkpoint')} of {len(rows)}, {size(sum(gone))}"] if gone else []
    parts += [f"{count(len(swept), 'object')} that nothing names"] if swept else []
    if parts:
        yield f"{'Would remove' if dry_run else 'Removed'} {', and '.join(parts)}."
