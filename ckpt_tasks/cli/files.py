"""`ckpt export` and `ckpt import`: a checkpoint as files of other tools, and a checkpoint from such files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ckpt_tasks.cli.arguments import (
    CheckpointArgument,
    DryOption,
    JsonOption,
    KeyOption,
    SingleOption,
    argument,
    complete_group,
    option,
    parse_target,
)
from ckpt_tasks.cli.output import column, first, from_here, listing, output, reading, title
from ckpt_tasks.errors import CheckpointNotFoundError, CkptError, ConfigError, IntegrityError, ObjectNotFoundError
from ckpt_tasks.run.report.words import count, size

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.restore.reading import Run
    from ckpt_tasks.checkpoint.transfer.export import ExportPlan, ExportReport
    from ckpt_tasks.checkpoint.transfer.importing.plan import ImportPlan
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.storage.port import Store

_LINES_SHOWN = 8
_TORCH_SUFFIXES = (".pt", ".pth")
_LEFT_OUT = {
    "safetensors": "Left out, since they are not tensors",
    "torch": "Left out, since random streams are useful only to a restore",
    "dcp": "Left out",
    "peft": "Left out, since they are not the adapter's",
}
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

OutArgument = Annotated[str, argument("OUT", "NAME.safetensors, NAME.pt, or a directory for shards or DCP")]
GroupOption = Annotated[
    list[str] | None,
    option(
        "--group",
        "NAME",
        "a group to export; may be repeated [default: modules; for torch all groups]",
        autocompletion=complete_group,
    ),
]
FormatOption = Annotated[
    Literal["safetensors", "torch", "dcp", "peft"] | None,
    option(
        "--format",
        "FORMAT",
        "safetensors, torch: one file of torch.save, dcp, or peft: an adapter [default: torch for .pt and .pth]",
    ),
]
SizeOption = Annotated[str | None, option("--max-shard-size", "SIZE", "largest shard in a directory [default: 5GB]")]
OverwriteOption = Annotated[bool, option("--overwrite", None, "replace OUT; of a directory only its weights")]


def export(
    checkpoint: CheckpointArgument,
    out: OutArgument,
    *,
    group: GroupOption = None,
    format_: FormatOption = None,
    max_shard_size: SizeOption = None,
    overwrite: OverwriteOption = False,
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write DIR@STEP to OUT as safetensors, torch.save or DCP.

    Other programs can read the files without this package and without the run. In safetensors files, the tensors of a
    single module have the names of its state_dict; with several modules, each name begins with the group's. A torch
    file holds the state_dict of one group, or several by the group's name. torch.load(weights_only=True) reads it; a
    value that torch.load would refuse is an error. dcp writes a directory; peft writes a directory with an adapter,
    which PeftModel.from_pretrained loads. Verifies every byte; OUT appears when all of it is good, or not at all.
    """
    from ckpt_tasks.checkpoint.transfer.export import write_export

    with output(as_json) as result:
        chosen = format_ or ("torch" if PurePath(out).suffix in _TORCH_SUFFIXES else "safetensors")
        named = {".safetensors": "safetensors", **dict.fromkeys(_TORCH_SUFFIXES, "torch")}.get(PurePath(out).suffix)
        if named not in (None, chosen):
            raise ConfigError(f"{out} is the name of a {named} file, and no {chosen}", hint="Give it another name.")
        how = how_to_export(group, max_shard_size, overwrite=overwrite)
        target = parse_target(checkpoint)
        run, record = target.find()
        try:
            if chosen == "dcp":
                if dry_run:
                    raise ConfigError("--dry-run is not for DCP", hint="It writes all groups into a new directory.")
                report = _as_dcp(target.checkpoint_dir, run, record, out, how)
            else:
                plan = plan_files(run.history.store, record, out, chosen, how)
                if dry_run:
                    words = f"{out} would get {size(plan.read_bytes)} of step {record.step}, as {chosen}."
                    facts = {"out": out, "format": chosen, "step": record.step, "size_bytes": plan.read_bytes}
                    result.answer({"dry_run": True, **facts}, [words])
                    return
                with reading(result, "exporting", plan.read_bytes) as on_progress:
                    report = write_export(run.history.store, plan, on_progress)
        except ObjectNotFoundError as error:
            raise _why_gone(run, record, error) from error
        except IntegrityError as error:
            error.hint = error.hint or _damaged(target.checkpoint_dir, run, record)
            raise
        names = ("tensors", "size_bytes", "tied", "dtypes", "left_out")
        facts = {
            "checkpoint_dir": run.history.store.url,
            "format": chosen,
            **{name: getattr(report, name) for name in ("run_key", "step", "manifest_digest", "groups")},
            "files": [file._asdict() for file in report.files],
            **{name: getattr(report, name) for name in names},
        }
        result.answer(facts, _export_parts(run, report, chosen))


