"""A process that is born to restore: build, restore as one contender does, take one step, say when, and die.

`python -m benchmarks.reborn CONTENDER DIRECTORY [--tiny]`. It dies by SIGKILL: so the next one finds what a killed
training leaves behind.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from xxhash import xxh3_128_digest

from benchmarks.states import Trained, build, flat, states
from ckpt_tasks.state.tensors.memcpy import copy_tensors

if TYPE_CHECKING:
    from ckpt_tasks import Checkpointer

__all__ = ["BARE", "CONTENDERS", "LIMIT", "MEMORY", "opened", "save", "start"]


_Restore = Callable[[], object]
_REGION_BYTES = 16 << 20


def _bare(directory: Path, target: Trained) -> _Restore:
    return lambda: None


def _ours(directory: Path, target: Trained) -> _Restore:
    ckpt = opened(directory, memory=False)
    return lambda: (ckpt, ckpt.restore(target.state))


def _from_memory(directory: Path, target: Trained) -> _Restore:
    ckpt = opened(directory, memory=True)
    return lambda: (ckpt, ckpt.restore(target.state))


def _torch_load(directory: Path, target: Trained) -> _Restore:
    return lambda: torch.load(directory / "torch.pt", weights_only=True)


def _torch_load_into(directory: Path, target: Trained, mmap: bool = False) -> _Restore:
    def restore() -> None:
        loaded = torch.load(directory / "torch.pt", weights_only=True, mmap=mmap)
        target.model.load_state_dict(loaded["model"])
        target.optimizer.load_state_dict(loaded["optimizer"])

    return restore


def _safetensors_into(directory: Path, target: Trained) -> _Restore:
    from safetensors.torch import load_file

    def restore() -> None:
        loaded = load_file(directory / "all.safetensors")
        with torch.no_grad():
            for name, tensor in flat(target).items():
                tensor.copy_(loaded[name])

    return restore


def _dcp_into(directory: Path, target: Trained) -> _Restore:
    from torch.distributed.checkpoint import state_dict_loader

    return lambda: state_dict_loader.load(states(target), checkpoint_id=directory / "dcp", no_dist=True)


def _limit(directory: Path, target: Trained) -> _Restore:
    """Digest the bytes of the state in shared memory, in 16 MiB, and copy them: no restore from memory does less."""
    tensors = [*flat(target).values()]
    ends = [*accumulate((tensor.nbytes for tensor in tensors), initial=0)]
    fd = os.memfd_create("limit")
    os.write(fd, bytes(ends[-1]))

    def restore() -> None:
        memory = mmap.mmap(fd, ends[-1], access=mmap.ACCESS_COPY)
        view, flat_bytes = memoryview(memory), torch.frombuffer(memory, dtype=torch.uint8)
        with ThreadPoolExecutor(2) as threads:
            list(
                threads.map(
                    lambda at: xxh3_128_digest(view[at : at + _REGION_BYTES]), range(0, ends[-1], _REGION_BYTES)
                )
            )
        copy_tensors(
            [tensor.detach() for tensor in tensors],
            [
                flat_bytes[begin:end].view(tensor.dtype).view(tensor.shape)
                for tensor, begin, end in zip(tensors, ends, ends[1:], strict=False)
            ],
        )

    return restore


BARE = "nothing (a bare start)"
LIMIT = "limit: digests, then a copy, of what lies in memory"
OURS = "ckpt-tasks (verified, into model and optimizer)"
ANEW = "ckpt-tasks, into an optimizer without moments"
MEMORY = "ckpt-tasks, from the memory of the process that was killed"
CONTENDERS: dict[str, Callable[[Path, Trained], _Restore]] = {
    BARE: _bare,
    OURS: _ours,
    ANEW: _ours,
    MEMORY: _from_memory,
    LIMIT: _limit,
    "torch.load": _torch_load,
    "torch.load + load_state_dict": _torch_load_into,
    "torch.load(mmap=True) + load_state_dict (unverified)": partial(_torch_load_into, mmap=True),
    "safetensors load_file + copy (unverified)": _safetensors_into,
    "DCP load (unverified, into tensors)": _dcp_into,
}


def opened(directory: Path, *, memory: bool) -> Checkpointer:
    """Open one of our two runs: with snapshots that outlive the process, and without."""
    from ckpt_tasks import CheckpointConfig, Checkpointer

    where = str(directory / ("in-memory" if memory else "ours"))
    return Checkpointer(CheckpointConfig(checkpoint_dir=where, run_key="bench", memory_dir="auto" if memory else None))


def save(directory: Path, trained: Trained) -> None:
    """Write the state as every contender wants it; in this process, which then no longer holds the run directory."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import state_dict_saver

    for memory in (False, True):
        with opened(directory, memory=memory) as ckpt:
            ckpt.save(1, trained.state)
    torch.save(states(trained), directory / "torch.pt")
    save_file(flat(trained), directory / "all.safetensors")
    state_dict_saver.save(states(trained), checkpoint_id=directory / "dcp", no_dist=True)


def start(contender: str, directory: Path, *, tiny: bool, device: str) -> dict[str, float]:
    """Run the process; return how long its restore took, and when (time.time()) its first step was done."""
    command = [sys.executable, "-m", "benchmarks.reborn", contender, str(directory), "--device", device]
    done = subprocess.run([*command, *(["--tiny"] if tiny else [])], capture_output=True, text=True, check=False)
    if done.returncode != -signal.SIGKILL:
        raise RuntimeError(f"{contender} ended with status {done.returncode}:\n{done.stderr}")
    report: dict[str, float] = json.loads(done.stdout)
    return report


def _save_again(restored: Any, target: Trained) -> None:
    ckpt, step = restored
    ckpt.save(step + 1, target.state)


def main() -> None:
    """Be the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=[*CONTENDERS])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    target = build(tiny=options.tiny, seed=1, device=options.device, stepped=options.contender != ANEW)
    restore = CONTENDERS[options.contender](options.directory, target)  # imports what it needs
    started = time.perf_counter()
    kept = restore()
    if options.device != "cpu":
        torch.cuda.synchronize()
    restore_s = time.perf_counter() - started
    target.step()
    sys.stdout.write(json.dumps({"restore_s": restore_s, "stepped_at": time.time()}) + "\n")
    sys.stdout.flush()
    if options.contender == MEMORY:
        _save_again(kept, target)  # for the next one
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
