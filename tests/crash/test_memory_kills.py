"""A training that saves every step into memory and storage, killed at random moments: together they never go back."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.format.digests import digest_hex
from ckpt_tasks.run.upkeep.verifying import verify_run_directory
from ckpt_tasks.storage.local import LocalStore
from ckpt_tasks.storage.local_fs import Calls
from ckpt_tasks.testing import located
from tests.crash.lives import seals
from tests.support.calls import WatchedCalls
from tests.support.children import Child

_log = logging.getLogger(__name__)
WIDTH = 512  # of the model; a weight is 1 MiB, so it and its moments take most of a copy's time
LARGE_BYTES = 1 << 16
STUCK_S = 60.0


# ── in the process that is killed ────────────────────────────────────────────────────────────────────────────────────


class SlowWrites(WatchedCalls):
    """Let every write to a checkpoint's objects take its time, or for ever."""

    def __init__(self, delay_s: float):
        super().__init__()
        self._delay_s = delay_s

    def cut(self, fd: int, piece: Any) -> Any:
        if "/checkpoint_" in self.paths[fd]:
            time.sleep(self._delay_s)
        return piece


def training() -> dict[str, Any]:
    """Make a model, an optimizer, fused: no version counter says when it wrote, its step waits; and plain values."""
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return {"model": model, "optimizer": optimizer, "plain": {"step": 0, "sums": torch.zeros(1 << 18)}}


def train_step(state: dict[str, Any], step: int) -> None:
    """Take a step that follows from the state and its number alone: no two of them leave any tensor alike."""
    state["optimizer"].zero_grad()
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    state["model"](batch).sub(batch.roll(1, 1)).square().mean().backward()
    state["optimizer"].step()
    state["plain"]["step"] = step
    state["plain"]["sums"] += step


def said_of(state: dict[str, Any]) -> dict[str, Any]:
    """Say what a state is: its own step, and the digest of each of its tensors, by name."""
    kept = state["optimizer"].state_dict()["state"]
    moments = {f"{number}/{key}": value for number, held in kept.items() for key, value in held.items()}
    tensors = {**state["model"].state_dict(), **moments, "sums": state["plain"]["sums"]}
    return {"step": state["plain"]["step"], **digests(tensors)}


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: digest_hex(value.detach().reshape(-1).view(torch.uint8).numpy().data) for name, value in tensors.items()
    }


def main(arguments: Sequence[str]) -> None:
    """Restore, say what was restored, and train; say before every save of what."""
    directory, memory_dir, delay_s = arguments
    torch.set_num_threads(1)
    calls: Calls = SlowWrites(float(delay_s)) if float(delay_s) else os
    location = located(LocalStore(directory, calls=calls))
    config = CheckpointConfig(checkpoint_dir=location, memory_dir=memory_dir, step_interval=1, max_num_checkpoints=3)
    with Checkpointer(config) as ckpt:
        state = training()
        step = ckpt.restore(state)
        say("restored", source=ckpt.last_restore.source if ckpt.last_restore else "", **said_of(state))
        while True:
            step += 1
            train_step(state, step)
            say("step", **said_of(state))
            ckpt.step(step, state)


def say(word: str, **what: Any) -> None:
    sys.stdout.write(json.dumps({"word": word, **what}) + "\n")
    sys.stdout.flush()


# ── in the test ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Past:
    """What training has said that it was, step by step: `had`; and how its lives ended.

    `newest` is the step below which it must not fall, `from_memory` counts the lives that began from a memory
    directory, and `cut` those that were killed in the middle of a copy.
    """

    def __init__(self, run_dir: Path, memory: Path):
        self.had = {0: said_of(training())}
        self.newest = self.from_memory = self.cut = 0
        self._run_dir, self._memory = run_dir, memory
        self._seen: set[str] = set()

    def check(self, said: list[dict[str, Any]]) -> None:
        """Check that a life began as a moment that training had, went on as it did before, and left no other ones."""
        first, steps = said[0], [one for one in said if one.pop("word") == "step"]
        source = first.pop("source")
        assert first["step"] >= self.newest
        assert first == self.had[first["step"]]
        self.from_memory += source.startswith(str(self._memory))
        for number, one in enumerate(steps, start=first["step"] + 1):
            assert one == self.had.setdefault(number, one), f"step {number}"
        self.newest = max(first["step"], *self._committed(), *seals(self._memory))
        self.cut += bool(steps) and any(self._is_cut(slot, steps[-1]) for slot in self._memory.glob("*/*/?"))

    def _committed(self) -> list[int]:
        run, state = open_run(str(self._run_dir)), training()
        checkpoints = run.checkpoints()[::-1]
        for checkpoint in checkpoints:
            if checkpoint.manifest not in self._seen:
                run.restore(checkpoint, state)
                assert said_of(state) == self.had[checkpoint.step]
                self._seen.add(checkpoint.manifest)
        steps = [checkpoint.step for checkpoint in checkpoints]
        assert steps == sorted(steps)
        return [0, *steps]

    @staticmethod
    def _is_cut(slot: Path, last: dict[str, Any]) -> bool:
        """Say whether a slot without a seal has some of the large tensors that training had at last, and not all."""
        if (slot / "seal.json").exists():
            return False
        found: dict[str, torch.Tensor] = {}
        for path in slot.glob("*.safetensors"):
            with suppress(SafetensorError):  # killed while it was made: it has no header yet, or not its size
                found |= load_file(path)
        there = digests({name: value for name, value in found.items() if value.nbytes >= LARGE_BYTES}).values()
        return 0 < sum(digest in last.values() for digest in there) < len(there)


@pytest.mark.parametrize("kills", [3, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.timeout(3000)
def test_killed_at_random_moments(run_dir: Path, memory: Path, kills: int) -> None:
    """P1, P30, P44, P72: killed anywhere, one moment of training comes back, and never an older one than before.

    That is the newest step that was sealed in memory, however far behind the store is. Copies are killed as well;
    whatever was committed on the way is one moment, too.
    """
    chance, past = random.Random(11), Past(run_dir, memory)
    for number in range(kills):
        arguments = [str(run_dir), str(memory), str((0.0, 0.02, STUCK_S)[number % 3])]
        lines, pause_s = chance.randint(2, 13), chance.uniform(0, 0.02)
        with Child(main, arguments, run_dir.parent / "output") as child:
            assert child.until(lambda: child.said().count("\n") >= lines), child.said()  # noqa: B023 (called at once)
            time.sleep(pause_s)
            child.send(signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL
            past.check([json.loads(line) for line in child.said().rpartition("\n")[0].splitlines()])
    _log.info("%d of %d kills within a copy, %d lives from memory", past.cut, kills, past.from_memory)
    assert past.from_memory > 0
    assert past.cut > 0 or kills < 100
    assert verify_run_directory(open_run(str(run_dir)).history).good
