"""`ckpt run SCRIPT`: a plain script goes on with all that its loop carries, or is refused before it runs."""

from __future__ import annotations

import ast
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent, indent

import pytest

from ckpt_tasks import CheckpointConfig, open_run
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.session.script import find_training_loop
from ckpt_tasks.session.scripted import run_script
from tests.support.children import Child

MADE = """
import os, random, signal, sys
from collections import defaultdict
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1); random.seed(1); np.random.seed(1)
x = torch.randn(40, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))

def die(epoch, batch):
    if (str(epoch), str(batch)) == tuple(sys.argv[2:]):
        os.kill(os.getpid(), signal.SIGKILL)

class Meter:
    def __init__(self): self.sum = self.count = 0
    def add(self, value): self.sum += value; self.count += 1
"""
AT_THE_TOP = """
loader = DataLoader(data, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
worst, steps, history, seen, meter = 0.0, 0, defaultdict(list), torch.zeros(3), Meter()
for epoch in range(3):
    total = 0.0
    for i, (a, b) in enumerate(loader):
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        total += loss.item()
        meter.add(loss.item())
        history[epoch].append((i, loss.item()))
        die(epoch, i)
    schedule.step(total)
    seen[epoch] = total
    if total > worst:
        worst = total
    die(epoch, "end")
"""
IN_FUNCTIONS = """
log, steps = [], 0

def train(model, loader, optimizer, epoch, history):
    global steps
    model.train()
    total, meter = 0.0, Meter()
    for i, (a, b) in enumerate(loader):
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        meter.add(loss.item())
        steps += 1
        note(i)
        history.append(loss.item())
        die(epoch, i)
    return total / len(loader) + meter.sum

def note(i):
    log.append(i)

def main():
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    history, worst = [], None
    for epoch in range(1, 4):
        mean = train(model, loader, optimizer, epoch - 1, history)
        schedule.step(mean)
        worst = mean if worst is None else max(worst, mean)
        die(epoch - 1, "end")
    return worst, history, log, steps

if __name__ == "__main__":
    worst, history, log, steps = main()
"""
SHOW = {
    AT_THE_TOP: "[worst, steps, dict(history), seen.tolist(), vars(meter), total]",
    IN_FUNCTIONS: "[worst, history, log, steps]",
}
DEATHS = [("0", "1"), ("1", "4"), ("1", "end")]


def run(arguments: Sequence[str]) -> None:
    script, place, *rest = arguments
    config = CheckpointConfig(checkpoint_dir=place, step_interval=2, keep_every_n_steps=1)
    run_script(Path(script), [place, *rest], config, logging.getLogger(__name__).warning)


def written(folder: Path, body: str) -> Path:
    script = folder / "train.py"
    script.write_text(f"{MADE}{body}\nwith open(sys.argv[1] + '.end', 'w') as file: file.write(repr({SHOW[body]}))\n")
    return script


@pytest.mark.parametrize("body", [AT_THE_TOP, IN_FUNCTIONS], ids=["at the top", "in functions"])
def test_a_plain_script_goes_on_with_all_that_its_loop_carries(body: str, tmp_path: Path) -> None:
    """Killed in the middle of an epoch, at its last batch and at its end, it ends with the same weights, extremes, sums
    and histories as one that nobody killed.
    """
    script, said = written(tmp_path, body), tmp_path / "said"
    for place, deaths in (("whole", []), ("killed", DEATHS)):
        for death in deaths:
            with Child(run, [str(script), str(tmp_path / place), *death], said) as child:
                assert child.wait(120) == -signal.SIGKILL, child.said()
        with Child(run, [str(script), str(tmp_path / place)], said) as child:
            assert child.wait(120) == 0, child.said()
            assert "In the state: model, optimizer, schedule, " in child.said()
            assert "enumerate" not in child.said()
    assert (tmp_path / "whole.end").read_text() == (tmp_path / "killed.end").read_text()
    curves = [
        [(one.step, one.metrics) for one in open_run(tmp_path / place).curve().steps] for place in ("whole", "killed")
    ]
    assert [step for step, _ in curves[0]] == [*range(1, 16)]
    assert all([*metrics] == ["loss"] for _, metrics in curves[0])
    assert dict(curves[0]) == dict(curves[1])


LOOP = """
for epoch in range(3):
    for a, b in loader:
        loss = model(a).sum()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1", "0 loops over epochs"),
        (LOOP + LOOP, "2 loops over epochs"),
        ("for fold in range(5):" + indent(LOOP, "    "), "2 loops over epochs|inside another loop"),
        (LOOP.replace("in loader", "in batches()"), "line 3: the batches are not those of one name"),
        (LOOP + "    if loss < 1:\n        break\n", "line 8: the loop over epochs may end early here"),
        ("def main():" + indent(LOOP + "    if loss < 1:\n        return\n", "    "), "may end early here"),
        ("while True:\n    for a in loader:\n        a.backward()\n", "0 loops over epochs"),
    ],
)
def test_a_script_whose_loop_is_not_understood_is_refused(source: str, says: str) -> None:
    """Nothing is guessed: the line is named, and what to write into the script."""
    with pytest.raises(ConfigError, match=says) as caught:
        find_training_loop(ast.parse(source), "runs/train")
    assert "for epoch in epochs" in str(caught.value.hint)


BEFORE = """
import torch
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 1), torch.ones(4)))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters())
"""


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (BEFORE + LOOP.replace("range(3)", "[0, 1]"), r"the epochs are \[0, 1\]"),
        (BEFORE.replace("loader =", "_ =") + "loader = [(torch.ones(1), 1)]" + LOOP, "resumable got"),
        (BEFORE.replace("optimizer =", "_optimizer =") + LOOP.replace("optimizer", "_optimizer"), "has the optimizer"),
        (BEFORE + "last = model" + LOOP + "    last = last or model\n", "the loop replaces last, of type Linear"),
        (BEFORE + "def main():\n    pass\n" + "def f():" + indent(LOOP, "    "), "never began"),
        ("def (:", "cannot be read as Python"),
    ],
)
def test_a_script_whose_variables_do_not_fit_is_refused(
    source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only shows when the script runs is refused before its loop begins, and nothing is written."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    script = tmp_path / "train.py"
    script.write_text(dedent(source))
    with pytest.raises(ConfigError, match=says):
        run([str(script), str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
