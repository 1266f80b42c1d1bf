"""`ckpt prune`: remove checkpoints that no rule keeps, say why, and delete orphans."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.cli.facts import RunArgument
from ckpt_tasks.cli.ls import title
from ckpt_tasks.cli.output import JsonOption, Output, output, table
from ckpt_tasks.errors import ConfigError, OwnedError
from ckpt_tasks.report.words import age, count, printable, size

if TYPE_CHECKING:
    from ckpt_tasks.format.ledger import State
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.ledger.config import CheckpointConfig
    from ckpt_tasks.policy.retention import Verdict
    from ckpt_tasks.reading.reading import Run
    from ckpt_tasks.storage.port import Store

__all__ = ["left_undeleted", "prune"]

NewestOption = Annotated[
    int | None, typer.Option("--max-num-checkpoints", metavar="N", help="keep the newest N checkpoints")
]
EveryOption = Annotated[int | None, typer.Option("--keep-every-n-steps", metavar="N", help="also keep every N-th step")]
BestOption = Annotated[int, typer.Option("--keep-best", metavar="N", help="also keep the best N", show_default=False)]
MetricOption = Annotated[
    str | None, typer.Option("--best-metric", metavar="NAME", help="metric for --keep-best [default: the run's own]")
]
ModeOption = Annotated[
    str | None, typer.Option("--best-mode", metavar="min|max", help="whether its lowest or its highest value is best")
]
MemoryOption = Annotated[str, typer.Option("--memory-dir", metavar="PATH", help="the memory_dir option of the run")]
DryOption = Annotated[bool, typer.Option("--dry-run", help="only print what would happen")]


def prune(
    directory: RunArgument,
    *,
    max_num_checkpoints: NewestOption = None,
    keep_every_n_steps: EveryOption = None,
    keep_best: BestOption = 0,
    best_metric: MetricOption = None,
    best_mode: ModeOption = None,
    memory_dir: MemoryOption = "auto",
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove checkpoints that no rule keeps.

    Also deletes orphaned objects. Without --max-num-checkpoints every checkpoint stays. The newest, pinned and leased
    ones always stay. Takes ownership of the run while it works: a run that is training is refused, since it prunes
    itself. Frees the run's snapshots in this host's memory, unless one of them is not in storage yet.
    """
    from ckpt_tasks.ledger.config import CheckpointConfig
    from ckpt_tasks.reading.reading import open_run
    from ckpt_tasks.upkeep.upkeep import missing_metric

    with output(as_json) as out:
        run = open_run(directory)
        state = run.head().state
        if max_num_checkpoints is None and (keep_every_n_steps is not None or keep_best):
            raise ConfigError(
                "without --max-num-checkpoints every checkpoint stays, and the other rules say nothing",
                hint="Add --max-num-checkpoints N, the number of newest ones to keep.",
            )
        config = CheckpointConfig(
            checkpoint_dir=directory,
            max_num_checkpoints=max_num_checkpoints,
            keep_every_n_steps=keep_every_n_steps,
            keep_best=keep_best,
            best_metric=best_metric or (state.best_metric if keep_best else None),
            best_mode=best_mode or state.best_mode,  # type: ignore[arg-type] # CheckpointConfig checks it
            memory_dir=memory_dir,
        )
        # The run keeps the named metric as the one that @best means, so it must exist even if no best one is kept.
        named = replace(config.retention_policy, keep_best=keep_best or int(best_metric is not None))
        missing = missing_metric(state, named)
        if missing is not None:
            raise ConfigError(missing, hint="Name one of them with --best-metric; nothing was removed.")
        _prune(out, run, config, dry_run)


