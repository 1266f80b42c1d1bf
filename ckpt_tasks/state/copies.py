"""Copies into live tensors: which live tensor takes which stored one, and whether shared memory can hold the values.

Two live tensors may show the same memory, whole or in part. One restore uses one `Copies` for the whole target, so that
a conflict between two groups is seen as well as one within a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ckpt_tasks.errors import StateMismatchError
from ckpt_tasks.format.tree import TensorRef
from ckpt_tasks.state.placements import is_sharded
from ckpt_tasks.state.restore_parts import HeldTensors, Stored, TensorSource
from ckpt_tasks.state.tensors import expanded, identity, may_overlap, same_bits
from ckpt_tasks.state.values import unpack

__all__ = ["Copies"]

_ALIGNED = 16


class _Wanted(NamedTuple):
    place: str
    live: torch.Tensor
    key: str


class Copies:
    """Copies into live tensors: collected, checked, and then made at once.

    `bind` says which live tensor will hold a stored one; `home` finds it again, for a place that shared its memory when
    the state was saved.
    """

    def __init__(self) -> None:
        self._wanted: list[_Wanted] = []
        self._source: TensorSource = HeldTensors({})
        self._keys: dict[Any, str] = {}
        self._homes: dict[str, torch.Tensor] = {}
        self._contents: dict[int, Any] = {}
        self._offered: list[tuple[torch.Tensor, str]] = []

    def offer(self, live: torch.Tensor, key: str) -> None:
        """Name a live tensor that will hold a stored one; nothing is done until a plain value asks."""
        self._offered.append((live, key))

    def bind(self, live: torch.Tensor, key: str) -> bool:
        """Reserve the memory of a live tensor for a stored one; say whether it was free, or the same one's."""
        self._take_offers()
        known = _shown(live)
        if known is not None and self._keys.setdefault(known, key) != key:
            return False
        self._homes.setdefault(key, live)
        return True

    def is_bound(self, live: torch.Tensor) -> bool:
        """Say whether the memory of a live tensor takes a stored one."""
        self._take_offers()
        return _shown(live) in self._keys

    def home(self, key: str) -> torch.Tensor | None:
        """Return the live tensor that will hold a stored one."""
        self._take_offers()
        return self._homes.get(key)

    def refill(self, container: Any, tree: Any, stored: Stored) -> bool:
        """Reserve a container for its new contents; False if it stands in two places that differ."""
        first = self._contents.setdefault(id(container), tree)
        return first is tree or _contents(first, stored) == _contents(tree, stored)

    def want(self, place: str, live: torch.Tensor, ref: TensorRef) -> None:
        """Ask for a copy; `place` is for the error."""
        self._wanted.append(_Wanted(place, live, ref.key))

    def prepare(self, source: TensorSource) -> None:
        """Raise StateMismatchError if memory that is shared would get two values."""
        self._source = source
        first: dict[Any, _Wanted] = {}
        different: list[_Wanted] = []
        for wanted in self._wanted:
            known = _shown(wanted.live)
            before = first.setdefault(known, wanted) if known else wanted
            if before is wanted:
                different += [] if is_sharded(wanted.live) else [wanted]  # shards are memory of their own
            elif before.key != wanted.key and not same_bits(source.read(wanted.key), source.read(before.key)):
                why = f"it is tied to {before.place} here, but they differ in the checkpoint"
                raise StateMismatchError(why, key=wanted.place)
        for cluster in _clusters(different):
            self._check(cluster)

    @property
    def pairs(self) -> list[tuple[torch.Tensor, str]]:
        """What `write` copies: the live tensors, each with its key."""
        return [(live, key) for _, live, key in self._wanted]

    def write(self) -> None:
        """Copy."""
        wanted, self._wanted = self._wanted, []
        self._source.copy([(live, key) for _, live, key in wanted])

    def _take_offers(self) -> None:
        offered, self._offered = self._offered, []
        for live, key in offered:
            self.bind(live, key)

    def _check(self, cluster: list[_Wanted]) -> None:
        """Write the values into scratch memory of the same layout, and see whether all of them can be read back."""
        base = cluster[0].live.data_ptr() & ~(_ALIGNED - 1)
        size_bytes = max(one.live.data_ptr() + _extent(one.live) for one in cluster) - base
        scratch = torch.zeros(size_bytes + _ALIGNED, dtype=torch.uint8)
        pairs = []
        for one in cluster:
            begin = one.live.data_ptr() - base
            view = scratch[begin : begin + _extent(one.live)].view(one.live.dtype)
            view = view.as_strided(one.live.shape, one.live.stride(), view.storage_offset())
            value = _in_memory(self._source.read(one.key), one.live)
            expanded(view).copy_(expanded(value, one.live.stride()))
            pairs.append((one, view, value))
        for one, view, value in pairs:
            if not same_bits(view, value):
                how = "overlaps another tensor"
                if may_overlap(one.live):
                    how = "is expanded" if 0 in one.live.stride() else "overlaps itself"
                raise StateMismatchError(f"it {how} here, but its values differ in the checkpoint", key=one.place)


def _shown(live: torch.Tensor) -> Any:
    known = identity(live)
    return known and (known, live.is_conj(), live.is_neg())


def _in_memory(value: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Return what the memory of a live tensor holds where it shows a value: the other sign for a flagged view."""
    value = value.conj_physical() if live.is_conj() else value
    return -value if live.is_neg() else value


def _contents(tree: Any, stored: Stored) -> str:
    # As text, where NaN equals itself and 1 is not True. Tensors without elements have no memory to be one in.
    return repr(unpack(tree, lambda ref, _: ref if all(stored[ref.key][1]) else stored[ref.key]))


def _extent(live: torch.Tensor) -> int:
    """Return how many bytes lie between the first and the last element that a tensor shows."""
    last = sum((size - 1) * step for size, step in zip(live.shape, live.stride(), strict=True))
    return (last + 1) * live.element_size()


def _clusters(different: list[_Wanted]) -> Iterator[list[_Wanted]]:
    """Group tensors whose memory may overlap; one that overlaps nothing, not even itself, is in no group."""
    cluster: list[_Wanted] = []
    device, end = None, 0
    for one in sorted(
        (one for one in different if one.live.numel()), key=lambda one: (one.live.get_device(), one.live.data_ptr())
    ):
        start = one.live.data_ptr()
        if one.live.device == device and start < end:
            cluster.append(one)
        else:
            yield from _suspects(cluster)
            cluster, device, end = [one], one.live.device, 0
        end = max(end, start + _extent(one.live))
    yield from _suspects(cluster)


def _suspects(cluster: list[_Wanted]) -> Iterator[list[_Wanted]]:
    if len(cluster) > 1 or (cluster and may_overlap(cluster[0].live)):
        yield cluster
