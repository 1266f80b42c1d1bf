"""One tensor: whether it can be stored, which tensors share its memory, how to copy and restore it.

Strides: a checkpoint holds values in C order; a TensorRef has the strides if the tensor was not in C order. A new dense
tensor (transposed, channels_last) gets the stored strides, and an expanded tensor is expanded again; a slice becomes
dense. A restore into an existing tensor keeps that tensor's strides.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache, lru_cache
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ckpt_tasks.errors import IntegrityError, StateError, UnsupportedStateError
from ckpt_tasks.format.keys import key_of_rank
from ckpt_tasks.format.layout.image import STORED_DTYPES
from ckpt_tasks.format.tree import TensorRef, new_ref
from ckpt_tasks.state.tensors.memcpy import LARGE_BYTES, copy_tensors
from ckpt_tasks.state.tensors.placements import ALONE, Shares, World, local_of, place_of

# The dtypes that can be stored and that this version of torch has.
DTYPES: Mapping[torch.dtype, str] = {getattr(torch, name): name for name in STORED_DTYPES if hasattr(torch, name)}

# Files store these complex dtypes as pairs of numbers of a real dtype.
REAL_DTYPES = {"complex128": torch.float64, "complex32": torch.float16}

_RESERVED = "__metadata__"  # A safetensors header uses this name for other data.
_FUNCTIONS = (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]


class RankRule(Enum):
    """How the plain tensors of several ranks relate to each other (decision 0073)."""

    REPLICATED = "training keeps them alike: the ranks divide each one, and compare samples"
    ONE = "one value for all: rank 0 writes it, and the ranks compare it"
    BY_RANK = "each rank has its own, in a tree of its own"
    BUFFER = "each rank has its own; another number of ranks takes rank 0's"


class ConstantTensor(torch.Tensor):
    """A tensor that must not change while a reference to it exists, such as a JAX array's; a save may copy it later.

    Make one with `tensor.as_subclass(ConstantTensor)`.
    """


class TensorSet:
    """Collects live tensors by their full keys, each piece of memory only once.

    `tensors` are live tensors, detached and not copied. Of two tensors with the same memory, dtype, shape and strides
    only the first is stored; the second refers to the first one's key.

    With many ranks, `tensors` holds only what this rank writes: its shard of a DTensor, and the plain tensors that
    their `RankRule` assigns to this rank. `places` has, for each part, the shape of the whole tensor and the offset in
    it. Ranks compare `one_for_all` and `replicated`. `buffers` are the keys of tensors with RankRule.BUFFER, and
    `constant` the keys of ConstantTensors. Without a `world`, the set takes every tensor as it is.
    """

    def __init__(self, world: World | None = ALONE) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.places: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.replicated: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {}
        self.one_for_all: dict[str, torch.Tensor] = {}
        self.buffers: list[str] = []
        self.constant: set[str] = set()
        self.files: list[Any] = []  # GroupFiles (state/kinds/group_parts.py).
        self.world = world
        self._keys: set[str] = set()
        self._known: dict[tuple[Any, ...], str] = {}
        self._rule = RankRule.REPLICATED
        self._alone = world is not None and world.size == 1
        self._shares = Shares(world) if world is not None else None

    @property
    def known(self) -> Mapping[tuple[Any, ...], str]:
        """The key of each piece of memory that the set has, by the identity of its tensor."""
        return self._known

    def take_all(self, tensors: Mapping[str, torch.Tensor], known: Mapping[tuple[Any, ...], str]) -> None:
        """Take the tensors of an earlier set, as they are now; `known` is that set's."""
        self.tensors |= {key: one.detach() if one.requires_grad else one for key, one in tensors.items()}
        self._keys |= tensors.keys()
        self._known |= known

    @property
    def many(self) -> bool:
        """True if many ranks share the state."""
        return self.world is not None and self.world.size > 1

    @contextmanager
    def by(self, rule: RankRule) -> Iterator[None]:
        """Apply this rule to tensors that the block adds; inside a ByRank part its rule stays."""
        before = self._rule
        if self.many and before is not RankRule.BY_RANK:
            self._rule = rule
        try:
            yield
        finally:
            self._rule = before

    def add(self, tensor: torch.Tensor, key: str, *, exact: bool = True, array: bool = False) -> TensorRef:
        """Add a tensor and return the TensorRef for the tree.

        `exact`: a restore will make a new tensor, so the type must be torch.Tensor or Parameter, without autograd
        history. Otherwise a restore writes into the existing tensor, and a subclass is allowed if it holds its own
        data. Raises UnsupportedStateError with the key.
        """
        local = local_of(tensor)
        if self._rule is RankRule.BY_RANK and self.world is not None:
            if local is not tensor:
                hint = "Leave it out of ByRank: each rank writes its own part of a DTensor anyway."
                raise UnsupportedStateError("a DTensor of one rank alone cannot be stored", key=key, hint=hint)
            key = key_of_rank(key, self.world.rank)
        _refuse(local, key, exact=exact and local is tensor)
        if local is not tensor:
            return new_ref((self._first(tensor, local, key, _identity(tensor, local)), False, None, False))
        flag = tensor.requires_grad
        if flag:
            tensor = tensor.detach()
        if tensor.is_neg() or tensor.is_conj():
            # A flag of the view conjugates or negates it; its bytes are unchanged.
            tensor = tensor.resolve_conj().resolve_neg()
        known = _identity(tensor, tensor)
        first = self._first(tensor, tensor, key, known)
        flag = flag and exact
        if not (array or flag) and (known is None or known[3] is None):
            return new_ref((first, False, None, False))
        return TensorRef(first, array=array, stride=strides(tensor), requires_grad=flag)

    def _first(self, tensor: torch.Tensor, local: torch.Tensor, key: str, known: tuple[Any, ...] | None) -> str:
        """Return the first key of this memory; add the tensor if its memory is new."""
        if known is None:
            return self._take(tensor, local, key)
        first = self._known.get(known)
        if first is None:
            first = self._known[known] = self._take(tensor, local, key)
        return first

    def _take(self, tensor: torch.Tensor, local: torch.Tensor, key: str) -> str:
        first = key if key not in self._keys and not key.endswith(_RESERVED) else self._free_key(key)
        self._keys.add(first)
        if self._shares is None or self.world is None or (self._alone and local is tensor):
            self.tensors[first] = tensor
            return first
        if self._rule is not RankRule.REPLICATED and self._is_undivided(tensor, local, first, self.world):
            return first
        share, begin = self._shares.of(tensor, local, first)
        held = local.detach() if local.requires_grad else local
        if begin is not None:
            self.replicated[first] = held, begin
        if share is not None:
            self.tensors[first] = share.of(held)
            if share.offset is not None:
                self.places[first] = share.full_shape, share.offset
        return first

    def _is_undivided(self, tensor: torch.Tensor, local: torch.Tensor, key: str, world: World) -> bool:
        """Add a tensor if the ranks do not divide it among themselves; return False if they divide it."""
        whole, held = local is tensor, local.detach() if local.requires_grad else local
        if self._rule is RankRule.BY_RANK:
            self.tensors[key] = held
        elif self._rule is RankRule.BUFFER and place_of(tensor, key, world).replicas == world.size:
            self.tensors[key_of_rank(key, world.rank) if world.rank else key] = held
            self.buffers.append(key)
        elif self._rule is RankRule.ONE and whole:
            self.one_for_all[key] = tensor
            if world.rank == 0:
                self.tensors[key] = tensor
        else:
            return False
        return True

    def _free_key(self, key: str) -> str:
        number = 2
        while f"{key}~{number}" in self._keys:
            number += 1
        return f"{key}~{number}"


