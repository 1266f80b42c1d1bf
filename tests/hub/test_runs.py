"""`ckpt push` and `ckpt pull` of a run: it is in the repository as a whole or not at all, and comes back as it was."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.hub import repository
from ckpt_tasks.upkeep.upkeep import verify_run_directory
from tests.support.cli_runs import ckpt, flip, only, save_steps, tree
from tests.support.hub import Hub

REPO = "org/run"


def trained(run_dir: Path, last: int) -> dict[str, Any]:
    """Train a net up to a step, with a save in each, and return its state."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    state: dict[str, Any] = {"model": net, "optimizer": torch.optim.Adam(net.parameters())}
    config = CheckpointConfig(checkpoint_dir=run_dir, run_key="run", memory_dir=None, max_num_checkpoints=None)
    with Checkpointer(config) as own:
        for step in range(own.restore(state) + 1, last + 1):
            state["optimizer"].zero_grad()
            net(torch.randn(4, 8)).square().mean().backward()
            state["optimizer"].step()
            own.save(step, state, metrics={"loss": 1 / step})
    return {**net.state_dict(), "random": torch.get_rng_state()}


def good(place: Path) -> list[int]:
    """Verify every byte of a run; return its steps."""
    verified = verify_run_directory(open_run(place).history)
    assert verified.good
    return sorted(one.step for one in open_run(place).checkpoints())


