"""A Lightning user's script, as a job whose legs are killed: what it trains is chosen by options."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
import torch
from datasets import Dataset
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_tasks import CheckpointConfig, ResumableLoader
from ckpt_tasks.errors import ConfigError, UnsupportedStateError
from ckpt_tasks.integrations.lightning import CkptCallback
from ckpt_tasks.integrations.lightning_io import CkptCheckpointIO
from tests.integrations.lightning_modules import MODULES, LateAverage, Net, Noisy, Unfreezing
from tests.support.legs import Leg

SAMPLES = 46  # 12 batches of 4, the last one of 2


def loader(kind: str, data: TensorDataset, workers: int) -> Any:
    if kind == "ours":
        return ResumableLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    if kind == "stateful":
        return StatefulDataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    if kind == "pairs":
        return [loader("ours", data, workers), loader("ours", TensorDataset(*data[:22]), workers)]
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
    data = (TensorDataset if kind == "stream" or (kind, options.get("workers")) == ("stateful", 2) else Noisy)(
        x, x.sum(1, keepdim=True)
    )
    config = CheckpointConfig(
        checkpoint_dir=leg.folder / "run",
        step_interval=options.get("interval", 1),
        memory_dir=leg.folder / "memory",
    )
    net = MODULES.get(options.get("module", ""), Net)(leg)
    net.saving = saving = CkptCallback(config, state={"average": net.average[0]})
    callbacks: list[Any] = [saving]
    if options.get("early"):
        callbacks.append(EarlyStopping("val", patience=0, min_delta=0.05))
    if options.get("ema"):
        callbacks.append(EMAWeightAveraging(decay=0.9))
    if options.get("late"):
        callbacks.append(LateAverage())
    if options.get("unfreezing"):
        callbacks.append(Unfreezing())
    if options.get("accumulates"):
        callbacks.append(GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}))
    # The first steps overflow and are skipped; later on the scale grows until some do again.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3) if options.get("scaled") else None
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
        plugins=MixedPrecision("16-mixed", "cpu", scaler) if scaler is not None else None,
        precision=options.get("precision"),
        val_check_interval=options.get("val", 1.0),
    )
    validation = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=23)
    trainer.fit(net, loader(kind, data, options.get("workers", 0)), validation)
    held = trainer.optimizers[0].state  # in the order in which the parameters got their moments
    moments = [v for parameter in net.parameters() if parameter in held for v in held[parameter].values()]
    if scaler is not None:
        leg.record("scale", trainer.global_step, scaler.get_scale())
    leg.end(trainer.global_step, [*net.state_dict().values(), *net.average[0].state_dict().values(), *moments])


class Bare(lightning.LightningModule):
    """Draws nothing: Lightning's own checkpoints have no random streams."""

    def __init__(self, leg: Leg):
        super().__init__()
        self.save_hyperparameters({"width": 8, "betas": (0.9, 0.99)})
        self.leg = leg
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def on_train_start(self) -> None:
        self.leg.record("begin", self.global_step, "")

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        loss: torch.Tensor = (self.net(x) - y).square().mean()
        self.log("loss", loss)
        self.leg.record("loss", self.global_step, loss.item())
        self.leg.within(self.global_step)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test", (self.net(x) - y).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        if self.leg.options.get("estimates"):
            self.trainer.estimated_stepping_batches  # noqa: B018 (it sets the data up before anything is restored)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])]


