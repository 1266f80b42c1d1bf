"""The example program: it learns, repeats itself bit for bit, and goes on from its state alone."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_tasks.flows.programs.byte_lm import ByteLM, read
from tests.support.sweeps import quick_first

SMALL: dict[str, Any] = {"d_model": 32, "n_layers": 2, "n_heads": 2, "context": 32, "batch_size": 8, "dropout": 0.2}
SHORT: dict[str, Any] = {"warmup_steps": 3, "decay_steps": 30, "lr": 1e-2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a directory of 40 small text files, some in a subdirectory."""
    words = ["def ", "return ", "import ", "self", "(", ")", ":\n", "    ", "value", " = "]
    for number in range(40):
        path = tmp_path / ("inner" if number % 3 else ".") / f"file{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(random.Random(number).choices(words, k=400)), encoding="utf-8")
    return tmp_path


def program(folder: Path, **params: Any) -> ByteLM:
    """Build a small one."""
    return ByteLM(data=str(folder), **{**SMALL, **SHORT, **params})


def snapshot(lm: ByteLM) -> dict[str, Any]:
    """Copy all that the program says is its state."""
    return {
        "model": {name: value.clone() for name, value in lm.model.state_dict().items()},
        "optimizer": torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, lm.optimizer.state_dict()),
        "scheduler": dict(lm.scheduler.state_dict()),
        "data": lm.sampler.state_dict(),
    }


def assert_equal(one: ByteLM, two: ByteLM) -> None:
    """Compare two programs' states bit for bit."""
    torch.testing.assert_close(snapshot(one)["model"], snapshot(two)["model"], rtol=0, atol=0)
    torch.testing.assert_close(snapshot(one)["optimizer"], snapshot(two)["optimizer"], rtol=0, atol=0)
    assert one.scheduler.state_dict() == two.scheduler.state_dict()
    assert one.sampler.state_dict() == two.sampler.state_dict()


def test_two_runs_are_equal(folder: Path) -> None:
    """P24: a run with the same seed is the same, bit for bit, and one with another seed is not."""
    first = program(folder, seed=1)
    metrics = [first.train_step() for _ in range(20)]
    second = program(folder, seed=1)
    assert [second.train_step() for _ in range(20)] == metrics
    assert_equal(first, second)
    assert program(folder, seed=2).train_step() != metrics[0]


@pytest.mark.parametrize("before", quick_first([1, 10, 15], 2))
def test_a_fresh_program_goes_on_from_the_state(folder: Path, before: int) -> None:
    """P23: a fresh program given state and random numbers goes on as the uninterrupted, over an epoch's edge too."""
    whole = program(folder, max_bytes=4100)  # 15 steps are an epoch
    metrics = [whole.train_step() for _ in range(20)]
    first = program(folder, max_bytes=4100)
    begun = [first.train_step() for _ in range(before)]
    saved, stream = snapshot(first), torch.get_rng_state()
    second = program(folder, max_bytes=4100, seed=0)
    assert set(second.state) == set(saved)
    for group, value in second.state.items():
        value.load_state_dict(saved[group])
    torch.set_rng_state(stream)
    assert begun + [second.train_step() for _ in range(20 - before)] == metrics
    assert_equal(whole, second)
    assert second.sampler.epoch == 1


@pytest.mark.slow
def test_it_learns(folder: Path) -> None:
    """The held-out loss begins at that of guessing and falls below what any model without context can reach."""
    lm = program(folder, decay_steps=150)
    before = lm.evaluate("full")
    assert before["heldout_loss"] == pytest.approx(math.log(256), rel=0.05)
    for _ in range(150):
        metrics = lm.train_step()
        assert metrics["bytes"] == 8 * 32
    after = lm.evaluate("full")
    assert after["heldout_loss"] < 0.9 * after["unigram_entropy"] < before["heldout_loss"]


