"""Lightning: a run that is started again with other arguments says what differs, and trains no sample in silence."""

from __future__ import annotations

import logging
import warnings
from contextlib import suppress
from itertools import chain, product
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_tasks import CheckpointConfig, ResumableLoader, open_run
from ckpt_tasks.integrations.lightning import CkptCallback
from ckpt_tasks.integrations.lightning_io import CkptCheckpointIO

SAMPLES = 24
QUIET: dict[str, Any] = dict.fromkeys(
    ("enable_checkpointing", "enable_model_summary", "enable_progress_bar", "logger"), False
)


class Stop(Exception):  # noqa: N818 (no error)
    """Ends a training as a kill does, after a step."""


class Ids(lightning.LightningModule):
    """Keeps the samples of every batch; leaves at a step."""

    def __init__(self, stop: int | None, kind: str):
        super().__init__()
        self.stop, self.kind = stop, kind
        self.seen: list[list[int]] = []
        self.ends: list[int] = []  # batches before the ends of optimizer steps
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, _: int) -> Any:
        if self.global_step == self.stop:
            raise Stop
        self.seen.append(batch[0].flatten().int().tolist())
        return self.net(batch[0]).sum()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.ends.append(len(self.seen))

    def on_train_epoch_end(self) -> None:
        self.seen.append([])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.001)
        return [optimizer], [getattr(torch.optim.lr_scheduler, self.kind)(optimizer, 0.5)]


def fit(
    folder: Path,
    stop: int | None,
    batch_size: int = 4,
    accumulate: int = 1,
    *,
    loader: Any = ResumableLoader,
    data: torch.Tensor | None = None,
    epochs: int = 2,
    kind: str = "ConstantLR",
    seed: int = 1,
) -> Ids:
    """Train epochs of 24 samples with Lightning from the run in `folder`, up to a step."""
    lightning.seed_everything(seed, verbose=False)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    net = Ids(stop, kind)
    trainer = lightning.Trainer(
        accelerator="cpu",
        accumulate_grad_batches=accumulate,
        callbacks=[CkptCallback(CheckpointConfig(checkpoint_dir=folder / "run", step_interval=1, memory_dir=None))],
        **QUIET,
        max_epochs=epochs,
    )
    rows = torch.arange(24.0)[:, None] if data is None else data
    with suppress(Stop), warnings.catch_warnings(action="ignore"):  # Lightning's own
        trainer.fit(net, loader(TensorDataset(rows), batch_size=batch_size, shuffle=True))
    return net


class Reloading(Ids):
    """Has other data in each epoch in which Lightning asks for its loader."""

    def train_dataloader(self) -> Any:
        rows = torch.arange(6.0)[:, None] + 100 * self.current_epoch
        return ResumableLoader(TensorDataset(rows), batch_size=2, shuffle=True)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("stop", [1, 4, 6, 8, 10])
def test_lightning_reloads_its_loaders_in_the_same_epochs(every: int, stop: int, tmp_path: Path) -> None:
    """With `reload_dataloaders_every_n_epochs` every epoch of 3 steps has the same data as without a stop."""

    def train(name: str, stop: int | None) -> list[int]:
        lightning.seed_everything(1, verbose=False)
        config = CheckpointConfig(checkpoint_dir=tmp_path / name, step_interval=1, memory_dir=None)
        trainer = lightning.Trainer(
            accelerator="cpu",
            callbacks=[CkptCallback(config)],
            **QUIET,
            max_epochs=5,
            reload_dataloaders_every_n_epochs=every,
        )
        with suppress(Stop), warnings.catch_warnings(action="ignore"):
            trainer.fit(net := Reloading(stop, "ConstantLR"))
        return [*chain.from_iterable(net.seen)]

    assert train("killed", stop) + train("killed", None) == train("whole", None)


# Batch size and accumulation of the first start and of the second one.
SIZES = [((4, 1), (8, 1)), ((8, 1), (4, 2)), ((2, 3), (2, 2))]
ALL_SIZES = product(product((2, 3, 8), (1, 2, 3)), repeat=2)


