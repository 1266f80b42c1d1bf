"""A warning of a run that begins with a trained state, for example in a notebook whose loop has run before."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from ckpt_tasks.checkpoint.extension import Extension, Restored

_log = logging.getLogger("ckpt_tasks")


class TrainedBefore(Extension):
    """Warns if a run without a checkpoint begins with an optimizer that has taken steps."""

    def restored(self, now: Restored) -> None:
        """Warn of the state with which a run begins."""
        optimizers = [(name, value) for name, value in now.state.items() if isinstance(value, Optimizer)]
        trained = [name for name, value in optimizers if any(map(_has_stepped, value.state.values()))]
        if trained and now.begins:
            _log.warning(
                "The run has no checkpoint and begins at step 0 with the state as it is, and %s has taken steps. If a "
                "loop ran before, make model and optimizer anew. After a save(0, state), restore() can go back to step "
                "0",
                ", ".join(trained),
            )


def _has_stepped(of_parameter: object) -> bool:
    """Return True if the optimizer's state of a parameter shows a step of training.

    Adagrad creates a state with step 0 at once; with schedulefree, reading a missing state creates an empty state.
    """
    if of_parameter == {}:
        return False
    step = of_parameter.get("step") if isinstance(of_parameter, Mapping) else None
    return not isinstance(step, int | float | torch.Tensor) or bool(torch.as_tensor(step).any())