@pytest.mark.parametrize("suite", quick_first(["quick", "full"]))
def test_an_evaluation_leaves_the_training_alone(folder: Path, suite: str) -> None:
    """P11: an evaluation is repeatable, and moves neither the state, nor the random streams, nor the mode."""
    lm, other = program(folder), program(folder)
    torch.manual_seed(5)
    expected = [lm.train_step() for _ in range(4)]
    torch.manual_seed(5)
    metrics = [other.train_step() for _ in range(2)]
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    scores = other.evaluate(suite)
    assert other.evaluate(suite) == scores
    assert other.model.training
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == streams[1:]  # type: ignore[index]  # noqa: NPY002
    assert metrics + [other.train_step() for _ in range(2)] == expected
    assert_equal(lm, other)
    other.model.eval()
    other.evaluate(suite)
    assert not other.model.training


@pytest.mark.slow
def test_the_learning_rate_rises_then_falls(folder: Path) -> None:
    """P15: the rate rises over the warm-up, falls to a tenth as a cosine, and stays there when a run goes on."""
    lm = program(folder, warmup_steps=4, decay_steps=12, lr=0.01)
    rates = [lm.train_step()["lr"] for _ in range(15)]
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert rates[4:13] == sorted(rates[4:13], reverse=True)
    assert rates[8] == pytest.approx(0.0055)
    assert rates[12:] == pytest.approx([0.001] * 3)


def test_no_byte_sees_what_follows(folder: Path) -> None:
    """What the model says of a byte depends on the bytes before it alone, so that its loss means something."""
    model = program(folder).model.eval()
    tokens = torch.arange(32)[None]
    changed = tokens.clone()
    changed[0, 20:] += 100
    one, two = model(tokens), model(changed)
    torch.testing.assert_close(one[:, :20], two[:, :20])
    assert not torch.allclose(one[:, 20:], two[:, 20:])


def test_files_are_split_by_name(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The split hangs on names alone: the same wherever the data lies; no held-out file is trained on."""
    train, held_out = read(str(folder), 1 << 20)
    elsewhere = tmp_path_factory.mktemp("copy")
    for path in sorted(folder.rglob("*.txt"), reverse=True):
        (elsewhere / path.relative_to(folder)).parent.mkdir(exist_ok=True)
        (elsewhere / path.relative_to(folder)).write_bytes(path.read_bytes())
    assert read(str(elsewhere), 1 << 20) == (train, held_out)
    assert read(str(folder / "**" / "*.txt"), 1 << 20) == (train, held_out)
    files = {path.read_bytes() for path in folder.rglob("*.txt")}
    trained, kept = set(train.split(b"\0")) - {b""}, set(held_out.split(b"\0")) - {b""}
    assert trained | kept == files
    assert not trained & kept
    assert kept
    # One more file moves no other file to the other side.
    (folder / "more.txt").write_text("something else", encoding="utf-8")
    assert (kept - set(read(str(folder), 1 << 20)[1].split(b"\0"))) == set()
    assert len(read(str(folder), 5000)[0]) == 5000 - len(read(str(folder), 5000)[1])


@pytest.mark.slow
def test_the_standard_library_is_there() -> None:
    """Without `data`, some megabytes of Python source are found, without tests and installed packages."""
    train, held_out = read(None, 1 << 22)
    assert len(train) + len(held_out) == 1 << 22
    assert len(held_out) == 1 << 16
    assert b"def " in held_out
    assert read(None, 1 << 22) == (train, held_out)


def test_data_that_cannot_be_used_is_refused(folder: Path, tmp_path: Path) -> None:
    """Too few files, or too few bytes for one batch, are said to be so before anything is trained."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file.txt").write_text("alone", encoding="utf-8")
    with pytest.raises(ValueError, match="1 files found"):
        program(tmp_path / "one")
    with pytest.raises(ValueError, match="0 files found"):
        program(tmp_path / "none")
    with pytest.raises(ValueError, match="held-out files hold 0 windows"):
        program(folder, max_bytes=1000)
    with pytest.raises(ValueError, match="training files hold"):
        program(folder, batch_size=100_000)
    with pytest.raises(ValueError, match="no evaluation set"):
        program(folder).evaluate("slow")


def test_a_device_that_is_named_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program trains on the device that it is given, also on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ByteLM(data=str(folder), device="cpu", **SMALL).device.type == "cpu"
