"""`ckpt push` and `ckpt pull` of weights: what from_pretrained loads, and a card that says where it is from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, load_torch_model, snapshot_download
from torch import nn

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from tests.support.cli_runs import ckpt, config
from tests.support.hub import Hub

REPO = "org/weights"


def saved(run_dir: Path, *steps: int) -> dict[int, nn.Linear]:
    models = {step: nn.Linear(200, 300) for step in steps}
    with Checkpointer(config(run_dir, memory_dir=None)) as own:
        for step, model in models.items():
            own.save(step, {"model": model}, metrics={"loss": 1 / step, "a|b": 0.5})
    return models


def test_weights_and_their_card(hub: Hub, run_dir: Path, tmp_path: Path) -> None:
    """One commit has weights that huggingface_hub loads, and a card with run, step, metrics and versions alone.

    The next push replaces both, and removes shards that it has not; repeated without news it makes no commit.
    """
    models = saved(run_dir, 1, 2)
    assert ckpt("push", f"{run_dir}@1", REPO, "--max-shard-size", "100KB").status == 0
    assert len(hub.commits(REPO)) == 2
    assert len([name for name in hub.tree(REPO) if name.endswith(".safetensors")]) == 2
    card = ModelCard(hub.read(REPO, "README.md").decode())
    assert "tags:\n- ckpt-tasks\n" in card.content
    for row in ("| run | run |", "| step | 1 |", "| loss | 1 |", "| a\\|b | 0.5 |", f"| torch | {torch.__version__} |"):
        assert row in card.text
    assert not any(f"| {name} |" in card.text for name in ("host", "command", "code"))

    assert "POST /api/repos/create" in hub.requests
    hub.requests.clear()
    answer = ckpt("push", f"{run_dir}@latest", REPO, "--json")
    assert "POST /api/repos/create" not in hub.requests  # A token may be allowed to commit, and to create nothing.
    assert (answer.status, answer.data["step"]) == (0, 2), answer.err
    assert answer.data["commit"] == hub.commits(REPO)[0]
    place = snapshot_download(REPO, cache_dir=tmp_path / "cache")
    fresh = nn.Linear(200, 300)
    load_torch_model(fresh, place)
    assert torch.equal(fresh.weight, models[2].weight)
    assert "| step | 2 |" in hub.read(REPO, "README.md").decode()
    commits, sent = hub.commits(REPO), hub.sent_bytes
    assert ckpt("push", f"{run_dir}@2", REPO).status == 0
    assert (hub.commits(REPO), hub.sent_bytes) == (commits, sent)


def test_a_card_of_a_user_stays(hub: Hub, run_dir: Path, tmp_path: Path) -> None:
    """A README without our line, and files that are no weights, are never touched."""
    saved(run_dir, 1)
    assert ckpt("push", f"{run_dir}@1", REPO).status == 0
    hub.write(REPO, "README.md", b"# Mine\n")
    hub.write(REPO, "config.json", b"{}")
    saved(tmp_path / "run2", 3)
    assert ckpt("push", f"{tmp_path / 'run2'}@3", REPO).status == 0
    assert hub.read(REPO, "README.md") == b"# Mine\n"
    assert hub.read(REPO, "config.json") == b"{}"


def test_weights_are_pulled_whole(hub: Hub, run_dir: Path, tmp_path: Path) -> None:
    """All files come into a new directory, each compared with the Hub's digest; if one differs nothing appears."""
    saved(run_dir, 1)
    assert ckpt("push", f"{run_dir}@1", REPO).status == 0
    answer = ckpt("pull", REPO, tmp_path / "out", "--dry-run", "--json")
    assert (answer.status, sorted(answer.data["files"])) == (0, sorted({*hub.tree(REPO)} - {".gitattributes"}))
    assert not (tmp_path / "out").exists()
    assert ckpt("pull", REPO, tmp_path / "out").status == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        name: hub.read(REPO, name) for name in hub.tree(REPO) if name != ".gitattributes"
    }
    assert "exists" in ckpt("pull", REPO, tmp_path / "out").err
    name = next(name for name in hub.tree(REPO) if name.endswith(".safetensors"))
    place = hub.root / "content" / hub.tree(REPO)[name]["sha256"]
    place.write_bytes(place.read_bytes()[:-1] + b"?")
    answer = ckpt("pull", REPO, tmp_path / "damaged")
    assert answer.status == 1
    assert name in answer.err
    assert sorted(path.name for path in tmp_path.iterdir() if "damaged" in path.name or "tmp" in path.name) == []
    assert "does not exist" in ckpt("pull", "org/nothing", tmp_path / "nothing").err


