"""Two processes of one flow run: the one that lost the run directory ends without a word to Prefect.

Prefect may start a flow run twice: a preempted one before its old process has ended, a resumed one while the pause is
still on its way, a crashed one that two watchers report. The ledger lets one of them train. If the other ended as
failed, its word would stand on the flow run that its sibling completes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.exceptions import Abort
from prefect.logging import get_run_logger

from ckpt_tasks.errors import CkptError, OwnerError
from ckpt_tasks.ledger.config import CheckpointConfig
from ckpt_tasks.reading.reading import run_of

__all__ = ["ends_quietly_for_a_sibling"]


@contextmanager
def ends_quietly_for_a_sibling(config: CheckpointConfig, flow_run_id: str | None) -> Iterator[None]:
    """Leave the flow run's state alone where the block is fenced by another process of the same flow run.

    It then ends with Prefect's Abort, which no state is proposed for. Any other OwnerError passes.
    """
    try:
        yield
    except OwnerError as error:
        if not _held_by(config, flow_run_id):
            raise
        get_run_logger().warning("Another process goes on with this flow run, and this one ends: %s", error)
        raise Abort(f"another process goes on with this flow run: {error}") from error


def _held_by(config: CheckpointConfig, flow_run_id: str | None) -> bool:
    try:
        run = run_of(config)
        owner = run.head().state.owner
    except CkptError:  # nothing is known: the error under way is the one to report
        return False
    return flow_run_id is not None and owner is not None and owner.flow_run_id == flow_run_id
