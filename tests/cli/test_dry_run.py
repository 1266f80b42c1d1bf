"""What every verb has: an example in its help, and `--dry-run` if it changes something."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

from ckpt_tasks.cli import app
from tests.support.cli_runs import ckpt, save_steps
from tests.support.sweeps import quick_first

SAID = {
    "pin": "Would be pinned: by hand",
    "unpin": "Would be unpinned; it is pinned: the paper",
    "rm": "Would be removed",
    "prune": "Would remove 3 checkpoints",
    "rollback": "Training would resume from it; 3 checkpoints on the discarded branch",
    "sync": "4 checkpoints would be copied",
    "fork": "would begin in",
    "export": "of step 40, as safetensors",
    "import": "would get them as step 0",
}
# What changes a run or makes one without it: a training or a service, a proof or a measurement that is its own trial,
# and the directory of a new project.
WITHOUT = {"init", "train", "evaluate", "up", "down", "restore-drill", "doctor-store"}
OF_HUB = {"push", "pull"}  # Their dry runs are tried beside a server: tests/hub.
LOOKS = {
    "doctor",
    "ls",
    "show",
    "samples",
    "watch",
    "serve",
    "diff",
    "report",
    "metrics",
    "verify",
    "verify-resume",
}


def tree(root: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in root.rglob("*") if path.is_file()}


def words_of(verb: str, run: Path, root: Path) -> list[Any]:
    words: dict[str, list[Any]] = {
        "pin": [f"{run}@20"],
        "unpin": [f"{run}@30"],
        "rm": [f"{run}@10"],
        "prune": [run, "--max-num-checkpoints", "1"],
        "rollback": [f"{run}@10"],
        "sync": [run, root / "copy"],
        "fork": [run, root / "fork"],
        "export": [run, root / "weights.safetensors", "--group", "model"],
        "import": [root / "weights.pt", root / "imported"],
    }
    return words[verb]


@pytest.mark.parametrize("verb", quick_first(SAID, 3))
def test_a_dry_run_says_what_would_happen_and_changes_no_byte(tmp_path: Path, verb: str) -> None:
    """No file of the run changes, none appears beside it, the status is 0, and --json says that it was a dry run."""
    run = save_steps(tmp_path / "run", 10, 20, 30, 40)
    assert ckpt("pin", f"{run}@30", "-m", "the paper").status == 0
    if verb == "prune":
        assert ckpt("unpin", f"{run}@30").status == 0
    torch.save({"weight": torch.ones(3)}, tmp_path / "weights.pt")
    before = tree(tmp_path)
    answer = ckpt(verb, *words_of(verb, run, tmp_path), "--dry-run")
    assert (answer.status, answer.err) == (0, "")
    assert SAID[verb] in " ".join(answer.out.split())
    assert ckpt(verb, *words_of(verb, run, tmp_path), "--dry-run", "--json").data["dry_run"] is True
    assert tree(tmp_path) == before
    assert ckpt(verb, *words_of(verb, run, tmp_path)).status == 0
    assert tree(tmp_path) != before


def test_each_verb_has_a_dry_run_or_needs_none() -> None:
    """A new verb is put into one of the three lists; those that can say what they would do have the option."""
    verbs: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    shown = {name for name, verb in verbs.items() if not verb.hidden}
    assert {name for name in shown if any("--dry-run" in one.opts for one in verbs[name].params)} == {*SAID} | OF_HUB
    assert shown == {*SAID} | OF_HUB | WITHOUT | LOOKS


def test_each_verb_ends_its_help_with_an_example_that_can_be_typed() -> None:
    """The example is a call of this verb, and its options exist; no line of it is broken at 80 columns."""
    verbs: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    for name, verb in verbs.items():
        example = str(verb.epilog).removeprefix("For example: ")
        assert example.startswith(f"ckpt {name}")
        assert len(example) < 70
        words = shlex.split(example)[2:]
        verb.make_context(name, words)
