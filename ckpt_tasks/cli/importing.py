"""`ckpt import`: make a checkpoint from a file that another tool wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tasks.cli.fork import KeyOption
from ckpt_tasks.cli.ls import title
from ckpt_tasks.cli.output import JsonOption, Output, output, reading, table
from ckpt_tasks.cli.sync import SingleOption
from ckpt_tasks.report.words import count, printable, size

if TYPE_CHECKING:
    from ckpt_tasks.copying.importing import ImportPlan
    from ckpt_tasks.format.records import Checkpoint

__all__ = ["import_"]

_SHOWN = 12

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="a torch.save or safetensors file, a Lightning checkpoint, or a directory of weights",
        show_default=False,
    ),
]
ToArgument = Annotated[
    str,
    typer.Argument(metavar="TO", help="a run directory: a new one, or one that holds only imports", show_default=False),
]
StepOption = Annotated[
    int | None, typer.Option("--step", metavar="N", help="step of the checkpoint [default: the file's own, else 0]")
]
GroupOption = Annotated[
    list[str] | None,
    typer.Option(
        "--group",
        metavar="GROUP[=NAME]",
        help="a group to make, and its name in the file; may be repeated [default: all]",
    ),
]


def import_(
    source: SourceArgument,
    run: ToArgument,
    *,
    step: StepOption = None,
    group: GroupOption = None,
    run_key: KeyOption = None,
    single_writer: SingleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a checkpoint from a file of torch.save or others.

    SOURCE is a file of torch.save, safetensors, Hugging Face or Lightning, or a directory of them. Weights become the
    group `model`, or the groups of --group; what cannot be imported is listed. A pickle is not executed: what it may
    name are tensors and plain values. The whole file is checked before anything is written; every byte is read back.
    """
    with output(as_json) as out:
        from ckpt_tasks.checkpoint.importing import ImportedRun
        from ckpt_tasks.copying.importing import plan_import
        from ckpt_tasks.ledger.config import CheckpointConfig
        from ckpt_tasks.storage.locations import Location

        plan = plan_import(source, step=step, groups=group or ())
        place = Location(run, single_writer=single_writer)
        config = CheckpointConfig(checkpoint_dir=place, run_key=run_key, max_num_checkpoints=None, memory_dir=None)
        with reading(out, "importing", 3 * plan.size_bytes) as on_progress:
            checkpoint = ImportedRun(config).add(plan, on_progress)
        out.data(_facts(plan, config.location.resolve(run_key).url, checkpoint))
        if not as_json:
            _print(out, plan, run, checkpoint)


def _facts(plan: ImportPlan, url: str, checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "source": plan.source.name,
        "source_kind": plan.source.kind,
        "files": plan.source.files,
        "checkpoint_dir": url,
        "step": checkpoint.step,
        "manifest_digest": checkpoint.manifest_digest,
        "size_bytes": checkpoint.size_bytes,
        "taken": [item._asdict() for item in plan.taken],
        "left": plan.left,
    }


def _print(out: Output, plan: ImportPlan, run: str, checkpoint: Checkpoint) -> None:
    from rich.text import Text

    from ckpt_tasks.reading.reading import open_run

    made = table("group", "in the file", "kind", "tensors", "size", "", right=("tensors", "size"))
    for item in plan.taken:
        tensors, room = (f"{item.tensors:,}", size(item.size_bytes)) if item.tensors else ("", "")
        made.add_row(item.group, printable(item.name), item.kind, tensors, room, printable(item.note))
    out.print(title(open_run(run), f" step {checkpoint.step}"), made)
    if plan.left:
        out.print(Text("Not taken:", style="yellow"))
        lines = [f"  {printable(name)}: {printable(why)}" for name, why in plan.left.items()]
        more = [f"  … and {len(lines) - _SHOWN} more (--json)"] if len(lines) > _SHOWN else []
        out.print(*(Text(line) for line in (*lines[:_SHOWN], *more)))
    summary = f"{count(len(plan.taken), 'group')} of the {plan.source.kind} {printable(plan.source.name)}"
    out.print(
        Text.assemble(("Imported", "bold green"), f" {summary}, {size(checkpoint.size_bytes)}, every byte read back.")
    )
    out.print(Text("No file has all random streams: they begin as in a process that was seeded with 0.", style="dim"))
