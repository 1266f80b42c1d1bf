"""What Prefect's pages show of a run: the table of its checkpoints."""

from __future__ import annotations

import re

from prefect.artifacts import create_table_artifact

from ckpt_tasks.checkpoint.checkpointer import Checkpointer

__all__ = ["publish_run"]


def publish_run(ckpt: Checkpointer, run_key: str) -> None:
    """Publish the run's checkpoints, newest first, as the table artifact "<run_key>-checkpoints" of this flow run."""
    rows = [
        {"step": one.step, "saved": one.saved_at, "bytes": one.size_bytes, "waited_s": one.cost_s, **one.metrics}
        for one in ckpt.checkpoints()
    ]
    key = re.sub(r"[^a-z0-9]+", "-", run_key.lower()).strip("-")  # Prefect's rule for keys
    create_table_artifact(rows, key=f"{key}-checkpoints", description=f"The checkpoints of the run {run_key}.")
