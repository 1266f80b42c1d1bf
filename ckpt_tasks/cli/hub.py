"""`ckpt push` and `ckpt pull`: copy a run, or the weights of a checkpoint, to a repository of the Hub and back."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ckpt_tasks.cli.arguments import (
    DryOption,
    JsonOption,
    RunOrCheckpointArgument,
    SingleOption,
    argument,
    option,
    parse_target,
)
from ckpt_tasks.cli.copy import copy_run
from ckpt_tasks.cli.files import GroupOption, SizeOption, how_to_export, plan_files
from ckpt_tasks.cli.output import Output, output, reading, title
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.report.words import count, size

if TYPE_CHECKING:
    from ckpt_tasks.copying.syncing import SyncReport
    from ckpt_tasks.hub.repository import HubRepository
    from ckpt_tasks.reading.reading import Run

RepositoryArgument = Annotated[str, argument("REPO", "ORG/NAME or ORG/NAME@REVISION, a model repository of the Hub")]
PulledArgument = Annotated[
    str, argument("TO", "a run directory: a new one, or a copy of this run; a new one for weights")
]
PrivateOption = Annotated[bool, option("--private", None, "make REPO private, if it does not exist yet")]
PushFormatOption = Annotated[
    Literal["safetensors", "peft"], option("--format", "FORMAT", "of weights: safetensors, or peft: an adapter")
]


def push(
    checkpoint: RunOrCheckpointArgument,
    repository: RepositoryArgument,
    *,
    format_: PushFormatOption = "safetensors",
    group: GroupOption = None,
    max_shard_size: SizeOption = None,
    private: PrivateOption = False,
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Send DIR, or the weights of DIR@STEP, to the Hub.

    DIR@STEP sends the files of `ckpt export`, which from_pretrained loads, and a card with run, step, metrics and
    versions; a card that you wrote is kept. DIR alone sends the whole run, which `ckpt pull` copies back and verifies
    byte by byte. One commit makes everything visible, or nothing. Repeat the command after an interruption, or to send
    new checkpoints. Reads HF_TOKEN and HF_ENDPOINT as huggingface_hub does.
    """
    with output(as_json) as out:
        target, hub = parse_target(checkpoint), _repository(repository, out)
        if target.which is None:
            if group or max_shard_size is not None or format_ != "safetensors":
                raise ConfigError("a run is sent as a whole", hint="Name the checkpoint to export: DIR@latest.")
            _push_run(out, target.open(), hub, private=private, dry_run=dry_run)
            return
        _check_kind(hub, hub.holds_run, "a run")
        run, record = target.find()
        store = run.history.store
        with tempfile.TemporaryDirectory(prefix="ckpt-push-") as place:
            plan = plan_files(store, record, f"{place}/export", format_, how_to_export(group, max_shard_size))
            facts: dict[str, Any] = {"run_key": run.run_key, "step": record.step, "to": hub.url, "format": format_}
            if dry_run:
                words = f"{hub.url} would get {size(plan.read_bytes)} of step {record.step}, as {format_}."
                out.answer({"dry_run": True, **facts, "size_bytes": plan.read_bytes}, [words])
                return
            from ckpt_tasks.copying.export import write_export
            from ckpt_tasks.hub.weights import push_weights

            with reading(out, "exporting", plan.read_bytes) as on_progress:
                report = write_export(store, plan, on_progress)
            hub.create(private=private)
            facts |= {
                "commit": push_weights(hub, run, record, plan),
                "files": [Path(f.path).name for f in report.files],
            }
        summary = f"{count(report.tensors, 'tensor')} of {', '.join(report.groups)}, {size(report.size_bytes)}"
        done = [("Pushed", "bold green"), f" {summary}: commit {facts['commit']} of {hub.url}"]
        out.answer({**facts, "size_bytes": report.size_bytes}, [title(run, f" step {record.step}"), done])


def _push_run(out: Output, run: Run, hub: HubRepository, *, private: bool, dry_run: bool) -> None:
    from ckpt_tasks.hub.weights import card

    def finish(report: SyncReport) -> Mapping[str, Any]:
        there = {row.checkpoint.manifest_digest for row in report.rows if row.outcome in ("copied", "there already")}
        newest = next((one for one in run.checkpoints() if one.manifest_digest in there), None)
        if newest is None or not hub.has_news:
            return {"commit": hub.at}
        files = card(hub, run, newest, f"ckpt pull {hub.repo_id} {run.run_key}")
        return {"commit": hub.commit(f"{run.run_key} up to step {newest.step}", files)}

    weights = not hub.holds_run and any(name.endswith(".safetensors") for name in hub.files)
    _check_kind(hub, weights, "weights")
    if not dry_run:
        hub.create(private=private)
    copy_run(out, run, hub, dry_run=dry_run, finish=finish)


def _check_kind(hub: HubRepository, other: bool, what: str) -> None:
    if other:
        raise ConfigError(f"{hub.url} holds {what}", hint="Runs and weights have repositories of their own.")


def pull(
    repository: RepositoryArgument,
    to: PulledArgument,
    *,
    single_writer: SingleOption = False,
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Bring a run, or weights, from the Hub to TO.

    A run that `ckpt push` sent becomes a run directory in which training can continue: every byte is verified, and a
    repeated pull copies only new objects. From any other repository, downloads all files into a new directory, compares
    each file with the Hub's digest, and makes the directory visible when it is complete.
    """
    from ckpt_tasks.storage.locations import Location

    with output(as_json) as out:
        hub = _repository(repository, out)
        if hub.holds_run:
            from ckpt_tasks.ledger.history import History
            from ckpt_tasks.reading.reading import Run

            history, place = History(hub), Location(to).resolve()
            run = Run(history, history.check(None))
            single_writer |= place.single_writer
            copy_run(out, run, place.open(), single_writer=single_writer, dry_run=dry_run)
            return
        from ckpt_tasks.hub.weights import files_to_pull, pull_weights

        if single_writer:
            raise ConfigError("--single-writer is for a run, and these are weights", hint="Leave it out.")
        names = files_to_pull(hub, to)
        facts = {"from": hub.url, "commit": hub.at, "to": to, "files": names}
        size_bytes = sum(hub.files[name] for name in names)
        if dry_run:
            words = f"{to} would get {count(len(names), 'file')} of {hub.url}, {size(size_bytes)}."
            out.answer({"dry_run": True, **facts, "size_bytes": size_bytes}, [words])
            return
        pull_weights(hub, names, to)
        words = f" {count(len(names), 'file')} of {hub.url}, {size(size_bytes)}, to {to}, every byte verified."
        out.answer({**facts, "size_bytes": size_bytes}, [[("Pulled", "bold green"), words]])


def _repository(name: str, out: Output) -> HubRepository:
    """Open a repository; huggingface_hub shows its progress only on a terminal."""
    try:
        from ckpt_tasks.hub.repository import HubRepository
    except ImportError as error:
        raise ConfigError("the Hub needs pip install 'ckpt-tasks[hub]'") from error
    return HubRepository(name, quiet=out.as_json or not sys.stderr.isatty())
