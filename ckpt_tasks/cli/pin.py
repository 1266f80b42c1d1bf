"""`ckpt pin`, `ckpt unpin` and `ckpt rm`: keep or remove one checkpoint by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.cli.completion import complete_checkpoint
from ckpt_tasks.cli.facts import parse_target
from ckpt_tasks.cli.ls import title
from ckpt_tasks.cli.output import JsonOption, Output, output
from ckpt_tasks.cli.prune import DryOption, left_undeleted
from ckpt_tasks.errors import ConfigError, OwnedError
from ckpt_tasks.report.words import count, printable, size

if TYPE_CHECKING:
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.policy.retention import Verdict
    from ckpt_tasks.reading.reading import Run

__all__ = ["pin", "rm", "unpin"]

OneArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR@STEP",
        help="a step of a run, @latest or @best",
        show_default=False,
        autocompletion=complete_checkpoint,
    ),
]
ReasonOption = Annotated[str, typer.Option("--reason", "-m", metavar="TEXT", help="why it must stay")]


def pin(checkpoint: OneArgument, *, reason: ReasonOption = "by hand", as_json: JsonOption = False) -> None:
    """Keep a checkpoint, whatever the policy of its run says.

    Works while another process trains the run: a pin is one entry in the ledger. `ckpt ls` shows it.
    """
    with output(as_json) as out:
        run, record = _named(checkpoint)
        run.pin(record, reason)
        _say(out, run, record, {"pinned": reason}, f"Pinned: {printable(reason)}. No rule removes it now.")


def unpin(checkpoint: OneArgument, *, as_json: JsonOption = False) -> None:
    """Remove a pin: the retention policy decides again.

    Works while another process trains the run.
    """
    with output(as_json) as out:
        run, record = _named(checkpoint)
        was = run.head().state.pins.get(record.manifest_digest)
        if was is None:
            raise ConfigError("the checkpoint is not pinned", step=record.step, hint="`ckpt ls` shows which ones are.")
        run.unpin(record)
        text = f"Unpinned; it was pinned: {printable(was)}. The run's own policy decides about it now."
        _say(out, run, record, {"pinned": None, "was": was}, text)


def rm(checkpoint: OneArgument, *, dry_run: DryOption = False, as_json: JsonOption = False) -> None:
    """Remove one checkpoint from its run, and delete its objects.

    The newest, the newest good, pinned and leased checkpoints stay, with exit status 1, as do objects that the store
    refuses to delete. The newest checkpoint is read back first. Takes ownership of the run while it works, so a run
    that is training is refused.
    """
    with output(as_json) as out:
        run, record = _named(checkpoint)
        verdict = _look(run, record) if dry_run else _remove(parse_target(checkpoint).checkpoint_dir, record)
        goes = not verdict.keep and not dry_run
        undeleted = left_undeleted(run, record.manifest.rpartition("/")[0] + "/") if goes else []
        fate = "stays" if verdict.keep else "would go" if dry_run else "not deleted" if undeleted else "removed"
        facts = {"dry_run": dry_run, "verdict": fate, "reasons": list(verdict.reasons), "size_bytes": record.size_bytes}
        why = printable(", ".join(verdict.reasons))
        text = f"It stays: {why}."
        if undeleted:
            text = f"Not deleted: {count(len(undeleted), 'object')}. Allow this process to delete, then: ckpt prune"
        elif not verdict.keep:
            text = f"{'Would be removed' if dry_run else 'Removed'}: {size(record.size_bytes)}."
        elif record.manifest_digest in run.head().state.pins:
            text += " `ckpt unpin` leaves it to the policy."
        _say(out, run, record, facts, text)
        if verdict.keep or undeleted:
            out.fail()


def _named(text: str) -> tuple[Run, Checkpoint]:
    target = parse_target(text)
    if target.which is None:
        raise ConfigError(f"{text!r:.200} names no checkpoint", hint="Write DIR@500, DIR@latest or DIR@best.")
    return target.find()


def _look(run: Run, checkpoint: Checkpoint) -> Verdict:
    from ckpt_tasks.upkeep.upkeep import newest_good, plan_removal

    state = run.head().state
    verified = frozenset({newest_good(run.history.store, state).manifest_digest})
    plan = plan_removal(state, checkpoint.manifest_digest, verified)
    return next(v for v in plan if v.manifest_digest == checkpoint.manifest_digest)


def _remove(directory: str, checkpoint: Checkpoint) -> Verdict:
    from ckpt_tasks.checkpoint.checkpointer import Checkpointer
    from ckpt_tasks.ledger.config import CheckpointConfig

    config = CheckpointConfig(checkpoint_dir=directory, max_num_checkpoints=None, memory_dir=None)
    with Checkpointer(config) as ckpt:
        try:
            ckpt.acquire()
        except OwnedError as error:
            error.hint = "Only the process that trains a run removes its checkpoints. Stop it first, or let it prune."
            raise
        return ckpt.remove(checkpoint)


def _say(out: Output, run: Run, checkpoint: Checkpoint, facts: dict[str, Any], text: str) -> None:
    out.data(
        {
            "checkpoint_dir": run.history.store.url,
            "step": checkpoint.step,
            "manifest_digest": checkpoint.manifest_digest,
            **facts,
        }
    )
    out.print(title(run, f" step {checkpoint.step}"), text)
