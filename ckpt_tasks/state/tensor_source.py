"""Where a restore gets its tensors from: a store, or memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ckpt_tasks.state.tensors import copy_all

__all__ = ["HeldTensors", "TensorSource"]


class TensorSource(Protocol):
    """The tensors of one checkpoint by full key.

    New tensors are filled and everything else is verified by `fetch`; until then nothing of the target may change, and
    after it `copy` has nothing left to fail at but the hardware.
    """

    def like(self, key: str) -> torch.Tensor:
        """Return a tensor without values (on the meta device) of the stored dtype and shape."""

    def read(self, key: str) -> torch.Tensor:
        """Return the verified values at once, on the CPU, to look at only."""

    def fill(self, into: torch.Tensor, key: str) -> None:
        """Let a new tensor, which nobody looks at yet, have the values from the end of `fetch` on."""

    def fetch(self) -> None:
        """Fill, and verify whatever is not filled; raise IntegrityError or StoreError."""

    def copy(self, pairs: Sequence[tuple[torch.Tensor, str]]) -> None:
        """Copy into live tensors of the stored shapes, on any device."""


class HeldTensors:
    """Tensors in memory that are known to be good."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = tensors

    def like(self, key: str) -> torch.Tensor:
        return torch.empty_like(self._tensors[key], device="meta")

    def read(self, key: str) -> torch.Tensor:
        return self._tensors[key]

    def fill(self, into: torch.Tensor, key: str) -> None:
        copy_all([(into, self._tensors[key])])

    def fetch(self) -> None:
        """Do nothing: everything is here."""

    def copy(self, pairs: Sequence[tuple[torch.Tensor, str]]) -> None:
        copy_all([(live, self._tensors[key]) for live, key in pairs])
