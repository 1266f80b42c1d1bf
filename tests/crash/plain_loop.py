"""A plain training loop with three lines of ckpt-tasks (numbered), to be killed by tests."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.flows.programs.byte_lm import Transformer
from ckpt_tasks.storage.locations import Location
from tests.support.recording import Recording


def main(arguments: Sequence[str] | None = None) -> None:
    """Train 60 steps of a 0.9 M-parameter transformer, saving every 10; SIGKILL in one step if asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("log")
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--ballast-mib", type=int, default=0)
    parser.add_argument("--private", action="store_true", help="no snapshot outlives the process")
    parser.add_argument("--storage-options", type=json.loads)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    random.seed(0)  # the program seeds torch alone, and these streams are part of the state
    np.random.seed(0)  # noqa: NPY002
    program = Recording(
        log=options.log, kill_at=options.kill_at, d_model=128, n_layers=4, n_heads=4, context=32, batch_size=16,
        max_bytes=1 << 20, dropout=0.1, decay_steps=60,
    )  # fmt: skip
    assert isinstance(program.model, Transformer)
    state = dict(program.state)
    if options.ballast_mib:
        state["ballast"] = nn.ParameterList(torch.randn(1 << 20) for _ in range(options.ballast_mib // 4))
    with Checkpointer(  # 1
        CheckpointConfig(
            checkpoint_dir=Location(options.directory, storage_options=options.storage_options),
            step_interval=options.interval,
            memory_dir=None if options.private else "auto",
        )
    ) as ckpt:
        step = ckpt.restore(state)  # 2
        report = ckpt.last_restore
        for done, why in report.skipped if report else ():
            sys.stderr.write(f"passed over step {done}: {why}\n")
        sys.stdout.write(f"restored {step}\n")
        known = None
        while step < options.steps:
            metrics = program.train_step()
            if options.ballast_mib:
                with torch.no_grad():
                    torch._foreach_add_(list(state["ballast"]), 1.0)
            step += 1
            ckpt.step(step, state, metrics=metrics)  # 3
            sys.stdout.write(f"step {step}\n")
            if ckpt.last_commit is not known:
                known = ckpt.last_commit
                sys.stdout.write(f"committed {known.step} by entry {known.n}\n" if known else "")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
