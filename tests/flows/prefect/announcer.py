"""A flow that tells its commits, in its own process: `python -m tests.flows.prefect.announcer DIRECTORY STEPS JSON`."""

from __future__ import annotations

import json
import sys
from typing import Any

from prefect import flow

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.flows.prefect.events import announce
from tests.support.tiny import Tiny


@flow(name="announcer")
def announcer(run_dir: str, steps: int, params: dict[str, Any], lost_at: int | None = None) -> None:
    """Train with a save every second step, none of which a newer one may take the place of."""
    config = CheckpointConfig(
        checkpoint_dir=run_dir,
        run_key="told",
        step_interval=2,
        keep_every_n_steps=2,
        max_num_checkpoints=2,
        memory_dir=None,
    )
    with Checkpointer(config) as ckpt:
        announce(ckpt, "told", program="tests.support.tiny:Tiny", params={"width": 8})
        program = Tiny(**params)
        ckpt.restore(program.state)
        for step in range(ckpt.position + 1, steps + 1):
            loss = program.train_step()["loss"]
            if step == lost_at:
                ckpt.wait()
                with Checkpointer(config, take_over=True) as other:
                    other.restore(Tiny().state)
            ckpt.step(step, program.state, metrics={"loss": loss, "odd": float("nan"), "most": float("inf")})


if __name__ == "__main__":
    announcer(sys.argv[1], int(sys.argv[2]), **json.loads(sys.argv[3]))
