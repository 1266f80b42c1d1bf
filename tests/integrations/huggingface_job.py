"""A Hugging Face user's script, as a job whose legs are killed: what it trains is chosen by options."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from datasets import Dataset
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from ckpt_tasks import CheckpointConfig, Checkpointer, ResumableLoader
from ckpt_tasks.errors import ConfigError
from ckpt_tasks.integrations.huggingface import CkptTrainer, state_of
from tests.support.legs import Leg

SAMPLES = 46  # 12 batches of 4, the last one of 2


def scale(accelerator: Accelerator) -> None:
    """Compute in fp16 with a GradScaler, as accelerate does on a GPU alone.

    The first steps overflow and are skipped; later on the scale grows until some do again.
    """
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)


class Scaled(CkptTrainer):
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        scale(self.accelerator)


class Recording(TrainerCallback):
    """Averages the weights, records what is logged, and gets killed between the gradients and the optimizer."""

    def __init__(self, leg: Leg, average: AveragedModel):
        self.leg = leg
        self.average = average

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.leg.record("begin", state.global_step, "")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name, value in logs.items():
            if name in {"loss", "grad_norm", "learning_rate", "eval_loss", "train_loss"}:
                self.leg.record(name, state.global_step, float(value))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.average.update_parameters(model)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.leg.within(state.global_step)


def train(leg: Leg, resume: str | bool | None = None) -> None:
    """Train three epochs of a tiny GPT-2 with random weights."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    options = leg.options
    transformers.set_seed(7)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    rows = Dataset.from_dict({"input_ids": torch.randint(0, 32, (SAMPLES, 8)).tolist()})
    rows = rows.map(lambda row: {"labels": row["input_ids"]}).with_format("torch")
    stream = rows.to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=8) if options.get("stream") else None
    args = TrainingArguments(
        str(leg.folder / "out"),
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        fp16=options.get("scaled", False),
        save_strategy=options.get("their_saves", "no"),
        logging_steps=options.get("logging", 1),
        num_train_epochs=options.get("epochs", 3),
        max_steps=30 if stream else -1,
        per_device_train_batch_size=4,
        eval_strategy="epoch",
        **options.get("args", {}),
    )
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    callbacks = [Recording(leg, average), *([EarlyStoppingCallback(1, 0.02)] if options.get("early") else [])]
    trainer = (Scaled if options.get("scaled") else CkptTrainer)(
        model=model,
        args=args,
        train_dataset=stream or rows,
        eval_dataset=rows.select(range(8)),
        callbacks=callbacks,
        checkpoint=CheckpointConfig(
            checkpoint_dir=leg.folder / "run",
            step_interval=options.get("interval", 1),
            memory_dir=leg.folder / "memory",
            on_non_finite="stop",  # a step that the scaler skips is healthy
        ),
        state={"average": average},
    )
    leg.settle = trainer.ckpt.wait
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.optimizer is not None
    held = [v for one in trainer.optimizer.state.values() for v in one.values()]
    if trainer.accelerator.scaler is not None:
        leg.record("scale", trainer.state.global_step, trainer.accelerator.scaler.get_scale())
    if resume is None:  # a checkpoint of Trainer's own has no average
        held += average.state_dict().values()
    leg.end(trainer.state.global_step, [*model.state_dict().values(), *held])


def switched(leg: Leg) -> None:
    """Resume by Trainer's own switch, from its checkpoint of step 10; in the second leg that one is a torn one."""
    out = leg.folder / "out"
    first, torn = out / "checkpoint-10", out / "checkpoint-30"
    if leg.folder.name == "reference":
        try:
            train(leg, resume=True)
        except ConfigError as error:
            leg.record("refused", 0, str(error))
        train(leg, resume=False)
    elif not out.exists():
        shutil.copytree(leg.folder.parent / "reference" / "out" / first.name, first)
        train(leg, resume=str(first))
    elif first.exists():
        first.rename(torn)
        for path in torn.iterdir():
            os.truncate(path, 10)
        train(leg, resume=True)
    else:
        train(leg, resume=str(first))


def both(leg: Leg) -> None:
    """Train by a Trainer, and then by a loop."""
    train(leg)
    leg.label = " of the loop"
    leg.folder /= "loop"
    (leg.folder / "memory").mkdir(parents=True, exist_ok=True)
    loop(leg)


def loop(leg: Leg) -> None:
    """Train a loop of one's own with accelerate."""
    transformers.set_seed(7)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    scale(accelerator)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    model, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    loader = ResumableLoader(TensorDataset(torch.randn(SAMPLES, 4)), batch_size=4, shuffle=True)
    config = CheckpointConfig(checkpoint_dir=leg.folder / "run", step_interval=1, memory_dir=leg.folder / "memory")
    with Checkpointer(config) as ckpt:
        leg.settle = ckpt.wait
        state = {**state_of(accelerator), "average": average, "data": loader}
        step = ckpt.restore(state)
        leg.record("begin", step, "")
        while loader.epoch < 3:
            for (x,) in loader:
                loss = model(x + random.random() + np.random.rand()).square().mean()  # noqa: NPY002 (as users do)
                accelerator.backward(loss)
                leg.within(step)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                average.update_parameters(accelerator.unwrap_model(model))
                step += 1
                leg.record("loss", step, loss.item())
                leg.record("scale", step, accelerator.scaler.get_scale())
                ckpt.step(step, state, metrics={"loss": loss.item()})
    leg.end(step, [*model.state_dict().values(), *average.state_dict().values()])
