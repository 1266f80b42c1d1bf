"""Copies of stored tensors into live tensors, and a check that two copies do not overwrite each other.

Live tensors may share memory, whole or in part. A restore uses one `Copies` for the whole state, so that the check also
finds a conflict between two groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ckpt_tasks.errors import StateMismatchError
from ckpt_tasks.format.tree import TensorRef, tensor_refs
from ckpt_tasks.state.tensors.placements import is_sharded
from ckpt_tasks.state.tensors.tensor_sources import HeldTensors, Stored, TensorSource
from ckpt_tasks.state.tensors.tensors import expanded, identity, may_overlap, same_bits

_ALIGNED = 16


class _Wanted(NamedTuple):
    place: str
    live: torch.Tensor
    key: str


class _Span(NamedTuple):
    """The memory from a tensor's first to its last element."""

    device: int
    begin: int
    end: int
    odd: bool  # It has gaps, or its elements may overlap.
    wanted: _Wanted


class Copies:
    """Copies into live tensors: collected, checked, and then made all at once.

    `bind` reserves a live tensor for a stored tensor; `home` returns it for later references to that stored tensor.
    """

    def __init__(self) -> None:
        self._wanted: list[_Wanted] = []
        self._source: TensorSource = HeldTensors({})
        self._keys: dict[Any, str] = {}
        self._homes: dict[str, torch.Tensor] = {}
        self._contents: dict[int, Any] = {}
        self._shown: dict[int, tuple[torch.Tensor, Any]] = {}  # The tensor is kept, or its id() would be used again.
        self._offered: list[tuple[torch.Tensor, str]] = []

    def offer(self, live: torch.Tensor, key: str) -> None:
        """Offer a live tensor as the target of a stored tensor; the next call that looks for targets reserves it."""
        self._offered.append((live, key))

    def bind(self, live: torch.Tensor, key: str) -> bool:
        """Reserve a live tensor's memory for a stored tensor; return False if another stored tensor has reserved it."""
        self._take_offers()
        known = self._memory(live)
        if known is not None and self._keys.setdefault(known, key) != key:
            return False
        self._homes.setdefault(key, live)
        return True

    def is_bound(self, live: torch.Tensor) -> bool:
        """Return True if a live tensor's memory is reserved."""
        self._take_offers()
        return self._memory(live) in self._keys

    def home(self, key: str) -> torch.Tensor | None:
        """Return the live tensor that will hold a stored tensor; None if no live tensor will."""
        self._take_offers()
        return self._homes.get(key)

    def shared(self, ref: TensorRef, device: torch.device | None) -> Any:
        """Return a live value with the memory of the ref's tensor on `device` (None: any device); None if it cannot."""
        home = self.home(ref.key)
        if home is None or (device is not None and home.device != device):
            return None
        if ref.array:
            return home.detach().numpy() if home.is_cpu else None
        if home.requires_grad == ref.requires_grad:
            return home
        return home.detach() if home.requires_grad else None

    def refill(self, container: Any, tree: Any, stored: Stored) -> bool:
        """Reserve a container for its new contents; return False if another reference to the container needs others."""
        first = self._contents.setdefault(id(container), tree)
        return first is tree or _contents(first, stored) == _contents(tree, stored)

    def want(self, place: str, live: torch.Tensor, ref: TensorRef) -> None:
        """Request a copy into a live tensor; errors name it by its `place` in the state."""
        self._wanted.append(_Wanted(place, live, ref.key))

    def prepare(self, source: TensorSource) -> None:
        """Check the copies; raise StateMismatchError if shared memory would get two different values."""
        self._source = source
        first: dict[Any, _Wanted] = {}
        spans: list[_Span] = []
        for wanted in self._wanted:
            known = self._memory(wanted.live)
            before = first.setdefault(known, wanted) if known else wanted
            if before is not wanted:
                if before.key != wanted.key and not same_bits(source.read(wanted.key), source.read(before.key)):
                    why = f"it is tied to {before.place} here, but they differ in the checkpoint"
                    raise StateMismatchError(why, key=wanted.place)
            elif known and not is_sharded(wanted.live):  # Empty tensors and shards share no memory.
                (begin, *_, steps), *_ = known
                size_bytes = wanted.live.nbytes if steps is None else _extent(wanted.live)
                spans.append(_Span(wanted.live.get_device(), begin, begin + size_bytes, steps is not None, wanted))
        for cluster in _clusters(spans):
            self._check(cluster)

    @property
    def pairs(self) -> list[tuple[torch.Tensor, str]]:
        """The copies that `write` will make: (live tensor, key)."""
        return [(live, key) for _, live, key in self._wanted]

    def write(self) -> None:
        """Copy the stored values into the live tensors."""
        wanted, self._wanted = self._wanted, []
        self._source.copy([(live, key) for _, live, key in wanted])

    def _memory(self, live: torch.Tensor) -> Any:
        """Return a key for a tensor's memory and how it shows it; None if it has no memory."""
        found = self._shown.get(id(live))
        if found is None:
            known = identity(live)
            found = self._shown[id(live)] = live, known and (known, live.is_conj(), live.is_neg())
        return found[1]

    def _take_offers(self) -> None:
        offered, self._offered = self._offered, []
        for live, key in offered:
            self.bind(live, key)

    def _check(self, cluster: list[_Wanted]) -> None:
        """Write the values into scratch memory with the same overlaps; raise StateMismatchError if one is lost."""
        base = cluster[0].live.data_ptr() & ~(_ALIGNED - 1)
        size_bytes = max(wanted.live.data_ptr() + _extent(wanted.live) for wanted in cluster) - base
        scratch = torch.zeros(size_bytes + _ALIGNED, dtype=torch.uint8)
        pairs = []
        for wanted in cluster:
            begin = wanted.live.data_ptr() - base
            view = scratch[begin : begin + _extent(wanted.live)].view(wanted.live.dtype)
            view = view.as_strided(wanted.live.shape, wanted.live.stride(), view.storage_offset())
            value = _in_memory(self._source.read(wanted.key), wanted.live)
            expanded(view).copy_(expanded(value, wanted.live.stride()))
            pairs.append((wanted, view, value))
        for wanted, view, value in pairs:
            if not same_bits(view, value):
                how = "overlaps another tensor"
                if may_overlap(wanted.live):
                    how = "is expanded" if 0 in wanted.live.stride() else "overlaps itself"
                raise StateMismatchError(f"it {how} here, but its values differ in the checkpoint", key=wanted.place)


