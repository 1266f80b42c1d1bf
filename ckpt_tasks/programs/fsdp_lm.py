"""The byte-level language model on many ranks with FSDP2, without Prefect.

Kill it at any moment, start it again with as many ranks or with another number, and it goes on::

    torchrun --nproc-per-node 2 -m ckpt_tasks.programs.fsdp_lm --steps 200
    torchrun --nproc-per-node 3 -m ckpt_tasks.programs.fsdp_lm --steps 400
"""

from __future__ import annotations

import argparse
import logging
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableSampler
from ckpt_tasks.programs.byte_lm import Text, Transformer, read, use_deterministic_kernels

CONTEXT = 128
log = logging.getLogger("flows")


def main() -> None:
    """Train up to `--steps`, from the newest checkpoint in `--checkpoint-dir`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="the last step")
    parser.add_argument("--checkpoint-dir", default="runs/fsdp-lm")
    parser.add_argument("--step-interval", type=int, default=20, help="save every so many steps")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        use_deterministic_kernels()
    dist.init_process_group("cuda:nccl,cpu:gloo" if device == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")

    torch.manual_seed(0)
    train, _ = (Text(part, CONTEXT) for part in read(None, 1 << 22))
    model = Transformer(CONTEXT, d_model=96, n_layers=2, n_heads=4, dropout=0.05).to(device)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = ResumableSampler(len(train), 16, rank=rank, world_size=world_size)
    batches = sampler.follow(DataLoader(train, batch_sampler=sampler))

    state = {"model": model, "optimizer": optimizer, "data": sampler}
    config = CheckpointConfig(checkpoint_dir=options.checkpoint_dir, step_interval=options.step_interval)
    with Checkpointer(config) as ckpt:
        start = ckpt.restore(state)
        for step in range(start + 1, options.steps + 1):
            batch = next(batches).to(device)
            loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
            ckpt.step(step, state, metrics={"loss": loss.item()})
            if step % 10 == 0:
                log.info("step %d on %d ranks: loss %.3f", step, world_size, loss.item())
        if start < options.steps and options.steps % options.step_interval:
            ckpt.save(options.steps, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
