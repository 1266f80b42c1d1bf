"""accelerate: what it has prepared goes on exactly, or is refused; and what depends on the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import ConfigError, StateError
from ckpt_tasks.integrations.huggingface import state_of


def accumulating() -> Accelerator:
    """Make an Accelerator of its own, which makes an optimizer step of three batches."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=3)


def test_an_accumulation_of_accelerate_goes_on(tmp_path: Path) -> None:
    """P19: saved between two optimizer steps, a loop with `accelerator.accumulate` goes on bit for bit."""

    def train(run: str, last: int) -> list[torch.Tensor]:
        accelerator = accumulating()
        torch.manual_seed(1)
        net = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        state = state_of(accelerator)
        with Checkpointer(CheckpointConfig(checkpoint_dir=tmp_path / run)) as ckpt:
            for step in range(ckpt.restore(state) + 1, last + 1):
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.full((1, 4), float(step))).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
            ckpt.save(last, state)
        return [p.detach() for p in net.parameters()]

    whole = train("whole", 12)
    train("first", 4)
    train("first", 8)
    assert all(map(torch.equal, whole, train("first", 12)))


MODES = [
    (stateful, seedable, shuffle, workers)
    for stateful in (False, True)
    for seedable in (False, True)
    for shuffle in (False, True)
    for workers in (0, 2)
]
QUICK = {(False, False, True, 0), (True, False, True, 0), (True, True, True, 0)}


@pytest.mark.parametrize("mode", [pytest.param(one, marks=[] if one in QUICK else [pytest.mark.slow]) for one in MODES])
def test_a_prepared_loader_goes_on_or_is_refused(mode: tuple[bool, bool, bool, int], tmp_path: Path) -> None:
    """A loader that accelerate has prepared goes on exactly, or `state_of` refuses it and says what to take instead.

    One without a state that does not shuffle, as for an evaluation, is neither: the state is without it.
    """
    stateful, seedable, shuffle, workers = mode

    def train(run: str, last: int) -> tuple[list[list[float]], list[torch.Tensor]]:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.manual_seed(3)
        modes = DataLoaderConfiguration(use_stateful_dataloader=stateful, use_seedable_sampler=seedable)
        accelerator = Accelerator(cpu=True, dataloader_config=modes)
        net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        data = torch.utils.data.TensorDataset(torch.arange(12.0)[:, None])
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=shuffle, num_workers=workers)
        model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
        state, seen = state_of(accelerator), []
        with Checkpointer(CheckpointConfig(checkpoint_dir=tmp_path / run, memory_dir=None)) as ckpt:
            step = ckpt.restore(state)
            while step < last:
                for (x,) in loader:
                    accelerator.backward(model(x).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                    seen.append(x[:, 0].tolist())
                    step += 1
                    if step == last:
                        break
            ckpt.save(step, state)
        return seen, [p.detach() for p in net.parameters()]

    if shuffle and not (stateful and seedable and not workers):
        with pytest.raises(ConfigError, match=r"continues with other batches after a resume.*Take a ResumableLoader"):
            train("run", 1)
        return
    seen, weights = train("whole", 9)
    legs = [train("run", last) for last in (2, 3, 4, 9)]
    exact = [batch for batches, _ in legs for batch in batches] == seen and all(map(torch.equal, weights, legs[-1][1]))
    assert exact == stateful


def test_gradients_of_one_rank_do_not_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """P19: between two optimizer steps of several ranks a save is refused, with where to save; at a step it is not."""
    accelerator = accumulating()
    accelerator.prepare(torch.nn.Linear(4, 1))
    accumulation = state_of(accelerator)["accumulation"]
    monkeypatch.setitem(accelerator.state.__dict__, "num_processes", 2)
    accelerator.step = 4
    with pytest.raises(StateError, match=r"differ between the ranks.*sync_gradients"):
        accumulation.state_dict()
    accelerator.step = 6
    assert accumulation.state_dict() == {"batches": 0}
