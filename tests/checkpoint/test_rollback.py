"""Training goes back to an older checkpoint and leaves batches out, whoever asks for it and whatever dies then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ckpt_tasks.checkpoint.checkpointer import Checkpointer
from ckpt_tasks.checkpoint.restore.reading import open_run
from ckpt_tasks.errors import ConfigError, IntegrityError, NonFiniteError, StateError
from ckpt_tasks.run.ledger.config import CheckpointConfig
from ckpt_tasks.state.data.sampler import ResumableSampler
from ckpt_tasks.testing import die
from tests.support import pipelines
from tests.support.cli_runs import ckpt as command
from tests.support.cli_runs import flip, only

BATCHES = 40


def config(run_dir: Path, **options: Any) -> CheckpointConfig:
    known = {"step_interval": 5, "max_num_checkpoints": None, "memory_dir": None}
    return CheckpointConfig(checkpoint_dir=run_dir, **(known | options))


class Training:
    """A training that sees one sample a step; `seen` has which."""

    def __init__(self) -> None:
        self.sampler = ResumableSampler(BATCHES, batch_size=1, shuffle=False)
        self.loader: Any = DataLoader(range(BATCHES), batch_sampler=self.sampler)  # type: ignore[arg-type]
        self.state: dict[str, Any] = {"data": self.sampler, "weight": torch.zeros(1)}
        self.seen: dict[int, int] = {}

    def go(self, ckpt: Checkpointer, end: int, bad: int | None = None) -> None:
        """Restore, and train to a step; the loss is NaN where the sample is `bad`."""
        step = ckpt.restore(self.state)
        for batch in self.sampler.follow(self.loader):
            if step == end:
                return
            step += 1
            self.seen[step] = int(batch)
            loss = float("nan") if int(batch) == bad else 1.0
            ckpt.step(step, self.state, metrics={"loss": loss})
            ckpt.wait()


def test_training_goes_on_from_there_and_leaves_the_named_batches_out(tmp_path: Path) -> None:
    """`ckpt rollback DIR@10 --skip-batches 12-14`: step 11 sees its batch, step 12 the one after the three."""
    with Checkpointer(config(tmp_path)) as ckpt:
        Training().go(ckpt, 20)
    answer = command("rollback", f"{tmp_path}@10", "--skip-batches", "12-14", "--reason", "a spike", "--json")
    assert (answer.data["step"], answer.data["skip"], answer.data["left_behind"]) == (10, [12, 14], [15, 20])
    again = Training()
    with Checkpointer(config(tmp_path)) as ckpt:
        again.go(ckpt, 20)
    assert again.seen == {11: 10} | {step: step + 2 for step in range(12, 21)}
    assert [c.step for c in open_run(tmp_path).checkpoints() if not c.abandoned] == [20, 15, 10, 5]
    assert command("report", tmp_path, "--out", tmp_path / "r.html").status == 0
    assert "a spike; batches 12 to 14 are left out" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("killed_at", [11, 16])
def test_a_death_before_or_after_the_left_out_batches_changes_nothing(tmp_path: Path, killed_at: int) -> None:
    """Whenever training dies after a rollback, the next one sees exactly the batches that were not left out."""
    with Checkpointer(config(tmp_path)) as ckpt:
        Training().go(ckpt, 20)
    assert command("rollback", f"{tmp_path}@10", "--skip-batches", "12-14").status == 0
    seen: dict[int, int] = {}
    for end in (killed_at, 20):
        training = Training()
        with Checkpointer(config(tmp_path, step_interval=1 if killed_at == 16 else 5)) as ckpt:
            training.go(ckpt, end)
        seen |= training.seen
    assert seen == {11: 10} | {step: step + 2 for step in range(12, 21)}


def test_what_lies_in_memory_does_not_undo_a_rollback(tmp_path: Path) -> None:
    """A snapshot that was sealed after the newest commit is not restored once that commit was rolled back to."""
    run_dir, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    state: dict[str, Any] = {"weight": torch.zeros(4)}
    writer = pipelines.opened(run_dir, memory_dir=memory)
    writer.restore(state)
    writer.save(1, state)
    pipelines.give_calls(writer, pipelines.Refusing())
    writer.step(2, state)
    die(writer)
    with pipelines.opened(run_dir) as ckpt:
        ckpt.acquire()
        ckpt.rollback(1)
    with pipelines.opened(run_dir, memory_dir=memory) as ckpt:
        assert ckpt.restore(state) == 1


def test_a_rollback_wants_a_restore_a_good_checkpoint_and_batches_behind_it(tmp_path: Path) -> None:
    """Damaged bytes and batches that were taken are refused, nothing is changed, and a save wants a restore first."""
    with Checkpointer(config(tmp_path)) as ckpt:
        with pytest.raises(StateError, match="does not hold"):
            ckpt.rollback(5)
        Training().go(ckpt, 15)
        with pytest.raises(ConfigError, match="do not come after step 10"):
            ckpt.rollback(10, skip_batches=(10, 12))
        ckpt.rollback(10)
        with pytest.raises(ConfigError, match="holds checkpoints"):
            ckpt.save(16, Training().state)
    shard = only(tmp_path, "checkpoint_000000000005/*/weight-*.safetensors")
    flip(shard, -1)
    with Checkpointer(config(tmp_path)) as ckpt:
        ckpt.acquire()
        with pytest.raises(IntegrityError, match="damaged"):
            ckpt.rollback(5)
        assert ckpt.restore(Training().state) == 10


def test_a_state_that_cannot_leave_batches_out_says_so_before_anything_changes(tmp_path: Path) -> None:
    """Without an object that has skip_batches(count) the restore is refused, and names what would help."""
    with Checkpointer(config(tmp_path)) as ckpt:
        for step in range(1, 11):
            ckpt.step(step, {"weight": torch.zeros(1)})
        ckpt.save(10, {"weight": torch.zeros(1)})
        ckpt.rollback(5, skip_batches=(6, 7))
        state = {"weight": torch.ones(1)}
        with pytest.raises(ConfigError, match="batches 6 to 7") as refused:
            ckpt.restore(state)
    assert "ResumableSampler" in str(refused.value)
    assert state["weight"].item() == 1.0


def test_a_loss_that_is_not_finite_leaves_out_the_batches_that_led_to_it(tmp_path: Path) -> None:
    """on_non_finite="rollback" goes back and past a batch that makes a deterministic program diverge each time."""
    training = Training()
    with Checkpointer(config(tmp_path, on_non_finite="rollback")) as ckpt:
        with pytest.raises(NonFiniteError):
            training.go(ckpt, 20, bad=12)
        training.go(ckpt, 20, bad=12)
    assert training.seen[11] == 13
    assert training.seen[20] == 22
    state = open_run(tmp_path).head().state
    assert state.rollback is not None
    assert (state.rollback.step, state.rollback.skip, state.rollback.pending) == (10, (11, 13), False)
