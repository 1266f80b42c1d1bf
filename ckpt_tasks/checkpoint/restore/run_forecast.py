"""Estimate how much space a run's checkpoints will take from the size of the newest one."""

from __future__ import annotations

from ckpt_tasks.checkpoint.restore.reading import Run
from ckpt_tasks.format.keys import MANIFEST_NAME
from ckpt_tasks.format.ledger import lineage
from ckpt_tasks.format.policy.space import CheckpointSize, Forecast, forecast


def forecast_run(run: Run, free_bytes: int) -> Forecast | None:
    """Forecast the space that a run needs for checkpoints like its newest one; return None if it has none.

    Assumes that later checkpoints reuse the same objects of older checkpoints as the newest one. Raises IntegrityError
    or StoreError if the newest one's manifest cannot be read.
    """
    state = run.head().state
    newest_first = lineage(state.live)
    if not newest_first:
        return None
    newest = newest_first[0]
    place = newest.manifest.removesuffix(MANIFEST_NAME)
    shared_bytes = 0
    if newest.reuses:
        from ckpt_tasks.run.opening import open_checkpoint  # This imports pyarrow.

        objects = open_checkpoint(run.history.store, newest).manifest.objects
        shared_bytes = sum(record.size_bytes for record in objects if not record.name.startswith(place))
    size = CheckpointSize(newest.size_bytes - shared_bytes, shared_bytes)
    return forecast(None, newest_first, pinned=state.pins, size=size, free_bytes=free_bytes)
