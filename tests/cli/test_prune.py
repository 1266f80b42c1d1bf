"""`ckpt prune`: says what goes and why, removes just that, and keeps away from a run in use."""

from __future__ import annotations

import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from ckpt_tasks import Checkpointer, open_run
from tests.run.ledger.test_heartbeats import held_elsewhere
from tests.run.ledger.test_ownership import owner_in
from tests.support.cli_runs import ckpt, config, flip, only, save_steps, some_state, started, tree
from tests.support.owner_child import OwnerChild
from tests.support.sweeps import quick_first
from tests.support.waiting import until


def steps(run_dir: Path) -> list[int]:
    return [row["step"] for row in ckpt("ls", run_dir, "--json").data["checkpoints"]]


def verdicts(run_dir: Path, *options: str) -> dict[int, tuple[str, list[str]]]:
    answer = ckpt("prune", run_dir, *options, "--json")
    assert answer.status == 0, answer.out
    return {row["step"]: (row["verdict"], row["reasons"]) for row in answer.data["checkpoints"]}


def test_prune_does_what_the_dry_run_said(run_dir: Path) -> None:
    """P60: what would go is removed from the ledger and from the disk, the rest verifies, and the run is let go."""
    before, rules = tree(save_steps(run_dir, 1, 2, 3)), ("--max-num-checkpoints", "1", "--keep-every-n-steps", "2")
    found = verdicts(run_dir, *rules, "--dry-run")
    assert {step: verdict for step, (verdict, _) in found.items()} == {3: "stays", 2: "stays", 1: "would go"}
    assert tree(run_dir) == before
    found = verdicts(run_dir, *rules)
    assert {step: verdict for step, (verdict, _) in found.items()} == {3: "stays", 2: "stays", 1: "removed"}
    assert steps(run_dir) == [3, 2]
    assert not (run_dir / "checkpoint_000000000001").exists()
    assert ckpt("verify", run_dir).status == 0
    assert ckpt("ls", run_dir, "--json").data["owner"]["released"] is True


def test_without_a_rule_only_orphans_go(run_dir: Path) -> None:
    """P68: a bare `ckpt prune DIR` removes no checkpoint; what dead attempts left is deleted and said."""
    save_steps(run_dir, 1, 2, 3, 4, 5)
    left = run_dir / "checkpoint_000000000009" / "e000001-00000000000000aa" / "manifest.json"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"{}")
    answer = ckpt("prune", run_dir, "--json")
    assert answer.data["swept"] == [str(left.relative_to(run_dir))]
    assert not left.exists()
    assert steps(run_dir) == [5, 4, 3, 2, 1]
    assert "There is nothing to remove." in ckpt("prune", run_dir).out


def test_a_run_in_use_is_refused(run_dir: Path) -> None:
    """P33, P64: while another process holds the run nothing is pruned; a dry run still answers."""
    owner = OwnerChild(run_dir)
    for step in (1, 2, 3):
        assert owner.ask(f"save {step}") == f"ok {step}"
    held = tree(run_dir)
    answer = ckpt("prune", run_dir, "--max-num-checkpoints", "1", "--json")
    dry = ckpt("prune", run_dir, "--max-num-checkpoints", "1", "--dry-run")
    after = tree(run_dir)
    owner.kill()
    assert (answer.status, answer.data["error"]["type"]) == (1, "OwnedError")
    assert "--dry-run" in answer.data["error"]["hint"]
    assert dry.status == 0
    assert after == held


def test_the_best_by_what_is_not_measured_is_refused(run_dir: Path) -> None:
    """A mistyped metric would leave none that is kept as the best: it is an error that names those that there are."""
    before = tree(save_steps(run_dir, 1, 2, 3))
    wrong = ("--max-num-checkpoints", "1", "--keep-best", "1", "--best-mode", "max", "--best-metric", "los", "--json")
    best = "--best-metric", "los", "--json"  # alone it would only change what @best means
    for options in (wrong, (*wrong, "--dry-run"), best, ("--max-num-checkpoints", "2", *best)):
        answer = ckpt("prune", run_dir, *options)
        assert (answer.status, answer.data["error"]["type"]) == (1, "ConfigError")
        assert "'los': only loss" in answer.data["error"]["message"]
    assert tree(run_dir) == before
    right = ["loss" if word == "los" else word for word in wrong]
    assert ckpt("prune", run_dir, *right).status == 0
    assert [one.step for one in open_run(str(run_dir)).checkpoints()] == [3, 1]


