"""Saves of a state on devices: nothing is digested, written, sealed or forgotten before the device is done.

The devices are stood for (devices.py); the files, threads and checkpoints are real.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.errors import StateError
from ckpt_tasks.state.tensors.tensors import same_bits
from ckpt_tasks.testing import images_of, seal, settle
from tests.support.devices import Cuda, Still, stand_for_cuda

SIZE = 1 << 12


class Model(nn.Module):
    """A parameter and a buffer on a device, and a buffer on the host."""

    def __init__(self, kind: type[torch.Tensor], value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((SIZE,), value).as_subclass(kind))
        self.register_buffer("mean", torch.full((3,), value).as_subclass(kind))
        self.register_buffer("count", torch.full((1,), value))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    stand_in = stand_for_cuda(monkeypatch)
    yield stand_in
    stand_in.gate.set()


def opened(run_dir: Path, **options: Any) -> Checkpointer:
    options = {"step_interval": 1, "max_num_checkpoints": None, "memory_dir": None, **options}
    return Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), **options))


def state(value: float, kind: type[torch.Tensor] = Still) -> dict[str, Any]:
    model = Model(kind, value)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)}


def committed(run_dir: Path) -> list[int]:
    """Compare every checkpoint with its step, and return the steps."""
    run = open_run(str(run_dir))
    for checkpoint in run.checkpoints():
        found = state(-1.0, torch.Tensor)
        run.restore(checkpoint, found)
        model = found["model"]
        for tensor in (model.weight.detach(), model.mean, model.count):
            assert same_bits(tensor, torch.full(tensor.shape, float(checkpoint.step)))
    return [checkpoint.step for checkpoint in reversed(run.checkpoints())]


def of_snapshots(run_dir: Path, memory: Path) -> list[str]:
    """Name what there is of snapshots on storage and in memory, images apart: their memory is there from the start."""
    files = [*run_dir.glob("checkpoint_*/*/*"), *memory.rglob("seal.json"), *memory.rglob("index.arrow")]
    return sorted(path.name for path in files)


def test_nobody_reads_an_image_before_its_device_is_done(run_dir: Path, tmp_path: Path, cuda: Cuda) -> None:
    """P1: step() returns at once; until the event has come there is no object, no seal, and then all of it."""
    memory = tmp_path / "memory"
    memory.mkdir()
    with opened(run_dir, memory_dir=str(memory)) as ckpt:
        cuda.gate.clear()
        live = state(1.0)
        ckpt.step(1, live)
        assert threading.current_thread() not in cuda.waited
        sealing = threading.Thread(target=seal, args=(ckpt,))
        sealing.start()
        sealing.join(0.3)
        assert sealing.is_alive()
        assert of_snapshots(run_dir, memory) == []
        assert threading.current_thread() not in cuda.waited
        cuda.gate.set()
        ckpt.wait()
        assert "manifest.json" in of_snapshots(run_dir, memory)
        assert "seal.json" in of_snapshots(run_dir, memory)
    assert committed(run_dir) == [1]


def test_a_device_that_fails_fails_the_save(run_dir: Path, tmp_path: Path, cuda: Cuda) -> None:
    """P28: an error at the event is raised, once, by the next step, with nothing sealed; a later save is good."""
    memory = tmp_path / "memory"
    memory.mkdir()
    with opened(run_dir, memory_dir=str(memory), on_flush_failure="warn") as ckpt:
        ckpt.save(1, state(1.0))
        sealed = {path: path.read_bytes() for path in memory.rglob("seal.json")}
        cuda.broken = RuntimeError("CUDA error: an illegal memory access was encountered")
        ckpt.step(2, state(2.0))
        settle(ckpt)
        assert {path: path.read_bytes() for path in memory.rglob("seal.json")} == sealed
        cuda.broken = None
        with pytest.raises(StateError, match="an illegal memory access"):
            ckpt.step(3, state(3.0))
        ckpt.step(4, state(4.0))
    assert committed(run_dir) == [1, 4]


def test_a_slot_is_not_filled_while_its_device_is_writing(run_dir: Path, cuda: Cuda) -> None:
    """P44: with the event far behind, a third snapshot waits for the first one's slot, and each has its own values."""
    with opened(run_dir) as ckpt:
        cuda.gate.clear()
        ckpt.step(1, state(1.0))
        threading.Timer(0.3, cuda.gate.set).start()
        ckpt.step(2, state(2.0))
        assert cuda.gate.is_set()
        ckpt.step(3, state(3.0))
    assert committed(run_dir)[-1] == 3


def test_memory_is_pinned_once_for_many_saves(run_dir: Path, cuda: Cuda) -> None:
    """P1, P2, P45: two slots are pinned at their first use and let go at the end; every checkpoint is of its step."""
    with opened(run_dir) as ckpt:
        for step in range(1, 12):
            ckpt.step(step, state(float(step)))
            ckpt.wait()
        names = [image.name.partition("-")[0] for images in images_of(ckpt).values() for image in images]
        assert sorted(names) == ["model", "model", "rng", "rng"]
        assert len(cuda.registered) == len(cuda.pinned) == 2
    gc.collect()
    assert (cuda.pinned, cuda.faults) == ({}, [])
    assert committed(run_dir) == [*range(1, 12)]


def test_a_state_that_moves_to_a_device_is_planned_again(run_dir: Path, cuda: Cuda) -> None:
    """P2: the same structure on another device is another plan: its images are pinned, and the old ones let go."""
    with opened(run_dir) as ckpt:
        ckpt.save(1, state(1.0, torch.Tensor))
        assert cuda.registered == []
        ckpt.save(2, state(2.0))
        assert len(cuda.pinned) > 0
        ckpt.save(3, state(3.0, torch.Tensor))
        gc.collect()
        assert (cuda.pinned, cuda.faults) == ({}, [])
    assert committed(run_dir) == [1, 2, 3]


def test_saves_without_pinned_memory_are_as_good(run_dir: Path, cuda: Cuda, caplog: pytest.LogCaptureFixture) -> None:
    """Where memory cannot be pinned there is one warning for all slots and saves, and every checkpoint is right."""
    cuda.code = 304
    with caplog.at_level(logging.WARNING, "ckpt_tasks"), opened(run_dir) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(float(step)))
    (record,) = caplog.records
    assert "cannot be pinned (cudaHostRegister: error 304)" in record.message
    assert "training waits for a save" in record.message
    gc.collect()
    assert (cuda.pinned, cuda.faults) == ({}, [])  # nothing is unregistered that was not registered
    assert committed(run_dir) == [1, 2, 3]
