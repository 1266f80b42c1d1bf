"""Shell completion, as a shell drives it: the script is run by bash, and by the words of zsh's and fish's protocol."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli_runs import ckpt, flip, save_steps
from tests.support.sweeps import quick_first

DRIVER = """\
source completion.bash
COMP_LINE=$1 COMP_POINT=${#1} COMP_CWORD=0
_ckpt_completion ckpt
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def root(fast_dir: Path) -> Path:
    """Return a directory with a program ckpt, two runs and a directory that is none."""
    made = fast_dir / "completion"
    (made / "bin").mkdir(parents=True)
    save_steps(made / "runs" / "first", 9, 100)
    save_steps(made / "runs" / "find", 7)
    (made / "runs" / "figures").mkdir()
    (made / "empty" / "deep").mkdir(parents=True)
    for name in ("z$(touch broken)", "z`touch broken`", "z; touch broken", "z*", "zebra"):
        save_steps(made / "odd" / name, 1)
    save_steps(made / "damaged", 1, 2)
    flip(min((made / "damaged" / "ledger").iterdir()), 40)  # The newest entry, a release.
    program = made / "bin" / "ckpt"
    program.write_text(f"#!{sys.executable}\nfrom ckpt_tasks.cli import main\nmain()\n")
    program.chmod(0o755)
    (made / "completion.bash").write_text(ckpt("--show-completion", "bash").out)
    return made


def run(root: Path, *command: str, **environment: str) -> list[str]:
    path = f"{root / 'bin'}:{os.environ['PATH']}"
    python = f"{Path(__file__).parents[2]}"
    surroundings = {**os.environ, "PATH": path, "PYTHONPATH": python, **environment}
    done = subprocess.run(command, cwd=root, env=surroundings, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1] if done.stdout.endswith("\n") else done.stdout.split("\n")


@pytest.mark.parametrize(
    ("line", "found"),
    quick_first(
        [
            ("ckpt show runs/first@", ["latest", "best", "100", "9"]),  # bash puts them behind the @
            ("ckpt ro", ["rollback"]),
            ("ckpt diff --gr", ["--group"]),
            ("ckpt ls runs/fi", ["runs/figures/", "runs/find", "runs/first"]),
            ("ckpt diff runs/find runs/first@1", ["100"]),
            ("ckpt show odd/z", ["odd/zebra"]),  # a shell would run the other names, or expand them
            ("ckpt diff odd/* odd/z", ["odd/zebra"]),
            ("ckpt show empty/", [""]),  # nothing: bash completes files by itself
            ("ckpt show s3://bucket/run@", [""]),
            ("ckpt show none@", [""]),
            ("ckpt train m:P --fork-from runs/first@", ["latest", "best", "100", "9"]),
            ("ckpt train m:P --on-non-finite st", ["stop"]),
            ("ckpt train m:P --cadence ", ["auto"]),
            ("ckpt train m:P --best-mode m", ["min", "max"]),
            ("ckpt train m:P --compile-cache t", ["true"]),
            ("ckpt diff runs/first@9 runs/first --group ", ["model", "position", "rng"]),
            ("ckpt export runs/first out --group mo", ["model"]),
            ("ckpt show damaged@", ["latest", "best", "2", "1"]),  # A warning would stand in the prompt.
            ("ckpt export nothing out --group ", [""]),
        ],
    ),
)
def test_bash(root: Path, line: str, found: list[str]) -> None:
    """Verbs, options, run directories and steps are completed where the cursor is, by the script in a real bash."""
    assert run(root, "bash", "--norc", "-c", DRIVER, "bash", line) == found


def test_zsh_and_fish(root: Path) -> None:
    """Their scripts name the same variable, and what the protocol of each asks is answered."""
    for shell in ("zsh", "fish"):
        script = ckpt("--show-completion", shell)
        assert (script.status, f"_CKPT_COMPLETE=complete_{shell}" in script.out) == (0, True)
    words = "ckpt show runs/first@"
    asked = {"_CKPT_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": words}
    assert '"runs/first@100"' in "".join(run(root, "ckpt", **asked))
    asked = {
        "_CKPT_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    assert "runs/first@100" in run(root, "ckpt", **asked)


def test_another_shell_is_an_error() -> None:
    """A shell that there is no script for is told, with those that there are."""
    answer = ckpt("--show-completion", "tcsh")
    assert answer.status == 2
    assert "bash, zsh, fish" in answer.err
