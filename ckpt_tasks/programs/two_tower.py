"""A two-tower recommender over a million ids, on data that it makes; on one rank or many, under Prefect or in a loop.

Its users and items are lookup tables, which grow as ids come and are spread over the ranks. Kill it at any moment, then
start it again with the same or another number of ranks, and it continues::

    ckpt train ckpt_tasks.programs.two_tower:TwoTower --steps 200 --ranks 2
    torchrun --nproc-per-node 2 -m ckpt_tasks.programs.two_tower --steps 200
    torchrun --nproc-per-node 3 -m ckpt_tasks.programs.two_tower --steps 400
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
from ckpt_tasks.tables.rules import Adagrad

TASTES = 64  # Every user has one of them, and every item suits one.
_HELD_OUT = 512
_UNEVEN = 8  # A few users and items come often, and most of them seldom.
log = logging.getLogger("flows")


class Tower(nn.Module):
    """Rows of a table, and a layer that turns them into unit vectors."""

    def __init__(self, dim: int, seed: int):
        super().__init__()
        self.rows = LookupTable(dim, slots=Adagrad(lr=0.3), seed=seed)
        self.top = nn.Linear(dim, dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a vector of length 1 for each id."""
        return functional.normalize(self.top(self.rows(ids)), dim=-1)


class TwoTower(nn.Module):
    """Learn which of a batch's items each user likes. `batch_size` is that of all ranks together."""

    unit = "pairs"

    def __init__(
        self, *, users: int = 1_000_000, items: int = 64_000, dim: int = 32, batch_size: int = 512, seed: int = 0
    ):
        super().__init__()
        torch.manual_seed(seed)
        self._users, self._items, self._batch_size, self._seed = users, items, batch_size, seed
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.user, self.item = Tower(dim, seed), Tower(dim, seed + 1)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        self.state: dict[str, Any] = {
            "user": self.user,
            "item": self.item,
            "users": self.user.rows,
            "items": self.item.rows,
            "optimizer": self.optimizer,
            "steps": torch.zeros((), dtype=torch.int64),
        }

    def train_step(self) -> dict[str, float]:
        """Make one step on this rank's share of the next batch; return its loss and pairs."""
        self.state["steps"] += 1
        users, items = (
            ids[self._rank :: self._ranks] for ids in self._pairs(int(self.state["steps"]), self._batch_size)
        )
        loss = functional.cross_entropy(20 * self.user(users) @ self.item(items).T, torch.arange(len(users)))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for parameter in self.parameters() if self._ranks > 1 else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= self._ranks
        self.optimizer.step()
        self.user.rows.step()
        self.item.rows.step()
        return {"loss": loss.item(), "pairs": float(len(users))}

    @torch.no_grad()
    def evaluate(self, suite: str) -> dict[str, float]:
        """Measure how often an item that suits a user is before one that comes by chance."""
        self.eval()
        try:
            users, items = self._pairs(0, _HELD_OUT)
            of_user, of_item = self.user(users), self.item(items)
            better = (of_user * of_item).sum(1) > (of_user * of_item.roll(1, 0)).sum(1)
            return {"heldout_accuracy": better.float().mean().item()}
        finally:
            self.train()

    def _pairs(self, step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return users, and an item that each of them likes; they follow from the step alone."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        users = (torch.rand(count, generator=generator) ** _UNEVEN * self._users).long()
        alike = (torch.rand(count, generator=generator) ** _UNEVEN * (self._items // TASTES)).long()
        return users, alike * TASTES + users * 2_654_435_761 % 2**32 % TASTES


def main() -> None:
    """Train up to `--steps`, from the newest checkpoint in `--checkpoint-dir`."""
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
                log.info("step %d: loss %.3f, users here: %d", step, metrics["loss"], program.user.rows.count)
        if start < options.steps and options.steps % options.step_interval:
            ckpt.save(options.steps, program.state)
        log.info("%s", program.evaluate("end"))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
