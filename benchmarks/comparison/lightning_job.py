"""Lightning with its own ModelCheckpoint, and `ckpt_path="last"`."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from benchmarks.comparison.shared import DIRECTORY, EVERY, STEPS, Steps, optimizer_of, prepare, shuffled


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.data = prepare()

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss: Tensor = self.net(*batch)["loss"]
        return loss

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.net)


class Saying(Callback):
    """Comes first: what is timed from one batch's start to the next has the save in it."""

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.said = Steps(trainer.global_step)
        self.begun = trainer.global_step

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step > self.said.done:
            self.said.step()

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.global_step > self.said.done:
            self.said.step()


warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
module, saying = Module(), Saying()
saving = ModelCheckpoint(DIRECTORY, monitor="step", mode="max", save_top_k=3, save_last=True, every_n_train_steps=EVERY)
trainer = lightning.Trainer(
    max_steps=STEPS,
    callbacks=[saying, saving],
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=DIRECTORY,
)
trainer.fit(module, shuffled(module.data), ckpt_path="last")
saying.said.end(module.net)
