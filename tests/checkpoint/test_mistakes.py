"""Mistakes that people make are told what is wrong, where, and what to do; docs/MISTAKES.md shows what is printed."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt_tasks import Checkpointer
from ckpt_tasks.errors import StateMismatchError
from tools.pages.mistake_list import MISTAKES
from tools.pages.mistaken import Mistake, config, printed, run, stepped, training
from tools.pages.mistakes import PAGE, WIDTH, folded, texts_of

CASES = [pytest.param(one, marks=[pytest.mark.slow] * one.slow, id=one.name) for one in MISTAKES]


@pytest.mark.parametrize("one", CASES)
def test_a_mistake_is_told(one: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed names what is wrong, with key and step where there are any, and says what to do next."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    text = printed(one, tmp_path)
    assert re.search(one.says, text, re.DOTALL), text
    assert re.search(one.do, text, re.DOTALL), text
    assert texts_of(PAGE.read_text(encoding="utf-8")).get(one.words) == folded(text), (
        "this message has changed: run `python -m tools.pages.mistakes`"
    )


def test_the_page_has_them_all() -> None:
    """The page lists every mistake once, in the order of the list, and no other; there are more than twenty."""
    assert [*texts_of(PAGE.read_text(encoding="utf-8"))] == [one.words for one in MISTAKES]
    assert len({one.words for one in MISTAKES}) == len(MISTAKES) > 20
    assert all(one.says and one.do for one in MISTAKES)


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
