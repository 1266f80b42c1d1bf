"""The sources of a restore's tensors (a checkpoint, or memory), and the Maker of its new tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ckpt_tasks.errors import IntegrityError
from ckpt_tasks.format.tree import TensorRef, tensor_refs
from ckpt_tasks.state.tensors.placements import is_sharded, like, local_of
from ckpt_tasks.state.tensors.tensors import allocate, copy_all

Pairs = Sequence[tuple[torch.Tensor, str]]  # Live tensors, and the keys of their stored values.


class TensorSource(Protocol):
    """The tensors of one checkpoint by full key.

    `fetch` fills new tensors, and verifies others for a later `copy`. `copy` verifies what it copies again, as it
    arrives: after a `fetch` of the same pairs, only a hardware fault can make it fail.
    """

    def like(self, key: str) -> torch.Tensor:
        """Return a tensor without values (on the meta device) of the stored dtype and shape."""

    def read(self, key: str) -> torch.Tensor:
        """Read and verify a tensor's values at once, on the CPU; the caller must not change them."""

    def fill(self, into: torch.Tensor, key: str) -> None:
        """Request that `fetch` fills a new tensor, to which the program has no reference yet."""

    def fetch(self, pairs: Pairs = (), *, verify: bool = True) -> None:
        """Fill requested tensors; `verify` all others and `pairs`. Raises IntegrityError or StoreError."""

    def copy(self, pairs: Pairs) -> None:
        """Copy the stored values of each key into its live tensor, which has the stored shape, on any device.

        Raises IntegrityError if the values are damaged and `fetch` has not verified them.
        """


class HeldTensors:
    """Verified tensors of a state, held in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = tensors

    def like(self, key: str) -> torch.Tensor:
        return torch.empty_like(self._tensors[key], device="meta")

    def read(self, key: str) -> torch.Tensor:
        return self._tensors[key]

    def fill(self, into: torch.Tensor, key: str) -> None:
        self.copy([(into, key)])

    def fetch(self, pairs: Pairs = (), *, verify: bool = True) -> None:
        """Do nothing: all tensors are already in memory and verified."""

    def copy(self, pairs: Pairs) -> None:
        copy_all([(local_of(live), local_of(self._tensors[key])) for live, key in pairs])


Stored = Mapping[str, tuple[str, tuple[int, ...]]]  # By full key: torch's name of the dtype, and the shape.


class Maker:
    """Makes new tensors and arrays for refs. Equal refs get the same tensor, so that tied tensors are tied again."""

    def __init__(self, source: TensorSource):
        self.source = source
        self._made: dict[tuple[TensorRef, torch.device], torch.Tensor] = {}

    def __call__(
        self,
        ref: TensorRef,
        live: Any,
        *,
        device: torch.device | None = None,
        model: torch.Tensor | None = None,
        now: bool = False,
    ) -> Any:
        """Make a tensor: on `device`, else on the device of the `live` tensor, else on the CPU.

        If `live` or else `model` is a DTensor of the stored shape, make a DTensor with the same placements. `now`:
        return a copy on the CPU that already has its values.
        """
        if now:
            values = self.source.read(ref.key).clone()
            return values.numpy() if ref.array else values
        model = live if is_sharded(live) else model
        if model is not None and is_sharded(model) and model.shape == self.source.like(ref.key).shape:
            return self._sharded(ref, model)
        if device is None or ref.array:
            device = live.device if isinstance(live, torch.Tensor) and not ref.array else torch.device("cpu")
        # Leave out the flag `array`, since an array and a tensor may share memory.
        plain = TensorRef(ref.key, stride=ref.stride, requires_grad=ref.requires_grad)
        if (plain, device) not in self._made:
            self._made[plain, device] = allocate(self.source.like(ref.key), plain, device)
            self.source.fill(self._made[plain, device], ref.key)
        made = self._made[plain, device]
        return made.numpy() if ref.array else made

    def _sharded(self, ref: TensorRef, model: torch.Tensor) -> torch.Tensor:
        local = local_of(model)
        if (ref, local.device) not in self._made:
            dtype = self.source.like(ref.key).dtype
            made = like(torch.empty(local.shape, dtype=dtype, device=local.device), model)
            self.source.fill(made, ref.key)
            self._made[ref, local.device] = made
        return self._made[ref, local.device]


def needed_keys(group: str, tree: Any, stored: Stored) -> set[str]:
    """Return the keys of a tree's tensors; raise IntegrityError if a tensor is not `stored`."""
    keys = {ref.key for ref in tensor_refs(tree)}
    if not keys <= stored.keys():
        raise IntegrityError(
            f"group {group} names a tensor that is not in the checkpoint", key=min(keys - stored.keys())
        )
    return keys
