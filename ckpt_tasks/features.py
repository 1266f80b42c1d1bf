"""The one table of features: each row and its file can be taken out, and the product still imports, saves and restores.

A row names its file as text, and nothing else imports the file. `tests/checkpoint/test_extensions.py` takes each row
out.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Feature:
    """A row: where the feature is, and the option that asks for it (None: it is always there).

    It is an Extension (checkpoint/extension.py); with a `kind` it is a GroupKind of this name (state/kinds/kinds.py).
    `agent`: a process that starts the ranks of a gang, and trains nothing itself, has the feature too. Its part of the
    reports: `note`, a note that it writes into the ledger, and the note's fields that are told; `resumes`, the parts of
    a resume that it takes; `figures`, the place of a function from a Course to JSON data and to rows of the report.
    """

    place: str
    option: str | None = None
    agent: bool = False
    kind: str | None = None
    note: tuple[str, ...] = ()
    resumes: tuple[str, ...] = ()
    figures: str | None = None


def found_at(place: str) -> Any:
    """Import what is at a place, as "module:name"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


_EXTENSIONS = "ckpt_tasks.checkpoint.extensions"
# In the order in which they are asked: what may refuse a step comes first.
FEATURES = [
    Feature(f"{_EXTENSIONS}.going_back:GoingBackFromBadMetrics"),
    Feature(f"{_EXTENSIONS}.left_out:LeftOutBatches"),
    Feature(f"{_EXTENSIONS}.unsaved:UnsavedObjects"),
    Feature(f"{_EXTENSIONS}.carried:CarriedGradients"),
    Feature(f"{_EXTENSIONS}.drawn_ahead:BatchesDrawnAhead"),
    Feature(f"{_EXTENSIONS}.step_metrics:StepLog"),
    Feature(f"{_EXTENSIONS}.space_forecast:SpaceForecast"),
    Feature(f"{_EXTENSIONS}.live_steps:LiveSteps"),
    Feature(f"{_EXTENSIONS}.local_copies:LocalCopies", option="local_dir"),
    Feature(
        f"{_EXTENSIONS}.compiled:CompiledCode",
        option="compile_cache",
        note=("compiled", "size_bytes"),
        resumes=("compiled_s",),
        figures="ckpt_tasks.run.report.compiled_code:compiled_code",
    ),
    Feature(f"{_EXTENSIONS}.notices:SpotNotices", option="spot_notices", agent=True),
    Feature("ckpt_tasks.state.tables.table_kind:TABLE", kind="table"),
    Feature("ckpt_tasks.state.tables.replay:REPLAY", kind="replay"),
]
