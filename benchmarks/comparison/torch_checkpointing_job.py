"""torch_checkpointing, as its tutorial has it: a directory a step, and the highest number is what is restored.

O_DIRECT is switched off: 0.1.1 writes the unaligned end of a file with it, which ext4 refuses (EINVAL).
"""

from __future__ import annotations

import re
from pathlib import Path

from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from benchmarks.comparison.shared import DIRECTORY, EVERY, STEPS, Steps, optimizer_of, prepare, shuffled, train_step


def main() -> None:
    """Train, and wait for the last save at the end."""
    net, data = prepare()
    optimizer = optimizer_of(net)
    manager = CheckpointManager(
        CheckpointManager.Config(storage_config=LocalFileSystemStorageConfig(use_direct_io=False))
    )
    found = [int(match[1]) for one in Path(DIRECTORY).iterdir() if (match := re.fullmatch(r"step_(\d+)", one.name))]
    step = 0
    if found:
        into = {"model": net.state_dict(), "optimizer": None, "step": 0}
        restored = manager.load(f"{DIRECTORY}/step_{max(found)}", into=into)
        optimizer.load_state_dict(restored["optimizer"])
        step = int(restored["step"])
    said = Steps(step)
    while step < STEPS:
        for x, y in shuffled(data):
            with manager.lock():  # The network changes its ballast in the forward pass, so the whole step is guarded.
                train_step(net, optimizer, (x, y))
            step += 1
            if step % EVERY == 0:
                state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                manager.save(f"{DIRECTORY}/step_{step}", state)
                with manager.lock():
                    pass  # The next step would wait for the copy: count it with this one, as for the other tools.
            said.step()
            if step == STEPS:
                break
    manager.close()
    said.end(net)


if __name__ == "__main__":  # Its writer is a process that is spawned.
    main()
