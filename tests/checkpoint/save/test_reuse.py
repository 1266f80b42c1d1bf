"""What has not changed is written once, and stays as long as a checkpoint needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.checkpoint.save.parts import Stored
from ckpt_tasks.checkpoint.save.tenure import Line
from ckpt_tasks.run.opening import open_checkpoint
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from ckpt_tasks.testing import settle

SIZE = 1 << 16


def _model(value: float, frozen: float = 0.5) -> dict[str, Any]:
    model = nn.ParameterDict({
        "base": nn.Parameter(torch.full((8 * SIZE,), float(frozen)), requires_grad=False),
        "adapter": nn.Parameter(torch.full((SIZE // 8,), float(value))),
    })  # fmt: skip
    return {"model": model}


def _opened(run_dir: Path, **options: Any) -> Checkpointer:
    return Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=None, **options))


def _bases(run_dir: Path) -> list[Path]:
    return sorted(path for path in run_dir.rglob("model-*.safetensors") if path.stat().st_size > SIZE * 8)


def _restored(run_dir: Path, step: int | str = "latest") -> tuple[float, float]:
    run, state = open_run(str(run_dir)), _model(-1, -1)
    run.restore(run.find(step), state)
    base, adapter = state["model"]["base"], state["model"]["adapter"]
    assert bool((base == base[0]).all())
    assert bool((adapter == adapter[0]).all())
    return base[0].item(), adapter[0].item()


def _whole(run_dir: Path) -> bool:
    return verify_run_directory(open_run(str(run_dir)).history).good


def test_frozen_parameters_are_written_once(run_dir: Path) -> None:
    """P65: of five checkpoints of a model with a frozen base, the base is written by the first alone; all restore."""
    for steps in ((1, 2, 3), (4, 5)):  # also across processes
        with _opened(run_dir, max_num_checkpoints=None) as ckpt:
            assert ckpt.restore(_model(0)) == steps[0] - 1
            for step in steps:
                ckpt.save(step, _model(step))
    assert len(_bases(run_dir)) == 1
    assert [_restored(run_dir, step) for step in range(1, 6)] == [(0.5, float(step)) for step in range(1, 6)]
    run = open_run(str(run_dir))
    first, *others = reversed(run.checkpoints())
    assert first.reuses == ()
    assert all(str(_bases(run_dir)[0].relative_to(run_dir)) in c.reuses for c in others)
    assert _whole(run_dir)


def test_what_changed_is_written_whatever_the_flag_says(run_dir: Path) -> None:
    """P2, P65: the digest of the bytes decides: of a frozen value that changed, and of one that trains from now on."""
    with _opened(run_dir, max_num_checkpoints=None) as ckpt:
        state = _model(1)
        ckpt.save(1, state)
        state["model"]["base"].data.fill_(3.0)
        ckpt.save(2, state)
        state["model"]["base"].requires_grad_(True)
        with torch.no_grad():
            state["model"]["base"].add_(1)
        ckpt.save(3, state)
    assert len(_bases(run_dir)) == 3
    assert [_restored(run_dir, step)[0] for step in (1, 2, 3)] == [0.5, 3.0, 4.0]


def test_an_object_that_was_given_up_meanwhile_is_written_again(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P65: an object that no live checkpoint keeps any more when the flush begins is not reused but written."""
    with _opened(run_dir, max_num_checkpoints=1) as ckpt:
        ckpt.save(1, _model(1))
        first = open_checkpoint(ckpt.run.history.store, ckpt.checkpoints()[0])
        stored = Stored.of(first.manifest.objects, first.index)
        ckpt.save(2, _model(2, frozen=2))
        ckpt.save(3, _model(3, frozen=3))
        settle(ckpt)
        monkeypatch.setattr(Line, "reusable", lambda line, store: stored)  # as if it had been read before step 2
        ckpt.save(4, _model(4))
    assert _restored(run_dir) == (0.5, 4.0)
    assert _whole(run_dir)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 3)), min_size=1, max_size=12),
)
@settings(max_examples=settings().max_examples // 5)
def test_any_history_keeps_every_live_checkpoint_whole(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[int, bool, int]]
) -> None:
    """P60, P65: over changes, prunings and restarts live checkpoints verify, and no orphan is left."""
    run_dir = tmp_path_factory.mktemp("any") / "run"
    step, values = 0, {}
    ckpt = _opened(run_dir, max_num_checkpoints=1)
    for number, (frozen, again, keep) in enumerate(history, start=1):
        if again and step:
            ckpt.close()
            ckpt = _opened(run_dir, max_num_checkpoints=keep)
            assert ckpt.restore(_model(0)) == step
        step = number
        values[step] = (float(frozen), float(step))
        ckpt.save(step, _model(step, frozen=frozen))
    ckpt.close()
    live = [c.step for c in open_run(str(run_dir)).checkpoints()]
    assert {s: _restored(run_dir, s) for s in live} == {s: values[s] for s in live}
    faults = verify_run_directory(open_run(str(run_dir)).history)
    assert faults.good
    assert faults.orphans == ()
