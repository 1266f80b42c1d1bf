"""What several verbs share: the run or checkpoint that the user names, and facts that are shown of it."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ckpt_tasks.cli.completion import complete_checkpoint, complete_run
from ckpt_tasks.ledger.targets import split_target
from ckpt_tasks.report.words import span

if TYPE_CHECKING:
    from ckpt_tasks.format.ledger import State
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.reading.reading import Run

__all__ = [
    "CheckpointArgument",
    "RunArgument",
    "RunOrCheckpointArgument",
    "Target",
    "kept_because",
    "lineage_facts",
    "params_line",
    "parse_target",
    "written",
]

RunArgument = Annotated[
    str,
    typer.Argument(metavar="DIR", help="a run directory", show_default=False, autocompletion=complete_run),
]


def _of_run(otherwise: str) -> Any:
    help_text = f"a step, @latest or @best; {otherwise} if none is named"
    return typer.Argument(metavar="DIR[@STEP]", help=help_text, show_default=False, autocompletion=complete_checkpoint)


CheckpointArgument = Annotated[str, _of_run("the latest")]
RunOrCheckpointArgument = Annotated[str, _of_run("the whole run")]


class Target(NamedTuple):
    """A run directory, and which checkpoint: a step, "latest", "best", or None if the user named none."""

    checkpoint_dir: str
    which: int | str | None

    def open(self) -> Run:
        """Open the run; raise CheckpointNotFoundError if there is none."""
        from ckpt_tasks.reading.reading import open_run

        return open_run(self.checkpoint_dir)

    def find(self) -> tuple[Run, Checkpoint]:
        """Open the run and find the checkpoint: the latest if no step is named.

        Raises CheckpointNotFoundError if there is no such run or checkpoint, ConfigError if "best" has no metric.
        """
        run = self.open()
        return run, run.find("latest" if self.which is None else self.which)


def parse_target(text: str) -> Target:
    """Split "DIR@STEP" at its last @; if a directory has the whole text as its name, that directory is meant.

    Raises ConfigError if the text after the @ is neither a step nor "latest" nor "best".
    """
    return Target(*split_target(text))


def kept_because(state: State) -> dict[str, list[str]]:
    """Return why each live checkpoint is kept, by manifest digest: newest, best, pinned, leased."""
    from ckpt_tasks.format.ledger import lineage
    from ckpt_tasks.policy.retention import RetentionPolicy, rank_best

    newest_first, now = lineage(state.live), time.time()
    # A ledger that somebody has edited may pin a checkpoint that is not live: hence the defaultdict.
    reasons: dict[str, list[str]] = defaultdict(list, {checkpoint.manifest_digest: [] for checkpoint in newest_first})
    for newest in newest_first[:1]:
        reasons[newest.manifest_digest].append("newest")
    policy = RetentionPolicy(keep_best=1, best_metric=state.best_metric, best_mode=state.best_mode)
    for best in rank_best(newest_first, policy, state.evaluated):
        reasons[best.manifest_digest].append(f"best {state.best_metric}")
    for digest, why in state.pins.items():
        reasons[digest].append(f"pinned: {why}")
    for lease in state.leases:
        if lease.expires_at > now:
            reasons[lease.manifest_digest].append(f"leased by {lease.holder}, {span(lease.expires_at - now)}")
    return reasons


def written(value: Any) -> str:
    """Write a parameter's value as --set takes it."""
    return json.dumps(value)


def params_line(params: Mapping[str, Any]) -> str:
    """Write parameters in one line."""
    return ", ".join(f"{name}={written(value)}" for name, value in params.items())


def lineage_facts(state: State) -> dict[str, Any]:
    """Return a run's parameters and the run that it was forked from (None: it was not), as --json prints them."""
    origin, params = state.origin, state.params
    return {"origin": None if origin is None else vars(origin), "params": None if params is None else dict(params)}
