"""A restore changes all of a target or nothing of it, whatever kind of memory a part of the target is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_tasks.errors import StateError
from tests.support.roundtrip import Holder, assert_same, everything, fingerprint, restore, save
from tests.support.sweeps import quick_first

N = 20_000  # of complex numbers: large enough that a copy goes another way than a small one


def conj(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.complex64).conj()


def inference(n: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(n)


def read_only(n: int) -> np.ndarray[Any, Any]:
    array = np.zeros(n, dtype=np.float32)
    array.flags.writeable = False
    return array


# The target; whether it can be restored at all: into a module, as a value by itself, and inside a container.
KINDS: dict[str, tuple[Callable[[int], Any], bool, bool, bool]] = {
    "plain": (torch.zeros, True, True, True),
    "conj": (conj, True, True, True),
    "neg": (lambda n: conj(n).imag, True, True, True),
    "conj of a slice": (lambda n: conj(2 * n)[::2], True, True, True),
    "slice": (lambda n: torch.zeros(2 * n)[::2], True, True, True),
    "expanded": (lambda n: torch.zeros(1).expand(n), False, False, True),
    "overlapping": (lambda n: torch.zeros(n + 2).unfold(0, 3, 1), False, False, True),
    "inference": (inference, True, True, True),
    "leaf": (lambda n: torch.zeros(n, requires_grad=True), True, True, True),
    "view of a leaf": (lambda n: torch.zeros(2 * n, requires_grad=True)[:n], True, False, False),
    "history": (lambda n: torch.zeros(n, requires_grad=True) * 1, True, False, False),
    "meta": (lambda n: torch.empty(n, device="meta"), False, False, False),
    "array": (lambda n: np.zeros(n, dtype=np.float32), False, True, True),
    "backwards array": (lambda n: np.zeros(n, dtype=np.float32)[::-1], False, True, True),
    "read-only array": (read_only, False, True, True),
    "another shape": (lambda n: torch.zeros(n + 1), False, True, True),
    "another dtype": (lambda n: torch.zeros(n, dtype=torch.float64), False, True, True),
}
HOMES = ("module", "alone", "inside")


def values_for(target: Any, n: int) -> Any:
    """Return values of the dtype that fits the target; of the usual shape."""
    if isinstance(target, np.ndarray):
        return np.arange(n, dtype=np.float32) + 1
    shape = (n, 3) if target.dim() == 2 else (n,)
    dtype = torch.complex64 if target.dtype == torch.complex64 else torch.float32
    return torch.randn(shape, dtype=dtype)


def at(home: str, value: Any) -> Any:
    if home == "module":
        holder = Holder()
        holder._buffers["t"] = value  # register_buffer would refuse a result of autograd
        return holder
    return value if home == "alone" else {"before": [1], "t": value, "after": torch.zeros(2)}


def shown(value: Any) -> Any:
    """Return what a target shows now, as an array; None for what shows nothing."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return None if value.is_meta else value.detach().clone().resolve_conj().resolve_neg().numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(("place", "n"), quick_first([("last", N), ("first", 4), ("last", 4), ("first", N)]))
def test_all_of_a_target_or_nothing(kind: str, home: str, place: str, n: int) -> None:
    """P5, P50: conjugate, negative, expanded, overlapping, read-only memory anywhere in a state: all or nothing."""
    make, *fit = KINDS[kind]
    target = make(n)
    if home == "module" and isinstance(target, np.ndarray):
        pytest.skip("a module holds no arrays")
    values = values_for(target, n)
    others, fresh = everything(1), everything(2)
    saved = save(ordered(others, at(home, values), place))
    here = ordered(fresh, home_of_target := at(home, target), place)
    before, target_before = fingerprint(fresh), shown(target)
    try:
        restore(saved, here)
    except StateError:
        assert not fit[HOMES.index(home)]
        assert fingerprint(fresh) == before
        if target_before is not None:
            np.testing.assert_array_equal(shown(target), target_before)
        return
    assert fit[HOMES.index(home)]
    assert fingerprint({name: here[name] for name in others}) == fingerprint(others)
    now = home_of_target.t if home == "module" else here["target"] if home == "alone" else here["target"]["t"]
    np.testing.assert_array_equal(shown(now), shown(values) if isinstance(values, torch.Tensor) else values)
    if kind in ("conj", "neg", "slice", "inference", "leaf", "array", "backwards array"):
        assert now is target


def ordered(groups: dict[str, Any], target: Any, place: str) -> dict[str, Any]:
    items = [*groups.items()]
    items.insert({"first": 0, "last": len(items)}[place], ("target", target))
    return dict(items)


def test_a_pair_of_a_tensor_and_its_conjugate_comes_back() -> None:
    """P5: two targets that show one memory with another sign take the values where these agree, and raise where not."""
    value = torch.randn(4, dtype=torch.complex64)
    base = torch.zeros(4, dtype=torch.complex64)
    saved = save({"one": Holder(t=value), "other": Holder(t=value.conj()), "imag": Holder(t=value.conj().imag)})
    state = {"one": Holder(t=base), "other": Holder(t=base.conj()), "imag": Holder(t=base.conj().imag)}
    restore(saved, state)
    assert_same(base, value)
    saved = save({"one": Holder(t=value), "other": Holder(t=value + 1), "imag": Holder(t=value.imag.clone())})
    with pytest.raises(StateError, match="differ in the checkpoint"):
        restore(saved, state)
    assert_same(base, value)
