"""What a restore brings onto CUDA devices, without one: see devices.py. With one: state/test_capture_cuda.py."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import IntegrityError, NoGoodCheckpointError, StateError
from ckpt_tasks.state.tensors import staging as staging_module
from ckpt_tasks.state.tensors.memcpy import copy_tensors
from ckpt_tasks.state.tensors.staging import STAGED_BYTES, Staging, byte_view
from ckpt_tasks.state.tensors.tensors import same_bits
from tests.support.devices import Cuda, Elsewhere, Still, There, plain, stand_for_cuda, write

HERE = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    stand_in = stand_for_cuda(monkeypatch)
    yield stand_in
    gc.collect()
    assert stand_in.pinned == {}
    assert stand_in.faults == []
    assert not any(stream.queue for stream in stand_in.copying)


def bring(staging: Staging, into: torch.Tensor, values: torch.Tensor) -> None:
    with staging.piece(into) as buffer:
        ctypes.memmove((ctypes.c_char * len(buffer)).from_buffer(buffer), values.data_ptr(), values.nbytes)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 64), st.integers(0, 6)), min_size=1, max_size=12))
def test_every_buffer_waits_for_its_device(pieces: list[tuple[int, int, int]]) -> None:
    """P2: with two buffers for a dozen pieces, however far the devices have come, each tensor gets its own bytes."""
    with pytest.MonkeyPatch.context() as patch:
        cuda = stand_for_cuda(patch)
        patch.setattr(staging_module, "STAGED_BYTES", 64)
        targets = [torch.zeros(size, dtype=torch.uint8).as_subclass((There, Elsewhere)[n]) for n, size, _ in pieces]
        values = [torch.full((size,), number, dtype=torch.uint8) for number, (_, size, _) in enumerate(pieces, 1)]
        with Staging((into.device for into in targets), 12 * 64, 1) as staging:
            for into, value, (*_, moves) in zip(targets, values, pieces, strict=True):
                bring(staging, into, value)
                for number in range(moves):
                    cuda.streams[number % len(cuda.streams)].step()
        assert not any(stream.queue for stream in cuda.streams)
        assert all(same_bits(plain(into), value) for into, value in zip(targets, values, strict=True))


def test_what_was_queued_before_writes_nothing_over_it(cuda: Cuda) -> None:
    """P2: a kernel of the program that still has to run when the block begins has run before the first copy."""
    live = torch.zeros(100).as_subclass(There)
    for _ in range(50):
        write(live, 7.0)
    with Staging([live.device], live.nbytes, 1) as staging:
        bring(staging, byte_view(live), torch.arange(100.0))
    cuda.current_stream(HERE).synchronize()
    assert same_bits(plain(live), torch.arange(100.0))


def test_a_block_that_fails_ends_when_nothing_is_under_way(cuda: Cuda) -> None:
    """P45: its error comes out, what it had not filled is not sent, and the tensors can be freed."""
    first, second = (torch.zeros(100).as_subclass(There) for _ in range(2))

    def act() -> None:
        with Staging([HERE], 3 * STAGED_BYTES, 1) as staging:
            bring(staging, byte_view(first), torch.ones(100))
            with staging.piece(byte_view(second)) as buffer:
                buffer[:4] = b"\1\1\1\1"
                raise IntegrityError("damaged")

    with pytest.raises(IntegrityError, match="damaged"):
        act()
    assert not any(stream.queue for stream in cuda.streams)
    assert same_bits(plain(first), torch.ones(100))
    assert same_bits(plain(second), torch.zeros(100))


def test_a_device_that_fails_is_told(cuda: Cuda) -> None:
    """P28: an error of the device is a StateError at the end of the block, however many buffers were sent."""
    live = torch.zeros(100).as_subclass(There)

    def act() -> None:
        with Staging([HERE], 3 * STAGED_BYTES, 1) as staging:
            for _ in range(2):
                bring(staging, byte_view(live), torch.ones(100))
            cuda.broken = RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(StateError, match="an illegal memory access"):
        act()
    cuda.broken = None


@pytest.mark.parametrize("code", [0, 304], ids=["pinned", "not pinned"])
def test_large_copies_onto_a_device_are_staged(cuda: Cuda, code: int) -> None:
    """Large tensors in C order go through pinned buffers, others through the driver; all arrive, on two devices."""
    cuda.code = code
    values = [torch.randn(6 << 20), torch.randn(6 << 20), torch.randn(5, 7).t(), torch.randn(1024, 1024).t()]
    into = [torch.zeros(value.shape).as_subclass((There, Elsewhere)[n % 2]) for n, value in enumerate(values)]
    copy_tensors(into, values)
    assert all(same_bits(plain(one), other) for one, other in zip(into, values, strict=True))
    assert [stream.device for stream in cuda.copying] == [HERE, torch.device("cuda", 1)]
    assert [size_bytes for _, size_bytes, _, _ in cuda.registered] == [3 * STAGED_BYTES]


class Model(nn.Module):
    """Tensors of every kind of copy: read straight onto the device, in a window, strided, complex, on the host."""

    def __init__(self, kind: type[torch.Tensor]) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(9 << 20).as_subclass(kind))
        self.small = nn.Parameter(torch.randn(100).as_subclass(kind))
        self.across = nn.Parameter(torch.randn(700, 500).t().as_subclass(kind))
        self.brief = nn.Parameter(torch.randn(1 << 18).to(torch.bfloat16).as_subclass(kind))
        self.register_buffer("turning", torch.randn(1 << 17, dtype=torch.complex128).as_subclass(kind))
        self.register_buffer("empty", torch.empty(0, 3).as_subclass(kind))
        self.register_buffer("here", torch.randn(1 << 17))
        self.register_buffer("number", torch.randn(()).as_subclass(kind))


def trained(kind: type[torch.Tensor], seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"model": Model(kind)}


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: plain(value).clone() for name, value in state["model"].state_dict().items()}


def opened(run_dir: Path, memory: Path | None) -> Checkpointer:
    memory_dir = None if memory is None else str(memory)
    return Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=memory_dir))


@pytest.mark.parametrize("source", ["storage", "memory"])
def test_a_state_on_a_device_is_restored(run_dir: Path, tmp_path: Path, cuda: Cuda, source: str) -> None:
    """P2: bit by bit, from storage and from memory, through pinned buffers where it is large."""
    memory = tmp_path if source == "memory" else None
    saved, state = trained(torch.Tensor, 1), trained(Still, 2)
    with opened(run_dir, memory) as ckpt:
        ckpt.save(1, saved)
        ckpt.restore(state)
        assert ckpt.last_restore is not None
        assert (str(run_dir) not in ckpt.last_restore.source) == (source == "memory")
        found, wanted = tensors(state), tensors(saved)
        assert [name for name in wanted if not same_bits(found[name], wanted[name])] == []
        assert 3 * STAGED_BYTES in [size_bytes for _, size_bytes, _, _ in cuda.registered]


@pytest.mark.parametrize("source", ["storage", "memory"])
def test_a_damaged_checkpoint_changes_nothing_on_a_device(
    run_dir: Path, tmp_path: Path, cuda: Cuda, source: str
) -> None:
    """P4: one bit of one tensor is wrong, and no byte has been sent to the device."""
    memory = tmp_path if source == "memory" else None
    state = trained(Still, 2)
    before = tensors(state)
    with opened(run_dir, memory) as ckpt:
        ckpt.save(1, trained(torch.Tensor, 1))
        for file in tmp_path.rglob("*.safetensors*"):
            if not file.stat().st_size:
                continue  # of memory that is made for the next save
            with file.open("r+b") as data:
                data.seek(file.stat().st_size // 2)
                (byte,) = data.read(1)
                data.seek(-1, 1)
                data.write(bytes([byte ^ 1]))
        with pytest.raises(NoGoodCheckpointError):
            ckpt.restore(state)
    found = tensors(state)
    assert [name for name in before if not same_bits(found[name], before[name])] == []
    assert cuda.registered == []
