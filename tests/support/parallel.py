"""A small program on many ranks, which fails where a test wants it to."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckpt_tasks import ByRank


class Parallel:
    """Fit noise with a net that has dropout, in a DistributedDataParallel or sharded; each rank has its own batches.

    `plan` has [step, rank, what]: before the optimizer step of this step the rank does that, once in all: "raise",
    "exit", "kill", "stop", "segv" or "term" (itself), "agent" or "server" (kill it), "terminate" (SIGTERM to an agent),
    "full" (its disk takes no more), "nan" (its loss is none) or "slow" (the step takes 12 s). Each leaves a file in
    `folder`, with the time of the host's clock. `trace` gets a line of rank 0's for each completed step: when, in which
    process, which step, 0; and beside it each rank its process.
    """

    recorded_params: tuple[str, ...] = ("kind", "plan", "folder", "trace")
    unit = "rows"

    def __init__(
        self,
        *,
        kind: str = "ddp",
        seed: int = 0,
        lr: float = 1e-2,
        plan: Sequence[tuple[int, int, str]] = (),
        folder: str = "",
        step_s: float = 0.0,
        logs: bool = False,
        trace: str = "",
    ):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1))
        self.model: nn.Module = net
        if dist.is_initialized() and kind == "ddp":
            # After its first step it lays out its buckets anew, so more than two ranks sum in another order then; this
            # keeps them as they are, and a restart is bit-equal.
            kept = dist.get_world_size() > 2
            self.model = nn.parallel.DistributedDataParallel(net, find_unused_parameters=kept)
        elif dist.is_initialized() and kind == "fsdp":
            fully_shard(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "steps": 0}
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(seed + self._rank)
        self._plan = {step: what for step, rank, what in plan if rank == self._rank}
        self._folder, self._step_s = Path(folder), step_s
        self._trace = trace
        if trace:
            Path(f"{trace}.{self._rank}").write_text(str(os.getpid()))
        if logs:
            Thread(target=_log_on, daemon=True).start()

    def train_step(self) -> dict[str, float]:
        time.sleep(self._step_s)
        loss = self.model(torch.randn(16, 4)).square().mean()
        self.state["steps"] += 1
        if self._interfere(self._plan.get(self.state["steps"], "")) == "nan":
            return {"loss": float("nan")}
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._trace and self._rank == 0:
            with open(self._trace, "a") as trace:
                trace.write(f"{time.time()} {os.getpid()} {self.state['steps']} 0\n")
        return {"loss": loss.item(), "rows": 16.0}

    def evaluate(self, suite: str) -> dict[str, float]:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.model.eval()
            value = self.model(torch.randn(64, 4)).square().mean().item()
            self.model.train()
        return {"heldout_loss": value, "suite": float(len(suite))}

    def _interfere(self, what: str) -> str:
        """Do what is planned, unless that is done already; return it."""
        done = self._folder / f"{self.state['steps']}-{self._rank}-{what}"
        if not what or done.exists():
            return ""
        done.write_text(str(time.monotonic()))
        if what == "raise":
            raise RuntimeError(f"injected in step {self.state['steps']}")
        if what == "exit":
            sys.exit(0)
        if what == "slow":
            end_s = time.monotonic() + 12.0
            while time.monotonic() < end_s:
                time.sleep(0.01)
        if what == "full":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        if what == "server":
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()  # until the kernel kills this one too: it may not end its step first
        agent = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV, "term": signal.SIGTERM}
        if what in numbers:
            os.kill(os.getpid(), numbers[what])
        elif what in ("agent", "terminate"):
            os.kill(agent, signal.SIGKILL if what == "agent" else signal.SIGTERM)
        return what


def _log_on() -> None:
    while True:
        logging.getLogger("tests").warning("a thread is busy")
        time.sleep(0.01)


class Alone(Parallel):
    """The same, which never asks for ranks."""

    def __init__(self, **options: Any):
        super().__init__(kind="none", **options)


class Unbuilt(Parallel):
    """The same, which does what the plan has for step 0 while it is built."""

    def __init__(self, *, kind: str = "ddp", plan: Sequence[tuple[int, int, str]] = (), folder: str = ""):
        super().__init__(kind=kind, plan=plan, folder=folder)
        self._interfere(self._plan.get(0, ""))


class Reducing(Parallel):
    """The same, which can only be built among ranks, and whose `evaluate` adds up over them; `broken` names a rank that
    fails there, while the others wait for it.
    """

    recorded_params = (*Parallel.recorded_params, "broken")

    def __init__(self, *, broken: int | None = None, **options: Any):
        super().__init__(**options)
        self._size, self._broken = dist.get_world_size(), broken

    def evaluate(self, suite: str) -> dict[str, float]:
        if self._rank == self._broken:
            raise RuntimeError("injected in evaluate")
        total = torch.tensor([1.0 + self._rank])
        dist.all_reduce(total)
        return {**super().evaluate(suite), "total": total.item()}


class Counting(Parallel):
    """The same, whose ranks return metrics of every kind; a rule that is none if `rule` names one."""

    recorded_params = (*Parallel.recorded_params, "rule")

    def __init__(self, *, rule: str = "sum", **options: Any):
        super().__init__(**options)
        self.reduce = {"correct": rule, "least": "min", "most": "max"}

    def train_step(self) -> dict[str, float]:
        super().train_step()
        own = 1.0 + self._rank
        many = {f"a metric with a long name, {number}": own * number for number in range(60)}
        alone = {} if self._rank else {"lr": 7.0}
        return {"loss": own, "correct": own, "least": own, "most": own, "rows": own, **alone, **many}

    def evaluate(self, suite: str) -> dict[str, float]:
        return {"loss": 1.0 + self._rank, "correct": 1.0 + self._rank}


class Initialising(Parallel):
    """The same, which begins as a script of torchrun does."""

    def __init__(self, **options: Any):
        dist.init_process_group()
        super().__init__(**options)


class Owned(Parallel):
    """Each rank has a value of its own in the state, which only as many ranks can restore."""

    def __init__(self, **params: Any):
        super().__init__(**params)
        self.state["own"] = ByRank({"rank": self._rank})

    def train_step(self) -> dict[str, float]:
        assert self.state["own"].value == {"rank": self._rank}
        return super().train_step()
