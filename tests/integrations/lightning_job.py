"""A Lightning user's script, as a job whose legs are killed: what it trains is chosen by options."""

from __future__ import annotations

import logging
import random
import warnings
from typing import Any

import lightning
import torch
from datasets import Dataset
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_tasks import CheckpointConfig, ResumableLoader
from ckpt_tasks.integrations.lightning import CkptCallback
from tests.support.legs import Leg

SAMPLES = 46  # 12 batches of 4, the last one of 2


class Noisy(TensorDataset):
    """Augments from the global streams."""

    def __getitem__(self, index: Any) -> Any:
        x, y = (tensor[index] for tensor in self.tensors)
        return x + 0.1 * torch.randn(4) + random.random(), y


class Net(lightning.LightningModule):
    saving: CkptCallback

    def __init__(self, leg: Leg):
        super().__init__()
        self.leg = leg
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def on_train_start(self) -> None:
        self.leg.record("begin", self.global_step, "")

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        loss: torch.Tensor = (self.net(x) - y).square().mean() * (1 + random.random())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.leg.record("loss", self.trainer.fit_loop.total_batch_idx, loss.item())
        assert self.saving.ckpt is not None
        self.leg.settle = self.saving.ckpt.wait
        self.leg.within(self.global_step)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        self.log("val", (self.net(x) - y).square().mean() + torch.rand(()))

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.leg.record("val", self.global_step, self.trainer.callback_metrics["val"].item())

    def on_train_epoch_end(self) -> None:
        self.leg.record("epoch", self.current_epoch, self.trainer.callback_metrics["loss_epoch"].item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        if self.leg.options.get("plateau"):
            schedule: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 36)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(kind: str, data: TensorDataset, workers: int) -> Any:
    if kind == "ours":
        return ResumableLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    if kind == "stateful":
        return StatefulDataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    assert kind == "stream"
    rows = Dataset.from_dict({"x": data.tensors[0].tolist(), "y": data.tensors[1].tolist()}).with_format("torch")
    stream = rows.to_iterable_dataset(num_shards=4)  # a shuffle buffer is not in the state of a stream
    return StatefulDataLoader(stream, batch_size=4, num_workers=workers)


def train(leg: Leg) -> None:
    """Train three epochs."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options = leg.options
    lightning.seed_everything(7, verbose=False)
    x = torch.randn(SAMPLES, 4)
    kind = options.get("loader", "ours")
    data = (Noisy if kind == "ours" else TensorDataset)(x, x.sum(1, keepdim=True))
    config = CheckpointConfig(
        checkpoint_dir=leg.folder / "run",
        step_interval=options.get("interval", 1),
        memory_dir=leg.folder / "memory",
    )
    saving = CkptCallback(config)
    callbacks: list[Any] = [saving]
    if options.get("early"):
        callbacks.append(EarlyStopping("val", patience=0, min_delta=0.05))
    if options.get("ema"):
        callbacks.append(EMAWeightAveraging(decay=0.9))
    trainer = lightning.Trainer(
        accelerator="cpu",
        accumulate_grad_batches=options.get("accumulate", 1),
        callbacks=callbacks,
        default_root_dir=leg.folder,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=3,
        precision=options.get("precision", "32-true"),
        val_check_interval=options.get("val", 1.0),
    )
    net = Net(leg)
    validation = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=23)
    net.saving = saving
    trainer.fit(net, loader(kind, data, options.get("workers", 0)), validation)
    moments = [v for held in trainer.optimizers[0].state.values() for v in held.values()]
    leg.end(trainer.global_step, [*net.state_dict().values(), *moments])