def refuse(tensor: torch.Tensor, key: str, *, exact: bool) -> None:
    """Raise UnsupportedStateError if a tensor cannot be stored and restored; `exact` as in TensorSet.add."""
    local = local_of(tensor)
    _refuse(local, key, exact=exact and local is tensor)


def _refuse(tensor: torch.Tensor, key: str, *, exact: bool) -> None:
    kind = type(tensor)
    if (
        (kind is torch.Tensor or kind is torch.nn.Parameter)
        and tensor.dtype in DTYPES
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_nested or (exact and tensor.requires_grad))
    ):
        return  # Return fast for most of up to 10⁵ tensors.
    reason, hint = _unsupported(tensor, exact=exact)
    if reason:
        raise UnsupportedStateError(f"{reason} cannot be stored", key=key, hint=hint)


def _unsupported(tensor: torch.Tensor, *, exact: bool) -> tuple[str, str]:
    """Return why a tensor cannot be stored, and what to do instead; ("", "") if it can be stored."""
    kind = type(tensor)
    if is_lazy(tensor):
        return "a parameter that is not initialised", "Run one forward pass first."
    if not (kind in (torch.Tensor, torch.nn.Parameter) or (not exact and _holds_its_data(kind))):
        name = f"{kind.__module__}.{kind.__qualname__}"
        return f"a tensor of type {name}", "Store the plain tensors that it is made of."
    if tensor.layout is not torch.strided or tensor.is_nested:
        what = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
        return what, "Make it dense, or store its parts."
    if tensor.is_meta:
        return (
            "a tensor on the meta device, which has no values,",
            "Materialise it first: model.to_empty(device=...), then initialise it.",
        )
    if tensor.dtype not in DTYPES:
        return f"a tensor of {tensor.dtype}", "Store its integer form and its parameters."
    if exact and tensor.requires_grad and not tensor.is_leaf:
        return "a tensor with an autograd history", "Store tensor.detach()."
    return "", ""


