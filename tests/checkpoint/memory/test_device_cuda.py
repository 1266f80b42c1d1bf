"""Copies beside training on CUDA devices. Skipped where there is none; the same without one: test_device_copies.py."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.checkpoint.memory.memory import PrivateMemory
from ckpt_tasks.checkpoint.memory.samples import take_samples
from ckpt_tasks.checkpoint.memory.snapshot import Image, ImageSet, plan_snapshot
from ckpt_tasks.state.tensors.device import Devices
from ckpt_tasks.state.tensors.tensors import same_bits
from ckpt_tasks.testing import images_of
from tests.support.devices import is_all

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

KINDS: list[dict[str, Any]] = [{}, {"fused": True}, {"capturable": True}, {"foreach": True}]

SLEEP_CYCLES = 4_000_000_000  # two seconds or more
AT_ONCE_S = 0.5


def sleep() -> None:
    """Keep the current stream busy for some seconds."""
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]


class Mixed(nn.Module):
    """Tensors of many kinds on devices and on the host: large, small, transposed, channels_last, complex, rare."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 2048), nn.BatchNorm1d(2048), nn.ReLU(), nn.Linear(2048, 8))
        self.conv = nn.Conv2d(8, 8, 3)
        self.to(device)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.across = nn.Parameter(torch.randn(300, 500, device=device).t())
        self.brief = nn.Parameter(torch.randn(1000, device=device, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(400, 400, device=device), requires_grad=False)
        self.register_buffer("turning", torch.randn(100, dtype=torch.complex128, device=device))
        self.register_buffer("eighth", torch.randn(100, device=device).to(torch.float8_e4m3fn))
        self.register_buffer("part", torch.randn(40, 40, device=device)[::2, 1::3])
        self.register_buffer("empty", torch.empty(0, 3, device=device))
        self.register_buffer("here", torch.randn(70_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("here").add_(1)
        self.get_buffer("turning").mul_(1.5)
        small = self.conv.weight.square().sum() + self.across.square().sum() + self.brief.float().square().sum()
        loss: torch.Tensor = self.layers(x).square().mean() + small * 1e-3
        return loss


class Training:
    """A mixed model, AdamW, and what they were after every step."""

    def __init__(self, device: str = "cuda", **options: Any) -> None:
        torch.manual_seed(1)
        self.model = Mixed(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **options)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.moments: dict[int, dict[str, torch.Tensor]] = {}

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 512, device=self.model.frozen.device)).backward()
        self.optimizer.step()
        self.moments[step] = self.now()

    def now(self) -> dict[str, torch.Tensor]:
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        for number, kept in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{name}": value.clone() for name, value in kept.items()}
        return found


def checked(run_dir: Path, training: Training) -> list[int]:
    """Compare every checkpoint with its moment; return the steps."""
    run = open_run(str(run_dir))
    for checkpoint in run.checkpoints():
        fresh = Training()
        run.restore(checkpoint, fresh.state)
        found, moment = fresh.now(), training.moments[checkpoint.step]
        assert found.keys() == moment.keys()
        torn = [name for name, value in found.items() if not same_bits(value, moment[name])]
        assert torn == [], checkpoint.step
    return [checkpoint.step for checkpoint in reversed(run.checkpoints())]


def saving(run_dir: Path, **options: Any) -> Checkpointer:
    options = {"step_interval": 1, "max_num_checkpoints": None, "memory_dir": None, **options}
    return Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), **options))


@pytest.mark.parametrize("options", KINDS, ids=lambda o: "-".join(o) or "default")
@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
def test_every_checkpoint_of_a_device_is_the_moment_of_its_step(
    run_dir: Path, options: dict[str, Any], shared: bool
) -> None:
    """P1, P2: copied while the next steps run, parameters, moments and buffers of a checkpoint are of one step."""
    training = Training(**options)
    with saving(run_dir, memory_dir="/dev/shm" if shared else None) as ckpt:
        for step in range(1, 16):
            training.step(step)
            ckpt.step(step, training.state)
        pinned = [
            torch.frombuffer(image.buffer, dtype=torch.uint8).is_pinned()
            for images in images_of(ckpt).values()
            for image in images
            if image.group in ("model", "optimizer")
        ]
        assert pinned
        assert all(pinned)
    steps = checked(run_dir, training)
    assert steps[0] == 1
    assert steps[-1] == 15


def image_of(live: torch.Tensor, devices: Devices) -> Image:
    """Make an image of one tensor, `x`; its memory is pinned until the image is dropped."""
    plan = plan_snapshot({"plain/x": live.detach()})
    (image,) = ImageSet(plan, PrivateMemory().take("a", plan.sizes)).images
    devices.pin(image.buffer, image, plan.devices[image.name])
    return image


def test_the_host_never_waits() -> None:
    """P1: behind a kernel of seconds step() and the optimizer's step return at once, and the copy is of the call."""
    devices, live = Devices(), torch.full((1 << 24,), 3.0, device="cuda", requires_grad=True)
    optimizer, image = torch.optim.SGD([live], lr=1.0), image_of(live, devices)
    live.grad = torch.ones_like(live)
    for again in (False, True):  # what a first copy has to set up may wait for the device
        optimizer.step()
        now = live.detach().clone()
        torch.cuda.synchronize()
        started = time.monotonic()
        sleep()
        copy = devices.start([(image.views["x"], live.detach())])
        optimizer.step()
        assert not again or time.monotonic() - started < AT_ONCE_S
        copy.wait()
        assert same_bits(image.views["x"], now)
    assert is_all(live, -1.0)


