"""What we cost a step in the loop of a framework, while nothing is saved: processor time of the main thread.

The plain script and the one with our lines take turns, each in a new process. The model is tiny, so that what is ours
stands out of the framework's own work; the figure is in microseconds a step, whatever the model is.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.apart import Report, answer, collect, summary
from benchmarks.peers import OURS
from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableLoader

__all__ = ["measure"]

_WIDTH, _BATCH, _FIRST = 16, 16, 100
_PLAIN = "the plain script"
_Marked = Callable[[torch.Tensor], torch.Tensor]  # computes the loss of a batch, and notes when


def measure(directory: Path, *, tiny: bool, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Time a thousand steps of each framework `rounds` times; `ratios` has the microseconds that a step takes more."""
    contenders = [f"{name}, {way}" for name in _LOOPS for way in (OURS, _PLAIN)]
    reports, _ = collect("benchmarks.hooks", contenders, directory, tiny=tiny, rounds=rounds, device=device)
    found: dict[str, Any] = {"size_bytes": 0, "rounds": rounds, "device": device, "rows": {}, "ratios": {}}
    for name in _LOOPS:
        times = {way: reports[f"{name}, {way}"]["step"] for way in (OURS, _PLAIN)}
        found["rows"][f"{name}: a step without a save"] = {way: summary(seconds) for way, seconds in times.items()}
        more_s = median(times[OURS]) - median(times[_PLAIN])
        found["ratios"][f"{name}: microseconds of processor time that a step takes more"] = 1e6 * more_s
    return found


def _measure(name: str, directory: Path, tiny: bool, device: str) -> Report:
    framework, way = name.split(", ")
    torch.set_num_threads(1)
    net, marks = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH)), list[float]()

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        marks.append(time.thread_time())
        loss: torch.Tensor = net(batch).square().mean()
        return loss

    config = CheckpointConfig(checkpoint_dir=directory / "run", step_interval=10**9) if way == OURS else None
    _LOOPS[framework](net, loss_of, 2 * _FIRST if tiny else 10 * _FIRST, config)
    return {"step": [median(end - begin for begin, end in itertools.pairwise(marks[_FIRST:]))]}


def _loader(kind: Any) -> Any:
    return kind(TensorDataset(torch.randn(64 * _BATCH, _WIDTH)), batch_size=_BATCH, shuffle=True)


def _lightning(net: nn.Module, loss_of: _Marked, steps: int, config: CheckpointConfig | None) -> None:
    lightning: Any = import_module("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = loss_of(batch[0])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    if config is None:  # What ours stands in for: Lightning's cost of any callback is not ours.
        callback = lightning.pytorch.callbacks.ModelCheckpoint(tempfile.gettempdir(), every_n_train_steps=10**9)
    else:
        off["enable_checkpointing"] = False
        callback = import_module("ckpt_tasks.integrations.lightning").CkptCallback(config)
    trainer = lightning.Trainer(max_steps=steps, max_epochs=-1, accelerator="cpu", callbacks=[callback], **off)
    trainer.fit(Module(), _loader(DataLoader if config is None else ResumableLoader))


def _trainer(net: nn.Module, loss_of: _Marked, steps: int, config: CheckpointConfig | None) -> None:
    transformers: Any = import_module("transformers")
    ours: Any = import_module("ckpt_tasks.integrations.huggingface").CkptTrainer

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": loss_of(x)}

    args = transformers.TrainingArguments(
        tempfile.gettempdir(),  # Nothing is written there.
        max_steps=steps,
        per_device_train_batch_size=_BATCH,
        save_strategy="no",
        logging_steps=steps,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [{"x": row} for row in torch.randn(64 * _BATCH, _WIDTH)]
    kind: Any = transformers.Trainer if config is None else ours
    extra: dict[str, Any] = {} if config is None else {"checkpoint": config}
    kind(model=Model(), args=args, train_dataset=rows, **extra).train()


def _accelerate(net: nn.Module, loss_of: _Marked, steps: int, config: CheckpointConfig | None) -> None:
    accelerator: Any = import_module("accelerate").Accelerator(cpu=True)
    _, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))

    state_of: Any = import_module("ckpt_tasks.integrations.huggingface").state_of
    loader = accelerator.prepare(_loader(DataLoader)) if config is None else _loader(ResumableLoader)
    state = {} if config is None else {**state_of(accelerator), "data": loader}
    with nullcontext() if config is None else Checkpointer(config) as ckpt:
        if ckpt is not None:
            ckpt.restore(state)
        batches = itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps)
        for step, (batch,) in enumerate(batches, 1):
            accelerator.backward(loss_of(batch))
            optimizer.step()
            optimizer.zero_grad()
            if ckpt is not None:
                ckpt.step(step, state)


_LOOPS = {"Lightning": _lightning, "Trainer": _trainer, "accelerate": _accelerate}


if __name__ == "__main__":
    answer(_measure)
