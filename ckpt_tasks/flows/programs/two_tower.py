"""A two-tower recommender over a million ids, on synthetic data; on one rank or many, under Prefect or in a loop.

Its users and items are lookup tables, which grow as ids come and are spread over the ranks. Kill it at any moment, then
start it again with the same or another number of ranks, and it continues::

    ckpt train ckpt_tasks.flows.programs.two_tower:TwoTower --steps 200 --ranks 2
    torchrun --nproc-per-node 2 -m ckpt_tasks.flows.programs.two_tower --steps 200
    torchrun --nproc-per-node 3 -m ckpt_tasks.flows.programs.two_tower --steps 400
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ckpt_tasks import CheckpointConfig, Checkpointer, LookupTable
from ckpt_tasks.state.tables.rules import Adagrad

TASTES = 64  # Every user and every item has one of these tastes.
_HELD_OUT = 512
_UNEVEN = 8  # This power makes a few users and items frequent, and most rare.
log = logging.getLogger("flows")


class Tops(nn.Module):
    """The top layers of both towers, which turn rows into vectors of length 1."""

    def __init__(self, dim: int):
        super().__init__()
        self.user, self.item = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a vector for each row of users, and for each row of items."""
        return functional.normalize(self.user(users), dim=-1), functional.normalize(self.item(items), dim=-1)


class TwoTower:
    """Learns which of a batch's items each user likes. `batch_size` is the size of the batch of all ranks together."""

    unit = "pairs"

    def __init__(
        self, *, users: int = 1_000_000, items: int = 64_000, dim: int = 32, batch_size: int = 512, seed: int = 0
    ):
        torch.manual_seed(seed)
        self._users, self._items, self._batch_size, self._seed = users, items, batch_size, seed
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.users, self.items = (LookupTable(dim, slots=Adagrad(lr=0.3), seed=seed + n) for n in range(2))
        tops = Tops(dim)
        self.tops: nn.Module = nn.parallel.DistributedDataParallel(tops) if self._ranks > 1 else tops
        self.optimizer = torch.optim.AdamW(tops.parameters(), lr=1e-3)
        self.state: dict[str, Any] = {
            "tops": self.tops,
            "optimizer": self.optimizer,
            "users": self.users,
            "items": self.items,
            "steps": torch.zeros((), dtype=torch.int64),
        }

    def train_step(self) -> dict[str, float]:
        """Make one step on this rank's share of the next batch; return its loss and pairs."""
        self.state["steps"] += 1
        users, items = self._pairs(int(self.state["steps"]), self._batch_size)
        mine = slice(self._rank, None, self._ranks)
        of_user, of_item = self.tops(self.users(users[mine]), self.items(items[mine]))
        loss = functional.cross_entropy(20 * of_user @ of_item.T, torch.arange(len(of_user)))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.optimizer.step()
        self.users.step()
        self.items.step()
        return {"loss": loss.item(), "pairs": float(len(of_user))}

    @torch.no_grad()
    def evaluate(self, suite: str) -> dict[str, float]:
        """Measure how often an item that suits a user ranks above a random item."""
        users, items = self._pairs(0, _HELD_OUT)
        modules = self.users, self.items, self.tops
        for module in modules:
            module.eval()  # In eval mode no row is added.
        try:
            of_user, of_item = self.tops(self.users(users), self.items(items))
        finally:
            for module in modules:
                module.train()
        better = (of_user * of_item).sum(1) > (of_user * of_item.roll(1, 0)).sum(1)
        return {"heldout_accuracy": better.float().mean().item()}

    def _pairs(self, step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return users, and an item that each of them likes; both depend on the step alone."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        users = (torch.rand(count, generator=generator) ** _UNEVEN * self._users).long()
        alike = (torch.rand(count, generator=generator) ** _UNEVEN * (self._items // TASTES)).long()
        return users, alike * TASTES + users * 2_654_435_761 % 2**32 % TASTES


def main() -> None:
    """Train until step `--steps`, from the newest checkpoint in `--checkpoint-dir`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="the last step")
    parser.add_argument("--checkpoint-dir", default="runs/two-tower")
    parser.add_argument("--step-interval", type=int, default=20, help="save every so many steps")
    options = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    program = TwoTower()
    logging.basicConfig(
        level=logging.WARNING if dist.is_initialized() and dist.get_rank() else logging.INFO, format="%(message)s"
    )
    config = CheckpointConfig(checkpoint_dir=options.checkpoint_dir, step_interval=options.step_interval)
    with Checkpointer(config) as ckpt:
        start = ckpt.restore(program.state)
        for step in range(start + 1, options.steps + 1):
            metrics = program.train_step()
            ckpt.step(step, program.state, metrics={"loss": metrics["loss"]})
            if step % 10 == 0:
                log.info("step %d: loss %.3f, users here: %d", step, metrics["loss"], program.users.count)
        if start < options.steps and options.steps % options.step_interval:
            ckpt.save(options.steps, program.state)
        log.info("%s", program.evaluate("end"))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
