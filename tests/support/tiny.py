"""A program that is small, has all that makes a resume hard, and fails where a test wants it to."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Tiny:
    """Fit noise with a net that has dropout; batches come from the global random stream.

    `fail_at` raises in the middle of that step (after backward, before the optimizer's), as often as the file
    `failures` allows: it holds one line per failure so far, at most `times`. `signal_at` sends this process `signum` in
    that step, unless TINY_CALM is set.
    """

    unit = "rows"
    recorded_params = ("failures",)  # a text: what is given at the first start goes on without being given again

    def __init__(
        self,
        *,
        seed: int = 0,
        width: int = 8,
        fail_at: int | None = None,
        times: int = 1,
        failures: str = "",
        signal_at: int | None = None,
        signum: int = signal.SIGTERM,
        step_s: float = 0.0,
    ):
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Tanh(), nn.Linear(width, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "steps": torch.zeros((), dtype=torch.int64),
        }
        self._fail_at, self._times, self._failures = fail_at, times, failures
        self._signal_at, self._signum = signal_at, signum
        self._step_s = step_s

    def train_step(self) -> dict[str, float]:
        step = int(self.state["steps"]) + 1
        time.sleep(self._step_s)
        x = torch.randn(16, 4)
        loss = self.model(x).square().mean()
        loss.backward()
        self._interfere(step)
        self.optimizer.step()
        self.optimizer.zero_grad()  # at the end: gradients of a failed step would stay for the next one
        self.state["steps"] += 1
        return {"loss": loss.item(), "rows": 16.0}

    def evaluate(self, suite: str) -> dict[str, float]:
        if suite == "broken":
            raise RuntimeError("this suite always fails")
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.model.eval()
            value = self.model(torch.randn(64, 4)).square().mean().item()
            self.model.train()
        return {"heldout_loss": value, "built_with_steps": float(self.state["steps"])}

    def _interfere(self, step: int) -> None:
        if step == self._signal_at and not os.environ.get("TINY_CALM"):
            os.kill(os.getpid(), self._signum)
        if step == self._fail_at:
            path = Path(self._failures)
            failed = path.read_text().count("\n") if path.exists() else 0
            if failed < self._times:
                path.write_text("failed\n" * (failed + 1))
                raise RuntimeError(f"injected in step {step}")


class Diverging(Tiny):
    """The same, whose loss is NaN from a step on; with `bad_times`, in so many steps (the file `failures` counts)."""

    def __init__(self, *, bad_from: int, bad_times: int | None = None, failures: str = "", **rest: Any):
        super().__init__(**rest)
        self._bad_from, self._bad_times, self._bad = bad_from, bad_times, Path(failures)

    def train_step(self) -> dict[str, float]:
        metrics = super().train_step()
        if int(self.state["steps"]) < self._bad_from:
            return metrics
        if self._bad_times is not None:
            times = len(self._bad.read_text()) if self._bad.exists() else 0
            if times >= self._bad_times:
                return metrics
            self._bad.write_text("x" * (times + 1))
        return {**metrics, "loss": float("nan")}


def wider(width: int = 8) -> Tiny:
    """Make a program that does not fit a run of Tiny: its tensors have other shapes."""
    return Tiny(width=width + 1)
