"""Mistakes that people make: the error or warning says what is wrong, where, and what to do."""

from __future__ import annotations

import ast
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableSampler
from ckpt_tasks.errors import CkptError, StateMismatchError
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.testing import located

State = dict[str, Any]


def training(width: int = 4, **more: Any) -> State:
    """Return a small model and its optimizer."""
    model = nn.Sequential()
    model.add_module("body", nn.Linear(3, width))
    model.add_module("head", nn.Linear(width, 2))
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1), **more}


def stepped(state: State) -> State:
    """Train one step, so that the optimizer has moments."""
    state["model"](torch.ones(1, 3)).sum().backward()
    state["optimizer"].step()
    return state


def config(place: Path, **options: Any) -> CheckpointConfig:
    return CheckpointConfig(checkpoint_dir=str(place / "lm-7"), **{"memory_dir": None, **options})


def run(place: Path, state: State, step: int = 3) -> None:
    """Train a run up to a step, and let it end."""
    with Checkpointer(config(place)) as ckpt:
        if ckpt.checkpoints():
            ckpt.restore(state)
        ckpt.save(step, state)


def resume(place: Path, state: State) -> None:
    with Checkpointer(config(place)) as ckpt:
        ckpt.restore(state)


class ReadOnly:
    """The system's calls, of which `mkdir` fails as on a disk that is mounted read-only."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def mkdir(self, *arguments: Any, **named: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def file_in_state(place: Path) -> None:
    with open(place / "train.log", "w", encoding="utf-8") as file:
        run(place, training(log={"file": file}))


def groups_changed(place: Path) -> None:
    model = nn.Linear(3, 2)
    groups: list[State] = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.01}]
    run(place, {"model": model, "optimizer": torch.optim.Adam(groups, lr=0.1)})
    resume(place, {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)})


def data_changed(place: Path) -> None:
    run(place, stepped(training(data=ResumableSampler(100, batch_size=4))))
    resume(place, training(data=ResumableSampler(120, batch_size=4)))


def read_only(place: Path) -> None:
    store = LocalStore(place / "lm-7", calls=ReadOnly())
    Checkpointer(CheckpointConfig(checkpoint_dir=located(store), memory_dir=None)).restore(training())


def steps_begin_again(place: Path) -> None:
    state = stepped(training())
    with Checkpointer(config(place)) as ckpt:
        ckpt.restore(training())
        for step in (1, 2, 3, 1):
            ckpt.step(step, state)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda place: run(place, training(schedule={"warmup": lambda: 1})), "function cannot be stored .at schedule/"),
        (file_in_state, "TextIOWrapper cannot be stored .at log/file.*open it anew"),
        (lambda place: run(place, training(batches=iter([1]))), "cannot be stored .at batches.*ResumableSampler"),
        (groups_changed, "same param groups.*1 param groups here, 2 in the checkpoint"),
        (data_changed, "same data set.*size is 100 in the checkpoint and 120 here"),
        (read_only, "Read-only file system.*mounted read-only"),
        (lambda place: Checkpointer(CheckpointConfig(checkpoint_dir="s3:/b/lm")), "after s3 come ://.*Write s3://b/lm"),
        (lambda place: Checkpointer(CheckpointConfig(checkpoint_dir="s4://b/lm")), "s4://b/lm.*Write s3://"),
        (lambda place: config(place, max_num_checkpoints=0), "must be a whole number from 1 on or None, not 0"),
        (lambda place: Checkpointer(config(place), take_over="no"), "take_over is True or False, not 'no'"),  # type: ignore[arg-type]
        (steps_begin_again, "step 1 comes after step 3.*count on over all epochs"),
    ],
)  # fmt: skip
def test_a_mistake_is_an_error_that_says_what_to_do(make: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    """The error names what is wrong, with its key, and then what to do."""
    with pytest.raises(CkptError, match=f"(?s){says}"):
        make(tmp_path)


def test_what_a_resume_would_do_again_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A state that was trained before a first start, and a sampler that nothing moves, are warnings with what to do."""
    sampler = ResumableSampler(8, 2)
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_sampler=sampler)
    state = training(data=sampler)
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        resume(tmp_path / "cell", stepped(training()))
        with Checkpointer(config(tmp_path)) as ckpt:
            for step, _ in enumerate(loader, start=1):
                ckpt.save(step, stepped(state))
    said = "\n".join(caplog.messages)
    assert "begins at step 0 with the state as it is, and optimizer has taken steps" in said
    assert "make model and optimizer anew" in said
    assert "whose position does not move: a resume begins the epoch again" in said
    assert "Iterate sampler.follow(loader)" in said


def test_the_hint_for_a_renamed_layer_works(tmp_path: Path) -> None:
    """What the error says to do for a layer with another name restores weights and moments bit for bit."""
    before = stepped(training())
    run(tmp_path, before)
    model = nn.Sequential()
    model.add_module("body", nn.Linear(3, 4))
    top = nn.Linear(4, 2)
    model.add_module("top", top)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    after = {"model": model, "optimizer": optimizer}
    with Checkpointer(config(tmp_path)) as ckpt:
        with pytest.raises(StateMismatchError, match="only renamed") as caught:
            ckpt.restore(after)
        assert caught.value.hint is not None
        only = ast.literal_eval(caught.value.hint.partition("only=")[2].rstrip(")"))
        assert ckpt.restore(after, only=only) == 3
    assert torch.equal(top.weight, before["model"].head.weight)
    old, new = before["optimizer"].state_dict()["state"], optimizer.state_dict()["state"]
    assert [*new] == [0, 1, 2, 3]
    assert all(torch.equal(new[n]["exp_avg"], old[n]["exp_avg"]) for n in new)


def test_what_is_in_the_state_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither an optimizer and its schedules in the state, nor one of another model, is a mistake; nor a resume."""

    def state() -> dict[str, object]:
        made = training()
        optimizer = made["optimizer"]
        halves = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 2)]
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, halves, milestones=[2])
        return {**made, "schedule": schedule}

    teacher = training()
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        for _ in range(2):
            run(tmp_path, state(), step=4)
    assert teacher["optimizer"].param_groups
    assert caplog.messages == []