@cache
def _holds_its_data(kind: type) -> bool:
    # The bytes are the whole value if the class changes neither operators nor the location of its values.
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)  # type: ignore[attr-defined]
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and function in _FUNCTIONS  # type: ignore[attr-defined]


def identity(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return a key for a tensor's memory, dtype, shape and strides; None if it has no memory."""
    return _identity(tensor, local_of(tensor))


def _identity(tensor: torch.Tensor, local: torch.Tensor) -> tuple[Any, ...] | None:
    pointer = local.data_ptr()  # The pointer is 0 if the tensor has no elements.
    if not pointer:
        if local is tensor:
            return None
        # Ranks that have elements see whether tensors are tied; this rank must get the same result.
        return local.untyped_storage(), tensor.dtype, tensor.shape, None
    steps = None if local.is_contiguous() else local.stride()
    return pointer, tensor.dtype, tensor.shape, steps


def strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides, in elements, that a copy must have; None for C order.

    The copy keeps dense strides and zeros of expanded dimensions, but not a slice's gaps; its dimensions keep their
    order.
    """
    if tensor.is_contiguous():
        return None
    kept = torch.empty_like(expanded(tensor), device="meta", memory_format=torch.preserve_format).stride()
    steps = tuple(
        0 if step == 0 and size > 1 else new
        for step, size, new in zip(tensor.stride(), tensor.shape, kept, strict=True)
    )
    dense = torch.empty(tensor.shape, device="meta").stride()
    return None if steps == dense else steps


def expanded(tensor: torch.Tensor, steps: Sequence[int] | None = None) -> torch.Tensor:
    """Narrow every expanded dimension (stride 0, in `steps` or the tensor's own) to 1, so that no element repeats."""
    for dim, step in enumerate(tensor.stride() if steps is None else steps):
        if step == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def may_overlap(tensor: torch.Tensor) -> bool:
    """Return True if two elements of a tensor may share memory, for example in an expanded or unfolded tensor."""
    tensor = local_of(tensor)
    if tensor.is_contiguous():
        return False
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= reach:
            return True
        reach += (size - 1) * step
    return False


def allocate(like: torch.Tensor, ref: TensorRef, device: torch.device) -> torch.Tensor:
    """Make a new tensor of `like`'s dtype and shape with the ref's strides and flag; its values are undefined.

    Raises IntegrityError for strides that no tensor of this shape can have, StateError if memory is short.
    """
    once = like if ref.stride is None else expanded(like, _sane(ref, ref.stride, like))
    try:
        if ref.stride is None:
            made = torch.empty(like.shape, dtype=like.dtype, device=device)
        else:
            made = torch.empty_strided(once.shape, ref.stride, dtype=like.dtype, device=device).expand(like.shape)
    except RuntimeError as error:
        raise StateError(
            f"a tensor of {like.nbytes} bytes has no room on {device}: {error!s:.200}", key=ref.key
        ) from error
    return made.requires_grad_() if ref.requires_grad else made


def _sane(ref: TensorRef, steps: Sequence[int], source: torch.Tensor) -> Sequence[int]:
    # Strides decide how much memory the tensor takes: refuse strides that take more than the values need.
    if len(steps) != source.dim() or any(step < 0 for step in steps):
        raise IntegrityError(f"a tensor of shape {tuple(source.shape)} has strides {tuple(steps)}", key=ref.key)
    if sum((size - 1) * step for size, step in zip(source.shape, steps, strict=True)) > max(source.numel() - 1, 0):
        raise IntegrityError(
            f"strides {tuple(steps)} leave gaps in a tensor of shape {tuple(source.shape)}", key=ref.key
        )
    return steps


@torch.no_grad()
def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of every pair into the first, which has the same shape and dtype, on any device."""
    into: list[torch.Tensor] = []
    out_of: list[torch.Tensor] = []
    for target, source in pairs:
        to, values = target.detach(), source  # torch refuses a write to an inference tensor, but not to its alias.
        if not target.is_contiguous():
            steps = target.stride()
            to, values = expanded(to, steps), expanded(source, steps)
        if to.is_conj() or to.is_neg():  # `_foreach_copy_` cannot write to such views.
            to.copy_(values)
            continue
        into.append(to)
        out_of.append(values)
    copy_tensors(into, out_of)
    for to in into:
        if to.nbytes >= LARGE_BYTES:
            torch.autograd.graph.increment_version(to)  # Tell autograd about the memcpy.


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if shape, dtype and every bit are equal: NaN equals itself, 0.0 differs from -0.0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def difference(tensor: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> str | None:
    """Return how a live tensor differs from the stored dtype and shape; None if it fits."""
    here = DTYPES.get(tensor.dtype, str(tensor.dtype))
    if here == dtype and tuple(tensor.shape) == tuple(shape):
        return None
    return f"{here}{list(tensor.shape)} here, {dtype}{list(shape)} in the checkpoint"


@lru_cache(1024)  # Many tensors of a state have the same dtype and shape.
def without_values(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor without values (on the meta device) of a stored dtype and shape."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def tensor_at(buffer: memoryview | mmap.mmap | bytearray, dtype: str, shape: Iterable[int], begin: int) -> torch.Tensor:
    """View a stored tensor's bytes as a tensor; copy complex values from files that store them as pairs of numbers."""
    shape = tuple(shape)
    stored = STORED_DTYPES[dtype]
    count = math.prod(shape) * math.prod(stored.suffix)
    if count == 0:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    if not stored.suffix:
        return torch.frombuffer(buffer, dtype=getattr(torch, dtype), offset=begin, count=count).view(shape)
    raw = torch.frombuffer(buffer, dtype=torch.uint8, offset=begin, count=count * stored.itemsize)
    real = raw.view(REAL_DTYPES[dtype]).view(*shape, *stored.suffix)
    return torch.view_as_complex(real.clone())
