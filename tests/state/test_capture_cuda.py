"""CUDA: streams, moments and values come back on the device that they were on. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tasks import CheckpointConfig, Checkpointer
from ckpt_tasks.errors import StateMismatchError
from ckpt_tasks.state.tensors.tensors import same_bits
from tests.support.roundtrip import Saved, assert_same, restore, save

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

KINDS: list[dict[str, Any]] = [{}, {"fused": True}, {"capturable": True}, {"foreach": True}]


def build(device: str = "cuda", seed: int = 0, **options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1)).to(device)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), **options)}


def train(state: dict[str, Any], steps: int) -> None:
    device = next(state["model"].parameters()).device
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.randn(8, 4, device=device)).sum().backward()
        state["optimizer"].step()


def on_host(saved: Saved) -> Saved:
    return Saved(saved.manifest, {key: t.cpu() for key, t in saved.tensors.items()})


@pytest.mark.parametrize("options", KINDS, ids=lambda o: "-".join(o) or "default")
@pytest.mark.parametrize("dirty", [False, True])
def test_training_on_a_device_goes_on_bit_by_bit(options: dict[str, Any], dirty: bool) -> None:
    """P17, P74: model, moments and streams of the device; every entry of the state is where it was."""
    state, fresh = build(**options), build(seed=1, **options)
    train(state, 3)
    saved = on_host(save(state))
    train(state, 3)
    if dirty:
        train(fresh, 2)
    restore(saved, fresh)
    train(fresh, 3)
    for group in state:
        assert_same(dict(state[group].state_dict()), dict(fresh[group].state_dict()), group)
    for one, other in zip(state["model"].parameters(), fresh["model"].parameters(), strict=True):
        places = [
            {key: value.device for key, value in s["optimizer"].state[p].items()}
            for s, p in ((state, one), (fresh, other))
        ]
        assert places[0] == places[1]


@pytest.mark.parametrize(("source", "target"), [("cpu", "cuda"), ("cuda", "cpu")])
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=lambda o: "-".join(o) or "default")
def test_a_state_moves_to_another_device(source: str, target: str, options: dict[str, Any]) -> None:
    """P57: saved on one device and restored on the other, moments follow their parameters, and training goes on."""
    state, fresh = build(source, **options), build(target, seed=1, **options)
    train(state, 2)
    restore(on_host(save(state)), fresh)
    for one, other in zip(state["model"].parameters(), fresh["model"].parameters(), strict=True):
        assert_same(one.detach().cpu(), other.detach().cpu())
        entry = fresh["optimizer"].state[other]
        assert entry["exp_avg"].device == other.device
        assert entry["step"].device == (other.device if options else torch.device("cpu"))
    train(fresh, 1)


def test_the_streams_of_the_device_go_on() -> None:
    """P11, P74: the device's stream and a generator of the user's give the next numbers; a capture draws none."""
    torch.rand(3, device="cuda")
    generator = torch.Generator("cuda").manual_seed(5)
    torch.rand(3, device="cuda", generator=generator)
    saved = on_host(save({"generator": generator}))
    assert "rng/cuda:0" in saved.stored
    assert_same(on_host(save({"generator": generator})).tensors, saved.tensors)

    def draw() -> list[float]:
        drawn = torch.randn(4, device="cuda", generator=generator)
        return [*torch.rand(4, device="cuda").tolist(), *drawn.tolist()]

    expected = draw()
    restore(saved, {"generator": generator})
    assert draw() == expected
    with pytest.raises(StateMismatchError, match=r"torch\.Generator on cpu here, torch\.Generator on cuda"):
        restore(saved, {"generator": torch.Generator()})


def test_values_come_back_on_the_device_of_the_present_ones() -> None:
    """P57: a tensor in a plain value goes where its counterpart is, else to the CPU; top-level ones stay in place."""
    value = {"there": torch.ones(2, device="cuda"), "new": torch.ones(2, device="cuda")}
    saved = on_host(save({"it": value, "t": torch.ones(3, device="cuda")}))
    held = torch.zeros(3, device="cuda")
    state: dict[str, Any] = {"it": {"there": torch.zeros(5, device="cuda")}, "t": held}
    restore(saved, state)
    assert [state["it"][name].device.type for name in ("there", "new")] == ["cuda", "cpu"]
    assert held.tolist() == [1.0, 1.0, 1.0]


def test_a_grad_scaler_on_a_device_goes_on() -> None:
    """P16: scale and growth tracker are tensors on the device."""
    scaler, fresh = (torch.amp.GradScaler("cuda", init_scale=64.0, growth_interval=2) for _ in range(2))
    scaler.scale(torch.ones(1, device="cuda"))
    scaler.load_state_dict({**scaler.state_dict(), "scale": 32.0, "_growth_tracker": 1})
    restore(on_host(save({"scaler": scaler})), {"scaler": fresh})
    fresh.scale(torch.ones(1, device="cuda"))
    assert fresh.state_dict() == scaler.state_dict()


def large(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    conv = nn.Conv2d(8, 8, 3)
    conv.weight.data = conv.weight.data.to(memory_format=torch.channels_last)
    model = nn.Sequential(nn.Linear(2048, 4096), conv).cuda()
    model.register_buffer("turning", torch.randn(1 << 18, dtype=torch.complex128, device="cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = dict(state["model"].state_dict())
    for number, kept in state["optimizer"].state_dict()["state"].items():
        found |= {f"{number}.{name}": value for name, value in kept.items()}
    return {name: value.clone() for name, value in found.items()}


@pytest.mark.parametrize("memory", [False, True], ids=["storage", "memory"])
@pytest.mark.parametrize("stream", [False, True], ids=["default stream", "a stream of the program's"])
def test_a_state_on_a_device_is_restored(run_dir: Path, tmp_path: Path, memory: bool, stream: bool) -> None:
    """P2: bit by bit, though kernels of the program that write the same tensors are still queued."""
    memory_dir = str(tmp_path) if memory else None
    with (
        Checkpointer(CheckpointConfig(checkpoint_dir=str(run_dir), memory_dir=memory_dir)) as ckpt,
        torch.cuda.stream(torch.cuda.Stream() if stream else torch.cuda.default_stream()),  # type: ignore[no-untyped-call]
    ):
        saved, state = large(1), large(2)
        wanted = tensors(saved)
        ckpt.save(1, saved)
        torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
        for parameter in state["model"].parameters():
            parameter.data.fill_(7.0)
        ckpt.restore(state)
        assert ckpt.last_restore is not None
        assert (str(run_dir) not in ckpt.last_restore.source) == memory
        found = tensors(state)
        assert [name for name in wanted if not same_bits(found[name], wanted[name])] == []
