"""`on_spike`: training goes back from a finite spike of its loss, and goes on without the spike's batches."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.checkpoint.transfer.comparison import compare_checkpoints
from ckpt_tasks.errors import ConfigError, SpikeError, StateError
from ckpt_tasks.format.policy.spikes import SEEN
from ckpt_tasks.state.data.sampler import ResumableSampler
from tests.support.children import Child
from tests.support.cli_runs import ckpt as command
from tests.support.sweeps import quick_first

BATCHES, TOTAL = 160, 140
BAD = (113, 114, 115)


def config(run_dir: Path, **options: Any) -> CheckpointConfig:
    known = {"step_interval": 10, "max_num_checkpoints": None, "memory_dir": None, "on_spike": "loss"}
    return CheckpointConfig(checkpoint_dir=run_dir, **(known | options))


class Training:
    """A model with momentum that sees one sample a step; from the `bad` ones its loss is large for good."""

    def __init__(self, bad: Sequence[int] = BAD) -> None:
        torch.manual_seed(0)
        self.data = torch.randn(BATCHES, 4)
        self.data[[*bad]] *= 1e3
        self.sampler = ResumableSampler(BATCHES, batch_size=1, shuffle=False)
        self.model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(self.model.parameters(), 1e-4, momentum=0.9)
        self.optimizer = optimizer
        self.state: dict[str, Any] = {"data": self.sampler, "model": self.model, "optimizer": optimizer}
        self.seen: dict[int, int] = {}
        self.restores: list[int] = []

    def go(self, ckpt: Checkpointer, end: int, *, left_out: Sequence[int] = (), die_at: int | None = None) -> None:
        """Train to a step, and restore after each spike, as a flow's retries do; `left_out` batches are not seen."""
        while True:
            step = ckpt.restore(self.state)
            self.restores.append(step)
            try:
                return self._steps(ckpt, step, end, left_out, die_at)
            except SpikeError as error:
                if not error.rolls_back:
                    raise

    def _steps(self, ckpt: Checkpointer, step: int, end: int, left_out: Sequence[int], die_at: int | None) -> None:
        loader: Any = DataLoader(range(BATCHES), batch_sampler=self.sampler)  # type: ignore[arg-type]
        for batch in self.sampler.follow(loader):
            if step == end:
                return
            if int(batch) in left_out:
                continue
            loss = (self.model(self.data[int(batch)]) - 1).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            step += 1
            self.seen[step] = int(batch)
            ckpt.step(step, self.state, metrics={"loss": loss})
            ckpt.wait()
            if step == die_at:
                ckpt.save(step, self.state)
                signal.raise_signal(signal.SIGKILL)


def main(arguments: Sequence[str]) -> None:
    """Train a run until it is killed after a step."""
    run_dir, at = json.loads(arguments[0])
    with Checkpointer(config(Path(run_dir), step_interval=100)) as ckpt:
        Training().go(ckpt, TOTAL, die_at=at)


def test_a_spike_is_left_out_and_the_rest_is_as_if_it_had_never_been(run_dir: Path) -> None:
    """P20: from the newest checkpoint before the spike training goes on bit-equal to one that never saw its batches."""
    spoilt, clean = Training(), Training()
    with Checkpointer(config(run_dir)) as ckpt:
        spoilt.go(ckpt, TOTAL)
        assert spoilt.restores == [0, 110]
    state = open_run(str(run_dir)).head().state
    assert state.rollback is not None
    first, last = state.rollback.skip or (0, 0)
    assert (state.rollback.step, first, last) == (110, 111, 116)
    with Checkpointer(config(run_dir.with_name("clean"), on_spike=None)) as ckpt:
        clean.go(ckpt, TOTAL, left_out=range(first - 1, last))
    assert spoilt.seen == clean.seen
    one, other = open_run(str(run_dir)), open_run(str(run_dir.with_name("clean")))
    found = compare_checkpoints(one.history.store, one.find("latest"), other.history.store, other.find("latest"))
    # The record of what the loop was handed says what the one has left out, and the other one never had.
    assert [one.place for one in found.differences if not one.place.startswith("data/seen/")] == []
    [note] = [note for note in open_run(str(run_dir)).notes() if note["note"] == "rollback"]
    assert (note["step"], note["began"], note["failed"]) == (110, 114, 116)
    assert command("report", run_dir, "--out", run_dir.with_name("r.html")).status == 0
    said = "a metric spiked in steps 114 to 116; batches 111 to 116 are left out"
    assert said in run_dir.with_name("r.html").read_text()


@pytest.mark.parametrize(
    ("at", "to"),
    quick_first([(114, 100), (50, 110), (113, 113), (115, 100)]),
)
def test_a_new_process_has_the_same_window(run_dir: Path, at: int, to: int) -> None:
    """Whenever a process is killed, also within the spike, the next one goes back from the same step."""
    with Child(main, [json.dumps([str(run_dir), at])], run_dir.with_name("log")) as killed:
        assert killed.wait() == -signal.SIGKILL
    training = Training()
    with Checkpointer(config(run_dir)) as ckpt:
        training.go(ckpt, TOTAL)
    assert training.restores == [at, to]
    [note] = [note for note in open_run(str(run_dir)).notes() if note["note"] == "rollback"]
    assert (note["began"], note["failed"]) == (114, 116)


def test_spikes_that_come_again_end(run_dir: Path) -> None:
    """After three rollbacks that did not get past the place, the error says so, and is not to be tried again."""
    with Checkpointer(config(run_dir)) as ckpt, pytest.raises(SpikeError, match="3 rollbacks did not help") as caught:
        Training(bad=range(113, BATCHES)).go(ckpt, TOTAL)
    assert not caught.value.rolls_back


def test_what_is_no_spike_changes_nothing(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two bad steps, a spike of another metric, NaN and no value raise nothing; a name that no step has is said."""
    with Checkpointer(config(run_dir, step_interval=1000)) as ckpt:
        for step in range(1, 300):
            loss = 100.0 if step in (150, 151) else float("nan") if step == 200 else float(step % 7)
            ckpt.step(step, {"n": step}, metrics={"loss": loss, "other": step**3} if step % 2 or loss == 100 else None)
    assert "on_spike" not in caplog.text
    with Checkpointer(config(run_dir.with_name("b"), step_interval=1000, on_spike="lss")) as ckpt:
        for step in range(1, 300):
            ckpt.step(step, {"n": step}, metrics={"loss": 1.0})
        with pytest.raises(StateError, match="a metric is one number"):
            ckpt.step(300, {"n": 300}, metrics={"lss": "much"})  # type: ignore[dict-item]
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "lss" in r.getMessage()] == [
        f"on_spike watches 'lss', and {SEEN} steps had no such metric"
    ]
    with pytest.raises(ConfigError, match="on_spike must be a metric's name or None"):
        config(run_dir, on_spike="")
