"""`ckpt export`: write a checkpoint as self-contained safetensors files, or as one file of torch.save."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ckpt_tasks.cli.facts import CheckpointArgument, parse_target
from ckpt_tasks.cli.ls import title
from ckpt_tasks.cli.output import JsonOption, Output, from_here, output, reading, table
from ckpt_tasks.errors import CheckpointNotFoundError, CkptError, ConfigError, ObjectNotFoundError
from ckpt_tasks.report.words import count, printable, size

if TYPE_CHECKING:
    from ckpt_tasks.copying.export import ExportReport
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.reading.reading import Run

__all__ = ["export"]

_SHOWN = 8
_TORCH_SUFFIXES = (".pt", ".pth")
_LEFT_OUT = {
    "safetensors": "Left out, since they are not tensors",
    "torch": "Left out, since random streams are useful only to a restore",
}
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

OutArgument = Annotated[
    str, typer.Argument(metavar="OUT", help="NAME.safetensors, NAME.pt, or a directory for shards", show_default=False)
]
GroupOption = Annotated[
    list[str] | None,
    typer.Option(
        "--group", metavar="NAME", help="a group to export; may be repeated [default: modules; for torch all groups]"
    ),
]
FormatOption = Annotated[
    Literal["safetensors", "torch"] | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="safetensors, or torch: one file of torch.save [default: torch for .pt and .pth]",
    ),
]
SizeOption = Annotated[
    str | None, typer.Option("--max-shard-size", metavar="SIZE", help="largest shard in a directory [default: 5GB]")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="replace OUT; of a directory only its weights")]


def export(
    checkpoint: CheckpointArgument,
    out: OutArgument,
    *,
    group: GroupOption = None,
    format_: FormatOption = None,
    max_shard_size: SizeOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint as files of safetensors or torch.save.

    Reading the files needs neither this package nor the run. In safetensors files a single module has the names of its
    state_dict; several have their group's name as a prefix. A torch file holds one group as its state_dict, or several
    by name; torch.load(weights_only=True) reads it, and a value that it would not read is refused. Every byte is
    verified; OUT appears when all of it is good, or not at all.
    """
    with output(as_json) as result:
        shard_bytes = None if max_shard_size is None else _size_bytes(max_shard_size)
        chosen = format_ or ("torch" if PurePath(out).suffix in _TORCH_SUFFIXES else "safetensors")
        how = {"groups": group, "max_shard_bytes": shard_bytes, "overwrite": overwrite}
        run, record = parse_target(checkpoint).find()
        try:
            report = (_to_torch if chosen == "torch" else _to_safetensors)(result, run, record, out, how)
        except ObjectNotFoundError as error:
            raise _why_gone(run, record, error) from error
        result.data({"checkpoint_dir": run.history.store.url, "format": chosen, **_facts(report)})
        if not as_json:
            _print(result, run, report, chosen)


def _to_safetensors(result: Output, run: Run, checkpoint: Checkpoint, out: str, how: Mapping[str, Any]) -> ExportReport:
    from ckpt_tasks.copying.export import plan_export, write_export

    store = run.history.store
    plan = plan_export(store, checkpoint, out, **how)
    with reading(result, "exporting", plan.read_bytes) as on_progress:
        return write_export(store, plan, on_progress)


def _to_torch(result: Output, run: Run, checkpoint: Checkpoint, out: str, how: Mapping[str, Any]) -> ExportReport:
    from ckpt_tasks.copying.export_torch import plan_torch_export, write_torch_export

    if how["max_shard_bytes"] is not None:
        raise ConfigError("a torch file is not cut into shards", hint="Export safetensors to a directory.")
    if PurePath(out).suffix == ".safetensors":
        raise ConfigError(f"{out} would be a torch file by the name of another", hint="Give it a name like model.pt.")
    store = run.history.store
    plan = plan_torch_export(store, checkpoint, out, groups=how["groups"], overwrite=how["overwrite"])
    with reading(result, "exporting", plan.read_bytes) as on_progress:
        return write_torch_export(store, plan, on_progress)


def _size_bytes(text: str) -> int:
    """Read a size: 5GB, 500 MiB, 1000000; raise ConfigError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(I?)B)?", text.strip().upper(), re.ASCII)
    if not match:
        raise ConfigError(f"{text!r:.80} is not a size", hint="Write 5GB, 500MB or 2GiB.")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2] or ""])


def _why_gone(run: Run, checkpoint: Checkpoint, error: ObjectNotFoundError) -> CkptError:
    """Return the error for a missing object: pruned during the read, or damaged."""
    if any(live.manifest_digest == checkpoint.manifest_digest for live in run.checkpoints()):
        return error
    return CheckpointNotFoundError(
        "the run has pruned the checkpoint meanwhile", step=checkpoint.step, hint="Take a newer one: DIR@latest."
    )


def _facts(report: ExportReport) -> dict[str, Any]:
    return {
        "run_key": report.run_key,
        "step": report.step,
        "manifest_digest": report.manifest_digest,
        "groups": report.groups,
        "files": [file._asdict() for file in report.files],
        "tensors": report.tensors,
        "size_bytes": report.size_bytes,
        "tied": report.tied,
        "dtypes": report.dtypes,
        "left_out": report.left_out,
    }


def _print(result: Output, run: Run, report: ExportReport, chosen: str) -> None:
    from rich.text import Text

    made = table("file", "tensors", "size", right=("tensors", "size"))
    for file in report.files:
        made.add_row(
            printable(from_here(file.path)), f"{file.tensors:,}" if file.tensors else "", size(file.size_bytes)
        )
    result.print(title(run, f" step {report.step}"), made)
    for heading, lines in (
        ("Tied, and stored only under the second name", [f"{name} = {kept}" for name, kept in report.tied.items()]),
        (
            "Stored as views, since safetensors has no such dtype",
            [f"{n}: {dtype}" for n, dtype in report.dtypes.items()],
        ),
        (_LEFT_OUT[chosen], [*report.left_out]),
    ):
        if lines:
            more = [f"… and {len(lines) - _SHOWN} more (--json)"] if len(lines) > _SHOWN else []
            result.print(Text(f"{heading}:", style="yellow"), *(f"  {printable(x)}" for x in (*lines[:_SHOWN], *more)))
    summary = f"{count(report.tensors, 'tensor')} of {', '.join(report.groups)}, {size(report.size_bytes)}"
    result.print(Text.assemble(("Exported", "bold green"), f" {summary}, every byte verified."))
