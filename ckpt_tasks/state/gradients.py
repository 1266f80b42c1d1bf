"""Gradients in the middle of an accumulation, as a part of the state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ckpt_tasks.errors import StateMismatchError
from ckpt_tasks.state.modules import unwrapped

__all__ = ["Gradients"]


class Gradients:
    """Save and restore the gradients that a module has accumulated.

    A module's state has no gradients: what `backward` has added up since the last optimizer step is lost with the
    process. A loop that saves at optimizer steps needs nothing. One that saves between them puts this beside it::

        state = {"model": model, "gradients": Gradients(model), "optimizer": optimizer, "micro_step": 0}

    It holds no tensors of its own.
    """

    def __init__(self, module: nn.Module):
        self._module = module

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the gradients there are, by the names of their parameters; they are live, not copies."""
        return {name: p.grad for name, p in self._parameters().items() if p.grad is not None}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the gradient of every parameter, None where `state` has none.

        One that is there already is copied into, since a bucket of DistributedDataParallel may own its memory. Raises
        StateMismatchError, before anything is set, for an unknown name or another shape.
        """
        parameters = self._parameters()
        unknown = tuple(name for name in state if name not in parameters)
        different = tuple(
            f"{name} ({[*parameters[name].shape]} here, {[*gradient.shape]} in the checkpoint)"
            for name, gradient in state.items()
            if name in parameters and parameters[name].shape != gradient.shape
        )
        if unknown or different:
            raise StateMismatchError("the gradients do not fit the module", unexpected=unknown, different=different)
        for name, parameter in parameters.items():
            gradient = state.get(name)
            if gradient is not None and parameter.grad is not None and parameter.grad.dtype == gradient.dtype:
                parameter.grad.copy_(gradient)
            else:
                parameter.grad = None if gradient is None else gradient.detach().clone().to(parameter.device)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(unwrapped(self._module).named_parameters())
