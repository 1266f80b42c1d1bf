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
from ckpt_tasks.errors import NoGoodCheckpointError
from ckpt_tasks.reading.opening import open_checkpoint
from ckpt_tasks.saving.parts import Stored
from ckpt_tasks.saving.tenure import Line
from ckpt_tasks.testing import settle
from ckpt_tasks.upkeep.upkeep import verify_run_directory
from tests.support.cli_runs import flip

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


def test_a_reused_object_outlives_the_checkpoint_that_wrote_it(run_dir: Path) -> None:
    """P65: pruning takes the older checkpoints' own objects, and the shared one only when its last user goes."""
    with _opened(run_dir, max_num_checkpoints=1) as ckpt:
        for step in range(1, 5):
            ckpt.save(step, _model(step))
        settle(ckpt)
        assert len(_bases(run_dir)) == 1
        assert _restored(run_dir) == (0.5, 4.0)
        assert _whole(run_dir)
        for step in (5, 6):  # the base is unfrozen and changes: nobody needs the old one any more
            ckpt.save(step, _model(step, frozen=step))
        ckpt.prune()
    assert len(_bases(run_dir)) == 1
    assert _restored(run_dir) == (6.0, 6.0)
    assert _whole(run_dir)


def test_unfreezing_plans_again(run_dir: Path) -> None:
    """P2: a parameter that begins to take gradients leaves the frozen file, and its new values are stored."""
    with _opened(run_dir, max_num_checkpoints=None) as ckpt:
        state = _model(1)
        ckpt.save(1, state)
        state["model"]["base"].requires_grad_(True)
        with torch.no_grad():
            state["model"]["base"].add_(1)
        ckpt.save(2, state)
    assert _restored(run_dir, 1) == (0.5, 1.0)
    assert _restored(run_dir, 2) == (1.5, 1.0)


def test_a_frozen_value_that_changed_all_the_same_is_written(run_dir: Path) -> None:
    """P2, P65: what decides is the digest of the bytes, not the flag."""
    with _opened(run_dir, max_num_checkpoints=None) as ckpt:
        state = _model(1)
        ckpt.save(1, state)
        state["model"]["base"].data[7] = 3.0
        ckpt.save(2, state)
    assert len(_bases(run_dir)) == 2
    run, found = open_run(str(run_dir)), _model(-1, -1)
    run.restore(run.find(2), found)
    assert found["model"]["base"][6:9].tolist() == [0.5, 3.0, 0.5]


def test_damage_in_a_shared_object_is_found_in_every_checkpoint_that_uses_it(run_dir: Path) -> None:
    """P49, P65: a flipped bit in the shared object fails all of its users, and `verify` names them."""
    with _opened(run_dir, max_num_checkpoints=None) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, _model(step))
    (base,) = _bases(run_dir)
    flip(base, base.stat().st_size // 2)
    assert not _whole(run_dir)
    with _opened(run_dir) as ckpt, pytest.raises(NoGoodCheckpointError):
        ckpt.restore(_model(0))


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
@settings(max_examples=settings().max_examples // 3)
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