def seeded_sums() -> TensorDataset:
    """Silence Lightning, seed everything, and return samples whose sums are to be learned."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(7, verbose=False)
    x = torch.randn(SAMPLES, 4)
    return TensorDataset(x, x.sum(1, keepdim=True))


def own(leg: Leg) -> None:
    """Train with Lightning's ModelCheckpoint alone, into our store, and go on by Lightning's `ckpt_path`."""
    data = seeded_sums()
    saving = ModelCheckpoint(
        leg.folder / "own",
        monitor="loss",
        save_top_k=2,
        every_n_train_steps=leg.options.get("every", 1),
        save_last=True,
    )
    io = AsyncCheckpointIO(CkptCheckpointIO()) if leg.options.get("async") else CkptCheckpointIO()
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=[saving],
        default_root_dir=leg.folder,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        log_every_n_steps=1,
        max_epochs=leg.options.get("epochs", 1),
        plugins=[io],
    )
    net = Bare(leg)
    trainer.fit(net, ResumableLoader(data, batch_size=4, shuffle=True), ckpt_path="last")
    held = sorted(path.name for path in (leg.folder / "own").iterdir())
    leg.record("held", len(held), "")
    torch.manual_seed(0)
    moments = [v for held in trainer.optimizers[0].state.values() for v in held.values()]
    leg.end(trainer.global_step, [*net.state_dict().values(), *moments])


class OfMany(Bare):
    """Records what its rank does, and what it is in the end."""

    def record(self, what: str, value: float | str) -> None:
        self.leg.record(f"{what} of rank {self.global_rank}", self.global_step, value)

    def on_train_start(self) -> None:
        if self.global_rank == 0:
            super().on_train_start()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        loss: torch.Tensor = (self.net(x) - y).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.record("loss", loss.item())
        if self.global_rank == 0:
            self.leg.within(self.global_step)
        return loss

    def on_train_end(self) -> None:
        torch.manual_seed(0)
        held = self.trainer.optimizers[0].state.values()
        if self.global_rank == 0:
            self.leg.end(self.global_step, [*self.state_dict().values(), *(v for one in held for v in one.values())])


def ranks(leg: Leg) -> None:
    """Train in two ranks, with Lightning's own checkpoints in our store; the first rank is killed."""
    data = seeded_sums()
    every_step = ModelCheckpoint(leg.folder / "own", monitor="loss", every_n_train_steps=1, save_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=[every_step],
        default_root_dir=leg.folder,
        devices=2,
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
        logger=False,
        max_epochs=2,
        plugins=[CkptCheckpointIO()],
        strategy="ddp_fork",
    )
    loader = ResumableLoader(data, batch_size=4, shuffle=True)
    with leg.ranks_end():
        trainer.fit(OfMany(leg), loader, ckpt_path="last")


def evaluated(leg: Leg) -> None:
    """Train with CkptCallback, and let Lightning's own switches read its run; say what each of them found."""
    data = seeded_sums()
    run = str(leg.folder / "run")
    quiet: Any = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    config = CheckpointConfig(checkpoint_dir=run, step_interval=6, memory_dir=None)
    trainer = lightning.Trainer(max_epochs=1, callbacks=[CkptCallback(config)], enable_checkpointing=False, **quiet)
    net, again = Bare(leg), Bare(leg)
    trainer.fit(net, ResumableLoader(data, batch_size=4, shuffle=True))
    reader = lightning.Trainer(max_epochs=1, plugins=[CkptCheckpointIO()], enable_checkpointing=False, **quiet)
    for which in ("", "@6"):
        (found,) = reader.test(again, DataLoader(data, batch_size=SAMPLES), ckpt_path=run + which, verbose=False)
        leg.record("test", 6 if which else 12, found["test"])
    (live,) = lightning.Trainer(**quiet).test(net, DataLoader(data, batch_size=SAMPLES), verbose=False)
    leg.record("test of the live one", 12, live["test"])
    # Lightning goes on from the run as from a file of its own: loops, schedule and moments by their numbers.
    reader.fit(again, ResumableLoader(data, batch_size=4, shuffle=True), ckpt_path=run)
    leg.record("trained", reader.global_step, "")
    for name, value in reader.optimizers[0].state_dict()["state"].items():
        same = torch.equal(value["exp_avg"], trainer.optimizers[0].state_dict()["state"][name]["exp_avg"])
        leg.record("moments", name, str(same))
    try:
        CkptCheckpointIO().save_checkpoint(
            {"state_dict": {}, "hyper_parameters": {"make": object()}}, leg.folder / "no"
        )
    except UnsupportedStateError as error:
        leg.record("refused", 0, str(error))
    leg.record("left", 0, str([path.name for path in leg.folder.iterdir() if "no" in path.name or path.name[0] == "."]))
    averaging = [CkptCallback(config), StochasticWeightAveraging(0.01)]
    try:
        lightning.Trainer(callbacks=averaging, enable_checkpointing=False, **quiet).fit(again, DataLoader(data))
    except ConfigError as error:
        leg.record("averaging", 0, str(error))
    try:
        CkptCheckpointIO().remove_checkpoint(run)
    except ValueError as error:
        leg.record("kept", 0, str(error))
