"""Weights of a checkpoint in a repository of the Hub, and the card that describes the repository's contents."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd, ModelCardData, snapshot_download

from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.checkpoint.transfer.export import ExportPlan
from ckpt_tasks.checkpoint.transfer.hub.repository import HubRepository
from ckpt_tasks.checkpoint.transfer.publishing import check_free, new_directory
from ckpt_tasks.errors import CheckpointNotFoundError, IntegrityError
from ckpt_tasks.format.records import Checkpoint
from ckpt_tasks.run.opening import open_checkpoint

_CARD = "README.md"
_OURS = "<!-- ckpt push writes this card anew for as long as this line is in it. -->"
_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_ADAPTER = "adapter_config.json"
_NOT_SHOWN = {"accelerator", "code", "command", "host", "threads"}  # A card is public, so it shows only versions.


def push_weights(hub: HubRepository, run: Run, checkpoint: Checkpoint, plan: ExportPlan) -> str:
    """Commit the files that an export has written, and the card; return the commit's id.

    The same commit deletes an earlier export's weights that have other names; all other files stay.
    """
    written = {Path(file.path).name: file.path for file in plan.report.files}
    old = [name for name in hub.files if plan.replaces.fullmatch(name) and name not in written]
    files = [CommitOperationAdd(name, path) for name, path in written.items()]
    about, use = ModelCardData(tags=["ckpt-tasks"]), f'load_torch_model(model, snapshot_download("{hub.repo_id}"))'
    if plan.index_name == _ADAPTER:
        base = json.loads(plan.index or b"{}").get("base_model_name_or_path") or ""
        about.library_name, about.base_model = "peft", base if _NAME.fullmatch(base) else None
        use = f'PeftModel.from_pretrained(base, "{hub.repo_id}")'
    files += _card(hub, run, checkpoint, use, about)
    return hub.commit(f"Weights of {run.run_key}, step {checkpoint.step}", files, old)


def _card(
    hub: HubRepository, run: Run, checkpoint: Checkpoint, use: str, about: ModelCardData
) -> list[CommitOperationAdd]:
    """Return the operation that writes the repository's card for this checkpoint; [] if a user has written a card."""
    if _CARD in hub.files and _OURS not in hub.get(_CARD).decode(errors="replace"):
        return []
    environment = open_checkpoint(run.history.store, checkpoint).manifest.environment
    evaluations = [one for one in run.evaluations() if one.manifest_digest == checkpoint.manifest_digest]
    metrics = {**checkpoint.metrics, **{f"{e.suite}: {name}": v for e in evaluations for name, v in e.metrics.items()}}
    versions = {name: text for name, text in environment.items() if name not in _NOT_SHOWN}
    rows = {
        "run": run.run_key,
        "step": checkpoint.step,
        "saved": checkpoint.saved_at,
        "digest of its manifest": checkpoint.manifest_digest,
        **{name: f"{value:.6g}" for name, value in sorted(metrics.items())},
        **versions,
    }
    table = "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items())
    text = f"---\n{about.to_yaml()}\n---\n{_OURS}\n\n# {run.run_key}\n\n| | |\n|---|---|\n{table}\n\n```\n{use}\n```\n"
    return [CommitOperationAdd(_CARD, text.encode())]


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def files_to_pull(hub: HubRepository, out: str) -> list[str]:
    """Return the names of the files to pull.

    Raises CheckpointNotFoundError if the repository has no files, ConfigError if `out` exists.
    """
    names = [name for name in hub.files if name != ".gitattributes"]
    if not names:
        what = "holds no files" if hub.at else "does not exist, or is not shown to you"
        raise CheckpointNotFoundError(f"{hub.url} {what}", hint="Check its name; a private one needs HF_TOKEN.")
    check_free(Path(out), overwrite=False)
    return names


def pull_weights(hub: HubRepository, names: Sequence[str], out: str) -> None:
    """Download files to a new directory, which appears only after the digest of each file has matched the Hub's.

    Raises IntegrityError if bytes differ.
    """
    with new_directory(Path(out)) as place, hub.asking():
        snapshot_download(hub.repo_id, revision=hub.at, local_dir=place, ignore_patterns=[".gitattributes"])
        checked = hub.api.verify_repo_checksums(hub.repo_id, revision=hub.at, local_dir=place)
        wrong = {one["path"] for one in checked.mismatches} | ({*checked.missing_paths} & {*names})
        if wrong:
            raise IntegrityError("the bytes that came are not the Hub's", key=min(wrong))
        shutil.rmtree(place / ".cache", ignore_errors=True)  # The library writes notes about its download here.