def test_a_failed_push_of_weights_is_no_commit(hub: Hub, run_dir: Path) -> None:
    """A Hub that fails at any request of a push leaves the repository as it was; another pusher's commit is kept."""
    saved(run_dir, 1)
    for at in ("PUT ", "POST /api/models/org/weights/commit"):
        hub.fault = lambda request, at=at: "cut" if request.startswith(at) else None  # type: ignore[misc]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
            assert ckpt("push", f"{run_dir}@1", REPO).status == 1
        assert [*hub.tree(REPO)] == [".gitattributes"]

    def interfere(request: str) -> None:
        if "/commit/" in request:
            hub.write(REPO, "theirs.txt", b"theirs")

    hub.fault = interfere
    answer = ckpt("push", f"{run_dir}@1", REPO)
    assert answer.status == 1
    assert "has another commit" in answer.err
    assert sorted(hub.tree(REPO)) == [".gitattributes", "theirs.txt"]


@pytest.mark.slow
def test_a_revision_is_a_branch(hub: Hub, run_dir: Path, tmp_path: Path) -> None:
    """ORG/NAME@REVISION pushes to that branch, which is made with the repository, and pulls from it."""
    saved(run_dir, 1)
    planned = ckpt("push", run_dir, REPO, "--dry-run", "--json")
    assert (planned.status, planned.data["step"], hub.commits(REPO)) == (0, 1, [])
    assert ckpt("push", run_dir, f"hf://{REPO}@tries", "--private").status == 0
    assert (hub.root / REPO / "visibility").read_text() == "private"
    assert "README.md" in {*hub.tree(REPO, "tries")} - {*hub.tree(REPO)}
    assert ckpt("pull", f"{REPO}@tries", tmp_path / "back").status == 0
    missing = ckpt("pull", f"{REPO}@other", tmp_path / "main")
    assert missing.status == 1
    assert "no revision other" in missing.err
    assert "is not a repository" in ckpt("push", run_dir, "runs/lm/copy").err


@pytest.mark.slow
def test_without_a_token(hub: Hub, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hub that refuses ends the push with a sentence about the token, and no bytes of the token."""
    saved(run_dir, 1)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    answer = ckpt("push", run_dir, REPO)
    assert answer.status == 1
    assert "HF_TOKEN" in answer.err
    assert "hf_wrong" not in answer.err


_LOAD = """
import sys, torch
from peft import PeftModel
from tests.integrations.finetuning_checks import base
loaded = PeftModel.from_pretrained(base(), "org/adapter").eval()
torch.save(loaded(input_ids=torch.arange(12)[None]).logits, sys.argv[1])
"""


@pytest.mark.framework
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of PEFT and Transformers
def test_from_pretrained_loads_an_adapter_by_its_name(hub: Hub, run_dir: Path, tmp_path: Path) -> None:
    """`PeftModel.from_pretrained(base, "org/adapter")` of another process gives the logits of the trained model."""
    import peft

    from ckpt_tasks.integrations.huggingface_adapters import AdapterConfigs
    from tests.integrations.finetuning_checks import KINDS, base, scattered

    model = scattered(peft.get_peft_model(base(), KINDS["lora"]())).eval()
    with Checkpointer(config(run_dir, memory_dir=None)) as own:
        own.save(1, {"model": model, "adapters": AdapterConfigs(model)})
    answer = ckpt("push", f"{run_dir}@1", "org/adapter", "--format", "peft")
    assert answer.status == 0, answer.err
    assert b"library_name: peft\n" in hub.read("org/adapter", "README.md")
    subprocess.run(
        [sys.executable, "-c", _LOAD, str(tmp_path / "logits")], check=True, env=hub.environment(tmp_path / "home")
    )
    logits = torch.load(tmp_path / "logits")
    assert torch.equal(logits, model(input_ids=torch.arange(12)[None]).logits)