def test_nothing_goes_while_nothing_that_stays_is_good(run_dir: Path) -> None:
    """P60: when what would stay is damaged nothing is removed, and that is a failure and is said."""
    save_steps(run_dir, 1, 2)
    flip(only(run_dir, "checkpoint_000000000002/*/index.arrow"), 50)
    answer = ckpt("prune", run_dir, "--max-num-checkpoints", "1")
    assert answer.status == 1
    assert "Nothing was removed" in answer.out
    assert steps(run_dir) == [2, 1]


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    made = tmp_path / "memory"
    made.mkdir()
    return made


def left_in_memory(run_dir: Path, memory_dir: str) -> None:
    """Train, and end with an error, which leaves the snapshots in memory."""
    with suppress(ZeroDivisionError), Checkpointer(config(run_dir, memory_dir=memory_dir, step_interval=1)) as ckpt_:
        ckpt_.save(1, some_state(1))
        raise ZeroDivisionError


def snapshots(memory: Path) -> list[Path]:
    """List the images in memory."""
    return [*memory.rglob("*.safetensors")]


def test_the_snapshots_in_memory_go_too(run_dir: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P67: what a run that ended badly left in the default memory directory is freed; a dry run leaves it."""
    monkeypatch.setattr("ckpt_tasks.checkpoint.memory.cache.default_directory", lambda size_bytes: memory)
    left_in_memory(run_dir, "auto")
    assert snapshots(memory) != []
    assert ckpt("prune", run_dir, "--dry-run").status == 0
    assert snapshots(memory) != []
    said = ckpt("prune", run_dir)
    assert (said.status, snapshots(memory)) == (0, [])
    assert "of this host's memory: snapshots of the run" in " ".join(said.out.split())
    assert "nothing to remove" not in said.out
    assert "There is nothing to remove." in ckpt("prune", run_dir).out
    assert steps(run_dir) == [1]


def test_a_memory_directory_of_the_runs_own_is_named(run_dir: Path, memory: Path) -> None:
    """P67: the ledger does not say where a host has its snapshots: --memory-dir does; another place is untouched."""
    left_in_memory(run_dir, str(memory))
    assert ckpt("prune", run_dir).status == 0
    assert snapshots(memory) != []
    assert ckpt("prune", run_dir, "--memory-dir", memory).status == 0
    assert snapshots(memory) == []
    wrong = ckpt("prune", run_dir, "--memory-dir", memory / "nothing", "--json")
    assert (wrong.status, wrong.data["error"]["type"]) == (1, "ConfigError")


def test_snapshots_of_runs_that_are_gone_are_freed(run_dir: Path, memory: Path) -> None:
    """P67: --memory frees what killed runs left whose directory is gone, a dry run nothing; it takes no directory."""
    left_in_memory(run_dir, str(memory))
    left_in_memory(run_dir.with_name("gone"), str(memory))
    kept = [*memory.glob("*/*")]
    [gone] = {lock.parent for lock in memory.glob("*/*/lock") if b"/gone" in lock.read_bytes()}
    shutil.rmtree(run_dir.with_name("gone"))
    free = ("prune", "--memory", "--memory-dir", memory, "--json")
    planned = ckpt(*free, "--dry-run").data
    assert [row["checkpoint_dir"] for row in planned["gone"]] == [str(run_dir.with_name("gone"))]
    assert planned["gone"][0]["size_bytes"] == planned["freed_memory_bytes"] > 0
    assert [*memory.glob("*/*")] == kept
    assert ckpt(*free).data == {**planned, "dry_run": False}
    assert {*memory.glob("*/*")} == {*kept} - {gone}
    assert ckpt(*free).data["gone"] == []
    assert "a run directory, or --memory" in ckpt("prune", run_dir, "--memory").err
    assert "a run directory, or --memory" in ckpt("prune").err


@pytest.mark.parametrize("sent", quick_first([signal.SIGINT, signal.SIGTERM]), ids=lambda sent: sent.name)
def test_a_wait_for_another_owner_says_so_and_ends_at_once(
    fast_dir: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    """The line names the owner that cannot be seen; the verb hears Ctrl-C and SIGTERM, and has changed nothing."""
    run = fast_dir / f"held-{sent.name}"
    held_elsewhere(run).write_text("torn")
    before = owner_in(run)
    said = tmp_path / "said"
    with said.open("w") as file, started("prune", run, "--max-num-checkpoints", 1, said=file) as process:
        until(lambda: "\n" in said.read_text())
        process.send(sent)
        status = process.wait()
    assert f"{run} is held by process {before.pid} on elsewhere: waiting at most 120 s" in said.read_text()
    assert status in {-sent, 128 + sent}
    assert owner_in(run) == before
