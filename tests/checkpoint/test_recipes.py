"""The forms of training in docs/RECIPES.md: the blocks of the page are the scripts that are killed here."""

from __future__ import annotations

import hashlib
import os
import re
import signal
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ckpt_tasks import open_run
from ckpt_tasks.checkpoint.transfer.comparison import compare_checkpoints
from tests.support.children import Child
from tools.sources import ROOT

PAGE = (ROOT / "docs" / "RECIPES.md").read_text(encoding="utf-8")
BEGIN, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
QUICK = {"Curriculum", "GAN", "EMA, best weights, early stop", "Reinforcement learning", "A batch drawn ahead"}


def block(text: str) -> str:
    """Return the first block of Python in a part of the page."""
    return text.split("```python\n")[1].partition("```")[0]


BLOCKS = {section.partition("\n")[0]: block(section) for section in SECTIONS if "```python" in section}
FORMS = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in BLOCKS]
NODES = """
from torch.utils.data import DistributedSampler, RandomSampler
from torchdata.nodes import Batcher, Loader, Mapper, SamplerWrapper

rows = Batcher(SamplerWrapper(DistributedSampler(data, 1, 0)), 8)
loader = Loader(Mapper(rows, lambda rows: data[rows]), restart_on_stop_iteration=False)
state |= {"data": loader}
with Checkpointer(config) as ckpt:
    step = ckpt.restore(state)
    while step < 36:
        for x, y in loader:
            descend(mse_loss(model(x), y))
            step += 1
            ckpt.step(step, state)
"""
CYCLED = """
from itertools import cycle

state |= {"data": loader}
with Checkpointer(config) as ckpt:
    batches, step = cycle(loader), ckpt.restore(state)
    while step < 36:
        x, y = next(batches)
        descend(mse_loss(model(x), y))
        step += 1
        ckpt.step(step, state)
"""
INEXACT = {  # The last rows of the page.
    "a target network": BLOCKS["A teacher and a queue"].replace(", teacher=teacher", ""),
    "a Loader that restarts": NODES.replace(", restart_on_stop_iteration=False", ""),
    "a RandomSampler": NODES.replace("DistributedSampler(data, 1, 0)", "RandomSampler(data)"),
}


def train(arguments: Sequence[str]) -> None:
    """Run a script in its folder, to be killed in one optimizer step; write a digest of each step to the file `log`."""
    script, log, kill_at = arguments
    folder, number, names = Path(script).parent, 0, dict[str, Any](__name__="__main__")
    os.chdir(folder)

    def kill(*_: object) -> None:
        nonlocal number
        number += 1
        if number == int(kill_at):
            (names.get("ckpt") or names["epochs"].ckpt).wait()
            os.kill(os.getpid(), signal.SIGKILL)

    def record(optimizer: torch.optim.Optimizer, *_: object) -> None:
        seen = hashlib.sha256()
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            seen.update(parameter.detach().numpy().tobytes() + parameter.grad.numpy().tobytes())
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{seen.hexdigest()}\n")

    register_optimizer_step_pre_hook(kill)
    register_optimizer_step_post_hook(record)
    torch.set_num_threads(1)
    exec(compile(Path(script).read_text(encoding="utf-8"), script, "exec"), names)


def legs(text: str, folder: Path, interval: int, kills: Iterable[int]) -> tuple[list[list[str]], str]:
    """Start a script, killed in these steps of its starts; return the digests of each start, and what was printed."""
    folder.mkdir()
    saving = f"config = replace(config, step_interval={interval}, memory_dir=None)\n"
    (folder / "train.py").write_text(block(BEGIN) + saving + text, encoding="utf-8")
    recorded, said = [], ""
    for number, kill_at in enumerate(chain(kills, [0])):
        log = folder / f"{number}.log"
        with Child(train, [str(folder / "train.py"), str(log), str(kill_at)], folder / "said") as child:
            status = child.wait()
            said += child.said()
        recorded.append(log.read_text(encoding="utf-8").split() if log.exists() else [])
        assert status in {0, -signal.SIGKILL}, said
        if status == 0:
            break
    return recorded, said


def check(text: str, folder: Path, interval: int, kills: Iterable[int]) -> None:
    [whole], told = legs(text, folder / "whole", 4, [])
    recorded, said = legs(text, folder / "killed", interval, kills)
    assert (told, said) == ("", ""), "no line of a right form is warned of"
    assert len(recorded) > 2
    begins = [whole.index(leg[0]) for leg in recorded]
    ends = [begin + len(leg) for begin, leg in zip(begins, recorded, strict=True)]
    assert recorded == [whole[begin:end] for begin, end in zip(begins, ends, strict=True)]
    assert all(one < other <= end for (one, other), end in zip(pairwise(begins), ends, strict=False))
    assert ends[-1] == len(whole)
    for run in (folder / "whole" / "runs").iterdir():
        one, other = open_run(run), open_run(folder / "killed" / "runs" / run.name)
        a, b = one.checkpoints()[0], other.checkpoints()[0]
        assert a.step == b.step
        assert [*compare_checkpoints(one.history.store, a, other.history.store, b).differences] == []


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_the_page_that_is_killed_twice_goes_on(form: str, tmp_path: Path) -> None:
    """Each step of each start has the gradients and weights of a run that nobody killed; the last checkpoint is equal.

    The second start resumes in an epoch, the third one where an epoch ends.
    """
    check(BLOCKS[form], tmp_path, 2, [5, 9])


@pytest.mark.slow
@pytest.mark.parametrize("form", BLOCKS)
def test_a_form_of_the_page_goes_on_from_any_step(form: str, tmp_path: Path) -> None:
    """Killed in the fourth step of each start, the next one resumes there, and the end is that of no kill."""
    check(BLOCKS[form], tmp_path, 1, repeat(4))


def test_a_loader_of_torchdatas_nodes_goes_on(tmp_path: Path) -> None:
    """In the one form that the page names it resumes exactly, at an epoch's end and in the epoch after it too."""
    check(NODES, tmp_path, 1, [13, 3])


@pytest.mark.slow
@pytest.mark.parametrize("form", INEXACT)
def test_what_the_page_calls_inexact_is_so_in_silence(form: str, tmp_path: Path) -> None:
    """Killed twice, it trains something else, and nothing is said: a row that is no longer true leaves the page."""
    [whole], told = legs(INEXACT[form], tmp_path / "whole", 4, [])
    recorded, said = legs(INEXACT[form], tmp_path / "killed", 1, [13, 3])
    assert (told, said) == ("", "")
    assert not {*recorded[-1]} <= {*whole}


def test_a_cycle_over_a_loader_is_refused(tmp_path: Path) -> None:
    """Outside of epochs too, the first save raises."""
    with pytest.raises(AssertionError, match=r"ConfigError: cycle\(\) repeats .* a resume would train other samples"):
        legs(CYCLED, tmp_path / "cycled", 4, [])
