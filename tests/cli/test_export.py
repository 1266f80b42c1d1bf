"""`ckpt export`: one command from a run to files that others read, and one line when it cannot be done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.transfer import export as exporting
from ckpt_tasks.cli.files import how_to_export
from tests.support.cli_runs import ckpt, config, flip, only, save, save_steps
from tests.support.measured import memory_of


def save_linears(run_dir: Path, *steps: int, **options: Any) -> dict[int, nn.Linear]:
    """Save a model at each step of a run, its loss falling, and return the models."""
    models = {step: nn.Linear(2, 3) for step in steps}
    with Checkpointer(config(run_dir, **options)) as ckpt:
        for step, model in models.items():
            ckpt.save(step, {"model": model}, metrics={"loss": 1 / step})
    return models


def test_one_command_makes_a_file_for_load_state_dict(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint, a step or the best one: its module, verified, and a line that says so."""
    monkeypatch.chdir(tmp_path)  # a long path is broken at the width of the screen
    models = save_linears(run_dir, 1, 2, 3, best_metric="loss", best_mode="max")
    for which, step in (("", 3), ("@latest", 3), ("@2", 2), ("@best", 1)):
        out = tmp_path / f"m{which}.safetensors"
        answer = ckpt("export", f"{run_dir}{which}", out)
        assert answer.status == 0, answer.err
        assert f"run step {step}" in answer.out
        assert "Exported 2 tensors of model" in answer.out
        assert out.name in answer.out
        fresh = nn.Linear(2, 3)
        fresh.load_state_dict(load_file(out))
        assert torch.equal(fresh.weight, models[step].weight)


def test_a_checkpoint_that_is_pruned_meanwhile(tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P64: a run that prunes what is being exported is told from a damaged one; one that is damaged stays damaged."""
    save_steps(run_dir, 1, 2)
    write_export = exporting.write_export

    def pruned_first(*arguments: Any) -> Any:
        with Checkpointer(config(run_dir, max_num_checkpoints=1)) as ckpt:
            ckpt.acquire()
            ckpt.prune()
        return write_export(*arguments)

    monkeypatch.setattr(exporting, "write_export", pruned_first)
    answer = ckpt("export", f"{run_dir}@1", tmp_path / "m.safetensors", "--group", "model")
    assert answer.status == 1
    assert "pruned the checkpoint meanwhile" in answer.err
    monkeypatch.undo()
    only(run_dir, "checkpoint_*/*/model-*").unlink()
    answer = ckpt("export", run_dir, tmp_path / "m.safetensors", "--group", "model", "--json")
    assert answer.data["error"]["type"] == "ObjectNotFoundError"
    assert [*tmp_path.iterdir()] == [run_dir]


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("100", 100), ("1gib", 1 << 30)]
)
def test_sizes(text: str, size_bytes: int) -> None:
    """A size is written as huggingface_hub writes it, in powers of ten, or of two with an i."""
    assert how_to_export(None, text)["max_shard_bytes"] == size_bytes


@pytest.mark.slow
@pytest.mark.parametrize("out", ["l", "l.pt"])
def test_it_needs_little_memory(tmp_path: Path, out: str) -> None:
    """P57: exporting 96 MiB in one tensor takes less than 48 MiB of its own; a file for torch needs torch."""
    small = save(tmp_path / "small", {"model": nn.Linear(1, 1)})
    large = save(tmp_path / "large", {"w": {"w": torch.ones(24 << 20)}})
    first = "s.safetensors" if out == "l" else "s.pt"  # what is imported for it is there before the large one
    modules, mib = memory_of(["export", small, tmp_path / first], ["export", large, tmp_path / out, "--group", "w"])
    assert (modules, mib < 48) == ([] if out == "l" else ["torch"], True), mib
    file = tmp_path / out / "model-00001-of-00001.safetensors" if out == "l" else tmp_path / out
    weights = load_file(file) if out == "l" else torch.load(file, weights_only=True)
    assert torch.equal(weights["w"], torch.ones(24 << 20))


def test_a_file_for_torch(tmp_path: Path, run_dir: Path) -> None:
    """--format torch, or a name that ends in .pt, makes one file that torch reads."""
    models = save_linears(run_dir, 1)
    answer = ckpt("export", f"{run_dir}@1", tmp_path / "m.bin", "--format", "torch", "--group", "model")
    assert (answer.status, "Exported 2 tensors of model" in answer.out) == (0, True)
    assert ckpt("export", run_dir, tmp_path / "all.pt", "--json").data["format"] == "torch"
    found = torch.load(tmp_path / "all.pt", weights_only=True)["model"]
    alone = torch.load(tmp_path / "m.bin", weights_only=True)
    assert all(torch.equal(one["weight"], models[1].weight) for one in (found, alone))


def test_a_damaged_checkpoint_says_what_to_do(run_dir: Path, tmp_path: Path) -> None:
    """The error names the checkpoint's object, the verb that lists what is bad, and the other steps."""
    save_linears(run_dir, 1, 2)
    flip(only(run_dir, "checkpoint_000000000002/*/model-*.safetensors"), -1)
    answer = ckpt("export", run_dir, tmp_path / "out.safetensors")
    assert answer.status == 1
    assert f"`ckpt verify {run_dir}` names what is bad, and export a good one: there are steps 1." in answer.err
    assert not [*tmp_path.glob("out*")]
