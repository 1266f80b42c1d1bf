"""The byte-level language model on many ranks with FSDP2, under Prefect or in a loop without it.

Kill it at any moment, then start it again with the same or another number of ranks, and it continues::

    ckpt train ckpt_tasks.flows.programs.fsdp_lm:FsdpLM --steps 200 --ranks 2
    torchrun --nproc-per-node 2 -m ckpt_tasks.flows.programs.fsdp_lm --steps 200
    torchrun --nproc-per-node 3 -m ckpt_tasks.flows.programs.fsdp_lm --steps 400
"""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableSampler
from ckpt_tasks.flows.programs.byte_lm import Text, Transformer, read, use_deterministic_kernels

CONTEXT = 128
_HELD_OUT = 64  # The number of windows in an evaluation.
log = logging.getLogger("flows")


class FsdpLM:
    """Train a byte-level transformer whose parameters are sharded over all ranks; a single process has all of them.

    `batch_size` is the size of one rank's batch. Losses are in nats per byte, of this rank's batch.
    """

    unit = "bytes"

    def __init__(self, *, seed: int = 0, batch_size: int = 16):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cuda":
            use_deterministic_kernels()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        torch.manual_seed(seed)
        train, self.held_out = (Text(part, CONTEXT) for part in read(None, 1 << 22))
        self.model = Transformer(CONTEXT, d_model=96, n_layers=2, n_heads=4, dropout=0.05).to(self.device)
        if dist.is_initialized():
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        sampler = ResumableSampler(len(train), batch_size, rank=rank, world_size=world_size)
        self._batches = sampler.follow(DataLoader(train, batch_sampler=sampler))
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "data": sampler}

    def train_step(self) -> dict[str, float]:
        """Make one optimizer step on the next batch of this rank; return its loss and bytes."""
        batch = next(self._batches)
        loss = self._loss(batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.optimizer.step()
        return {"loss": loss.item(), "bytes": float(batch[:, 1:].numel())}

    @torch.no_grad()
    def evaluate(self, suite: str) -> dict[str, float]:
        """Measure the loss on held-out files."""
        windows = range(0, len(self.held_out), max(1, len(self.held_out) // _HELD_OUT))
        self.model.eval()
        try:
            return {"heldout_loss": self._loss(torch.stack([self.held_out[index] for index in windows])).item()}
        finally:
            self.model.train()

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.to(self.device)
        logits: torch.Tensor = self.model(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def main() -> None:
    """Train until step `--steps`, from the newest checkpoint in `--checkpoint-dir`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="the last step")
    parser.add_argument("--checkpoint-dir", default="runs/fsdp-lm")
    parser.add_argument("--step-interval", type=int, default=20, help="save every so many steps")
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")

    program = FsdpLM()
    config = CheckpointConfig(checkpoint_dir=options.checkpoint_dir, step_interval=options.step_interval)
    with Checkpointer(config) as ckpt:
        start = ckpt.restore(program.state)
        for step in range(start + 1, options.steps + 1):
            metrics = program.train_step()
            ckpt.step(step, program.state, metrics={"loss": metrics["loss"]})
            if step % 10 == 0:
                log.info("step %d on %d ranks: loss %.3f", step, world_size, metrics["loss"])
        if start < options.steps and options.steps % options.step_interval:
            ckpt.save(options.steps, program.state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
