"""What tests of overlapped copies share: a small training, snapshots of it, and places that hold a copy back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt_tasks.state.capture import capture
from ckpt_tasks.state.overlap import OverlappedCopy
from ckpt_tasks.state.tensors import same_bits

Pair = tuple[torch.Tensor, torch.Tensor]
WEIGHT, MOMENT = "model/layers.0.weight", "optimizer/model/layers.0.weight/exp_avg"


class Gate(torch.Tensor):
    """A place in an image: the thread that copies into it goes on when it is `opened`, or raises what is `broken`."""

    opened: threading.Event
    reached: threading.Event
    broken: BaseException | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        gate = args[0] if args else None
        if func.__name__ in ("__getitem__", "copy_") and isinstance(gate, Gate) and hasattr(gate, "opened"):
            gate.reached.set()
            assert gate.opened.wait(60)
            if gate.broken is not None:
                raise gate.broken
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def gate_for(live: torch.Tensor) -> Gate:
    """Make a gate; `live` must be large and transposed, so that torch copies it and takes it by itself."""
    gate = torch.zeros(live.shape).as_subclass(Gate)
    gate.opened, gate.reached, gate.broken = threading.Event(), threading.Event(), None
    return gate


def across() -> nn.Parameter:
    """Make a large transposed parameter."""
    return nn.Parameter(torch.randn(250, 100).t())


class Model(nn.Module):
    """Parameters: large, small, transposed and frozen; buffers, which its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.across = across()
        self.frozen = nn.Parameter(torch.randn(200, 200), requires_grad=False)
        self.layers = nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200), nn.Linear(200, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().sum() + self.across.square().sum()
        return loss


class Training:
    """A model that has taken one step with its optimizer."""

    def __init__(self, make: Callable[[Any], Optimizer] = torch.optim.AdamW) -> None:
        self.model = Model()
        self.optimizer = make(self.model.parameters())
        self.step()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 200)).backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        return capture({"model": self.model, "optimizer": self.optimizer}).tensors


class Snapshot:
    """An overlapped copy of a training that has begun; where `held`, it goes no further than its first late tensor."""

    def __init__(self, training: Training, *, held: bool = False, at_once: Sequence[str] = ()) -> None:
        live = training.tensors()
        self.now = {name: tensor.clone() for name, tensor in live.items()}
        self.places = {name: torch.full_like(tensor, 7).contiguous() for name, tensor in live.items()}
        self.names = [*live]
        pairs = [(self.places[name], tensor) for name, tensor in live.items()]
        self.gate = gate_for(live["model/across"])
        if held:
            pairs.insert(0, (self.gate, live["model/across"]))
            self.names.insert(0, "gate")
        numbers = {number for number, name in enumerate(self.names) if name in at_once}
        self.copy = OverlappedCopy(pairs, [training.optimizer], at_once=numbers)
        self.copy.start()
        if held:
            assert self.gate.reached.wait(60)

    @property
    def moved(self) -> set[str]:
        return {self.names[number] for number in self.copy.moved} - {"gate"}

    def is_the_moment(self) -> bool:
        return all(same_bits(self.places[name], tensor) for name, tensor in self.now.items())

    def open_later(self) -> None:
        threading.Timer(0.2, self.gate.opened.set).start()


def copying_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ckpt-overlap")]


class ByData(Optimizer):
    """An optimizer that writes through .data, which no version counter sees."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad)
                    self.state[parameter].setdefault("sum", torch.zeros_like(parameter)).data.add_(parameter.grad)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "one by one": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": torch.optim.Adagrad,
    "by .data": ByData,
}


def weight_of(training: Training) -> nn.Parameter:
    weight = training.model.layers[0].weight
    assert isinstance(weight, nn.Parameter)
    return weight


@torch.no_grad()
def write_in_place(training: Training) -> None:
    weight_of(training).add_(1)