@pytest.mark.parametrize(
    ("was", "now"),
    [*SIZES, *(pytest.param(*one, marks=pytest.mark.slow) for one in ALL_SIZES)],
    ids=lambda one: f"{one[0]}x{one[1]}",
)
def test_lightning_goes_on_behind_the_samples_that_it_has_trained(
    was: tuple[int, int], now: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With another batch size or accumulation every sample of an epoch is trained once, up to the last optimizer step.

    Only a step with another number of samples is told, and a step that takes fewer batches.
    """
    whole = [*chain.from_iterable(fit(tmp_path / "whole", None).seen)]
    before = fit(tmp_path, 2 if was[0] * was[1] < 12 else 1, *was)
    trained = before.seen[: before.ends[-1]]
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        after = fit(tmp_path, None, *now)
    assert [*chain.from_iterable(trained + after.seen)] == whole
    assert after.ends[-1] == len(after.seen) - 1
    done = sum(map(len, trained)) % SAMPLES
    batches = -(-SAMPLES // now[0]) - -(-(SAMPLES - done) // now[0])
    fewer = was != now and batches % now[1] > 0
    assert len(caplog.messages) == (was[0] * was[1] != now[0] * now[1] or fewer)
    assert [f"takes {now[1] - batches % now[1]} in place of {now[1]}" in message for message in caplog.messages] == [
        fewer
    ] * len(caplog.messages)
    another = was[0] * was[1] != now[0] * now[1]
    assert ["OneCycleLR keeps its length" in message for message in caplog.messages] == [another] * len(caplog.messages)


CHANGE: dict[str, Any] = {
    "epochs": 3,
    "kind": "LinearLR",
    "seed": 2,
    "data": -torch.arange(24.0)[:, None],
    "batch_size": 6,
}
SAYS = [
    "data: ['24 samples (",
    "lr_schedulers: ['ConstantLR'] → ['LinearLR']. A new one continues",
    "max_epochs: 2 → 3. OneCycleLR keeps",
    "samples in a step: 4 → 6. The epoch continues behind the samples trained. OneCycleLR keeps its length, and ends",
    "seed: '1' → '2'. The run's random streams are restored.",
]


def test_what_differs_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each changed argument is one line of one warning: what it was, what it is, what that does; no other is."""
    fit(tmp_path, 3)
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        fit(tmp_path, 4)
        assert caplog.messages == []
        fit(tmp_path, 5, **CHANGE)
    blocks = [message.splitlines() for message in caplog.messages]  # one of settings, one of data
    lines = sorted(line.strip() for block in blocks for line in block if line.startswith("  "))
    assert len(blocks) == 2
    assert len(lines) == len(SAYS), lines
    assert all(line.startswith(says) for line, says in zip(lines, SAYS, strict=True)), lines


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loader_that_counts_batches_is_told_with_its_samples(
    accumulate: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The position of a StatefulDataLoader is a number of batches: with another size samples come twice, as is said.

    A schedule ends elsewhere only where a step has another number of samples.
    """
    fit(tmp_path, 3, loader=StatefulDataLoader)
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        fit(tmp_path, None, 2, accumulate, loader=StatefulDataLoader)
    (block,) = caplog.messages
    assert "The run has trained 3 batches of the epoch, and its loader continues after as many of the present" in block
    assert ("OneCycleLR keeps its length, and may raise" in block) == (accumulate == 1)


def test_an_ended_run_trains_on_with_the_next_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that has ended and is given more epochs trains their samples, or a warning says that it may not.

    Without more, as a second fold in its directory, no batch is trained, and a warning says so.
    """
    whole = fit(tmp_path / "whole", None, epochs=4).seen
    first = fit(tmp_path, None).seen
    with caplog.at_level(logging.INFO, "ckpt_tasks"):
        assert fit(tmp_path, None).seen == []
    (warned,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "Nothing was left to train: the run in" in warned
    assert "Resumed from step 12 of" in caplog.text
    assert first + fit(tmp_path, None, epochs=4).seen == whole
    assert "may repeat its first epochs" not in caplog.text
    for epochs in (2, 2, 3):
        assert "may repeat its first epochs" not in caplog.text
        fit(tmp_path / "others", None, loader=StatefulDataLoader, epochs=epochs)
    assert "StatefulDataLoader may repeat its first epochs" in caplog.text


class Validated(Ids):
    """Validates, and may be stopped there as by a kill."""

    def validation_step(self, batch: Any, _: int) -> None:
        if self.stop is not None and self.global_step >= -self.stop:
            raise Stop
        self.log("val_loss", self.net(batch[0]).square().mean())


def validated(folder: Path, stop: int | None = None, epochs: int = 2) -> lightning.Trainer:
    """Train epochs of six steps, each with a validation; a save is due at every fourth step."""
    lightning.seed_everything(1, verbose=False)
    data = TensorDataset(torch.arange(float(SAMPLES))[:, None])
    config = CheckpointConfig(checkpoint_dir=folder / "run", step_interval=4, memory_dir=folder)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=epochs, callbacks=[CkptCallback(config)], **QUIET)
    with suppress(Stop), warnings.catch_warnings(action="ignore"):  # Lightning's own
        trainer.fit(Validated(stop, "ConstantLR"), ResumableLoader(data, batch_size=4), DataLoader(data, batch_size=8))
    return trainer


def test_an_ended_run_has_the_metrics_with_which_it_ended(tmp_path: Path) -> None:
    """Started again, it trains nothing, and who reads its metrics finds them; an added epoch goes on with them."""
    ended = validated(tmp_path).callback_metrics
    assert "val_loss" in ended
    assert validated(tmp_path).callback_metrics == ended
    validated(tmp_path, epochs=3)
    before = {one.step: one.metrics.get("val_loss") for one in open_run(tmp_path / "run").checkpoints()}
    assert before[16] == before[12] == pytest.approx(float(ended["val_loss"]))


def test_a_step_is_counted_before_its_validation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Killed in the validation after step 6, two steps after the save of step 4 are trained again."""
    validated(tmp_path, stop=-1)
    caplog.clear()
    with caplog.at_level(logging.INFO, "ckpt_tasks"):
        validated(tmp_path)
    assert "Resumed from step 4" in caplog.text
    assert "the 2 steps after it are trained again" in caplog.text


def test_a_checkpoint_of_lightnings_own_is_a_file_by_its_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """ModelCheckpoint's saves through CkptCheckpointIO tell of no training that begins, and have their path's name."""
    io = CkptCheckpointIO()
    with caplog.at_level(logging.INFO):
        for step in (8, 9):
            io.save_checkpoint({"global_step": step, "state_dict": {"w": torch.ones(2)}}, tmp_path / "epoch=0.ckpt")
    assert [one.getMessage() for one in caplog.records if one.name == "ckpt_tasks.told"] == []
    run = open_run(tmp_path / "epoch=0.ckpt")
    assert (run.run_key, run.find("latest").step) == ("epoch-0.ckpt", 9)


class Forgetful(Ids):
    """Trains what is in no module, or draws from a generator of its script."""

    generator = torch.Generator()

    def __init__(self, forgets: str):
        super().__init__(None, "ConstantLR")
        self.forgets, self.hidden = forgets, [torch.nn.Linear(1, 1)]

    def training_step(self, batch: Any, index: int) -> Any:
        if self.forgets == "generator":
            torch.rand(1, generator=self.generator)
        return super().training_step(batch, index) + self.hidden[0](batch[0]).sum()

    def configure_optimizers(self) -> Any:
        more = self.hidden[0].parameters() if self.forgets == "parameters" else ()
        optimizer = torch.optim.SGD([*self.parameters(), *more], 0.001)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@pytest.mark.parametrize(
    ("forgets", "says"),
    [("", ""), ("parameters", "2 parameters that are not in the state"), ("generator", "noise (Generator) is not in")],
)
def test_what_a_state_forgets_is_told_under_lightning(
    forgets: str, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checks of a plain loop are made; an average, schedules and a validation of Lightning's are none of them."""
    noise = Forgetful.generator = torch.Generator()
    config = CheckpointConfig(checkpoint_dir=tmp_path / "run", step_interval=1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=[CkptCallback(config), EMAWeightAveraging()],
        **QUIET,
        max_epochs=1,
    )
    rows = TensorDataset(torch.arange(24.0)[:, None])
    with warnings.catch_warnings(action="ignore"), caplog.at_level(logging.WARNING, "ckpt_tasks"):
        trainer.fit(Forgetful(forgets), ResumableLoader(rows, 4, shuffle=True))
    assert len(caplog.messages) == bool(says)
    assert says in "".join(caplog.messages)
    assert noise is Forgetful.generator
