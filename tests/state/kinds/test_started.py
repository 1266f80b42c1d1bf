"""What a run was started with is in its checkpoints, and a restore says what differs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.state.kinds.started import Started, outline_of


class Loop(Started):
    effects: ClassVar = {"batch_size": "Batches are larger or smaller.", "epochs": "Training ends there."}

    def __init__(self, started: Any):
        self.started = started

    def state_dict(self) -> dict[str, Any]:
        return {"started": self.started}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


SAID = ["  batch_size: 8 → 4. Batches are larger or smaller.", "  epochs: 2 → 3. Training ends there."]


@pytest.mark.parametrize(
    ("was", "now", "lines"),
    [
        ({"batch_size": 8, "epochs": 2}, {"batch_size": 8, "epochs": 2}, []),
        ({"batch_size": 8, "epochs": 2}, {"batch_size": 4, "epochs": 3}, SAID),
        ({"batch_size": 8, "host": "a"}, {"epochs": 3, "host": "b"}, []),
        *((nothing, {"epochs": 3}, []) for nothing in (None, [1])),
    ],
)
def test_what_differs_is_said(
    was: Any, now: Any, lines: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One block has a line for each value of both sides that differs; where the run goes on is one INFO line."""
    config = CheckpointConfig(checkpoint_dir=tmp_path / "run", memory_dir=None)
    with Checkpointer(config) as ckpt, caplog.at_level(logging.INFO, "ckpt_tasks"):
        ckpt.save(3, {"loop": Loop(was)})
        assert ckpt.restore({"loop": Loop(now)}) == 3
    texts = {record.levelname: record.getMessage() for record in caplog.records}
    assert f" of {tmp_path}/run, " in texts["INFO"]
    assert texts.get("WARNING", "").splitlines()[1:-1] == lines


class Counted(Dataset[int]):
    """A data set of a user, whose samples may be drawn: nobody may read one ahead of training."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> int:
        raise AssertionError(number)


def numbers(*values: int) -> TensorDataset:
    return TensorDataset(torch.tensor(values))


def table(*values: int) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"x": [*values]})


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ([1, 2, 3], [1, 2, 3], [1, 3, 2]),
        ([{"x": torch.ones(2)}], [{"x": torch.ones(2)}], [{"x": torch.zeros(2)}]),
        (numbers(1, 2, 3), numbers(1, 2, 3), numbers(3, 2, 1)),
        (Subset(numbers(1, 2, 3), [0, 1]), Subset(numbers(1, 2, 9), [0, 1]), Subset(numbers(1, 2, 3), [0, 2])),
        (Subset(Counted(), [0, 1]), Subset(Counted(), [0, 1]), Subset(Counted(), [0, 2])),
        ([], [], [1]),
    ],
)
def test_other_data_are_seen(one: Any, same: Any, other: Any) -> None:
    """The outline of a data set is that of an equal one, and not that of another one or of another order."""
    assert outline_of(one) == outline_of(same) != outline_of(other)


@pytest.mark.framework
def test_other_tables_are_seen() -> None:
    """A table of datasets has the outline of an equal one, and another one in another order."""
    one, same = table(1, 2, 3), table(1, 2, 3).map(lambda row: row)
    assert outline_of(one) == outline_of(same) != outline_of(one.select([0, 2, 1]))


@pytest.mark.framework
def test_no_transform_of_a_table_is_run() -> None:
    """What a table of datasets would make of its rows is the user's code, and does not count."""
    assert outline_of(table(1).with_transform(lambda rows: 1 / 0)) == outline_of(table(1))


def test_no_code_of_the_user_is_run() -> None:
    """Of a data set of the user's own only the length counts, and of a stream nothing."""
    assert outline_of(Counted()) == "5 samples"
    assert outline_of(iter([1])) is None
