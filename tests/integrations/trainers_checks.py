"""What a Trainer's class keeps in files of its own, and what a state forgets under a Trainer."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from ckpt_tasks import CheckpointConfig
from ckpt_tasks.integrations.huggingface import CkptMixin, CkptTrainer
from tests.integrations.libraries_checks import Recording, check_stops, tokenizer, trained


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Return the arguments of eight steps of two samples."""
    return TrainingArguments(
        str(folder / "out"), max_steps=8, per_device_train_batch_size=2, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=True, remove_unused_columns=False, **options,
    )  # fmt: skip


class Weighted(Trainer):
    """A Trainer that keeps a coefficient in files of its own; `place` says in which of the ways that people write."""

    coef, place, loader = 1.0, "_get_output_dir", "_load_optimizer_and_scheduler"

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.coef *= 0.7
        loss: Any = super().compute_loss(model, inputs, *args, **kwargs)
        return self.coef * loss

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        root = self._get_output_dir(trial=trial) if self.place == "_get_output_dir" else str(self.args.output_dir)
        Path(root, f"checkpoint-{self.state.global_step}", "coef.json").write_text(json.dumps(self.coef))

    def read(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.coef = json.loads(Path(checkpoint, "coef.json").read_text())

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(checkpoint, model)
        if self.loader == "_load_from_checkpoint":
            self.read(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.loader == "_load_optimizer_and_scheduler":
            self.read(checkpoint)


class Behind(CkptMixin, Weighted):  # type: ignore[misc]  # Its base is Trainer, which CkptMixin is not.
    """The mixin before somebody else's class."""


class Before(CkptTrainer):
    """A class of a user's own over CkptTrainer, with the same methods."""

    coef, place, loader = 1.0, "args", "_load_from_checkpoint"
    read = Weighted.read

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.coef *= 0.7
        loss: Any = super().compute_loss(model, inputs, *args, **kwargs)
        return self.coef * loss

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        name = Path(str(self.args.output_dir), f"checkpoint-{self.state.global_step}", "coef.json")
        name.write_text(json.dumps(self.coef))

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(checkpoint, model)
        self.read(checkpoint)


class NeverRead(CkptTrainer):
    """A class that writes into Trainer's checkpoints what its train() reads."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        Path(self._get_output_dir(trial=trial), "coef.json").write_text("1.0")


class ElsewhereSaved(CkptTrainer):
    """A right class that reads weights in its own way: Trainer's files, which a run does not have."""

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        raise FileNotFoundError(checkpoint)


@pytest.mark.parametrize(
    ("kind", "place", "loader"),
    [
        (Behind, "_get_output_dir", "_load_optimizer_and_scheduler"),
        (Behind, "args", "_load_from_checkpoint"),
        (Before, "args", "_load_from_checkpoint"),
        (ElsewhereSaved, "", ""),
    ],
)
def test_what_a_trainer_keeps_in_its_own_files_is_state(kind: Any, place: str, loader: str, tmp_path: Path) -> None:
    """A class that overrides Trainer's saving and loading resumes with its own values; no file is left in output_dir.

    An override that only reads, for files of Trainer's own, is not called: the run has what it would read.
    """

    def train(run: str, stop: int | None = None) -> tuple[list[Any], list[torch.Tensor]]:
        set_seed(1)
        net = torch.nn.Linear(4, 4)
        rows = [{"x": torch.randn(4)} for _ in range(24)]
        args = arguments(tmp_path, learning_rate=0.1, logging_steps=1)
        recording = Recording(stop)
        trainer = kind(
            model=Squares(net),
            args=args,
            train_dataset=rows,
            callbacks=[recording],
            checkpoint=CheckpointConfig(checkpoint_dir=tmp_path / run, step_interval=1),
        )
        trainer.place, trainer.loader = place, loader
        kept = trained(trainer, recording)
        assert type(trainer) is kind
        assert trainer.args.output_dir == str(tmp_path / "out")
        return kept

    check_stops(train, 2, 5)
    assert not [*tmp_path.glob("out/*")]


@pytest.mark.parametrize(("kind", "said"), [(NeverRead, 1), (Before, 0), (ElsewhereSaved, 0), (CkptTrainer, 0)])
def test_files_that_nothing_reads_are_told(kind: Any, said: int, tmp_path: Path, caplog: Any) -> None:
    """A class that writes into Trainer's checkpoints and reads it in a place of its own hears that it is not kept."""
    kind(model=Squares(torch.nn.Linear(4, 4)), args=arguments(tmp_path), train_dataset=[], checkpoint=tmp_path / "run")
    assert len(caplog.messages) == said
    assert all("NeverRead overrides _save_checkpoint" in message for message in caplog.messages)


class Forgetful(CkptTrainer):
    """Trains what is in no module, or draws from a generator of its script."""

    forgets, generator, hidden = "", torch.Generator(), [torch.nn.Linear(4, 1)]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is None:
            more = self.hidden[0].parameters() if self.forgets in ("parameters", "gradients") else ()
            model: Any = self.model
            self.optimizer = torch.optim.SGD([*model.parameters(), *more], 0.1)
        return self.optimizer

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.forgets == "generator":
            torch.rand(1, generator=self.generator)
        return super().compute_loss(model, inputs, *args, **kwargs) + self.hidden[0](inputs["x"]).mean()


@pytest.mark.parametrize(
    ("forgets", "says"),
    [
        ("", ""),
        ("parameters", "2 parameters that are not in the state"),
        ("gradients", "The gradients of optimizer were accumulated over a save at step"),
        ("generator", "noise (Generator) is not in"),
    ],
)
def test_what_a_state_forgets_is_told_under_a_trainer(
    forgets: str, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checks of a plain loop are made; Trainer's own loaders, samplers and schedule are none of them.

    Trainer zeroes the gradients of its model alone: those of a loss with parameters of its own go on for ever.
    """
    noise = Forgetful.generator = torch.Generator()
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=3)
    rows = [{"x": torch.randn(4)} for _ in range(24)]
    config = CheckpointConfig(checkpoint_dir=tmp_path / "run", step_interval=1)
    net = Squares(torch.nn.Linear(4, 4))
    own = {"hidden": Forgetful.hidden[0]} if forgets == "gradients" else {}
    trainer = Forgetful(model=net, args=args, train_dataset=rows, eval_dataset=rows[:4], checkpoint=config, state=own)
    trainer.forgets = forgets
    with caplog.at_level(logging.WARNING, "ckpt_tasks"):
        trainer.train()
    assert noise is trainer.generator
    assert len(caplog.messages) == bool(says)
    assert says in "".join(caplog.messages)


class Squares(torch.nn.Module):
    def __init__(self, net: torch.nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - 1).square().mean()}


class Averaging(CkptTrainer):
    """A class of a user's own that logs means over the steps since its last log."""

    def __init__(self, sums: Any, **options: Any):
        super().__init__(**options)
        self.own_sums, self.cache = sums, {"train": object()}

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().compute_loss(model, inputs, *args, **kwargs)
        sums = self.own_sums.get("train", self.own_sums)
        sums["squares"].append(loss.item() ** 2)
        sums["count"] = sums["count"] + 1 if "count" in sums else 1
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        sums = self.own_sums.get("train", self.own_sums)
        if "loss" in logs:
            logs["squares"] = sum(sums["squares"]) / sums["count"]
            sums.clear()
        super().log(logs, *args, **kwargs)


@pytest.mark.parametrize("by_mode", [False, True])
def test_the_sums_of_a_class_of_ones_own_are_state(by_mode: bool, tmp_path: Path) -> None:
    """Numbers and lists in a defaultdict, or in one for each mode, are those of the steps since the last log."""

    def train(run: str, stop: int | None = None) -> tuple[list[Any], list[torch.Tensor]]:
        set_seed(1)
        args = arguments(tmp_path, learning_rate=0.1, logging_steps=3)
        recording = Recording(stop)
        sums: Any = defaultdict(list)
        trainer = Averaging(
            {"train": sums, "eval": defaultdict(list)} if by_mode else sums,
            model=Squares(torch.nn.Linear(4, 4)),
            args=args,
            train_dataset=[{"x": torch.randn(4)} for _ in range(24)],
            callbacks=[recording],
            checkpoint=CheckpointConfig(checkpoint_dir=tmp_path / run, step_interval=1),
        )
        return trained(trainer, recording)

    check_stops(train, 2, 4)


@pytest.mark.filterwarnings("ignore")  # of TRL
def test_the_sums_of_orpo_are_state(tmp_path: Path) -> None:
    """TRL's ORPO, stopped between two of its logs, logs the means over all of their steps."""
    pytest.importorskip("trl")
    orpo = pytest.importorskip("trl.experimental.orpo")

    class Orpo(CkptMixin, orpo.ORPOTrainer):  # type: ignore[misc, name-defined]
        pass

    def train(run: str, stop: int | None = None) -> tuple[list[Any], list[torch.Tensor]]:
        set_seed(1)
        shape = GPT2Config(vocab_size=10, n_positions=32, n_embd=8, n_layer=1, n_head=1, bos_token_id=1, eos_token_id=1)
        args = orpo.ORPOConfig(
            str(tmp_path / "out"), max_steps=8, max_length=12, save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=True, bf16=False, learning_rate=0.01, logging_steps=3, per_device_train_batch_size=2,
        )  # fmt: skip
        recording = Recording(stop)
        rows = [{"prompt": f"{a} ", "chosen": f"{b} {a}", "rejected": f"{a} {a}"} for a in "abcd" for b in "efgh"]
        trainer = Orpo(
            GPT2LMHeadModel(shape),
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
            callbacks=[recording],
            checkpoint=CheckpointConfig(checkpoint_dir=tmp_path / run, step_interval=1),
        )
        return trained(trainer, recording)

    check_stops(train, 2, 4)
