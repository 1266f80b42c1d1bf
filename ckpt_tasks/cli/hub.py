"""`ckpt push` and `ckpt pull`: copy the weights of a checkpoint to a repository of the Hub, and back."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ckpt_tasks.cli.arguments import (
    CheckpointArgument,
    DryOption,
    JsonOption,
    argument,
    complete_group,
    option,
    parse_target,
)
from ckpt_tasks.cli.files import SizeOption, how_to_export, plan_files
from ckpt_tasks.cli.output import Output, output, reading, title
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.run.report.words import count, size

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.transfer.hub.repository import HubRepository

RepositoryArgument = Annotated[str, argument("REPO", "ORG/NAME or ORG/NAME@REVISION, a model repository of the Hub")]
PulledArgument = Annotated[str, argument("TO", "a new directory")]
GroupOption = Annotated[
    list[str] | None,
    option("--group", "NAME", "a module to send; may be repeated [default: all]", autocompletion=complete_group),
]
PrivateOption = Annotated[bool, option("--private", None, "make REPO private, if it does not exist yet")]
PushFormatOption = Annotated[
    Literal["safetensors", "peft"], option("--format", "FORMAT", "of weights: safetensors, or peft: an adapter")
]


def push(
    checkpoint: CheckpointArgument,
    repository: RepositoryArgument,
    *,
    format_: PushFormatOption = "safetensors",
    group: GroupOption = None,
    max_shard_size: SizeOption = None,
    private: PrivateOption = False,
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Send the weights of a checkpoint to the Hub.

    Sends the files of `ckpt export`, which from_pretrained loads, and a card with run, step, metrics and versions; a
    card that you wrote is kept. One commit makes everything visible, or nothing. Repeat the command after an
    interruption. Reads HF_TOKEN and HF_ENDPOINT as huggingface_hub does. A whole run goes by `ckpt sync` instead.
    """
    with output(as_json) as out:
        hub = _repository(repository, out)
        run, record = parse_target(checkpoint).find()
        store = run.history.store
        with tempfile.TemporaryDirectory(prefix="ckpt-push-") as place:
            plan = plan_files(store, record, f"{place}/export", format_, how_to_export(group, max_shard_size))
            facts: dict[str, Any] = {"run_key": run.run_key, "step": record.step, "to": hub.url, "format": format_}
            if dry_run:
                words = f"{hub.url} would get {size(plan.read_bytes)} of step {record.step}, as {format_}."
                out.answer({"dry_run": True, **facts, "size_bytes": plan.read_bytes}, [words])
                return
            from ckpt_tasks.checkpoint.transfer.export import write_export
            from ckpt_tasks.checkpoint.transfer.hub.weights import push_weights

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


def pull(
    repository: RepositoryArgument,
    to: PulledArgument,
    *,
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Bring weights from the Hub to TO.

    Downloads all files of the repository, compares each file with the Hub's digest, and makes the directory visible
    when it is complete.
    """
    with output(as_json) as out:
        hub = _repository(repository, out)
        from ckpt_tasks.checkpoint.transfer.hub.weights import files_to_pull, pull_weights

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
        from ckpt_tasks.checkpoint.transfer.hub.repository import HubRepository
    except ImportError as error:
        raise ConfigError("the Hub needs pip install 'ckpt-tasks[hub]'") from error
    return HubRepository(name, quiet=out.as_json or not sys.stderr.isatty())
