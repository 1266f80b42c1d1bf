"""`ckpt sync`: one command from a run at one store to the same run at another, and one line when it cannot be done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt_tasks import Checkpointer, open_run
from ckpt_tasks.errors import StoreError
from tests.servers.s3 import S3Server
from tests.support.answers import NOT_IMPLEMENTED
from tests.support.chaos import Chaos
from tests.support.cli_runs import ckpt, config, flip, only, save, save_steps, started, tree
from tests.support.measured import memory_of
from tests.support.owner_child import OwnerChild
from tests.support.rules import Fault, Gate
from tests.support.small_disk import small_disk
from tests.support.waiting import until_taken


@pytest.fixture
def s3(ministack: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a URL in a fresh bucket; the environment has the credentials."""
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{bucket}"


def test_a_run_goes_over(run_dir: Path, tmp_path: Path) -> None:
    """A table says what was copied; the copy lists, verifies and compares like the run, which is not changed by it."""
    save_steps(run_dir, 1, 2)
    objects = {name: data for name, data in tree(run_dir).items() if not name.startswith("ledger/")}
    answer = ckpt("sync", run_dir, tmp_path / "b")
    assert answer.status == 0, answer.err
    assert "Copied: 2 checkpoints of 2" in answer.out
    assert "every byte verified" in answer.out
    assert ckpt("verify", tmp_path / "b").status == 0
    assert ckpt("diff", f"{run_dir}@latest", f"{tmp_path / 'b'}@latest").status == 0
    assert {name: data for name, data in tree(run_dir).items() if not name.startswith("ledger/")} == objects
    answer = ckpt("sync", run_dir, tmp_path / "b")
    assert answer.status == 0
    assert "There is nothing to copy." in answer.out


def test_damage_is_said_and_the_rest_is_copied(run_dir: Path, tmp_path: Path) -> None:
    """P49: exit status 1, the fault with its object, and the other checkpoints are there."""
    save_steps(run_dir, 1, 2)
    flip(only(run_dir, "checkpoint_000000000001/*/model-*"), -1)
    answer = ckpt("sync", run_dir, tmp_path / "b")
    assert (answer.status, "model/bias" in answer.out) == (1, True)
    assert "Not everything could be copied" in answer.out
    assert [c.step for c in open_run(str(tmp_path / "b")).checkpoints()] == [2]


def test_a_target_in_use_is_refused(run_dir: Path, tmp_path: Path) -> None:
    """P33: while a process trains at the target, nothing is copied there."""
    save_steps(run_dir, 1)
    ckpt("sync", run_dir, tmp_path / "b")
    save_more(run_dir, 2)
    owner = OwnerChild(tmp_path / "b")
    assert owner.ask("acquire") == "ok"
    before = tree(tmp_path / "b")
    answer = ckpt("sync", run_dir, tmp_path / "b", "--json")
    assert tree(tmp_path / "b") == before
    owner.kill()
    assert (answer.status, answer.data["error"]["type"]) == (1, "OwnedError")
    assert "training" in answer.data["error"]["hint"]


def save_more(run_dir: Path, step: int) -> None:
    with Checkpointer(config(run_dir)) as ckpt_:
        state = {"model": {"weight": torch.zeros(3, 4), "bias": torch.zeros(4)}, "position": {}}
        ckpt_.restore(state)
        ckpt_.save(step, state)


@pytest.mark.slow
def test_it_needs_no_torch_and_little_memory(tmp_path: Path) -> None:
    """P57: copying 96 MiB in one tensor takes less than 48 MiB of memory that the system cannot take back."""
    small = save(tmp_path / "small", {"w": {"w": torch.ones(1)}})
    large = save(tmp_path / "large", {"w": {"w": torch.ones(24 << 20)}})
    modules, mib = memory_of(["sync", small, tmp_path / "s"], ["sync", large, tmp_path / "l"])
    assert (modules, mib < 48) == ([], True), mib
    assert ckpt("diff", large, tmp_path / "l").status == 0


@pytest.mark.slow
def test_a_temporary_directory_that_is_too_small(tmp_path: Path) -> None:
    """P37: where TMPDIR fills up, the command says so; writing to memory that has no room would kill it."""
    source = save(tmp_path / "run", {"w": {"w": torch.ones(1 << 20)}})
    with small_disk(tmp_path / "small", size="1m") as small:
        command = [str(Path(sys.executable).with_name("ckpt")), "sync", str(source), str(tmp_path / "b")]
        environment = {**os.environ, "TMPDIR": str(small)}
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "Set TMPDIR to a directory with room" in done.stderr
    assert ckpt("sync", source, tmp_path / "b").status == 0


# ── object stores ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_store_without_the_condition(run_dir: Path, s3: str, chaos: Chaos, monkeypatch: pytest.MonkeyPatch) -> None:
    """P31: a target without conditional writes is refused, unless it is said that nobody else writes there."""
    save_steps(run_dir, 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", chaos.endpoint)
    chaos.on(Fault(answer=NOT_IMPLEMENTED), headers={"if-none-match": "."})
    answer = ckpt("sync", run_dir, f"{s3}/run", "--json")
    assert (answer.status, answer.data["error"]["type"]) == (1, StoreError.__name__)
    answer = ckpt("sync", run_dir, f"{s3}/run", "--single-writer")
    assert answer.status == 0, answer.err
    assert ckpt("verify", f"{s3}/run").status == 0


def test_an_interrupted_copy_is_completed(run_dir: Path, s3: str, chaos: Chaos) -> None:
    """P30, P38: stopped in the middle of an object, nothing of it is committed, and the same command completes it."""
    save_steps(run_dir, 1, 2)
    target, gate = f"{s3}/run", Gate()
    chaos.on(Fault(hold_request=gate), operation="PutObject", key=r"000002/.*/index")
    with started("sync", str(run_dir), target, environment={"AWS_ENDPOINT_URL": chaos.endpoint}) as process:
        assert gate.reached.wait(60)
        process.send(signal.SIGINT)
        until_taken(process.pid, signal.SIGINT)
        gate.open()
        assert process.wait() != 0
    chaos.off()
    found = open_run(target)
    assert [c.step for c in found.checkpoints()] == [1]
    assert ckpt("verify", target).status == 0
    owner = found.head().state.owner
    assert owner is not None
    assert owner.released
    answer = ckpt("sync", str(run_dir), target, "--json")
    assert answer.status == 0, answer.out
    assert [one["outcome"] for one in answer.data["checkpoints"]] == ["there already", "copied"]
    assert answer.data["checkpoints"][1]["found_bytes"] > 0
    assert ckpt("diff", run_dir, target).status == 0
