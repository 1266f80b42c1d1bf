"""Lightning modules and callbacks that a job trains: each draws, accumulates, averages or fetches in its own way."""

from __future__ import annotations

import random
from typing import Any

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from ckpt_tasks.integrations.lightning import CkptCallback
from tests.support.legs import Leg


class Noisy(TensorDataset):
    """Augments from the global streams."""

    def __getitem__(self, index: Any) -> Any:
        x, y = (tensor[index] for tensor in self.tensors)
        return x + 0.1 * torch.randn(4) + random.random(), y


class Unfreezing(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            module.net[0].requires_grad_(True)


class LateAverage(lightning.Callback):
    """Averages the weights as many a callback of one's own does: it has no state before the training begins."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.average = AveragedModel(module.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        if given := getattr(self, "given", None):
            self.average.load_state_dict(given)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.average.update_parameters(module.net)
        module.leg.record(
            "average", trainer.fit_loop.total_batch_idx, sum(p.sum().item() for p in self.average.parameters())
        )

    def state_dict(self) -> dict[str, Any]:
        return self.average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state


class Net(lightning.LightningModule):
    saving: CkptCallback

    def __init__(self, leg: Leg):
        super().__init__()
        self.leg = leg
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        # In a tuple it is no submodule: it is saved as an object of one's own.
        self.average = (AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9)),)  # type: ignore[no-untyped-call]

        self.metric = torchmetrics.MeanMetric() if leg.options.get("metric") else None

    def on_train_start(self) -> None:
        self.leg.record("begin", self.global_step, "")

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        loss: torch.Tensor = (self.net(x) - y).square().mean() * (1 + random.random())
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(x))
        if self.metric is not None:
            self.metric(loss)
            self.log("mean", self.metric, on_step=False, on_epoch=True)
        self.leg.record("loss", self.trainer.fit_loop.total_batch_idx, loss.item())
        assert self.saving.ckpt is not None
        self.leg.settle = self.saving.ckpt.wait
        self.leg.within(self.global_step)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.average[0].update_parameters(self.net)

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        self.log("val", (self.net(x) - y).square().mean() + torch.rand(()))

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.leg.record("val", self.global_step, self.trainer.callback_metrics["val"].item())

    def on_train_epoch_end(self) -> None:
        self.leg.record("epoch", self.current_epoch, self.trainer.callback_metrics["loss_epoch"].item())
        if self.metric is not None:
            self.leg.record("mean", self.current_epoch, self.trainer.callback_metrics["mean"].item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        if self.leg.options.get("estimates"):
            steps = int(self.trainer.estimated_stepping_batches)  # sets the data up before anything is restored
            schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        if self.leg.options.get("plateau"):
            # No loss is good enough for this threshold: every epoch halves the rate, so that a lost step shows.
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=1.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 36)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Drawing(Net):
    """Draws in every hook that gets a batch."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [tensor + random.random() for tensor in batch]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [tensor + 0.1 * torch.randn(()) for tensor in batch]


class Pairs(Net):
    """Takes a batch of each of two loaders; the shorter one begins again."""

    def training_step(self, batch: Any, n: int) -> torch.Tensor:
        return super().training_step([one + two[: len(one)].mean() for one, two in zip(*batch, strict=True)], n)


class Fetching(Net):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        batch, n, _ = next(dataloader_iter)
        return super().training_step(batch, n)


class Manual(Net):
    """Steps two optimizers by itself: one after each batch, one after every third."""

    def __init__(self, leg: Leg):
        super().__init__(leg)
        self.automatic_optimization = False

    def training_step(self, batch: Any, n: int) -> None:  # type: ignore[override]
        both: Any = self.optimizers()
        often, seldom = both
        often.zero_grad()
        self.manual_backward(super().training_step(batch, n))
        often.step()
        if n % 3 == 2:
            seldom.step()
            seldom.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net[0].parameters(), 0.01), torch.optim.AdamW(self.net[3].parameters(), 0.01)


class Accumulating(Net):
    """Has a zero_grad of its own, that keeps the gradients of two batches."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


MODULES = {"drawing": Drawing, "pairs": Pairs, "fetching": Fetching, "manual": Manual, "accumulating": Accumulating}