def _in_memory(value: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Conjugate or negate a value if the live tensor is a conjugated or negated view: its memory holds it so."""
    value = value.conj_physical() if live.is_conj() else value
    return -value if live.is_neg() else value


def _contents(tree: Any, stored: Stored) -> str:
    # Compare texts, in which NaN equals itself, and 1 differs from True. Empty tensors share no memory.
    contents = repr(tree)
    for ref in tensor_refs(tree):
        contents = contents if all(stored[ref.key][1]) else contents.replace(repr(ref), repr(stored[ref.key]))
    return contents


def _extent(live: torch.Tensor) -> int:
    """Return the bytes of memory from a tensor's first to its last element."""
    last = sum((size - 1) * step for size, step in zip(live.shape, live.stride(), strict=True))
    return (last + 1) * live.element_size()


def _clusters(spans: list[_Span]) -> Iterator[list[_Wanted]]:
    """Yield groups of tensors whose memory may overlap, and single tensors that may overlap themselves."""
    cluster: list[_Span] = []
    device, end = -2, 0
    for span in sorted(spans, key=itemgetter(0, 1)):
        if span.device != device or span.begin >= end:
            yield from _suspects(cluster)
            cluster, device, end = [], span.device, 0
        cluster.append(span)
        end = max(end, span.end)
    yield from _suspects(cluster)


def _suspects(cluster: list[_Span]) -> Iterator[list[_Wanted]]:
    if len(cluster) > 1 or (cluster and cluster[0].odd and may_overlap(cluster[0].wanted.live)):
        yield [span.wanted for span in cluster]