def _replayed(live: torch.Tensor) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        live.data.add_(1)
    return graph.replay


WRITES: dict[str, Callable[[torch.Tensor], Callable[[], object]]] = {
    "counted": lambda live: lambda: live.detach().add_(1),
    "by .data": lambda live: lambda: live.data.add_(1),
    "replayed graph": _replayed,
}


@pytest.mark.parametrize("make", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("size", [3, 1 << 22])
def test_a_write_after_the_call_is_not_in_the_copy(
    make: Callable[[torch.Tensor], Callable[[], object]], size: int
) -> None:
    """P1: whatever writes after start(), the copy is of the call."""
    devices, live = Devices(), torch.ones(size, device="cuda", requires_grad=True)
    image, write = image_of(live, devices), make(live)
    now = live.detach().clone()
    sleep()
    copy = devices.start([(image.views["x"], live.detach())])
    write()
    copy.wait()
    assert same_bits(image.views["x"], now)


def _wait(devices: Devices, live: torch.Tensor) -> Callable[[], object]:
    return devices.start([(image_of(live, devices).views["x"], live)]).wait


def _pin(devices: Devices, live: torch.Tensor) -> Callable[[], object]:
    return lambda: image_of(live, devices)


def _unpin(devices: Devices, live: torch.Tensor) -> Callable[[], object]:
    images = [image_of(live, devices)]

    def act() -> None:
        images.clear()
        gc.collect()

    return act


BACKGROUND: dict[str, Callable[[Devices, torch.Tensor], Callable[[], object]]] = {
    "wait": _wait,
    "pin": _pin,
    "unpin": _unpin,
}


@pytest.mark.parametrize("prepare", BACKGROUND.values(), ids=BACKGROUND)
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_graph_can_be_captured_meanwhile(
    prepare: Callable[[Devices, torch.Tensor], Callable[[], object]], mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """P1: what the background does while training captures a CUDA graph works, and so does the graph."""
    live, graph = torch.zeros(1 << 20, device="cuda"), torch.cuda.CUDAGraph()
    act = prepare(Devices(), live.clone())
    with ThreadPoolExecutor(1) as pool:
        with torch.cuda.graph(graph, capture_error_mode=mode):
            live.add_(1)
            pool.submit(act).result()
            live.add_(1)
        graph.replay()
    assert is_all(live, 2.0)
    assert caplog.text == ""


def test_memory_that_cannot_be_pinned_does_not_disturb_training(caplog: pytest.LogCaptureFixture) -> None:
    """A refused registration is said once; the next kernel of this thread is not blamed for it; copies are right."""
    devices, live = Devices(), torch.full((1 << 20,), 5.0, device="cuda")
    image = image_of(live, devices)
    assert torch.frombuffer(image.buffer, dtype=torch.uint8).is_pinned()
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        devices.pin(image.buffer, devices, live.device)  # it is pinned already
    assert "cannot be pinned" in caplog.text
    live.add_(1)
    devices.start([(image.views["x"], live)]).wait()
    assert is_all(image.views["x"], 6.0)


def test_a_kernel_that_fails_fails_the_save(run_dir: Path) -> None:
    """P28: after an illegal access nothing is committed, and a call of ours says so."""
    code = f"""
        import os
        import torch
        from ckpt_tasks import CheckpointConfig, Checkpointer
        from ckpt_tasks.errors import StateError
        ckpt = Checkpointer(CheckpointConfig(checkpoint_dir={str(run_dir)!r}, step_interval=1, memory_dir=None))
        state = {{"x": torch.ones(1 << 20, device="cuda")}}
        ckpt.save(1, state)
        torch.cuda._sleep(1_000_000_000)
        torch.ones(4, device="cuda")[torch.tensor([99], device="cuda")]
        try:
            ckpt.step(2, state)
            ckpt._writer.wait_idle()
            ckpt.step(3, state)
        except StateError as error:
            print("told:", error, flush=True)
        os._exit(0)  # nothing more can be done with this device
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, check=False
    )
    assert "told: the state could not be copied between its device and the host" in done.stdout, done.stderr
    assert [checkpoint.step for checkpoint in open_run(str(run_dir)).checkpoints()] == [1]


def test_samples_are_those_of_the_moment_and_training_does_not_wait() -> None:
    """A sample sees the work queued before it and none after it, and has the digest of the same values on the host."""
    held = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    sleep()
    held.add_(1)
    started_s = time.perf_counter()
    samples = take_samples({"model/w": (held, (0,))}, 5, Devices())
    held.add_(1)
    assert time.perf_counter() - started_s < AT_ONCE_S
    ones = torch.ones(1 << 20)
    assert samples.digests() == take_samples({"model/w": (ones, (0,))}, 5, Devices()).digests()
