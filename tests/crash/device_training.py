"""A mixed-precision training on a CUDA device, to be killed; it prints each step, and at the end digests of all it is.

Dropout and a generator draw on the device; a GradScaler, a fused optimizer, an average of the weights and the place in
the data go on as well.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableSampler
from ckpt_tasks.flows.programs.byte_lm import use_deterministic_kernels
from tests.crash.test_memory_kills import digests

WIDTH = 512


def main() -> None:
    """Restore, say from where, and train to `--steps`; every third step is saved."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--memory-dir")
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    use_deterministic_kernels()
    torch.manual_seed(4)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout()) for _ in range(6)]
    model = nn.Sequential(*layers).cuda()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16, growth_interval=5)
    noise = torch.Generator("cuda").manual_seed(7)
    data = TensorDataset(torch.randn(256, WIDTH))
    sampler = ResumableSampler(len(data), 32, seed=1)
    batches = sampler.follow(DataLoader(data, batch_sampler=sampler, pin_memory=True))
    state = {
        "model": model, "average": average, "optimizer": optimizer, "scaler": scaler, "noise": noise, "data": sampler,
    }  # fmt: skip
    config = CheckpointConfig(checkpoint_dir=options.directory, step_interval=3, memory_dir=options.memory_dir)
    with Checkpointer(config) as ckpt:
        start = ckpt.restore(state)
        report = ckpt.last_restore
        say(f"restored {start} from {report.source if report else 'nothing'}")
        for step in range(start + 1, options.steps + 1):
            (batch,) = next(batches)
            there = batch.cuda(non_blocking=True)
            with torch.autocast("cuda", torch.float16):
                noisy = there + 0.1 * torch.randn(there.shape, device="cuda", generator=noise)
                loss = functional.mse_loss(model(noisy).float(), there)
            optimizer.zero_grad()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            average.update_parameters(model)
            ckpt.step(step, state, metrics={"loss": loss.item()})
            say(f"step {step}")
        ckpt.wait()
    say(json.dumps(described(state)))


def described(state: dict[str, Any]) -> dict[str, Any]:
    """Return a digest of each tensor, and every plain value."""
    tensors: dict[str, torch.Tensor] = {
        **{f"model/{name}": value for name, value in state["model"].state_dict().items()},
        **{f"average/{name}": value for name, value in state["average"].state_dict().items()},
        **{
            f"optimizer/{number}/{name}": value
            for number, held in state["optimizer"].state_dict()["state"].items()
            for name, value in held.items()
        },
        "noise": state["noise"].get_state(),
        "streams/cpu": torch.get_rng_state(),
        "streams/cuda": torch.cuda.get_rng_state(),
    }
    there = digests({name: value.cpu().contiguous() for name, value in tensors.items()})
    return {**there, "scaler": state["scaler"].state_dict(), "data": repr(state["data"].state_dict())}


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