def _as_dcp(place: str, run: Run, record: Checkpoint, out: str, how: Mapping[str, Any]) -> ExportReport:
    if how["max_shard_bytes"] is not None or how["overwrite"]:
        raise ConfigError("a DCP directory is new, and DCP cuts its files", hint="Name a directory that is not there.")
    from ckpt_tasks.integrations.dcp.directories import export_directory

    return export_directory(place, run, record, out, how["groups"])


def how_to_export(group: list[str] | None, max_shard_size: str | None, *, overwrite: bool = False) -> dict[str, Any]:
    """Return the options of an export for `plan_files`; raise ConfigError for a bad size."""
    shard_bytes = None if max_shard_size is None else _size_bytes(max_shard_size)
    return {"groups": group, "max_shard_bytes": shard_bytes, "overwrite": overwrite}


def plan_files(store: Store, checkpoint: Checkpoint, out: str, chosen: str, how: Mapping[str, Any]) -> ExportPlan:
    """Plan an export in a format, with the options of `how_to_export`; raise ConfigError if an option does not fit."""
    if chosen == "safetensors":
        from ckpt_tasks.checkpoint.transfer.export import plan_export

        return plan_export(store, checkpoint, out, **how)
    if chosen == "peft" and how["max_shard_bytes"] is None:
        from ckpt_tasks.checkpoint.transfer.export_peft import plan_peft_export

        return plan_peft_export(store, checkpoint, out, groups=how["groups"], overwrite=how["overwrite"])
    if how["max_shard_bytes"] is not None:
        raise ConfigError(f"--format {chosen} cuts nothing into shards", hint="Export safetensors to a directory.")
    from ckpt_tasks.checkpoint.transfer.export_torch import plan_torch_export

    return plan_torch_export(store, checkpoint, out, groups=how["groups"], overwrite=how["overwrite"])


