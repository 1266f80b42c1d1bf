"""Lightning in several ranks, as jobs whose legs are killed; `strategy` says how they share the model."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric

from ckpt_tasks import CheckpointConfig, ResumableLoader
from ckpt_tasks.integrations.lightning import CkptCallback
from tests.integrations.ranks.launching import IN_A_STEP, SAMPLES, digest, launched, refusing
from tests.support.legs import Leg


class Other(DDPStrategy):
    """A strategy of a user's own."""


class Net(lightning.LightningModule):
    def __init__(self, leg: Leg, size: int, saving: CkptCallback):
        super().__init__()
        self.leg, self.size, self.saving = leg, size, saving
        self.idle = nn.Parameter(torch.ones(3), requires_grad=bool(leg.options.get("manual")))
        self.automatic_optimization = not leg.options.get("manual")
        self.net = nn.Sequential(
            nn.Linear(4, 12), nn.Dropout(0 if leg.options.get("frozen") else 0.5), nn.Linear(12, 3)
        )
        self.mean, self.most, self.all = MeanMetric(), MaxMetric(), CatMetric()

    def metrics(self) -> tuple[Metric, ...]:
        return self.mean, self.most, self.all

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh = self.device_mesh
            assert mesh is not None
            if mesh["tensor_parallel"].size() > 1:
                plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(self.net, mesh["tensor_parallel"], plan)
            if mesh["data_parallel"].size() > 1:
                for one in (self.net[0], self.net[2]):
                    fully_shard(one, mesh=mesh["data_parallel"])
                fully_shard(self.net, mesh=mesh["data_parallel"])

    def train_dataloader(self) -> Any:
        numbered = torch.cat([torch.arange(float(SAMPLES))[:, None], self.leg.options["rows"]], 1)
        if self.leg.options.get("stateful"):
            return StatefulDataLoader(TensorDataset(numbered), batch_size=IN_A_STEP // self.size)
        mesh = getattr(self, "_device_mesh", None)
        of_data = {} if mesh is None else {"mesh": mesh["data_parallel"]}
        ranks = self.size if mesh is None else mesh["data_parallel"].size()
        return ResumableLoader(TensorDataset(numbered), batch_size=IN_A_STEP // ranks, shuffle=True, **of_data)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=3)

    def on_train_start(self) -> None:
        self.leg.record("begin", self.global_step, "")
        self.held("begin state")

    def held(self, what: str) -> None:
        self.leg.record(what, self.global_step, digest(self, self.trainer.optimizers[0]))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        (x,) = batch
        mesh = getattr(self, "_device_mesh", None)
        if mesh is None or mesh["tensor_parallel"].get_local_rank() == 0:  # The others train on the same samples.
            self.leg.record("samples", self.global_step, str(x[:, 0].int().tolist()))
        losses = (self.net(x / SAMPLES) - 1).square().mean(1)
        for metric in self.metrics():
            metric.update(losses.detach())
        loss: torch.Tensor = losses.mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("of all", loss, on_epoch=True, sync_dist=True)
        self.log("most", loss, on_epoch=True, sync_dist=True, reduce_fx="max")
        self.log("sum", losses.sum(), on_epoch=True, sync_dist=True, reduce_fx="sum")
        assert self.saving.ckpt is not None
        self.leg.settle = self.saving.ckpt.wait
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()[0]  # type: ignore[index]
            self.manual_backward(loss)
            optimizer.step()  # The gradients of a step are added to those before.
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.leg.within(self.global_step)

    def on_train_batch_end(self, *_: Any) -> None:
        self.held("state")

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val", self.net(batch[0]).square().mean(), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        for name in ("loss_epoch", "of all", "most", "sum", "val"):
            self.leg.record(name, self.global_step, self.trainer.callback_metrics[name].item())
        for metric, name in zip(self.metrics(), ("mean", "max", "cat"), strict=True):
            self.leg.record(name, self.global_step, metric.compute().double().sum().item())
            metric.reset()

    def on_train_end(self) -> None:
        self.leg.record("idle", self.global_step, str(sum(len(one.state) for one in self.trainer.optimizers[1:])))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), 0 if self.leg.options.get("frozen") else 0.01)
        if not self.automatic_optimization:
            return [optimizer, torch.optim.AdamW([self.idle])]
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])]


def train(leg: Leg, size: int) -> None:
    """Train three epochs."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(7, verbose=False)
    leg.options = {**leg.options, "rows": torch.randn(SAMPLES, 3)}
    of_tensors = {"tp": size, "both": 2}.get(leg.options["strategy"], 1)
    strategies: dict[str, Any] = {"ddp": "ddp", "other": Other()}
    parallel = ModelParallelStrategy(size // of_tensors, of_tensors)
    saving = CkptCallback(
        CheckpointConfig(checkpoint_dir=leg.folder / "run", step_interval=1, memory_dir=leg.folder / "memory")
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=[saving],
        default_root_dir=leg.folder,
        devices=size,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=3,
        strategy=strategies.get(leg.options["strategy"], parallel),
    )
    with refusing(leg):
        trainer.fit(Net(leg, size, saving))
    leg.end(trainer.global_step, [])


def ranks(leg: Leg) -> None:
    """Train in ranks."""
    launched(leg, train)
