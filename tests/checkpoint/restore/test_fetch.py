"""Tensors read from a store to where they belong: verified first, in place, and without memory of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.checkpoint.restore.restore import restore_newest, restore_one
from ckpt_tasks.errors import CkptError, IntegrityError, StoreError
from ckpt_tasks.format.keys import parse_attempt
from ckpt_tasks.state.tensors.tensors import DTYPES, same_bits
from ckpt_tasks.storage.local import LocalStore
from tests.support.sweeps import quick_first

MIB = 1 << 20


class SecondThoughts(LocalStore):
    """A store on failing hardware: from the `nth` read of a tensor's bytes on, a byte comes back changed."""

    def __init__(self, root: str, nth: int):
        super().__init__(root)
        self._left = nth

    def read(self, name: str, begin: int, into: memoryview) -> None:
        super().read(name, begin, into)
        if begin and name.endswith(".safetensors"):
            self._left -= 1
            if self._left < 0:
                into[0] ^= 1


def _saved(run_dir: Path, *states: dict[str, Any]) -> None:
    with Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), max_num_checkpoints=None)) as ckpt:
        for step, state in enumerate(states, start=1):
            ckpt.save(step, state)


def _restored(run_dir: Path, state: dict[str, Any]) -> dict[str, Any]:
    run = open_run(str(run_dir))
    run.restore(run.find("latest"), state)
    return state


@pytest.mark.parametrize(
    ("size_bytes", "fresh"),
    # Of the quick ones every second size is made new, and the others are live.
    quick_first([(size, new) for new in (True, False) for size in (16 * MIB + 48, 2 * MIB + 48, 256 * 1024, 8, 0)], 2),
)
def test_tensors_of_every_size_come_back(run_dir: Path, size_bytes: int, fresh: bool) -> None:
    """Whatever way a size takes (many in a read, one in several, several regions), every bit comes back."""
    torch.manual_seed(size_bytes)
    values = {
        f"{n}-{name}": torch.randint(0, 256, (-(-size_bytes // 16) * 16,), dtype=torch.uint8).view(dtype)
        for n, (dtype, name) in enumerate(DTYPES.items())
        if name in ("uint8", "float32", "bfloat16", "int64", "complex64", "complex128")
    }
    _saved(run_dir, {"it": [*values.values()], "small": torch.ones(3)})
    live: dict[str, Any] = {
        "it": [] if fresh else [torch.zeros_like(v) for v in values.values()],
        "small": torch.zeros(3),
    }
    _restored(run_dir, live)
    assert all(same_bits(a, b) for a, b in zip(live["it"], values.values(), strict=True))
    assert torch.equal(live["small"], torch.ones(3))


def test_targets_in_any_form_are_filled(run_dir: Path) -> None:
    """P5: a live tensor keeps its memory and its strides: transposed, a slice, channels-last, negated, conjugated."""
    source = nn.Module()
    for name, value in {
        "a": torch.randn(600, 700),
        "b": torch.randn(2, 8, 200, 100),
        "c": torch.randn(300, 400),
        "d": torch.randn(300, 400),
        "e": torch.randn(200, 200, dtype=torch.complex64),
    }.items():
        source.register_buffer(name, value)
    _saved(run_dir, {"model": source})
    target = nn.Module()
    backing = torch.zeros(1400, 600)
    target.register_buffer("a", backing.T[:, ::2])
    target.register_buffer("b", torch.zeros(2, 8, 200, 100).to(memory_format=torch.channels_last))
    target.register_buffer("c", torch.zeros(500, 400)[100:400])
    target.register_buffer("d", torch._neg_view(torch.zeros(300, 400)))
    target.register_buffer("e", torch.zeros(200, 200, dtype=torch.complex64).conj())
    pointers = {name: (value.data_ptr(), value.stride()) for name, value in target.named_buffers()}
    _restored(run_dir, {"model": target})
    assert {name: (value.data_ptr(), value.stride()) for name, value in target.named_buffers()} == pointers
    values = {name: value.resolve_neg().resolve_conj() for name, value in target.named_buffers()}
    assert all(same_bits(value, getattr(source, name)) for name, value in values.items())
    assert not backing[1::2].any()


def test_autograd_sees_that_a_restore_changed_a_tensor(run_dir: Path) -> None:
    """A backward through values that a restore has overwritten raises instead of using the new ones."""
    for size in (4, 1 << 15, MIB):  # Copied by torch, copied by a memcpy, and read into place.
        weight = nn.Parameter(torch.ones(size))
        _saved(run_dir / str(size), {"weight": weight})
        loss: torch.Tensor = (weight * weight).sum()
        _restored(run_dir / str(size), {"weight": weight})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # type: ignore[no-untyped-call]


def test_nothing_changes_before_everything_is_verified(run_dir: Path) -> None:
    """P49: a fault in the first pass, at whichever read, leaves the target as it was."""
    _saved(run_dir, {"a": torch.ones(3 * MIB), "b": torch.ones(10), "c": torch.ones(100, 200)})
    run = open_run(str(run_dir))
    reads = 0
    while True:
        state = {"a": torch.zeros(3 * MIB), "b": torch.zeros(10), "c": torch.zeros(200, 100).T}
        try:
            restore_one(SecondThoughts(str(run_dir), reads), run.find("latest"), state)
        except IntegrityError:
            assert not any(value.any() for value in state.values())
        except StoreError:
            break  # the second pass has begun
        reads += 1
    assert reads > 5


def test_a_store_that_changes_its_mind_is_said_and_healed(run_dir: Path) -> None:
    """P49: bytes that differ between the two passes are found; the error says what to do, and that heals the state."""
    old, new = (
        {"a": torch.ones(3 * MIB), "b": torch.ones(9)},
        {"a": torch.full((3 * MIB,), 2.0), "b": torch.full((9,), 2.0)},
    )
    _saved(run_dir, old, new)
    run, state = open_run(str(run_dir)), {"a": torch.zeros(3 * MIB), "b": torch.zeros(9)}
    good = 0
    while _outcome(restore_one, SecondThoughts(str(run_dir), good), run.find("latest"), dict(state)) is IntegrityError:
        good += 1  # as many reads as the first pass needs
    with pytest.raises(StoreError, match=r"half restored.*Restore again"):
        restore_one(SecondThoughts(str(run_dir), good), run.find("latest"), dict(state))
    victim = next(
        p for p in sorted(run_dir.rglob("a-*.safetensors"), reverse=True) if parse_attempt(str(p.relative_to(run_dir)))
    )
    with victim.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    _, report, _ = restore_newest(run.history.store, run.checkpoints(), state)
    assert (report.step, [step for step, _ in report.skipped]) == (1, [2])
    assert all(same_bits(state[name], old[name]) for name in state)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_restore_needs_no_second_copy_of_the_state(run_dir: Path) -> None:
    """P57: the peak of memory during a restore is the state and a few buffers, also where moments are made new."""
    model = nn.ParameterList([nn.Parameter(torch.full((4 * MIB,), float(n))) for n in range(8)])  # 128 MiB
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    _saved(run_dir, {"model": model, "optimizer": optimizer})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    _restored(run_dir, {"model": model, "optimizer": optimizer})
    assert _status("VmHWM") - before < (128 + 32) * MIB  # the moments, which were not there, and the rest
    assert len(optimizer.state) == 8


def _outcome(call: Callable[..., object], *args: object) -> type[BaseException] | None:
    try:
        call(*args)
    except CkptError as error:
        return type(error)
    return None


def _status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field + ":"))
    return int(line.split()[1]) * 1024
