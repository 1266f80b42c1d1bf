"""Programs on many ranks: one that goes on bit for bit, and one that forgets something in one rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.cli.proving.programs import Whole


class Sharded(Whole):
    """Everything is in the state."""

    def __init__(self) -> None:
        super().__init__()
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        torch.manual_seed(dist.get_rank())

    def evaluate(self, suite: str) -> dict[str, float]:
        with torch.no_grad():
            return {"heldout": self.model(torch.ones(1, 4)).item()}


class Forgetful(Sharded):
    """Rank 1 counts its steps outside of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def factor(self) -> float:
        self.seen += dist.get_rank()
        return 1 / (1 + self.seen)
