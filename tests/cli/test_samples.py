"""`ckpt samples`: which samples have made a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tasks import ByRank, Checkpointer, ResumableLoader
from tests.support.cli_runs import ckpt, config, save

SIZE = 50
DATA: Any = [*range(SIZE)]


class Noted:
    """Note the epoch and the id of each sample that training has seen."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"ids": [[*one] for one in self.ids]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.ids = [[*one] for one in state_dict["ids"]]


def train(ckpt: Checkpointer, last: int, bad: tuple[int, ...] = ()) -> None:
    """Train to a step; the loss is large in the `bad` ones."""
    loader = ResumableLoader(DATA, batch_size=4, shuffle=True, seed=3, drop_last=True)
    noted = Noted()
    state = {"data": loader, "noted": noted, "weight": torch.zeros(1)}
    step = ckpt.restore(state)
    for epoch in loader.epochs(1000):
        for batch in loader:
            step += 1
            noted.ids += [[epoch, sample] for sample in batch.tolist()]
            ckpt.step(step, state, metrics={"loss": (1e6 if step in bad else 1.0) + step % 7 / 10})
            if step == last:
                ckpt.save(step, state)
                return


def compare(run_dir: Path, step: int) -> Any:
    """Compare the answer with what training has noted in the same checkpoint; return the answer."""
    from ckpt_tasks import open_run
    from ckpt_tasks.run.opening import open_checkpoint

    run = open_run(run_dir)
    noted = open_checkpoint(run.history.store, run.find(step)).groups["noted"].tree["ids"]
    answer = ckpt("samples", f"{run_dir}@{step}", "--order", "--json")
    assert answer.status == 0, answer.err
    (found,) = answer.data["data"]
    assert [[one["epoch"], sample] for one in found["epochs"] for sample in one["order"]] == noted
    lines = ckpt("samples", f"{run_dir}@{step}", "--order").out.splitlines()
    assert [[*map(int, line.split())] for line in lines] == noted
    for one in found["epochs"]:
        assert ids(one["ids"]) == sorted(one["order"])
    times = Counter(sample for _, sample in noted)
    assert {i: one["times"] for one in found["times"] for i in ids(one["ids"])} == {i: times[i] for i in range(SIZE)}
    return found


def ids(ranges: list[list[int]]) -> list[int]:
    return [sample for first, last in ranges for sample in range(first, last + 1)]


def test_it_names_the_samples_that_training_has_seen(run_dir: Path) -> None:
    """P24: over epochs and a resume, and after a rollback that skips batches: none that is undone or skipped."""
    with Checkpointer(config(run_dir, step_interval=5)) as checkpointer:
        train(checkpointer, 17)
    with Checkpointer(config(run_dir, step_interval=5)) as checkpointer:
        train(checkpointer, 30)
    found = compare(run_dir, 30)
    assert [len(ids(one["left_out"])) for one in found["epochs"]] == [2, 2, 0]
    assert ckpt("rollback", f"{run_dir}@20", "--skip-batches", "23-27").status == 0
    with Checkpointer(config(run_dir, step_interval=5)) as checkpointer:
        train(checkpointer, 40)
    found = compare(run_dir, 40)
    assert len(ids(found["epochs"][1]["left_out"])) == 2 + 4 * 2, "batches 23 and 24 were of this epoch"
    said = ckpt("samples", f"{run_dir}@40").out
    assert "50 samples in a data set, shuffled; in epoch 3" in said
    assert "times seen" in said


@pytest.mark.framework
def test_what_is_not_known_is_named(run_dir: Path) -> None:
    """A state of an older version, a stream, and a checkpoint without data: each says what it lacks."""
    loader = ResumableLoader(DATA, batch_size=4)
    older = {name: value for name, value in loader.state_dict().items() if name != "seen"}
    from datasets import Dataset

    rows = Dataset.from_dict({"a": [*range(24)]}).to_iterable_dataset(num_shards=4)
    stream = ResumableLoader(rows, batch_size=4)
    read = iter(stream)
    next(read), next(read)
    save(run_dir, {"data": older, "stream": ByRank(stream)})
    said, facts = ckpt("samples", run_dir), ckpt("samples", run_dir, "--json").data["data"]
    assert "data: 50 samples in a data set; in epoch 0" in said.out
    assert "The version that saved this checkpoint kept no record" in said.out
    assert "stream: a stream in epoch 0, after 8 samples of it" in said.out
    assert "worker 0: 8 samples in 2 batches" in said.out
    assert "Not known: which samples these are" in said.out
    assert [one["kind"] for one in facts] == ["samples", "stream"]
    assert facts[0]["recorded_since"] is None
    assert facts[1]["workers"][0]["samples"] == 8
    assert "no sample is known by a number" in ckpt("samples", run_dir, "--order").err