def _size_bytes(text: str) -> int:
    """Read a size: 5GB, 500 MiB, 1000000; raise ConfigError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(I?)B)?", text.strip().upper(), re.ASCII)
    if not match:
        raise ConfigError(f"{text!r:.80} is not a size", hint="Write 5GB, 500MB or 2GiB.")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2] or ""])


def _why_gone(run: Run, checkpoint: Checkpoint, error: ObjectNotFoundError) -> CkptError:
    """Return the error for a missing object: its checkpoint was pruned during the read, or is damaged."""
    if any(live.manifest_digest == checkpoint.manifest_digest for live in run.checkpoints()):
        error.hint = error.hint or _damaged(run.history.store.url, run, checkpoint)
        return error
    return CheckpointNotFoundError(
        "the run has pruned the checkpoint meanwhile", step=checkpoint.step, hint="Take a newer one: DIR@latest."
    )


def _damaged(directory: str, run: Run, checkpoint: Checkpoint) -> str:
    """Return what to do about a damaged checkpoint: take another one, if there is any."""
    others = [str(one.step) for one in run.checkpoints() if one.manifest_digest != checkpoint.manifest_digest]
    export = f", and export a good one: there are steps {', '.join(others[:_LINES_SHOWN])}" if others else ""
    return f"The checkpoint is damaged, and nothing was written. `ckpt verify {directory}` names what is bad{export}."


_FILES = (
    column("file", lambda file: from_here(file.path)),
    column("tensors", lambda file: f"{file.tensors:,}" if file.tensors else "", numbers=True),
    column("size", "size_bytes", size, numbers=True),
)


def _export_parts(run: Run, report: ExportReport, chosen: str) -> Iterator[Any]:
    yield title(run, f" step {report.step}")
    yield listing(_FILES, report.files)
    views = "Stored as views, since safetensors has no such dtype"
    for heading, lines in (
        ("Tied, and stored only under the second name", [f"{name} = {kept}" for name, kept in report.tied.items()]),
        (views, [f"{name}: {dtype}" for name, dtype in report.dtypes.items()]),
        (_LEFT_OUT[chosen], [*report.left_out]),
    ):
        if lines:
            yield f"{heading}:", "yellow"
            yield from (f"  {line}" for line in first(lines, _LINES_SHOWN))
    summary = f"{count(report.tensors, 'tensor')} of {', '.join(report.groups)}, {size(report.size_bytes)}"
    yield [("Exported", "bold green"), f" {summary}, every byte verified."]


# ── import ───────────────────────────────────────────────────────────────────────────────────────────────────────

_LEFT_SHOWN = 12

SourceArgument = Annotated[
    str,
    argument("SOURCE", "a torch.save or safetensors file, Lightning's checkpoint, a directory of weights or of DCP"),
]
ToArgument = Annotated[str, argument("TO", "a run directory: a new one, or one that holds only imports")]
StepOption = Annotated[int | None, option("--step", "N", "step of the checkpoint [default: the file's own, else 0]")]
AsOption = Annotated[
    list[str] | None,
    option("--group", "GROUP[=NAME]", "a group to make, and its name in the file; may be repeated [default: all]"),
]


def import_(
    source: SourceArgument,
    run: ToArgument,
    *,
    step: StepOption = None,
    group: AsOption = None,
    run_key: KeyOption = None,
    single_writer: SingleOption = False,
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a checkpoint in TO from files of other tools.

    SOURCE is a file of torch.save, safetensors, Hugging Face or Lightning, a directory of such files, or a directory of
    DCP. Weights become the group `model`, or the groups that --group names. Lists what cannot be imported. Does not
    execute a pickle, which may name only tensors and plain values. Checks the whole file before it writes anything, and
    reads every byte back.
    """
    with output(as_json) as out:
        from ckpt_tasks.checkpoint.importing import ImportedRun
        from ckpt_tasks.checkpoint.transfer.importing.plan import plan_import
        from ckpt_tasks.run.ledger.config import CheckpointConfig
        from ckpt_tasks.storage.locations import Location

        plan = _dcp_plan(source, step, group) or plan_import(source, step=step, groups=group or ())
        place = Location(run, single_writer=single_writer)
        config = CheckpointConfig(checkpoint_dir=place, run_key=run_key, max_num_checkpoints=None, memory_dir=None)
        if dry_run:
            facts = {"taken": [item._asdict() for item in plan.taken], "left": plan.left, "step": plan.step}
            words = [listing(_TAKEN, plan.taken), f"{run} would get them as step {plan.step}, {size(plan.size_bytes)}."]
            out.answer({"dry_run": True, **facts, "size_bytes": plan.size_bytes}, words)
            return
        with reading(out, "importing", 3 * plan.size_bytes) as on_progress:
            checkpoint = ImportedRun(config).add(plan, on_progress)
        facts = {
            "source": plan.source.name,
            "source_kind": plan.source.kind,
            "files": plan.source.files,
            "checkpoint_dir": config.location.resolve(run_key).url,
            "step": checkpoint.step,
            "manifest_digest": checkpoint.manifest_digest,
            "size_bytes": checkpoint.size_bytes,
            "taken": [item._asdict() for item in plan.taken],
            "left": plan.left,
        }
        out.answer(facts, _import_parts(plan, run, checkpoint))


def _dcp_plan(source: str, step: int | None, groups: list[str] | None) -> ImportPlan | None:
    """Return the plan for a directory of DCP; None for any other source."""
    if not os.path.isfile(os.path.join(source, ".metadata")):
        return None
    if groups:
        raise ConfigError("a DCP checkpoint is imported as a whole", hint="Leave --group out.")
    from ckpt_tasks.integrations.dcp.directories import plan_directory

    return plan_directory(source, step=step)


_TAKEN = (
    column("group", "group"),
    column("in the file", "name"),
    column("kind", "kind"),
    column("tensors", lambda item: f"{item.tensors:,}" if item.tensors else "", numbers=True),
    column("size", lambda item: size(item.size_bytes) if item.tensors else "", numbers=True),
    column("", "note"),
)


def _import_parts(plan: ImportPlan, run: str, checkpoint: Checkpoint) -> Iterator[Any]:
    from ckpt_tasks.checkpoint.restore.reading import open_run

    yield title(open_run(run), f" step {checkpoint.step}")
    yield listing(_TAKEN, plan.taken)
    if plan.left:
        yield "Not taken:", "yellow"
        yield from (f"  {line}" for line in first([f"{name}: {why}" for name, why in plan.left.items()], _LEFT_SHOWN))
    summary = f"{count(len(plan.taken), 'group')} of the {plan.source.kind} {plan.source.name}"
    yield [("Imported", "bold green"), f" {summary}, {size(checkpoint.size_bytes)}, every byte read back."]
    yield "No file has all random streams: they begin as in a process that was seeded with 0.", "dim"
