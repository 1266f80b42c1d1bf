"""Every checkpoint says what made it: code, command, versions and machine; and never a secret."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_tasks.checkpoint.save.provenance import code_of, command_of, directory_of
from tests.support.cli_runs import ckpt as command

ROOT = Path(__file__).resolve().parents[3]
SECRET = "hush-hush-9137"
SCRIPT = """
import torch
from ckpt_tasks import CheckpointConfig, Checkpointer
with Checkpointer(CheckpointConfig(checkpoint_dir="run", memory_dir=None)) as ckpt:
    ckpt.save(1, {"x": torch.ones(2)})
"""
HIDDEN = [
    *([f"{name}={SECRET}"] for name in ("--token", "HF_TOKEN", "--x", "x", "MYSQL_PWD", "--lr", "--storage-options")),
    *([name, SECRET] for name in ("--api-key", "--password", "-p", "--login", "--with", "-u", "--", "login", "3", "=")),
    *([name, "9137"] for name in ("--pin", "--pw", "--auth-code")),
    ["--url", f"s3://bob:{SECRET}@store.example.org/bucket"],
    ["--checkpoint-dir", f"s3://bob:{SECRET}@store.example.org/bucket"],
    [f"https://store.example.org/data?signature={SECRET}"],
    [f"https://hooks.example.org/services/{SECRET}"],
    [f"postgresql://bob:{SECRET}@host/db"],
    [f"Server=db;Uid=bob;Pwd={SECRET}"],
    ["-p", f'checkpoint={{"storage_options": {{"secret": "{SECRET}"}}}}'],
    ["--header", f"Authorization: Bearer {SECRET}"],
    ["-H", f"X-Api:{SECRET}"],
    [f"-p{SECRET}"],
    [f"bob:{SECRET}"],
    [f"{SECRET}="],
    [f"{SECRET}=="],
    [f"/nowhere/{SECRET}"],
    ["ghp16C7e42F292c6912E7710c838347Ae178B4a".replace("C7e42F29", SECRET.replace("-", ""))],
]


@pytest.mark.parametrize("arguments", HIDDEN, ids=lambda one: " ".join(one).replace(SECRET, "…")[:24])
def test_no_secret_of_the_command_line_lands_on_storage(arguments: list[str]) -> None:
    """However a secret is given, it is not in the text, and what is known to be harmless is."""
    text = command_of(["python", "train.py", "--lr", "0.1", *arguments, "--steps", "300"])
    assert "9137" not in text
    assert text.startswith("python train.py --lr 0.1")
    assert text.endswith("--steps 300")


def test_what_is_no_secret_stays() -> None:
    """Numbers, switches, devices, existing paths, stores, imported programs and our own options are shown."""
    line = "ckpt train json:Program --max-tokens 512 run_key=lm-7 --run-key lm-7 --param lr=1e-4 --amp --device=cuda:0"
    line += (
        f" -n 4 -lr .1 --every 30s --dtype bf16 --data {Path(__file__)} s3://bucket/runs/a-1 --max-num-checkpoints 3"
    )
    assert command_of(line.split()) == line
    assert command_of(["python", "-u", "-m", "lab.train", "-m", "lab.train"]) == "python -u -m lab.train -m '***'"
    assert command_of(["python", "-c", "print(1)", "--steps", "3"]) == "python -c '***' --steps 3"
    assert len(command_of([*line.split(), *map(str, range(1000))])) == 2000  # it is in every manifest


def repository(place: Path) -> list[str]:
    """Commit SCRIPT in a new repository; return the words that begin a git command there."""
    if shutil.which("git") is None:
        pytest.skip("no git here")
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (place / "train.py").write_text(SCRIPT, encoding="utf-8")
    for arguments in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *arguments], check=True)
    return git


def test_a_script_is_recorded_with_its_commit_and_without_its_secrets(tmp_path: Path) -> None:
    """A real process in a repository: commit, changes and command are shown, and no byte of a secret is stored."""
    git = repository(tmp_path)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert code_of(str(tmp_path)) == f"git {commit}, clean"
    (tmp_path / "train.py").write_text(SCRIPT + "# changed\n", encoding="utf-8")
    line = [sys.executable, "train.py", f"--token={SECRET}", "--lr", "0.1"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "MY_TOKEN": f"{SECRET}-env"}
    subprocess.run(line, cwd=tmp_path, env=env, check=True)
    made = json.loads(command("show", tmp_path / "run", "--json").out)["environment"]
    assert made["code"] == f"git {commit}, with uncommitted changes"
    assert made["command"].endswith("train.py '--token=***' --lr 0.1")
    assert {"torch", "python", "numpy", "ckpt-tasks", "host", "accelerator"} <= made.keys()
    stored = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert SECRET.encode() not in stored
    shown = command("show", tmp_path / "run").out
    assert commit in shown
    assert "train.py" in shown
    assert "an argument that is not kept, because it could be a secret" in shown


@pytest.mark.slow
def test_a_look_at_the_code_runs_and_changes_nothing(tmp_path: Path) -> None:
    """A repository may name a program of its own for git to run, and have an old index: neither run, nor refreshed."""
    git = repository(tmp_path)
    (hook := tmp_path / ".git/hook").write_text(f"#!/bin/sh\ntouch {tmp_path}/has-run\n", encoding="utf-8")
    hook.chmod(0o755)
    subprocess.run([*git, "config", "core.fsmonitor", str(hook)], check=True)
    os.utime(tmp_path / "train.py", (1e9, 1e9))
    (tmp_path / ".gitattributes").write_text("*.py filter=own\n", encoding="utf-8")
    for name in ("clean", "process"):
        subprocess.run([*git, "config", f"filter.own.{name}", str(hook)], check=True)
    subprocess.run([*git, "config", "filter.own.required", "true"], check=True)
    before = (tmp_path / ".git/index").read_bytes()
    assert code_of(str(tmp_path)).endswith(", clean")
    assert not (tmp_path / "has-run").exists()
    assert (tmp_path / ".git/index").read_bytes() == before


@pytest.mark.slow
def test_code_that_no_git_knows_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P43: no repository, no git, and a git that hangs are no errors; the last one costs two seconds."""
    assert code_of(str(tmp_path)) == "unknown"
    (git := tmp_path / "git").write_text("#!/bin/sh\nexec tail -f /dev/null\n", encoding="utf-8")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert code_of(str(tmp_path)) == "unknown"
    monkeypatch.setenv("PATH", "")
    assert code_of(str(ROOT)) == "unknown"


def test_the_code_is_that_of_the_script_not_of_what_runs_it() -> None:
    """`python -m prefect.engine` and a command of the environment stand for the program in the working directory."""
    assert directory_of("/home/a/work/train.py") == "/home/a/work"
    for installed in (
        "/home/a/.local/lib/python3.11/site-packages/prefect/engine.py",  # a home may be a repository of its own
        "/usr/lib/python3/dist-packages/prefect/engine.py",
        f"{sys.prefix}/bin/ckpt",
        None,
    ):
        assert directory_of(installed) == "."