def test_a_run_comes_back_and_trains_on(
    hub: Hub, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pushed by one commit and pulled, a run verifies, goes on bit for bit, and is pushed and pulled on from there.

    Bytes that the repository has are not sent or fetched again; with nothing new there is no commit.
    """
    monkeypatch.setattr(repository, "_SENT_AT_ONCE_BYTES", 3000)  # Some objects alone, some together.
    trained(run_dir, 3)
    pushed = ckpt("push", run_dir, REPO, "--json")
    assert pushed.status == 0, pushed.out + pushed.err
    assert pushed.data["commit"] == hub.commits(REPO)[0]
    assert len(hub.commits(REPO)) == 2  # The Hub's own, with .gitattributes, and one.
    assert not [name for name in hub.tree(REPO) if name.startswith("heartbeat")]
    sent, requests = hub.sent_bytes, len(hub.requests)
    assert ckpt("push", run_dir, REPO).status == 0
    assert [one for one in hub.requests[requests:] if not one.startswith("GET")] == []

    assert ckpt("pull", REPO, tmp_path / "back").status == 0
    assert good(tmp_path / "back") == [1, 2, 3]
    alone, back = trained(run_dir, 6), trained(tmp_path / "back", 6)
    assert all(torch.equal(value, back[name]) for name, value in alone.items())
    assert ckpt("push", tmp_path / "back", f"hf://{REPO}").status == 0
    assert len(hub.commits(REPO)) == 3
    assert hub.sent_bytes - sent <= sum(len(d) for n, d in tree(tmp_path / "back").items() if n.endswith(("s", "w")))
    assert ckpt("pull", REPO, tmp_path / "once_more").status == 0
    assert good(tmp_path / "once_more") == [1, 2, 3, 4, 5, 6]
    names = {name for name in hub.tree(REPO) if name.startswith("checkpoint_")}
    assert names == {name for name in tree(tmp_path / "back") if name.startswith("checkpoint_")}


def test_a_revision_is_a_branch(hub: Hub, run_dir: Path, tmp_path: Path) -> None:
    """ORG/NAME@REVISION pushes to that branch, which is made with the repository, and pulls from it."""
    save_steps(run_dir, 1)
    planned = ckpt("push", run_dir, REPO, "--dry-run", "--json")
    assert (planned.status, planned.data["steps"], hub.commits(REPO)) == (0, [1], [])
    assert ckpt("push", run_dir, f"{REPO}@tries", "--private").status == 0
    assert (hub.root / REPO / "visibility").read_text() == "private"
    assert "format.json" in hub.tree(REPO, "tries")
    assert "format.json" not in hub.tree(REPO)
    assert ckpt("pull", f"{REPO}@tries", tmp_path / "back").status == 0
    assert ckpt("pull", REPO, tmp_path / "main").status == 1
    missing = ckpt("pull", f"{REPO}@other", tmp_path / "main")
    assert missing.status == 1
    assert "no revision other" in missing.err


def test_two_pushes_do_not_mix(hub: Hub, run_dir: Path, tmp_path: Path) -> None:
    """If another commit comes first, a push commits nothing and says so; the same command then sends the rest."""
    trained(run_dir, 2)
    assert ckpt("push", run_dir, REPO).status == 0
    trained(run_dir, 3)

    def interfere(request: str) -> None:
        if "/commit/" in request:
            hub.write(REPO, "notes.txt", b"of another one")

    hub.fault = interfere
    answer = ckpt("push", run_dir, REPO)
    assert answer.status == 1
    assert "has another commit" in answer.err
    hub.fault = lambda request: None
    assert len(hub.commits(REPO)) == 3
    assert ckpt("push", run_dir, REPO).status == 0
    assert hub.read(REPO, "notes.txt") == b"of another one"
    assert ckpt("pull", REPO, tmp_path / "back").status == 0
    assert good(tmp_path / "back") == [1, 2, 3]


def test_another_run_is_refused(hub: Hub, run_dir: Path, tmp_path: Path) -> None:
    """A repository of another run, or of weights, gets nothing; a run's takes no weights."""
    save_steps(run_dir, 1)
    save_steps(tmp_path / "other", 1)
    hub.write("org/weights", "model.safetensors", b"weights")
    assert ckpt("push", run_dir, REPO).status == 0
    before = hub.requests.copy()
    for words, arguments in (
        ("holds the run 'run'", (tmp_path / "other", REPO)),
        ("holds weights", (run_dir, "org/weights")),
        ("holds a run", (f"{run_dir}@1", REPO)),
        ("sent as a whole", (run_dir, REPO, "--format", "peft")),
        ("is not a repository", (run_dir, "runs/lm/copy")),
    ):
        answer = ckpt("push", *arguments)
        assert answer.status == 1
        assert words in answer.err
    assert all(request.startswith("GET") for request in hub.requests[len(before) :])


def test_faults_of_the_hub(hub: Hub, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors and cut connections are retried, or end the push with nothing committed; a lost answer does no harm."""
    trained(run_dir, 1)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    failed: set[str] = set()

    def once(request: str) -> str | None:
        """Fail each kind of request once, with an error and then by a cut."""
        kind = request.rsplit("/", 1)[0] if "content" in request else request
        for fault in ("500", "cut"):
            if kind + fault not in failed and "/commit/" not in request:
                failed.add(kind + fault)
                return fault
        return None

    hub.fault = once
    statuses = [ckpt("push", run_dir, REPO).status for _ in range(7)]
    assert statuses[-1] == 0
    for fault in ("500", "cut"):
        trained(run_dir, 2 if fault == "500" else 3)
        hub.fault = lambda request, fault=fault: fault if "/commit/" in request else None  # type: ignore[misc]
        before = hub.commits(REPO)
        answer = ckpt("push", run_dir, REPO)
        assert (answer.status, hub.commits(REPO)) == (1, before)
        assert "the Hub fails" in answer.err
    hub.fault = lambda request: "lost" if "/commit/" in request else None
    assert ckpt("push", run_dir, REPO).status == 1
    hub.fault = lambda request: None
    assert "nothing to copy" in ckpt("push", run_dir, REPO).out
    assert ckpt("pull", REPO, tmp_path / "back").status == 0
    assert good(tmp_path / "back") == [1, 2, 3]


def test_without_a_token(hub: Hub, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hub that refuses ends the push with a sentence about the token, and no bytes of the token."""
    save_steps(run_dir, 1)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    answer = ckpt("push", run_dir, REPO)
    assert answer.status == 1
    assert "HF_TOKEN" in answer.err
    assert "hf_wrong" not in answer.err


def test_changed_bytes_do_not_become_a_run(hub: Hub, run_dir: Path, tmp_path: Path) -> None:
    """A damaged object of the repository is named, and its checkpoint is not committed at the target."""
    save_steps(run_dir, 1, 2, 3)
    flip(only(run_dir, "checkpoint_000000000003/*/manifest.json"), 30)
    answer = ckpt("push", run_dir, REPO)
    assert (answer.status, "damaged" in answer.out) == (1, True), "what is damaged here is not sent"
    assert b"| step | 2 |" in hub.read(REPO, "README.md")
    name = next(n for n in hub.tree(REPO) if n.startswith("checkpoint_000000000002") and "model" in n)
    place = hub.root / "content" / hub.tree(REPO)[name]["sha256"]
    place.write_bytes(place.read_bytes()[:-1] + b"?")
    answer = ckpt("pull", REPO, tmp_path / "back")
    assert answer.status == 1
    assert name.rsplit("/", 1)[1] in answer.out
    assert good(tmp_path / "back") == [1]


# ── killed ───────────────────────────────────────────────────────────────────────────────────────────────────────


def run(verb: tuple[str | Path, ...]) -> None:
    sys.exit(ckpt(*verb).status)


def killed(hub: Hub, verb: tuple[str | Path, ...], when: Callable[[int, str], bool], how: str) -> int | None:
    """Run a verb in a fork that is killed at a request; return its status, and leave the server without faults."""
    process = multiprocessing.get_context("fork").Process(target=run, args=(verb,))
    begun = len(hub.requests)

    def kill(request: str) -> str | None:
        if when(len(hub.requests) - begun, request):
            os.kill(process.pid or 0, signal.SIGKILL)
            return how
        return None

    hub.fault = kill
    process.start()
    process.join()
    hub.fault = lambda request: None
    return process.exitcode


def check_killed(hub: Hub, run_dir: Path, place: Path, when: Callable[[int, str], bool], how: str) -> bool:
    """Kill a first push, look, push again, and pull; return False if the push ended before."""
    status = killed(hub, ("push", run_dir, REPO), when, how)
    here = hub.tree(REPO)
    assert "format.json" in here or not [name for name in here if name not in (".gitattributes", "README.md")]
    assert ckpt("push", run_dir, REPO).status == 0
    assert ckpt("pull", REPO, place / "back").status == 0
    assert good(place / "back") == [1]
    return status == -signal.SIGKILL


@pytest.mark.parametrize("at", ["PUT ", "POST /api/models/org/run/commit"])
def test_a_killed_push_is_repeated(hub: Hub, run_dir: Path, tmp_path: Path, at: str) -> None:
    """P52: killed in an upload, or before or after its commit, a push leaves a whole run or none; repeated, it ends."""
    save_steps(run_dir, 1)
    assert check_killed(hub, run_dir, tmp_path, lambda n, request: request.startswith(at), "lost")
