"""PyTorch training as resumable Prefect flows, and the checkpoint library below it.

Every public name is listed here, and its module is imported when the name is first used: importing the package
imports neither torch nor Prefect, so the command line starts at once and ranks run without Prefect.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpt_tasks import errors
from ckpt_tasks.logs import guard_log

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.checkpointer import Checkpointer
    from ckpt_tasks.checkpoint.restore.reading import open_run
    from ckpt_tasks.checkpoint.restore.restore import RestoreReport
    from ckpt_tasks.checkpoint.resumable import resumable
    from ckpt_tasks.checkpoint.save.listening import Listener
    from ckpt_tasks.checkpoint.transfer.export import export_checkpoint
    from ckpt_tasks.checkpoint.transfer.syncing import plan_sync, run_sync
    from ckpt_tasks.flows.prefect.attempts import AttemptHooks, resumable_task
    from ckpt_tasks.flows.prefect.blocks import CheckpointStore
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.run.ledger.config import CheckpointConfig
    from ckpt_tasks.state.data.drawing import sample_generator
    from ckpt_tasks.state.data.loader import ResumableLoader
    from ckpt_tasks.state.data.sampler import ResumableSampler
    from ckpt_tasks.state.data.shuffling import ShuffleBuffer
    from ckpt_tasks.state.groups import ByRank
    from ckpt_tasks.state.kinds.modules import Gradients
    from ckpt_tasks.state.tables.replay import ReplayBuffer
    from ckpt_tasks.state.tables.table import LookupTable
    from ckpt_tasks.storage.locations import Location

__version__ = "0.1.0.dev0"

guard_log()

__all__ = [
    "AttemptHooks",
    "ByRank",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointStore",
    "Checkpointer",
    "Gradients",
    "Listener",
    "Location",
    "LookupTable",
    "ReplayBuffer",
    "RestoreReport",
    "ResumableLoader",
    "ResumableSampler",
    "ShuffleBuffer",
    "errors",
    "export_checkpoint",
    "open_run",
    "plan_sync",
    "resumable",
    "resumable_task",
    "run_sync",
    "sample_generator",
]

_MODULES = {
    "AttemptHooks": "ckpt_tasks.flows.prefect.attempts",
    "ByRank": "ckpt_tasks.state.groups",
    "Checkpoint": "ckpt_tasks.format.records",
    "CheckpointConfig": "ckpt_tasks.run.ledger.config",
    "CheckpointStore": "ckpt_tasks.flows.prefect.blocks",
    "Checkpointer": "ckpt_tasks.checkpoint.checkpointer",
    "Gradients": "ckpt_tasks.state.kinds.modules",
    "Listener": "ckpt_tasks.checkpoint.save.listening",
    "Location": "ckpt_tasks.storage.locations",
    "ReplayBuffer": "ckpt_tasks.state.tables.replay",
    "RestoreReport": "ckpt_tasks.checkpoint.restore.restore",
    "LookupTable": "ckpt_tasks.state.tables.table",
    "ResumableLoader": "ckpt_tasks.state.data.loader",
    "ResumableSampler": "ckpt_tasks.state.data.sampler",
    "ShuffleBuffer": "ckpt_tasks.state.data.shuffling",
    "export_checkpoint": "ckpt_tasks.checkpoint.transfer.export",
    "open_run": "ckpt_tasks.checkpoint.restore.reading",
    "plan_sync": "ckpt_tasks.checkpoint.transfer.syncing",
    "resumable": "ckpt_tasks.checkpoint.resumable",
    "resumable_task": "ckpt_tasks.flows.prefect.attempts",
    "run_sync": "ckpt_tasks.checkpoint.transfer.syncing",
    "sample_generator": "ckpt_tasks.state.data.drawing",
}


def __getattr__(name: str) -> Any:  # See PEP 562.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value  # Later uses find the name here and do not call this function.
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
