"""PyTorch training as resumable Prefect flows, and the checkpoint library below it.

Every public name is listed here, and its module is imported when the name is first used: importing the package
imports neither torch nor Prefect, so the command line starts at once and ranks run without Prefect.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpt_tasks import errors

if TYPE_CHECKING:
    from ckpt_tasks.checkpoint.checkpointer import Checkpointer
    from ckpt_tasks.format.records import Checkpoint
    from ckpt_tasks.ledger.config import CheckpointConfig
    from ckpt_tasks.orchestration.attempts import resumable_task
    from ckpt_tasks.reading.reading import open_run
    from ckpt_tasks.reading.restore import RestoreReport
    from ckpt_tasks.state.sampler import ResumableSampler

__version__ = "0.1.0.dev0"

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "Checkpointer",
    "RestoreReport",
    "ResumableSampler",
    "errors",
    "open_run",
    "resumable_task",
]

_MODULES = {
    "Checkpoint": "ckpt_tasks.format.records",
    "CheckpointConfig": "ckpt_tasks.ledger.config",
    "Checkpointer": "ckpt_tasks.checkpoint.checkpointer",
    "RestoreReport": "ckpt_tasks.reading.restore",
    "ResumableSampler": "ckpt_tasks.state.sampler",
    "open_run": "ckpt_tasks.reading.reading",
    "resumable_task": "ckpt_tasks.orchestration.attempts",
}


def __getattr__(name: str) -> Any:  # PEP 562
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