def _prune(out: Output, run: Run, config: CheckpointConfig, dry_run: bool) -> None:
    from ckpt_tasks.upkeep.upkeep import plan_prune

    head, store = run.head(), run.history.store
    before = {checkpoint.manifest_digest: checkpoint for checkpoint in head.state.live}
    swept = _unnamed(store, head.state)
    verdicts, freed_bytes = (plan_prune(head.state, config.retention_policy), 0) if dry_run else _execute(config)
    left = {checkpoint.manifest_digest for checkpoint in run.checkpoints()}
    undeleted = [] if dry_run else left_undeleted(run)
    rows = [_row(verdict, before[verdict.manifest_digest], left, undeleted, dry_run) for verdict in verdicts]
    stuck = [row["step"] for row in rows if row["verdict"] == "stays after all"]
    swept = [name for name in swept if name not in undeleted]
    facts = {"checkpoint_dir": store.url, "dry_run": dry_run, "freed_memory_bytes": freed_bytes}
    out.data({**facts, "checkpoints": rows, "swept": swept, "undeleted": undeleted})
    if not out.as_json:
        _print(out, run, rows, swept, dry_run)
        if undeleted:
            what = f"{count(len(undeleted), 'object')} of retired checkpoints could not be deleted, and take up room."
            out.print(f"{what} Allow this process to delete, and prune again.")
        if freed_bytes:
            out.print(f"Freed {size(freed_bytes)} of this host's memory: snapshots of the run, which storage has.")
        elif not swept and all(row["verdict"] == "stays" for row in rows):
            out.print("There is nothing to remove.")
    if stuck or undeleted:
        out.fail()


def left_undeleted(run: Run, prefix: str = "") -> list[str]:
    """List the objects below `prefix` of checkpoints that the run no longer has, because nobody could delete them."""
    return sorted(filter(run.head().state.has_retired, run.history.store.names(prefix)))


def _unnamed(store: Store, state: State) -> list[str]:
    """List objects that no checkpoint names: orphans, and retired objects that are not deleted yet."""
    from ckpt_tasks.upkeep.upkeep import orphans

    return sorted({*orphans(store, state), *filter(state.has_retired, store.names(""))})


def _execute(config: CheckpointConfig) -> tuple[list[Verdict], int]:
    """Prune; return the verdicts, and how many bytes of snapshots in memory were freed."""
    from ckpt_tasks.checkpoint.checkpointer import Checkpointer

    with Checkpointer(config) as ckpt:
        try:
            ckpt.acquire()
            return ckpt.prune(), ckpt.freed_bytes
        except OwnedError as error:
            error.hint = "A run that is training prunes itself. --dry-run only looks."
            raise


def _row(
    verdict: Verdict, checkpoint: Checkpoint, left: set[str], undeleted: list[str], dry_run: bool
) -> dict[str, Any]:
    if verdict.keep:
        fate = "stays"
    elif dry_run:
        fate = "would go"
    elif verdict.manifest_digest in left:
        fate = "stays after all"
    else:
        attempt = checkpoint.manifest.rpartition("/")[0] + "/"
        fate = "not deleted" if any(name.startswith(attempt) for name in undeleted) else "removed"
    return {
        "step": verdict.step,
        "verdict": fate,
        "reasons": list(verdict.reasons),
        "saved_at": checkpoint.saved_at,
        "size_bytes": checkpoint.size_bytes,
        "manifest_digest": verdict.manifest_digest,
    }


def _print(out: Output, run: Run, rows: list[dict[str, Any]], swept: list[str], dry_run: bool) -> None:
    from rich.text import Text

    made = table("step", "saved", "size", "verdict", "because", right=("step", "size"))
    styles = {"stays": "", "stays after all": "red", "not deleted": "red"}
    for row in rows:
        why = printable(", ".join(row["reasons"]))
        cells = (str(row["step"]), age(row["saved_at"]), size(row["size_bytes"]), row["verdict"], why)
        made.add_row(*cells, style=styles.get(row["verdict"], "yellow"))
    out.print(title(run), made)
    gone = [row for row in rows if row["verdict"] in ("would go", "removed")]
    freed = size(sum(row["size_bytes"] for row in gone))
    parts = [f"{count(len(gone), 'checkpoint')} of {len(rows)}, {freed}"] if gone else []
    parts += [f"{count(len(swept), 'object')} that nothing names"] if swept else []
    if any(row["verdict"] == "stays after all" for row in rows):
        out.print(
            Text("Nothing was removed: the newest checkpoint cannot be read back. Look at it: ckpt verify", style="red")
        )
    elif parts:
        out.print(f"{'Would remove' if dry_run else 'Removed'} {', and '.join(parts)}.")
